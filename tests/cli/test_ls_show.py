"""`surefoot ls` and `surefoot show` on real runs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_jobs import STEPS, WITHIN_S, Answer, Evicted, Finished, Killed, until
from run_files import commits, first, resealed, shard_of

from surefoot.core.layout import BoundaryId, commit_key, plan_key
from surefoot.core.manifest import Generation
from surefoot.records.records import Records
from surefoot.scenario.s3_server import S3Server
from surefoot.tiers.disk import DiskTier

Command = Callable[..., Answer]
ROW = {
    "step": int,
    "boundary": int,
    "generation": int,
    "trigger": str,
    "tiers": list,
    "bytes": int,
    "world_size": int,
    "time": float,
    "verified": bool,
}


def listed(answer: Answer) -> list[dict[str, Any]]:
    assert answer.code == 0, answer.err
    rows: list[dict[str, Any]] = json.loads(answer.out)
    return rows


def test_ls_lists_what_is_there_newest_first(surefoot: Command, finished: Finished) -> None:
    """Every field of the contract has its type, and says what the files themselves say."""
    rows = listed(surefoot("ls", finished.run, "--json"))
    assert [(row["step"], row["generation"]) for row in rows] == sorted(
        ((at.boundary, at.generation) for at in commits(finished.run)), reverse=True
    )
    assert rows[0]["step"] == STEPS
    for row in rows:
        assert {name: type(row[name]) for name in ROW} == ROW
        shards = list((finished.run / "steps" / str(BoundaryId(row["step"], row["generation"]))).glob("*.safetensors"))
        assert row["bytes"] == sum(path.stat().st_size for path in shards)
        assert (row["tiers"], row["world_size"], row["verified"]) == (["disk"], 1, True)


def test_ls_tells_trigger_tag_and_metrics(surefoot: Command, finished: Finished) -> None:
    """The tagged save of step 3 bears its tag and metrics, the last step its trigger."""
    rows = {row["step"]: row for row in listed(surefoot("ls", finished.run, "--json"))}
    assert (rows[3]["trigger"], rows[3]["tag"], rows[3]["metrics"]) == ("manual", "best", {"loss": 0.25})
    assert rows[STEPS]["trigger"] == "final"


def test_ls_is_a_short_table_for_people(surefoot: Command, finished: Finished) -> None:
    """One line a checkpoint and one of headings."""
    answer = surefoot("ls", finished.run)
    lines = answer.out.splitlines()
    assert len(lines) == 1 + len(commits(finished.run))
    assert "tag best, loss 0.25" in next(line for line in lines if line.split()[0] == "3")


def test_a_copy_on_a_local_disk_counts_as_a_tier(surefoot: Command, evicted: Evicted, s3_env: object) -> None:
    """The bucket's checkpoints are on `object`; with all their shards copied to a disk, on both."""
    rows = listed(surefoot("ls", evicted.uri, "--json"))
    assert rows
    assert all(row["tiers"] == ["object"] and row["verified"] for row in rows)


def test_disks_hold_copies_of_the_bucket(surefoot: Command, evicted: Evicted, s3_env: object, tmp_path: Path) -> None:
    """Shards that are copied are on disk and object; one byte too few, and they are not."""
    step, copied = download(evicted.uri, tmp_path)
    rows = {row["step"]: row for row in listed(surefoot("ls", evicted.uri, "--disk", tmp_path, "--json"))}
    assert rows.pop(step)["tiers"] == ["disk", "object"]
    assert all(row["tiers"] == ["object"] for row in rows.values())
    copied.write_bytes(copied.read_bytes()[:-1])
    rows = {row["step"]: row for row in listed(surefoot("ls", evicted.uri, "--disk", tmp_path, "--json"))}
    assert rows[step]["tiers"] == ["object"]


