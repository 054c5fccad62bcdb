"""Retention by a real agent, save after save."""

from __future__ import annotations

import json
from pathlib import Path

import evidence
import pytest
from machines import Machine, MakeMachine, wait_for

NOW = {"agent.save.shipping._RETENTION_EVERY_S": 0.0, "agent.save.retention.SWEEP_DELAY_S": 0.0}


def visible(run: Path) -> list[evidence.At]:
    return sorted(evidence.checkpoints(evidence.of_directory(run)))


def settled(place: Machine, run: Path, step: int, kept: list[evidence.At]) -> None:
    """After the save of `step` and its aftermath exactly these are left; until then never fewer than two."""
    place.saved(step)
    wait_for(lambda: visible(run) == kept, f"{kept} after step {step}, there is {visible(run)}")


def test_the_newest_two_and_tagged_ones_stay_over_thirty_saves(machine: MakeMachine, tmp_path: Path) -> None:
    """Steps in numeric order across 9, 99 and 9999, three with a tag: the newest two and those, at any moment."""
    run = tmp_path / "run"
    place = machine(run, bounds=NOW)
    place.begin(1)
    steps = [*range(5, 13), *range(95, 105), *range(9_995, 10_005), 99_999_999, 100_000_000]
    tagged: list[evidence.At] = []
    before: list[int] = []
    for step in steps:
        tag = "keep" if step in (9, 100, 9_999) else None
        place.saved(step, tag=tag)
        found = visible(run)
        assert [(s, 1) for s in [*before, step][-2:]] == [at for at in found if at[0] in [*before, step][-2:]]
        assert [at for at in tagged if at not in found] == []
        tagged += [(step, 1)] if tag else []
        before.append(step)
    kept = sorted({*tagged, *((s, 1) for s in steps[-2:])})
    assert len(steps) == 30
    wait_for(lambda: visible(run) == kept, f"{kept} to be all that is left")
    place.finish(steps[-1])
    left = {path.name for path in (run / "steps").iterdir()}
    assert left == {f"{step:08d}-g{generation:04d}" for step, generation in kept}
    assert machine(run).begin(1) == 100_000_000


@pytest.mark.holds("parent-stays")
def test_what_a_run_was_resumed_from_stays_until_a_newer_one_is_there(machine: MakeMachine, tmp_path: Path) -> None:
    """The newer two are bad, so step 1 is resumed from; it stays through crashes, and until two newer ones verify."""
    run = tmp_path / "run"
    first = machine(run)
    first.begin(1)
    for step in (1, 2, 3):
        first.saved(step, tag=f"t{step}")
    first.finish(3)
    for step in (2, 3):
        for shard in (run / f"steps/{step:08d}-g0001").glob("*.safetensors"):
            shard.write_bytes(b"bad")
    for _crash in range(2):
        crashing = machine(run, bounds=NOW)
        assert crashing.begin(1) == 1
        crashing.kill()
    place = machine(run, bounds=NOW)
    assert place.begin(1) == 1
    place.saved(4)
    assert (run / "steps/00000001-g0001").exists()
    place.finish(4)
    assert machine(run).begin(1) == 4


@pytest.mark.parametrize("what", ["manifests", "shards", "all", "renamed"])
def test_checkpoints_deleted_by_hand_are_gone_and_no_trouble(machine: MakeMachine, tmp_path: Path, what: str) -> None:
    """Between two saves somebody deletes or renames checkpoints: retention and saving go on, the new one is whole."""
    run = tmp_path / "run"
    place = machine(run, bounds=NOW)
    place.begin(2)
    for step in (1, 2, 3):
        place.saved(step)
    wait_for(lambda: len(visible(run)) == 2, "step 1 to be given up")
    for path in (run / "commits").glob("*g0001.json") if what in ("manifests", "all") else []:
        path.unlink()
    for path in (run / "steps").glob("0000000[23]-g0001/*.safetensors") if what in ("shards", "all") else []:
        path.unlink()
    for path in (run / "commits").glob("*g0001.json") if what == "renamed" else []:
        path.rename(path.with_suffix(".old"))
    for step in (4, 5, 6):
        place.saved(step)
    place.finish(6)
    assert not [event for event in place.events("warning") if "given up" in event["what"]]
    bodies = [evidence.body_of(path.read_bytes()) for path in sorted((run / "commits").glob("*.json"))]
    live = [body["step"] for body in bodies if "tombstone" not in body and body["retired"] is None]
    assert live[-2:] == [5, 6]
    assert machine(run).begin(2) == 6


def test_a_run_saved_by_another_world_size_keeps_its_order(machine: MakeMachine, tmp_path: Path) -> None:
    """Two ranks save 1 and 2, one rank goes on with 3 and 4: retention counts steps, not shards."""
    run = tmp_path / "run"
    two, one = machine(run, bounds=NOW), machine(run, bounds=NOW)
    two.begin(2)
    two.saved(1)
    two.saved(2)
    two.finish(2)
    assert one.begin(1) == 2
    settled(one, run, 3, [(2, 1), (3, 2)])
    settled(one, run, 4, [(3, 2), (4, 2)])


def test_copies_on_local_drives_go_with_their_checkpoint(machine: MakeMachine, tmp_path: Path) -> None:
    """Ten saves, copies beside: as many steps lie on the drive as in the run."""
    run, copies = tmp_path / "run", tmp_path / "copies"
    place = machine(run, bounds=NOW, disks=(str(copies),))
    place.begin(2)
    for step in range(1, 11):
        place.saved(step)
    place.finish(10)
    assert sorted(path.name for path in (copies / "steps").iterdir()) == ["00000009-g0001", "00000010-g0001"]
    for key, data in evidence.of_directory(copies).items():
        assert data == (run / key).read_bytes()


def test_only_damaged_checkpoints_are_never_deleted(machine: MakeMachine, tmp_path: Path) -> None:
    """Every shard cut short: with nothing that verifies nothing is given up, the new save included in the count."""
    run = tmp_path / "run"
    first, second = machine(run), machine(run, bounds=NOW)
    first.begin(1)
    for step in (1, 2, 3):
        first.saved(step, tag=f"t{step}")
    first.finish(3)
    for shard in (run / "steps").rglob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-1])
    keys = set(evidence.of_directory(run))
    second.begin(1, resume="never")
    second.saved(1)
    second.finish(1)
    assert keys <= set(evidence.of_directory(run))
    for manifest in (run / "commits").glob("*g0001.json"):
        assert json.loads(manifest.read_bytes())["body"]["retired"] is None
