"""The tools of these tests show what is there: without that nothing below means anything."""

from __future__ import annotations

from pathlib import Path

import evidence
import pytest
from machines import MakeMachine


def test_a_run_goes_on_on_another_machine(machine: MakeMachine, tmp_path: Path) -> None:
    """Two ranks save two steps and leave; elsewhere two ranks go on from the second with every byte as sealed."""
    first = machine(tmp_path / "run")
    assert first.begin(2) is None
    first.saved(1)
    first.saved(2)
    assert first.finish(2) == 0
    found = evidence.checkpoints(evidence.of_directory(tmp_path / "run"))
    assert sorted(found) == [(1, 1), (2, 1)]
    second = machine(tmp_path / "run")
    assert second.begin(2) == 2


def test_the_independent_check_sees_a_torn_checkpoint(machine: MakeMachine, tmp_path: Path) -> None:
    """One changed byte in a shard, one in a manifest, one missing shard: each is called torn."""
    place = machine(tmp_path / "run")
    place.begin()
    place.saved(1)
    place.finish(1)
    good = evidence.of_directory(tmp_path / "run")
    assert sorted(evidence.checkpoints(good)) == [(1, 1)]
    (shard,) = [key for key in good if key.endswith(".safetensors")]
    for key in (shard, "commits/00000001-g0001.json"):
        data = bytearray(good[key])
        data[-10] ^= 1
        with pytest.raises((AssertionError, ValueError)):
            evidence.checkpoints({**good, key: bytes(data)})
    with pytest.raises(AssertionError, match="missing"):
        evidence.checkpoints({key: data for key, data in good.items() if key != shard})