def download(uri: str, directory: Path) -> tuple[int, Path]:
    """Copy the newest checkpoint's only shard to where a local disk would have it."""
    from surefoot.tiers.open import open_tier

    async def fetch() -> tuple[int, Path]:
        tier = open_tier(uri)
        at = max(await Records(tier).commits())
        manifest = await Records(tier).manifest(at)
        assert manifest is not None
        (shard,) = manifest.shards
        await DiskTier(directory).put(shard.key, await tier.get(shard.key))
        await tier.close()
        return at.boundary, directory / shard.key

    return asyncio.run(fetch())


def test_disk_copies_are_whole_files_of_the_run(surefoot: Command, finished: Finished, run_copy: Path) -> None:
    """A shard that is gone from the run still lies on the disk where the job copied it."""
    shard_of(run_copy, STEPS).unlink()
    assert rows_by_boundary(surefoot("ls", run_copy, "--json"))[STEPS]["verified"] is False
    row = rows_by_boundary(surefoot("ls", run_copy, "--disk", finished.disk, "--json"))[STEPS]
    assert (row["tiers"], row["verified"]) == (["disk"], True)


def rows_by_boundary(answer: Answer) -> dict[int, dict[str, Any]]:
    return {row["boundary"]: row for row in listed(answer)}


@pytest.mark.parametrize("damage", ["shard gone", "shard short", "plan gone", "manifest cut"])
def test_ls_verifies_sizes_and_presence(surefoot: Command, run_copy: Path, damage: str) -> None:
    """What is not whole is listed, and listed as not verified."""
    manifest = run_copy / commit_key(BoundaryId(STEPS, 1))
    if damage == "shard gone":
        shard_of(run_copy, STEPS).unlink()
    elif damage == "shard short":
        shard_of(run_copy, STEPS).write_bytes(shard_of(run_copy, STEPS).read_bytes()[:-1])
    elif damage == "plan gone":
        first(run_copy, "plans/*.json").unlink()
    else:
        manifest.write_bytes(manifest.read_bytes()[:-100])
    rows = rows_by_boundary(surefoot("ls", run_copy, "--json"))
    assert rows[STEPS]["verified"] is False
    assert rows[STEPS]["step"] == (None if damage == "manifest cut" else STEPS)
    assert rows[3]["verified"] is (damage != "plan gone")


def test_given_up_checkpoints_are_left_out(surefoot: Command, run_copy: Path) -> None:
    """A retired manifest, a tombstone and an unfinished attempt are no checkpoints; `--all` marks them."""
    shutil.copytree(run_copy / "steps" / str(BoundaryId(STEPS, 1)), run_copy / "steps" / str(BoundaryId(5, 1)))
    for path in (run_copy / "steps" / str(BoundaryId(5, 1))).glob("*.ok.json"):
        path.unlink()
    asyncio.run(give_up(run_copy))
    rows = rows_by_boundary(surefoot("ls", run_copy, "--json"))
    assert not {2, 3, 5} & set(rows)
    assert rows[STEPS]["verified"]
    states = {step: row["state"] for step, row in rows_by_boundary(surefoot("ls", run_copy, "--all", "--json")).items()}
    assert states[3] == "retired"
    assert states[2] == "deleted"
    assert states[5] == "uncommitted"


async def give_up(run: Path) -> None:
    records = Records(DiskTier(run))
    manifest = await records.manifest(BoundaryId(3, 1))
    assert manifest is not None
    await records.rewrite_manifest(manifest.retire(1.0))
    await records.bury(BoundaryId(2, 1), 1.0)


def test_quarantined_checkpoints_are_left_out(surefoot: Command, run_copy: Path) -> None:
    """A checkpoint with a shard that must not be used again is shown with `--all` only."""
    key = str(shard_of(run_copy, STEPS).relative_to(run_copy))
    asyncio.run(Records(DiskTier(run_copy)).quarantine(key, "bad bytes", 1.0))
    assert STEPS not in rows_by_boundary(surefoot("ls", run_copy, "--json"))
    assert rows_by_boundary(surefoot("ls", run_copy, "--all", "--json"))[STEPS]["state"] == "quarantined"


