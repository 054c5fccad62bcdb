"""Shards, whole and in part, from several places: what is read, what is verified, and what happens to what is bad."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.agent.start import reading
from surefoot.agent.start.reading import Fetched, Portion, ReadPlace, ShardError, close_all, portion_of, read_portions
from surefoot.agent.start.sources import CopiesPlace, RunPlace
from surefoot.core.layout import BoundaryId, ShardId
from surefoot.core.manifest import Shard
from surefoot.core.plan import Leaf, Plan, Report, make_plan
from surefoot.core.ranges import Range, in_blocks, total_bytes
from surefoot.errors import TierError
from surefoot.records.image_hash import ImageHash
from surefoot.tiers.disk import DiskTier

BLOCK = 10_000
"""No multiple of a page: nothing may depend on that."""
LEAF = Leaf("t", "uint8", (95_000,), "local")
PLAN: Plan = make_plan([Report((LEAF,), '{"$dict":[["t",{"$tensor":"t"}]],"type":"dict"}')])
SIZE = PLAN.image(0).size_bytes
DATA = bytes(number * 7 % 251 for number in range(SIZE))
WANTED: list[Range] = [(4096, 4097), (35_000, 52_000), (SIZE - 1, SIZE)]


def shard_of(data: bytes, block_bytes: int | None) -> Shard:
    hashing = ImageHash(block_bytes or SIZE)
    hashing.update(memoryview(data))
    shard = Shard(ShardId(BoundaryId(3, 1), 0, "abcd"), PLAN.hash, len(data), hashing.hexdigest(), {})
    return shard if block_bytes is None else replace(shard, blocks=hashing.sums())


class Places:
    """A directory with copies, and the run's own."""

    def __init__(self, directory: Path, shard: Shard) -> None:
        self.copy, self.own = directory / "copies" / shard.key, directory / "run" / shard.key
        self.refused: list[tuple[str, str]] = []
        self.shard = shard
        for path in (self.copy, self.own):
            path.parent.mkdir(parents=True)
            path.write_bytes(DATA)

    async def refuse(self, key: str, why: str) -> None:
        self.refused.append((key, why))

    def fetch(self, wanted: Sequence[Range] = WANTED) -> tuple[Fetched, Counter[str], Portion]:
        async def run() -> tuple[Fetched, Counter[str], Portion]:
            copies, own = DiskTier(self.copy.parents[2]), DiskTier(self.own.parents[2])
            try:
                places: list[ReadPlace] = [CopiesPlace(copies, self.refuse), RunPlace(own)]
                portion = portion_of(self.shard, PLAN, lambda _gap: wanted)
                (fetched,), counts = await read_portions(places, [portion])
                return fetched, counts, portion
            finally:
                await copies.close()
                await own.close()

        return asyncio.run(run())


def flip(path: Path, *places: int) -> None:
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 1
    path.write_bytes(data)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path, shard_of(DATA, BLOCK))


def check(fetched: Fetched, wanted: Sequence[Range]) -> None:
    """What was wanted is there, and nothing else."""
    try:
        there = in_blocks(wanted, BLOCK, SIZE)
        assert fetched.ranges is not None
        assert list(fetched.ranges) == there
        held = os.pread(fetched.fd, SIZE, 0)
        expected = bytearray(SIZE)
        for start, stop in there:
            expected[start:stop] = DATA[start:stop]
        assert held == bytes(expected)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fetched.fd, b"x", 0)
        assert os.fstat(fetched.fd).st_blocks * 512 < SIZE
    finally:
        close_all([fetched])


def test_only_the_blocks_that_are_needed(places: Places) -> None:
    """From the nearest place alone; the other blocks take no memory, and what is handed out cannot be written."""
    fetched, counts, portion = places.fetch()
    check(fetched, WANTED)
    assert counts == {"disk copy": total_bytes(in_blocks(WANTED, BLOCK, SIZE))}
    assert portion.ranges == ((0, 10_000), (30_000, 60_000), (90_000, SIZE))
    assert places.refused == []


@pytest.mark.holds("corrupt-copy")
def test_a_bad_block_is_taken_from_the_next_place(places: Places) -> None:
    """Only that block; bad ones that nobody needs are not met."""
    flip(places.copy, 41_000, 15_000)
    flip(places.own, 15_000)
    fetched, counts, _portion = places.fetch()
    check(fetched, WANTED)
    assert counts == {"disk copy": total_bytes(in_blocks(WANTED, BLOCK, SIZE)), "disk": BLOCK}
    assert places.refused == [(places.shard.key, "its bytes 40000 to 50000 do not match the sum of their block")]


