"""A LoRA-shaped job on the real road: its base is saved once, and what resumes has it, bit by bit."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from lora import TOTAL, Lora, flip
from safetensors.torch import load_file

from surefoot.inspect.checkpoints import Checkpoint, checkpoints
from surefoot.inspect.detail import RunDetail, run_detail
from surefoot.inspect.survey import survey
from surefoot.inspect.verify import Verdict, verify
from surefoot.records.records import Records
from surefoot.scenario.s3_server import S3Server
from surefoot.tiers.disk import DiskTier

MIB = 1024 * 1024


def test_the_base_is_saved_once_and_outside_the_slots(undisturbed: Lora) -> None:
    """One file, named by its hash, with the base alone in it; shards hold the rest; every checkpoint names it."""
    (file,) = undisturbed.frozen()
    assert file.stem == xxhash.xxh3_128_hexdigest(file.read_bytes())
    tensors = load_file(file)
    assert sum(tensor.nbytes for tensor in tensors.values()) == 64 * MIB + 64 * 1024 * 2
    assert all(name.startswith(("model.base.", "model.table.")) for name in tensors)
    commits = sorted(undisturbed.run.glob("commits/*.json"))
    assert commits
    for commit in commits:
        (shard,) = json.loads(commit.read_text())["body"]["shards"]
        named = shard["record"]["frozen"]
        assert named == {"xxh3_128": file.stem, "size_bytes": file.stat().st_size}
        inside = load_file(undisturbed.run / shard["path"])
        assert "model.down.0" in inside
        assert "model.calls" in inside
        assert not inside.keys() & tensors.keys()
    (saved,) = undisturbed.events("frozen_saved")
    assert saved["bytes"] == file.stat().st_size


def test_no_checkpoint_is_committed_before_its_base_is_durable(undisturbed: Lora) -> None:
    """The first periodic commit comes after the frozen file, and the saves before it say why they wait."""
    (saved,) = undisturbed.events("frozen_saved")
    assert all(commit["t"] >= saved["t"] for commit in undisturbed.events("committed"))
    assert any("frozen" in skipped["why"] for skipped in undisturbed.events("skipped"))


@pytest.mark.parametrize("damage", ["none", "flipped", "cut", "lost"])
def test_verify_reads_frozen_files_too(undisturbed: Lora, tmp_path: Path, damage: str) -> None:
    """Whatever is wrong with a frozen file is named; what is listed and shown accounts for it once."""
    run = shutil.copytree(undisturbed.run, tmp_path / "run")
    (file,) = run.glob("frozen/*.safetensors")
    size_bytes = file.stat().st_size
    expected = {
        "none": [],
        "flipped": [(f"frozen/{file.name}", "its bytes do not match their hash")],
        "cut": [(f"frozen/{file.name}", f"has {size_bytes - 1} bytes, the manifest says {size_bytes}")],
        "lost": [(f"frozen/{file.name}", "is missing")],
    }
    if damage == "flipped":
        flip(file, size_bytes - 1)
    elif damage == "cut":
        os.truncate(file, size_bytes - 1)
    elif damage == "lost":
        file.unlink()
    verdict, rows, detail = asyncio.run(_inspected(run))
    assert [(problem.object, problem.what) for problem in verdict.problems] == expected[damage]
    shards = sum(path.stat().st_size for path in run.glob("steps/*/*.safetensors"))
    assert detail.size_bytes == shards
    assert {row.frozen_bytes for row in rows} == {size_bytes}
    assert {row.verified for row in rows} == {damage not in ("cut", "lost")}
    if damage == "none":
        live = sum(row.size_bytes or 0 for row in rows if row.state == "live")
        assert verdict.size_bytes == live + size_bytes
        assert detail.frozen_bytes == size_bytes


async def _inspected(run: Path) -> tuple[Verdict, list[Checkpoint], RunDetail]:
    tier = DiskTier(run)
    try:
        found = await survey(Records(tier))
        rows = checkpoints(found, {})
        return await verify(tier), rows, run_detail(found, rows, 0.0)
    finally:
        await tier.close()


def _resumed_like(job: Lora, undisturbed: Lora, total: int) -> None:
    expected = {step: result for step, result in undisturbed.steps().items() if step <= total}
    assert {step: result for step, result in job.steps().items() if step <= total} == expected
    assert job.starts()[-1]["base"] == undisturbed.starts()[0]["base"]


def test_an_equal_base_is_not_loaded(killed: Callable[..., Lora], undisturbed: Lora) -> None:
    """Killed and started again with the same base: nothing is read of it, and every step is that of one long run."""
    job = killed()
    begun = job.commits()[-1]
    job.play(total=max(begun + 3, 20))
    assert job.starts()[-1]["begins"] >= begun
    assert job.events("frozen_loaded") == []
    assert len(job.events("frozen_saved")) == 1
    assert len(job.frozen()) == 1
    _resumed_like(job, undisturbed, 20)


def test_another_base_is_replaced_by_the_saved_one(killed: Callable[..., Lora], undisturbed: Lora) -> None:
    """Started again by a script that makes its base differently: the saved one is loaded, and nothing else shows."""
    job = killed()
    job.play(total=max(job.commits()[-1] + 3, 20), seed=5)
    (loaded,) = job.events("frozen_loaded")
    assert loaded["bytes"] == job.frozen()[0].stat().st_size
    _resumed_like(job, undisturbed, 20)
    assert len(job.frozen()) == 1


def test_a_flipped_byte_is_named_and_not_loaded(killed: Callable[..., Lora]) -> None:
    """A damaged file is refused by name where it is needed, noted, and written anew by who still has the base."""
    job = killed()
    (file,) = job.frozen()
    good = file.read_bytes()
    flip(file, len(good) // 2)
    job.play(total=1000, seed=5, code=1)
    assert len(job.starts()) == 1
    assert f"frozen/{file.name}" in job.output
    assert "do not match their hash" in job.output
    assert [event["object"] for event in job.events("quarantined")] == [f"frozen/{file.name}"]
    assert (job.run / "quarantine" / f"frozen~{file.name}.json").exists()
    begun = job.commits()[-1]
    job.play(total=begun + 3)
    assert job.starts()[-1]["begins"] == begun
    assert file.read_bytes() == good
    assert not list((job.run / "quarantine").glob("*"))


def test_the_next_copy_is_taken(killed: Callable[..., Lora], tmp_path: Path, undisturbed: Lora) -> None:
    """A damaged copy on a local drive is dropped, the run's own is loaded over it, and the copy made anew."""
    disk = tmp_path / "disk"
    job = killed(disk)
    copy = disk / "frozen" / job.frozen()[0].name
    good = copy.read_bytes()
    (length,) = struct.unpack("<Q", good[:8])
    flip(copy, 8 + length + 20 * MIB)
    process = job.start(total=100_000, seed=5, disk=[str(disk)])
    job.until(lambda: copy.exists() and max(job.steps()) >= 20, "the copy, and enough steps")
    job.kill(process)
    assert [event["tier"] for event in job.events("quarantined")] == ["disk copy"]
    assert copy.read_bytes() == good
    _resumed_like(job, undisturbed, 20)


