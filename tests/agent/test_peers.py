"""What the run's place lost, from another node's drive; and other nodes that fail while they are asked."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from membership_nodes import nodes_of

from surefoot.agent.memory.memory import Memory
from surefoot.agent.memory.replicas import Replicas
from surefoot.agent.nodes.membership import Membership
from surefoot.agent.nodes.peer_drives import PeerDrives, PeerDrivesPlace
from surefoot.agent.nodes.peers import PeerPlace, Peers
from surefoot.agent.start.reading import Portion, ReadPlace, ShardError, close_all, portion_of, read_portions
from surefoot.agent.start.sources import MemoryPlace, RunPlace
from surefoot.core.layout import BoundaryId, ShardId
from surefoot.core.manifest import Shard
from surefoot.core.plan import Leaf, Plan, Report, make_plan
from surefoot.core.recovery import Copy, Source
from surefoot.errors import AgentError
from surefoot.ipc.home import Home
from surefoot.records.image_hash import ImageHash
from surefoot.tiers.disk import DiskTier

BLOCK = 10_000
LEAF = Leaf("t", "uint8", (95_000,), "local")
PLAN: Plan = make_plan([Report((LEAF,), '{"$dict":[["t",{"$tensor":"t"}]],"type":"dict"}')])
SIZE = PLAN.image(0).size_bytes
DATA = bytes(number * 7 % 251 for number in range(SIZE))


def _shard() -> Shard:
    hashing = ImageHash(BLOCK)
    hashing.update(memoryview(DATA))
    shard = Shard(ShardId(BoundaryId(3, 1), 0, "abcd"), PLAN.hash, SIZE, hashing.hexdigest(), {})
    return replace(shard, blocks=hashing.sums())


SHARD = _shard()


@dataclass
class Two:
    """Two nodes of a round."""

    fleets: list[Membership]
    said: list[str]
    place: Path

    def drive(self, name: str) -> DiskTier:
        return DiskTier(self.place / name)

    def drives_of(self, number: int, drive: DiskTier | None) -> PeerDrives:
        return PeerDrives(self.fleets[number], drive, self.said.append)


@asynccontextmanager
async def _two(place: Path) -> AsyncIterator[Two]:
    async with nodes_of(place / "mesh", "a", "b", ranks=1) as nodes:
        yield Two([node.membership for node in nodes], [], place)


def _put(path: Path, *flipped: int) -> None:
    path = path / SHARD.key
    path.parent.mkdir(parents=True, exist_ok=True)
    data = bytearray(DATA)
    for place in flipped:
        data[place] ^= 1
    path.write_bytes(data)


async def _fetch(places: Sequence[ReadPlace], portion: Portion | None = None) -> tuple[bytes, Counter[str]]:
    (fetched,), counts = await read_portions(places, [portion or portion_of(SHARD, PLAN, lambda _: [(0, SIZE)])])
    try:
        return os.pread(fetched.fd, SIZE, 0), counts
    finally:
        close_all([fetched])


async def _from_two(two: Two) -> tuple[bytes, Counter[str], dict[str, str]]:
    """By the first node, from the run's place and the second node's drive."""
    two.drives_of(1, two.drive("drive"))
    mine, lost = two.drives_of(0, None), dict[str, ShardError]()
    data, counts = await _fetch([RunPlace(two.drive("run"), lost), PeerDrivesPlace(mine, lost)])
    return data, counts, {key: error.why for key, error in lost.items()}


def test_a_missing_shard_comes_from_another_node(tmp_path: Path) -> None:
    """All of it, and what was wrong in the run's place is known."""

    async def story() -> None:
        async with _two(tmp_path) as two:
            _put(tmp_path / "drive")
            data, counts, lost = await _from_two(two)
            assert data == DATA
            assert counts == {"peer disk": SIZE}
            assert lost == {SHARD.key: "is missing"}

    asyncio.run(story())


