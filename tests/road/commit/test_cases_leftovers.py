"""Failures told of other systems: what an interrupted save, or somebody's hand, left behind stops no later one."""

from __future__ import annotations

from pathlib import Path

import evidence
import pytest
from machines import MakeMachine


def leave_behind(run: Path) -> None:
    """What a save of step 2 left when it was killed; and junk where the next one will lie, and beside every record."""
    step = run / "steps/00000002-g0001"
    step.mkdir()
    (step / "rank-00000-ffff.safetensors").write_bytes(b"\x10\0\0\0")
    (step / "rank-00000-ffff.safetensors").chmod(0o400)
    (step / "rank-00001-ffff.safetensors").write_bytes(b"")
    (step / "rank-00001-eeee.safetensors").symlink_to("nowhere")
    following = run / "steps/00000002-g0002"
    following.mkdir()
    (following / "notes.txt").write_text("mine")
    (following / "rank-00000-dddd").mkdir()
    (following / "rank-00000-dddd.safetensors.part").write_bytes(b"x")
    (following / "link").symlink_to("nowhere")
    for name in ("commits", "generations", "plans", "steps"):
        (run / name / ".nfs000000000000beef").write_bytes(b"x")
        (run / name / "README").write_text("do not touch")
        (run / name / "link").symlink_to("nowhere")
        (run / name / "00000009-g0009.json.part").write_bytes(b"{")


@pytest.mark.holds("interrupted-save-blocks-start")
def test_leftovers_where_the_next_step_will_lie(machine: MakeMachine, tmp_path: Path) -> None:
    """Half a shard, an empty one, a dangling link, files of others: the next start goes on from the step before, saves
    into the same directory, and the one after that finds it whole."""
    run = tmp_path / "run"
    first, second, third = machine(run), machine(run), machine(run)
    assert first.begin(2) is None
    first.saved(1)
    first.kill()
    leave_behind(run)
    assert second.begin(2) == 1
    second.saved(2)
    objects = evidence.of_directory(run)
    assert objects["steps/00000002-g0002/notes.txt"] == b"mine"
    documents = {key: data for key, data in objects.items() if not key.startswith("commits/") or "-g" in Path(key).stem}
    assert sorted(evidence.checkpoints({k: d for k, d in documents.items() if not k.endswith(".part")})) == [
        (1, 1),
        (2, 2),
    ]
    assert second.finish(2) == 0
    assert third.begin(2) == 2