@pytest.mark.parametrize("silent", [False, True])
def test_what_only_looks_frozen_is_saved_with_every_step(lora: Lora, silent: bool) -> None:
    """An average of weights that the script moves by hand is found out, named, and comes back as it was; also one that
    moves no version counter, by the last step that is saved with a tag."""
    lora.play(total=12, average=True, silent=silent, tag=silent)
    warnings = [event["what"] for event in lora.events("warning")]
    assert any(what.startswith("average.weight is frozen") for what in warnings), warnings
    end = lora.lines()[-1]
    assert end["average"] == 12.0
    lora.play(total=13, average=True, seed=5)
    assert lora.starts()[-1]["begins"] == 12
    assert lora.starts()[-1]["average"] == 12.0
    assert lora.starts()[-1]["base"] == lora.starts()[0]["base"]
    assert all("average.weight" not in load_file(file) for file in lora.frozen()[-1:])


def test_two_ranks_save_the_base_once(lora: Lora) -> None:
    """Under DDP each rank writes its half; a restart with another base loads it on both ranks."""
    lora.play(ranks=2, total=8, ddp=True)
    files = [load_file(file) for file in lora.frozen()]
    assert len(files) == 2
    assert not files[0].keys() & files[1].keys()
    sizes = [sum(tensor.nbytes for tensor in file.values()) for file in files]
    assert sum(sizes) == 64 * MIB + 64 * 1024 * 2
    assert max(sizes) - min(sizes) <= 4 * MIB
    lora.play(ranks=2, total=10, ddp=True, seed=5)
    (loaded,) = lora.events("frozen_loaded")
    assert loaded["bytes"] == sum(file.stat().st_size for file in lora.frozen())
    assert {start["base"] for start in lora.starts()} == {lora.starts()[0]["base"]}
    assert [start["begins"] for start in lora.starts()[2:]] == [8, 8]
    assert len(lora.frozen()) == 2


