"""Private parts and replicas of two machines: a lost one's image is made whole, byte for byte, or not at all."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from membership_nodes import Node, nodes_of, until

from surefoot.agent.memory.memory import Held, Memory
from surefoot.agent.memory.replicas import Replicas
from surefoot.core.layout import BoundaryId
from surefoot.core.plan import Leaf, Plan, Report, make_plan
from surefoot.core.replicas import MAX_OWN_BYTES, areas, with_replicas
from surefoot.errors import CorruptError, ObjectMissingError
from surefoot.ipc.home import Home
from surefoot.ipc.segment import Segment

STRUCTURE = '{"$dict":[],"type":"dict"}'
SHARED = {f"t{n}": 3000 + 100 * n for n in range(6)}
OWN = 700


def _plan() -> Plan:
    leaves = [Leaf(name, "uint8", (size,), "replicated", "same") for name, size in SHARED.items()]
    reports = [Report((*leaves, Leaf("own", "uint8", (OWN,), "local")), STRUCTURE) for _ in range(2)]
    return with_replicas(make_plan(reports), reports, [0, 1])


PLAN = _plan()


@dataclass
class Machine:
    home: Home
    memory: Memory
    replicas: Replicas
    segment: Segment
    said: list[str]


def _fill(segment: Segment, slot: int, step: int, record_bytes: int = 100) -> None:
    """As a trainer would: its own image, and its replicas of what the replica's rank keeps."""
    segment.begin(slot)
    _put(segment.image(slot), segment.rank, segment.rank, step)
    for rank, _start in areas(PLAN, segment.rank).items():
        _put(segment.replica(slot, rank), rank, segment.rank, step)
    record = {
        "boundary": step,
        "step": step,
        "epoch": None,
        "generation": 1,
        "rank": segment.rank,
        "more": "x" * record_bytes,
    }
    segment.seal(slot, BoundaryId(step, 1, step), json.dumps(record).encode(), durable=False, staged_ns=step)


def _put(image: memoryview, of_rank: int, by_rank: int, step: int) -> None:
    item_of = {item.box.name: item for item in PLAN.kept_by(of_rank)}
    for box, start in PLAN.image(of_rank).places:
        item = item_of[box.name]
        if item.spread != "local":
            image[start : start + box.size_bytes] = (
                bytes([(step + len(item.leaf + str(box.shape))) % 251]) * box.size_bytes
            )
        elif of_rank == by_rank:
            image[start : start + box.size_bytes] = bytes([step % 251, of_rank]) * (box.size_bytes // 2)


@pytest.fixture
def homes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Home]]:
    with ExitStack() as stack:

        def take(name: str) -> Home:
            # A socket's path is short.
            base = stack.enter_context(tempfile.TemporaryDirectory(prefix="sf-test-", dir="/dev/shm"))
            monkeypatch.setenv("SUREFOOT_SHM", base)
            home = Home.take("run-1", "launch", name)
            stack.callback(home.release)
            return home

        yield take


@asynccontextmanager
async def _two(place: Path, homes: Callable[[str], Home]) -> AsyncIterator[list[Machine]]:
    async with nodes_of(place, "a", "b", ranks=1) as nodes:
        machines = []
        for rank, node in enumerate(nodes):
            home = homes(node.membership.me)
            memory = Memory(home, lambda what, why: None)
            said: list[str] = []
            replicas = Replicas(home, node.membership, memory, said.append)
            (segment,) = memory.reserve(PLAN, [rank], 2 * MAX_OWN_BYTES, 2)
            machines.append(Machine(home, memory, replicas, segment, said))
        yield machines


async def _told(machines: list[Machine], step: int, slot: int = 0) -> Held:
    """Both have sealed a step, and the first has told its private_part."""
    for machine in machines:
        _fill(machine.segment, slot, step)
    held = await machines[0].memory.hash_slot(machines[0].segment, slot)
    assert held is not None
    machines[0].replicas.hashed(held)
    await until(lambda: any(copy.at.boundary == step for copy in machines[1].replicas.copies()))
    return held


def _first_shared_byte() -> int:
    shared = {item.box.name for item in PLAN.kept_by(0) if item.spread != "local"}
    return next(start for box, start in PLAN.image(0).places if box.name in shared)


def test_what_is_filled_anew_while_it_is_read_is_not_told(tmp_path: Path, homes: Callable[[str], Home]) -> None:
    """A slot whose trainer has begun to overwrite it is history, and no error; damage in one that stands is said."""

    async def story() -> None:
        async with _two(tmp_path, homes) as machines:
            _fill(machines[0].segment, 0, 5)
            held = await machines[0].memory.hash_slot(machines[0].segment, 0)
            assert held is not None
            at = machines[0].segment.geometry.record_offset(0)
            machines[0].segment.memory[at] ^= 1
            machines[0].replicas.hashed(held)
            assert ["step 5 of rank 0 has no second copy" in said for said in machines[0].said] == [True]
            machines[0].segment.begin(0)
            machines[0].replicas.hashed(held)
            assert len(machines[0].said) == 1
            await _told(machines, 6, slot=1)
            assert [copy.at.boundary for copy in machines[1].replicas.copies()] == [6]

    asyncio.run(story())