def _delete(path: Path) -> None:
    path.unlink()


def _shorten(path: Path) -> None:
    path.write_bytes(DATA[:-1])


def _forbid(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(("harm", "says"), [(_delete, None), (_shorten, f"has {SIZE - 1} bytes"), (_forbid, "")])
def test_a_copy_that_cannot_be_read_is_passed_over(
    places: Places, harm: Callable[[Path], None], says: str | None
) -> None:
    """One that is not there in silence, others by name."""
    harm(places.copy)
    fetched, counts, _portion = places.fetch()
    check(fetched, WANTED)
    assert counts == {"disk": total_bytes(in_blocks(WANTED, BLOCK, SIZE))}
    assert [key for key, _why in places.refused] == ([] if says is None else [places.shard.key])
    assert says is None or places.refused[0][1].startswith(says)


def test_a_block_that_is_bad_everywhere_is_named(places: Places) -> None:
    """Two different bits in one block: neither place has it, and no other block is to blame."""
    flip(places.copy, 41_000)
    flip(places.own, 42_000)
    with pytest.raises(ShardError, match="its bytes 40000 to 50000 do not match") as caught:
        places.fetch()
    assert caught.value.key == places.shard.key
    _delete(places.own)
    with pytest.raises(ShardError, match="is missing"):
        places.fetch()
    _forbid(places.copy)
    places.own.mkdir()
    with pytest.raises(TierError):
        places.fetch()


def whole_of(places: Places) -> tuple[bytes, Counter[str]]:
    fetched, counts, _portion = places.fetch([(0, SIZE)])
    try:
        assert fetched.ranges is None
        return os.pread(fetched.fd, SIZE, 0), counts
    finally:
        close_all([fetched])


@pytest.fixture(params=[16 * 1024 * 1024, 30_000], ids=["at once", "in pieces"])
def piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(reading, "_PIECE_BYTES", request.param)
    return int(request.param)


@pytest.mark.usefixtures("piece_bytes")
def test_a_whole_shard_is_verified_as_a_whole(places: Places) -> None:
    """By one hash; of a damaged one the good blocks stay, and the bad ones come from the next place."""
    assert whole_of(places) == (DATA, {"disk copy": SIZE})
    flip(places.copy, 41_000, 15_000)
    flip(places.own, 52_000)
    assert whole_of(places) == (DATA, {"disk copy": SIZE, "disk": 2 * BLOCK})
    assert places.refused == [(places.shard.key, "its bytes 10000 to 20000 do not match the sum of their block")]


@pytest.mark.usefixtures("piece_bytes")
@pytest.mark.parametrize("damage", [(), (41_000,)])
def test_a_hash_that_contradicts_the_sums_is_believed(tmp_path: Path, damage: tuple[int, ...]) -> None:
    """Sums that all hold make no shard good whose hash is another, from one place or from two."""
    places = Places(tmp_path, replace(shard_of(DATA, BLOCK), xxh3_128="0" * 32))
    flip(places.copy, *damage)
    with pytest.raises(ShardError, match="its bytes do not match their hash"):
        whole_of(places)


def test_nothing_is_handed_out_that_no_place_has(places: Places) -> None:
    """Missing or damaged bytes are never taken for zeros, also if the last place refuses them without an error."""

    async def read(*wanted: Range) -> None:
        tier = DiskTier(places.copy.parents[2])
        try:
            portion = portion_of(places.shard, PLAN, lambda _gap: wanted)
            await read_portions([CopiesPlace(tier, places.refuse)], [portion])
        finally:
            await tier.close()

    flip(places.copy, 41_000)
    for wanted in ((0, SIZE), (41_000, 41_001)):
        with pytest.raises(ShardError, match="bytes 40000 to 50000 are good in no place"):
            asyncio.run(read(wanted))
    places.copy.unlink()
    with pytest.raises(ShardError, match=f"bytes 0 to {SIZE} are good in no place"):
        asyncio.run(read((0, SIZE)))


@pytest.mark.usefixtures("piece_bytes")
def test_a_shard_without_sums_is_read_whole(tmp_path: Path) -> None:
    """As it was saved before there were sums: verified by the hash of all its bytes."""
    places = Places(tmp_path, shard_of(DATA, None))
    flip(places.copy, 15_000)
    assert whole_of(places) == (DATA, {"disk copy": SIZE, "disk": SIZE})
    assert places.refused == [(places.shard.key, "its bytes do not match their hash")]