def test_a_killed_worker_resumes_from_memory_with_the_saved_base(lora: Lora, undisturbed: Lora) -> None:
    """A trainer that is started again and makes another base: the step comes from memory, the base from the run."""
    supervised = ("-m", "surefoot.cli.main", "run", "--to", str(lora.run), "--max-restarts", "3")
    process = lora.launch(*supervised, to=None, total=TOTAL, by_restart=5, held_at=12)
    lora.until(lambda: 12 in lora.commits(), "the checkpoint")
    os.kill(lora.starts()[0]["pid"], signal.SIGKILL)
    assert process.wait(lora.within_s) == 0, lora.output
    lora.until_quiet()
    assert lora.events("resumed")[-1]["tier"] == "ram"
    assert len(lora.events("frozen_loaded")) == 1
    assert len(lora.events("frozen_saved")) == 1
    _resumed_like(lora, undisturbed, TOTAL)


def test_a_killed_agent_is_told_again_and_saves_nothing_twice(lora: Lora) -> None:
    """The agent that replaces another goes on with the frozen file that is there, and the run with its saves."""
    process = lora.start(total=100_000)
    lora.until(lambda: lora.frozen() and any(step > 3 for step in lora.commits()), "a checkpoint")
    before = lora.commits()[-1]
    (lock,) = lora.memory.glob("*.lock")
    os.kill(json.loads(lock.read_text())["pid"], signal.SIGKILL)
    lora.until(lambda: len(lora.events("agent_started")) == 2 and lora.commits()[-1] > before + 1, "a later checkpoint")
    lora.kill(process)
    assert len(lora.events("frozen_saved")) == 1
    assert len(lora.frozen()) == 1


@pytest.mark.holds("frozen-parameters")
def test_a_layer_that_is_trained_from_some_step_on(lora: Lora) -> None:
    """Thawed in mid-run: from the next plan on it is in the shards, with its optimizer's state, and comes back."""
    lora.play(total=12, thaw=5)
    (shard,) = (lora.run / "steps").glob("00000012-*/*.safetensors")
    thawed = load_file(shard)["model.base.0.weight"]
    assert "optimizer.state.model.base.0.weight.exp_avg" in load_file(shard)
    record = json.loads((lora.run / "commits" / f"{shard.parent.name}.json").read_text())["body"]["shards"][0]["record"]
    frozen = load_file(lora.run / "frozen" / f"{record['frozen']['xxh3_128']}.safetensors")
    assert "model.base.0.weight" not in frozen
    assert len(frozen) == 16
    base = lora.lines()[-1]["base"]
    lora.play(total=13, thawed=True, seed=5)
    assert (lora.starts()[-1]["begins"], lora.starts()[-1]["base"]) == (12, base)
    assert thawed.any()


@pytest.mark.parametrize("silent", [False, True])
def test_a_layer_that_the_script_changes_by_hand(lora: Lora, silent: bool) -> None:
    """Doubled once behind everybody's back: named, saved with every step from there, and back after a restart."""
    lora.play(total=30, touch=6, silent=silent, tag=silent)
    assert any("model.base.1.weight is frozen" in event["what"] for event in lora.events("warning"))
    base = lora.lines()[-1]["base"]
    assert base != lora.starts()[0]["base"]
    lora.play(total=31, seed=5)
    assert (lora.starts()[-1]["begins"], lora.starts()[-1]["base"]) == (30, base)


def test_a_bucket_has_the_base_too(lora: Lora, s3_env: S3Server, undisturbed: Lora) -> None:
    """On an object store the base is one object; a restart with another base reads it from there."""
    uri = s3_env.url("lora")
    lora.play(to=uri, total=8)
    lora.play(to=uri, total=12, seed=5)
    (loaded,) = lora.events("frozen_loaded")
    assert loaded["tier"] == "object"
    assert lora.starts()[-1]["begins"] == 8
    _resumed_like(lora, undisturbed, 12)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.soak), 5])
def test_an_eviction_before_the_base_is_saved(lora: Lora, seed: int) -> None:
    """Committed without its base, which is said: resumed by a script that makes the same one, refused by another."""
    surefoot = (
        "-m",
        "surefoot.cli.main",
        "run",
        "--to",
        str(lora.run),
        "--max-bytes-per-s",
        "500000",
        "--grace-s",
        "8",
    )
    process = lora.launch(*surefoot, to=None, total=100_000)
    lora.until(lambda: lora.events("frozen_saving"), "the beginning of the upload")
    process.terminate()
    assert process.wait(60) == 75, lora.output
    lora.until_quiet()
    # A notice lifts the limit of the upload: it may be over before or after the trainer has left its step.
    saved = bool(lora.events("frozen_saved"))
    assert saved or "it can be resumed only by a script that makes the same frozen tensors" in lora.output
    (at,) = lora.commits()
    if seed == 0 or saved:
        lora.play(total=at + 2, seed=seed)
        assert lora.starts()[-1]["begins"] == at
        assert len(lora.frozen()) == 1
    else:
        lora.play(total=at + 2, seed=seed, code=1)
        assert "is not saved, and the script's own frozen tensors differ from it" in lora.output
