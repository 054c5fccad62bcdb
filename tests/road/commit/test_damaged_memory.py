"""Shared memory, damaged while nobody looks: every part of a segment, one bit at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import Machine, MakeMachine, wait_for

from surefoot.core.image import PAGE_BYTES
from surefoot.core.layout import BoundaryId
from surefoot.ipc.segment import Sealed, Segment, open_segment_file

IN_MEMORY = BoundaryId(3, 1)
WORDS = {
    "seq": 0,
    "boundary": 1,
    "generation": 2,
    "flags": 3,
    "record_bytes": 4,
    "record_hash": 5,
    "staged_ns": 7,
    "hashed_seq": 8,
    "hash": 9,
    "voided_seq": 11,
    "step": 12,
    "epoch": 13,
}
HEADER_BYTES = (0, 16, 56, 140, 190)


def newest_in(place: Machine, rank: int) -> tuple[Path, Segment, Sealed]:
    """The segment of a rank that holds the newest step, hashed."""

    def held() -> Iterator[tuple[Path, Segment, Sealed]]:
        for path in place.shm.glob(f"*/rank-{rank:05d}-*.seg"):
            segment = open_segment_file(path)
            yield from ((path, segment, s) for s in segment.all_sealed() if s.at == IN_MEMORY and s.image_hash)

    wait_for(lambda: any(True for _ in held()), "the newest step to be hashed")
    return next(held())


def flip(path: Path, offset: int) -> None:
    """The lowest bit: step 3 becomes step 2, which is there as well."""
    with path.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), offset)


def trained(place: Machine) -> None:
    """Step 2 is committed, step 3 lies in memory only."""
    place.begin(2)
    place.saved(2)
    place.save(3, trigger=None)


def places(segment: Segment, sealed: Sealed) -> dict[str, int]:
    """Offsets to hit, by name."""
    geometry, slot = segment.geometry, sealed.slot
    image = geometry.image_offset(slot)
    found = {f"entry word {name}": PAGE_BYTES + slot * 16 * 8 + word * 8 for name, word in WORDS.items()}
    found |= {"first byte of the image": image, "last byte of the image": image + geometry.image_bytes - 1}
    found |= {"middle of the image": image + geometry.image_bytes // 2}
    found |= {"record": geometry.record_offset(slot) + 3, "plan": 2 * PAGE_BYTES + 20}
    found |= {f"header byte {n}": n for n in HEADER_BYTES}
    return found


TARGETS = [
    *(f"entry word {name}" for name in WORDS),
    "first byte of the image",
    "middle of the image",
    "last byte of the image",
    "record",
    "plan",
    *(f"header byte {n}" for n in HEADER_BYTES),
]
HARMLESS = ("entry word flags", "entry word staged_ns", "entry word voided_seq", "entry word hashed_seq")
UNNAMED = ("entry word seq",)
"""Looks like a slot that a trainer was filling when it died."""


@pytest.mark.holds("bad-copy-passed-over")
@pytest.mark.parametrize("target", TARGETS)
def test_a_flipped_bit_in_memory_is_never_trained_on(machine: MakeMachine, tmp_path: Path, target: str) -> None:
    """Another launch adopts the memory: step 3 as it was sealed, or the run's step 2 and the bad one named."""
    place = machine(tmp_path / "run")
    trained(place)
    path, segment, sealed = newest_in(place, 1)
    place.kill()
    flip(path, places(segment, sealed)[target])
    step = place.begin(2)
    named = [event for event in place.events("quarantined") if event["tier"] == "ram"]
    if target in HARMLESS:
        assert (step, named) == (3, [])
    elif target in UNNAMED:
        assert step == 2
    else:
        assert step == 2
        assert named, "what was passed over was not named"
        assert any("rank 1" in f"{event}" or path.name in f"{event}" for event in named)
    place.saved(4)


@pytest.mark.holds("corrupt-copy")
@pytest.mark.parametrize("target", ["middle of the image", "record", "entry word step", "entry word hash"])
def test_a_flipped_bit_under_a_living_agent_is_never_trained_on(
    machine: MakeMachine, tmp_path: Path, target: str
) -> None:
    """Trainers die, a bit flips, trainers come again to the same agent: the run's own step 2, and nothing breaks."""
    place = machine(tmp_path / "run", owner_pid=os.getpid())
    trained(place)
    path, segment, sealed = newest_in(place, 0)
    place.kill_trainers()
    flip(path, places(segment, sealed)[target])
    assert place.went_on_from(place.restart_trainers(2)) == 2
    assert [event for event in place.events("quarantined") if event["tier"] == "ram"]
    place.saved(4)


@pytest.mark.holds("sealed-is-not-verified")
@pytest.mark.parametrize("target", ["middle of the image", "record", "entry word step", "entry word generation"])
def test_a_flipped_bit_is_never_shipped(machine: MakeMachine, tmp_path: Path, target: str) -> None:
    """The launch ends, the agent is to ship the newest image, whose bytes have changed: it is named, not committed."""
    place = machine(tmp_path / "run")
    trained(place)
    path, segment, sealed = newest_in(place, 1)
    flip(path, places(segment, sealed)[target])
    agent = place.agent
    assert agent is not None
    place.kill_trainers()
    agent.exit_code()
    assert [event for event in place.events("quarantined") if event["tier"] == "ram"]
    committed = sorted(path.name for path in (tmp_path / "run/commits").iterdir())
    assert committed == ["00000002-g0001.json"]
