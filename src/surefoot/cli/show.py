"""`surefoot show`: a run, or one checkpoint, in detail."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import typer

from surefoot.cli import printing
from surefoot.cli.arguments import AsJson, Run, Step
from surefoot.core.layout import BoundaryId
from surefoot.host.clock import wall_s

if TYPE_CHECKING:
    from surefoot.inspect.checkpoints import Checkpoint
    from surefoot.inspect.detail import RunDetail, StepDetail
    from surefoot.inspect.survey import Survey
    from surefoot.records.records import Records

_SHOWN = 40
"""Rows of a table before the rest is only counted; JSON has them all."""


def register(app: typer.Typer) -> None:
    app.command("show")(show)


def show(run: Run, step: Step = None, as_json: AsJson = False) -> None:
    """Show RUN, or what is in its checkpoint STEP."""
    detail = asyncio.run(_read(run, step))
    if as_json:
        printing.print_json(detail.to_json())
        return
    from surefoot.inspect.detail import RunDetail

    if isinstance(detail, RunDetail):
        _tell_run(detail)
    else:
        _tell_step(detail)


async def _read(run: str, step: str | None) -> RunDetail | StepDetail:
    from surefoot.inspect.checkpoints import checkpoints, parse_selector
    from surefoot.inspect.detail import run_detail
    from surefoot.inspect.survey import survey
    from surefoot.records.records import Records
    from surefoot.tiers.open import open_tier
    from surefoot.tiers.silence import spoken_of

    wanted = None if step is None else parse_selector(step)
    tier = spoken_of(open_tier(run))
    try:
        records = Records(tier)
        found = (await survey(records)).demand()
        rows = checkpoints(found, {})
        if wanted is None:
            return run_detail(found, rows, wall_s())
        return await _step(records, found, rows, wanted)
    finally:
        await tier.close()


async def _step(records: Records, found: Survey, rows: list[Checkpoint], wanted: BoundaryId | int) -> StepDetail:
    from surefoot.errors import ConfigError, CorruptError, ObjectMissingError
    from surefoot.inspect.checkpoints import resolve
    from surefoot.inspect.detail import StepDetail

    at = resolve(found, wanted)
    manifest = found.manifests.get(at)
    if manifest is None:
        why = "its manifest is damaged" if at in found.damaged else "it was given up and deleted"
        raise ConfigError(f"checkpoint {at} cannot be shown: {why}")
    try:
        plan = await records.plan(manifest.plan)
    except (CorruptError, ObjectMissingError) as error:
        printing.warn(f"the plan of {at} cannot be read: {error}")
        plan = None
    return StepDetail(next(row for row in rows if row.at == at), manifest, plan)


def _tell_run(detail: RunDetail) -> None:
    found, newest = detail.found, detail.newest
    for problem in found.problems:
        printing.warn(f"{problem.object} {problem.what}")
    printing.say(f"run {found.run.run if found.run else '?'} at {found.uri}")
    frozen = f", {printing.size(detail.frozen_bytes)} in frozen files" if detail.frozen_bytes else ""
    printing.say(f"{detail.checkpoints} checkpoint(s); {printing.size(detail.size_bytes)} in shards altogether{frozen}")
    if newest is None:
        printing.say("no verified checkpoint yet")
    else:
        age = printing.span(detail.newest_age_s)
        printing.say(
            f"newest: {newest.at.label} (generation {newest.at.generation}, {newest.trigger}) "
            f"on {' and '.join(newest.tiers)}, {printing.size(newest.size_bytes)}, committed {age} ago"
        )
    _tell_generations(detail)


def _tell_generations(detail: RunDetail) -> None:
    rows = detail.to_json()["generations"]
    cells = [
        (
            str(row["generation"]),
            "scratch" if row["parent"] is None else f"{_at(row['parent'])} of {row['parent']['generation']}",
            row["launch"],
            row["node"],
            str(row["world_size"]),
            printing.moment(row["time"]),
            "off the lineage" if row["on_lineage"] is False else "",
        )
        for row in rows[-_SHOWN:]
    ]
    columns = ("generation", "from", "launch", "node", "ranks", "time", "remarks")
    printing.print_table(columns, cells, right=("generation", "ranks"))
    _tell_rest(len(rows), "older generations")


def _at(parent: dict[str, Any]) -> str:
    return BoundaryId(parent["boundary"], parent["generation"], parent["step"]).label


def _labels(at: BoundaryId) -> str:
    return at.label if at.epoch is None else f"{at.label}, epoch {at.epoch}"


def _tell_step(detail: StepDetail) -> None:
    manifest, row = detail.manifest, detail.row
    printing.say(
        f"checkpoint {manifest.at}: {_labels(manifest.at)}, {manifest.trigger}, {manifest.world_size} rank(s), "
        f"{printing.size(manifest.size_bytes)}, {printing.moment(manifest.created)}"
    )
    marks = [row.state, "verified" if row.verified else "NOT verified"]
    marks += [f"tag {manifest.tag}"] if manifest.tag is not None else []
    marks += ["off the lineage"] if row.on_lineage is False else []
    marks += [f"{name} {value}" for name, value in manifest.metrics.items()]
    printing.say(", ".join(marks))
    shards = [(str(s.id.rank), s.key, printing.size(s.size_bytes), s.xxh3_128) for s in manifest.shards]
    shards += [("frozen", f.key, printing.size(f.size_bytes), f.xxh3_128) for f in detail.frozen]
    printing.print_table(("rank", "shard", "size", "xxh3-128"), shards[:_SHOWN], right=("rank", "size"))
    _tell_rest(len(shards), "shards")
    _tell_tensors(detail)
    _tell_values(detail)


def _tell_tensors(detail: StepDetail) -> None:
    tensors = detail.tensors()
    cells = [
        (t["name"], t["dtype"], "×".join(map(str, t["shape"])) or "scalar", printing.size(t["bytes"]), str(t["rank"]))
        for t in tensors[:_SHOWN]
    ]
    printing.say("")
    printing.print_table(("tensor", "type", "shape", "size", "rank"), cells, right=("size", "rank"))
    _tell_rest(len(tensors), "tensors")


def _tell_values(detail: StepDetail) -> None:
    values = detail.values()
    cells = [("all" if v.rank is None else str(v.rank), v.path, v.text) for v in values[:_SHOWN]]
    printing.say("")
    printing.print_table(("rank", "value", "is"), cells, right=("rank",))
    _tell_rest(len(values), "values")


def _tell_rest(count: int, what: str) -> None:
    if count > _SHOWN:
        printing.say(f"… and {count - _SHOWN} more {what}; --json has all")