def test_no_room_for_a_keepsakes_file(tmp_path: Path, homes: Callable[[str], Home]) -> None:
    """Said once; the connection that brought it stays, and the copy is there as long as this agent is."""

    async def story() -> None:
        async with _two(tmp_path, homes) as machines:
            place = machines[1].home.directory
            place.rename(place.with_name("away"))
            for step in (5, 6):
                held = await _told(machines, step, slot=step % 2)
                assert await machines[1].memory.hash_slot(machines[1].segment, step % 2) is not None
            place.with_name("away").rename(place)
            assert ["end with this agent" in said for said in machines[1].said] == [True]
            made = await machines[1].replicas.find(BoundaryId(6, 1, 6), PLAN.hash, 0)
            assert made.image_hash == held.image_hash

    asyncio.run(story())


def test_a_lost_image_is_made_whole(tmp_path: Path, homes: Callable[[str], Home]) -> None:
    """Every byte of it, its record and its hash; offered as what it is; and gone again when it is not needed."""

    async def story() -> None:
        async with _two(tmp_path, homes) as machines:
            held = await _told(machines, 5)
            replica = bytes(machines[1].segment.replica(0, 0))
            assert replica != bytes(machines[0].segment.image(0))  # its own part is missing
            (copy,) = machines[1].replicas.copies()
            assert (copy.at, copy.rank, copy.node) == (BoundaryId(5, 1, 5), 0, "b")
            assert (copy.xxh3_128, copy.size_bytes) == (held.image_hash, len(replica))
            made, again = await asyncio.gather(
                *(machines[1].replicas.find(BoundaryId(5, 1, 5), PLAN.hash, 0) for _ in range(2))
            )
            assert made is again
            assert bytes(made.segment.image(0)) == bytes(machines[0].segment.image(0))
            assert (made.image_hash, made.record()) == (held.image_hash, held.record())
            assert made.segment.path is not None
            machines[1].replicas.forget()
            assert not made.segment.path.exists()

    asyncio.run(story())


def test_whoever_replaces_an_agent_has_its_keepsakes(tmp_path: Path, homes: Callable[[str], Home]) -> None:
    """The newest four of a rank; a damaged one is said to be of no use, and what was half written is removed."""

    async def story() -> None:
        async with _two(tmp_path, homes) as machines:
            for step in range(1, 7):
                await _told(machines, step, step % 2)
            directory = machines[1].home.directory
            kept = sorted(directory.glob("*.private_part"), key=lambda path: path.stat().st_mtime_ns)
            assert len(kept) == 4
            kept[-2].write_bytes(kept[-2].read_bytes().replace(b'"boundary":5', b'"boundary":4'))
            (directory / "x.draft").write_bytes(b"half")
            (directory / "x.rebuilt").write_bytes(b"half")
            said: list[str] = []
            successor = Replicas(machines[1].home, Node(tmp_path, "b").membership, machines[1].memory, said.append)
            successor.adopt()
            assert [copy.at.boundary for copy in successor.copies()] == [6]
            assert [what for what in said if kept[-2].name in what]
            assert not list(directory.glob("x.*"))
            made = await successor.find(BoundaryId(6, 1, 6), PLAN.hash, 0)
            assert bytes(made.segment.image(0)) == bytes(machines[0].segment.image(0))
            successor.forget()

    asyncio.run(story())


def test_a_step_whose_slot_moved_on_is_not_offered(tmp_path: Path, homes: Callable[[str], Home]) -> None:
    """The replica went with the slot; the private_part alone is nothing."""

    async def story() -> None:
        async with _two(tmp_path, homes) as machines:
            await _told(machines, 5)
            _fill(machines[1].segment, 0, 6)
            assert machines[1].replicas.copies() == []
            with pytest.raises(ObjectMissingError, match="rank 0 at step 5"):
                await machines[1].replicas.find(BoundaryId(5, 1, 5), PLAN.hash, 0)

    asyncio.run(story())


@pytest.mark.holds("two-machines-hold-it")
@pytest.mark.parametrize("where", ["shared", "own"])
def test_replicas_that_differ_are_not_taken_for_the_same(
    tmp_path: Path, homes: Callable[[str], Home], where: str
) -> None:
    """One bit of the second copy, or of what was told: an error that names rank, step and node, and nothing is left."""

    async def story() -> None:
        async with _two(tmp_path, homes) as machines:
            await _told(machines, 5)
            if where == "shared":
                machines[1].segment.replica(0, 0)[_first_shared_byte()] ^= 1
            else:
                ((private_part, path),) = machines[1].replicas._kept[0].values()
                wrong = bytes([private_part.own[0] ^ 1, *private_part.own[1:]])
                machines[1].replicas._kept[0][private_part.key] = (replace(private_part, own=wrong), path)
            with pytest.raises(CorruptError, match="rank 0 at step 5, put together on node b"):
                await machines[1].replicas.find(BoundaryId(5, 1, 5), PLAN.hash, 0)
            assert machines[1].replicas.copies() == []
            left = {path.suffix for path in machines[1].home.directory.iterdir()}
            assert left.isdisjoint({".private_part", ".rebuilt", ".draft"})

    asyncio.run(story())


def test_a_record_that_is_too_large_is_said_once(tmp_path: Path, homes: Callable[[str], Home]) -> None:
    """It is not told, and a person hears what that means."""

    async def story() -> None:
        async with _two(tmp_path, homes) as machines:
            for step in (5, 6):
                _fill(machines[0].segment, 0, step, MAX_OWN_BYTES)
                held = await machines[0].memory.hash_slot(machines[0].segment, 0)
                assert held is not None
                machines[0].replicas.hashed(held)
            (said,) = machines[0].said
            assert "rank 0" in said
            await _told(machines, 7, 1)
            assert [copy.at.boundary for copy in machines[1].replicas.copies()] == [7]

    asyncio.run(story())