@pytest.mark.holds("corrupt-copy")
def test_only_what_is_bad_comes_from_another_node(tmp_path: Path) -> None:
    """Of a damaged shard only the damaged block is asked for; a block that is bad over there is no harm if it is good
    here."""

    async def story() -> None:
        async with _two(tmp_path) as two:
            _put(tmp_path / "run", 41_000)
            _put(tmp_path / "drive", 15_000)
            data, counts, lost = await _from_two(two)
            assert data == DATA
            assert counts == {"disk": SIZE, "peer disk": BLOCK}
            assert lost == {SHARD.key: "its bytes 40000 to 50000 do not match the sum of their block"}

    asyncio.run(story())


@pytest.mark.parametrize("there", [None, 41_001])
def test_what_is_good_nowhere(tmp_path: Path, there: int | None) -> None:
    """Whether the other node has nothing or the same block bad: said is what is wrong in the run's place."""

    async def story() -> None:
        async with _two(tmp_path) as two:
            _put(tmp_path / "run", 41_000)
            if there is not None:
                _put(tmp_path / "drive", there)
            with pytest.raises(ShardError, match="bytes 40000 to 50000 do not match") as caught:
                await _from_two(two)
            assert caught.value.key == SHARD.key

    asyncio.run(story())


def test_a_node_that_does_not_tell_is_an_error(tmp_path: Path) -> None:
    """It may have what is looked for: the step is not passed over."""

    async def story() -> None:
        async with _two(tmp_path) as two:
            lost: dict[str, ShardError] = {}
            places = [RunPlace(two.drive("run"), lost), PeerDrivesPlace(two.drives_of(0, None), lost)]
            with pytest.raises(AgentError, match="node b"):
                await _fetch(places)

    asyncio.run(story())


def test_only_shards_are_told(tmp_path: Path) -> None:
    """Another node cannot ask for any other file, nor for more at once than fits into a message."""
    (tmp_path / "drive").mkdir()
    (tmp_path / "drive" / "notes").write_bytes(b"secret")

    async def story() -> None:
        async with _two(tmp_path) as two:
            two.drives_of(1, two.drive("drive"))
            _put(tmp_path / "drive")
            for key in ("notes", f"../drive/{SHARD.key}"):
                with pytest.raises(AgentError, match="not a shard's key"):
                    await two.fleets[0].ask("b", {"op": "shard bytes", "key": key, "offset": 0, "length": 6}, 10.0)
            body = {"op": "shard bytes", "key": SHARD.key, "offset": 0, "length": 1 << 30}
            with pytest.raises(AgentError, match="cannot be had"):
                await two.fleets[0].ask("b", body, 10.0)

    asyncio.run(story())


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    # A socket's path is short.
    with tempfile.TemporaryDirectory(prefix="sf-test-", dir="/dev/shm") as base:
        monkeypatch.setenv("SUREFOOT_SHM", base)
        home = Home.take("run-1", "launch", "b")
        yield home
        home.release()


@pytest.mark.parametrize(
    ("holder", "why"), [("b", "could not be had from another node"), ("a", "is not good in this node's memory")]
)
def test_an_image_that_is_gone_when_it_is_read(tmp_path: Path, home: Home, holder: str, why: str) -> None:
    """From another node, or from this one, which asks itself for nothing: the step is passed over by its name, like one
    that was never there, and nothing else breaks."""

    async def story() -> None:
        async with _two(tmp_path) as two:
            memories = [Memory(home, lambda what, why: None) for _ in two.fleets]
            mine, _theirs = [
                Peers(membership, one, Replicas(home, membership, one, print))
                for membership, one in zip(two.fleets, memories, strict=True)
            ]
            copy = Copy(BoundaryId(3, 1), PLAN.hash, 1, 0, SHARD.xxh3_128, SIZE, holder)
            source = Source(copy.at, "ram", copy.plan, False, ((copy,),))
            whole = Portion(0, "image of rank 0", SIZE, SHARD.xxh3_128, None, ((0, SIZE),))
            with pytest.raises(ShardError, match=why):
                await _fetch([MemoryPlace(memories[0], {}), PeerPlace(mine, source)], whole)

    asyncio.run(story())
