"""`surefoot ls`: the checkpoints of a run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli import printing
from surefoot.cli.arguments import AsJson, Run

if TYPE_CHECKING:
    from surefoot.inspect.checkpoints import Checkpoint
    from surefoot.inspect.survey import Survey


def register(app: typer.Typer) -> None:
    app.command("ls")(ls)


def ls(
    run: Run,
    disk: Annotated[list[str] | None, typer.Option(help="Local directory with copies; repeatable.")] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Also what was given up, is off the lineage or not whole.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of RUN, newest first."""
    found, rows = asyncio.run(_read(run, disk or [], all_=all_))
    if as_json:
        printing.print_json([row.to_json() for row in rows])
        return
    for problem in found.problems:
        printing.warn(f"{problem.object} {problem.what}")
    if not rows:
        printing.say(f"no checkpoint at {found.uri} yet")
        return
    columns = ("step", "gen", "trigger", "tiers", "size", "ranks", "time", "verified", "remarks")
    printing.print_table(columns, map(_cells, rows), right=("step", "gen", "size", "ranks"))


async def _read(run: str, disk: list[str], *, all_: bool) -> tuple[Survey, list[Checkpoint]]:
    from surefoot.inspect.checkpoints import checkpoints, copies_on, usable
    from surefoot.inspect.survey import survey
    from surefoot.records.records import Records
    from surefoot.tiers.open import open_disks, open_tier
    from surefoot.tiers.silence import spoken_of

    tier, disks = spoken_of(open_tier(run)), open_disks(disk)
    try:
        found = (await survey(Records(tier), all_commits=all_)).demand()
        rows = checkpoints(found, await copies_on(disks))
        return found, rows if all_ else usable(rows)
    finally:
        await tier.close()
        if disks is not None:
            await disks.close()


def _cells(row: Checkpoint) -> tuple[str, ...]:
    return (
        "?" if row.at.step is None else str(row.at.step),
        str(row.at.generation),
        row.trigger or "?",
        " ".join(row.tiers) or "-",
        printing.size(row.size_bytes),
        "?" if row.world_size is None else str(row.world_size),
        printing.moment(row.created),
        "yes" if row.verified else "NO",
        _remarks(row),
    )


def _remarks(row: Checkpoint) -> str:
    remarks: list[str] = [] if row.state == "live" else [row.state]
    remarks += [f"boundary {row.at.boundary}"] if row.at.boundary != row.at.step else []
    remarks += [f"tag {row.tag}"] if row.tag is not None else []
    remarks += ["off the lineage"] if row.on_lineage is False else []
    remarks += [f"and {printing.size(row.frozen_bytes)} frozen"] if row.frozen_bytes else []
    remarks += [f"{name} {value}" for name, value in (row.metrics or {}).items()]
    return ", ".join(remarks)