def test_what_is_off_the_lineage_is_left_out(surefoot: Command, run_copy: Path) -> None:
    """A later generation that went back to step 3 makes step 6 history; without a record nobody knows."""
    resealed(run_copy, 2, parent_step=3)
    assert max(rows_by_boundary(surefoot("ls", run_copy, "--json"))) == 3
    row = rows_by_boundary(surefoot("ls", run_copy, "--all", "--json"))[STEPS]
    assert (row["on_lineage"], row["state"]) == (False, "live")
    (run_copy / "generations/g0001.json").unlink()
    answer = surefoot("ls", run_copy, "--json")
    assert rows_by_boundary(answer)[STEPS]["on_lineage"] is None


def test_damage_is_said_on_standard_error(surefoot: Command, run_copy: Path) -> None:
    """A damaged record does not keep the rest from being listed, and is not passed over either."""
    (run_copy / "run.json").write_bytes(b"{}")
    answer = surefoot("ls", run_copy)
    assert answer.code == 0
    assert "surefoot: run.json not a whole document" in answer.err
    assert len(answer.out.splitlines()) == 1 + len(commits(run_copy))


def test_a_place_without_a_run_is_one_sentence(surefoot: Command, tmp_path: Path) -> None:
    """Exit code 2 and one line."""
    for command in ("ls", "show"):
        answer = surefoot(command, tmp_path)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.splitlines() == [
            f"surefoot: there is no run at {tmp_path}: give the URI or directory that `surefoot run --to` had"
        ]


def test_an_unreachable_store_is_no_empty_run(surefoot: Command, s3_env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused credentials are an error of the tier, never "no run"."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    answer = surefoot("ls", s3_env.url("cli"))
    assert answer.code == 2
    assert "no run" not in answer.err
    assert len(answer.err.splitlines()) == 1


def test_show_a_run(surefoot: Command, finished: Finished) -> None:
    """Run id, generations and the newest checkpoint, as the records have them."""
    shown = json.loads(surefoot("show", finished.run, "--json").out)
    record = json.loads((finished.run / "run.json").read_text())["body"]
    generation = json.loads((finished.run / "generations/g0001.json").read_text())["body"]
    assert shown["run"] == record["run"]
    assert shown["newest"]["step"] == STEPS
    assert shown["newest_age_s"] > 0
    assert shown["bytes"] == sum(path.stat().st_size for path in finished.run.glob("steps/*/*.safetensors"))
    (row,) = shown["generations"]
    assert [row[name] for name in ("generation", "launch", "node", "world_size", "parent")] == [
        generation[name] for name in ("generation", "launch", "node", "world_size", "parent")
    ]
    text = surefoot("show", finished.run).out
    assert f"run {record['run']} at {finished.run}" in text
    assert f"newest: step {STEPS} (generation 1, final) on disk" in text


def test_show_follows_the_generations(surefoot: Command, killed: Killed) -> None:
    """A run that went on has a second generation, which names the step it went on from."""
    shown = json.loads(surefoot("show", killed.run, "--json").out)
    first_one, second = shown["generations"]
    assert second["parent"] == {"generation": 1, "boundary": STEPS, "committed": True, "step": STEPS}
    assert (first_one["counts_to_boundary"], second["counts_to_boundary"]) == (STEPS, None)


@pytest.mark.parametrize("step", ["3", "00000003-g0001"])
def test_show_a_checkpoint(surefoot: Command, finished: Finished, step: str) -> None:
    """Tensors, biggest first, values in a readable form, and shards."""
    shown = json.loads(surefoot("show", finished.run, step, "--json").out)
    assert (shown["step"], shown["generation"], shown["tag"]) == (3, 1, "best")
    tensors = {tensor["name"]: tensor for tensor in shown["tensors"]}
    weight = tensors["model.weight"]
    assert (weight["dtype"], weight["shape"], weight["bytes"]) == ("float32", [16, 16], 1024)
    sizes = [tensor["bytes"] for tensor in shown["tensors"]]
    assert sizes == sorted(sizes, reverse=True)
    values = {value["path"]: value["value"] for value in shown["values"]}
    assert values["notes.seen"] == "[1, 2]"
    assert values["notes.name"] == "'small'"
    assert values["optimizer.param_groups[0].betas"] == "(0.9, 0.999)"
    (shard,) = shown["shards"]
    assert shard["bytes"] == (finished.run / shard["path"]).stat().st_size
    text = surefoot("show", finished.run, step).out
    assert "model.weight" in text
    assert "16×16" in text


def test_a_step_of_two_generations_is_the_one_on_the_lineage(surefoot: Command, run_copy: Path) -> None:
    """After going back to step 3 and on to 6 again, step 6 means the new one; cut both off, and it must be named."""
    resealed(run_copy, 2, parent_step=3)
    asyncio.run(commit_again(run_copy, BoundaryId(STEPS, 1), 2))
    assert json.loads(surefoot("show", run_copy, STEPS, "--json").out)["generation"] == 2
    assert json.loads(surefoot("show", run_copy, str(BoundaryId(STEPS, 1)), "--json").out)["on_lineage"] is False
    resealed(run_copy, 3, parent_step=None)
    answer = surefoot("show", run_copy, STEPS)
    assert answer.code == 2
    assert f"{BoundaryId(STEPS, 1)} and {BoundaryId(STEPS, 2)}, none of them on the lineage" in answer.err


async def commit_again(run: Path, at: BoundaryId, generation: int) -> None:
    from dataclasses import replace

    records = Records(DiskTier(run))
    manifest = await records.manifest(at)
    assert manifest is not None
    again = BoundaryId(at.boundary, generation)
    shards = tuple(replace(s, id=replace(s.id, at=again)) for s in manifest.shards)
    assert await records.put_manifest(replace(manifest, at=again, shards=shards))


@pytest.mark.parametrize("step", ["7", "00000006-g0009", "six", "6-7"])
def test_a_step_that_is_not_there_is_one_sentence(surefoot: Command, finished: Finished, step: str) -> None:
    """Exit code 2, and the step is named."""
    answer = surefoot("show", finished.run, step)
    assert (answer.code, answer.out) == (2, "")
    assert step in answer.err


def test_a_checkpoint_can_be_shown_without_its_plan(surefoot: Command, run_copy: Path) -> None:
    """Values and shards are still known, and the missing plan is said."""
    plan = first(run_copy, "plans/*.json")
    plan.unlink()
    answer = surefoot("show", run_copy, "3", "--json")
    assert json.loads(answer.out)["tensors"] == []
    assert plan_key(plan.stem) in answer.err


def test_lineage_records_are_generations() -> None:
    """The helper that makes later generations writes what the run itself reads."""
    data = Generation(2, "launch", None, 1, "node", 1.0).to_bytes()
    assert Generation.from_bytes(data, "generations/g0002.json").number == 2


def test_ls_says_what_it_waits_for(evicted: Evicted, s3_server: S3Server, tmp_path: Path) -> None:
    """A store that does not answer is named on standard error while it is waited for; the answer is whole."""
    command = [sys.executable, "-m", "surefoot.cli.main", "ls", evicted.uri, "--json"]
    said = tmp_path / "said"
    s3_server.pause()
    try:
        with said.open("wb") as err:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, env={**os.environ, **s3_server.env})
        until(lambda: f"waiting for {evicted.uri}: no answer" in said.read_text(), said.read_text)
    finally:
        s3_server.go_on()
    out, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, said.read_text()
    assert json.loads(out)[0]["step"] == evicted.steps
    assert f"{evicted.uri} answers again" in said.read_text()
