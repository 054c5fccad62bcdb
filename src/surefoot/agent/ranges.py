"""Ranges: of the shards of a committed step, the blocks that this node's trainers need, from the nearest good places.

Each block is verified by itself. One that is bad in one place is taken from the next; the others stay where they are
good. What is handed out is as long as the shard and has holes: a tensor lies where it lies in the whole image.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import xxhash

from surefoot.agent.fetch import Fetched, ShardError, close_all
from surefoot.agent.memory import Held, Memory
from surefoot.core.image import round_up
from surefoot.core.manifest import Manifest, Shard
from surefoot.core.plan import Plan
from surefoot.core.ranges import Range, cut, in_blocks, merged
from surefoot.errors import AgentError, CorruptError, ObjectMissingError, ResourceError, SurefootError, TierError
from surefoot.events import human_bytes
from surefoot.memory_room import available_bytes
from surefoot.tiers.base import Tier

_READ_BYTES = 16 * 1024 * 1024
_READS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of an object that can be verified by itself."""

    start: int
    stop: int
    is_good: Callable[[memoryview], bool]


@dataclass(frozen=True, slots=True)
class Portion:
    """What is needed of one object."""

    rank: int
    key: str
    size_bytes: int
    blocks: Sequence[Block]
    """Ascending."""

    @property
    def ranges(self) -> list[Range]:
        return merged((block.start, block.stop) for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Reads:
    """What was read for a start, and what of it was needed."""

    needed_bytes: int
    """By at least one trainer of this node."""
    by_place: Mapping[str, int] = field(default_factory=dict)
    """Bytes read, by the place's name; what was bad there counts too."""

    @property
    def read_bytes(self) -> int:
        return sum(self.by_place.values())

    def to_json(self) -> dict[str, Any]:
        """For the event: `amplification` is bytes read for each byte needed."""
        amplification = round(self.read_bytes / self.needed_bytes, 4) if self.needed_bytes else None
        return {
            "needed_bytes": self.needed_bytes,
            "read_bytes": self.read_bytes,
            "amplification": amplification,
            "by_place": dict(self.by_place),
        }


class Place(Protocol):
    """Where an object may lie."""

    name: str

    async def size(self, portion: Portion) -> int: ...
    async def read_into(self, portion: Portion, offset: int, buffer: memoryview) -> None: ...
    async def refuse(self, portion: Portion, error: SurefootError) -> None:
        """It is not there, or cannot be used. Raises if there is no place after this one."""


class MemoryPlace:
    """Images in shared memory that are, by their hash, those of the shards."""

    name = "ram"

    def __init__(self, memory: Memory, held: Mapping[str, Held]) -> None:
        self._memory = memory
        self._held = held
        """By shard's key."""

    async def size(self, portion: Portion) -> int:
        return len(self._image(portion))

    async def read_into(self, portion: Portion, offset: int, buffer: memoryview) -> None:
        image = self._image(portion)
        await asyncio.to_thread(buffer.__setitem__, slice(None), image[offset : offset + len(buffer)])

    async def refuse(self, portion: Portion, error: SurefootError) -> None:
        if not isinstance(error, ObjectMissingError):
            self._memory.give_up(self._held[portion.key], str(error))

    def _image(self, portion: Portion) -> memoryview:
        held = self._held.get(portion.key)
        if held is None or not held.unchanged():
            raise ObjectMissingError(f"{portion.key} is not in memory")
        return held.segment.image(held.sealed.slot)


class _TierPlace:
    """A tier on which an object has its shard's key."""

    def __init__(self, name: str, tier: Tier) -> None:
        self.name = name
        self._tier = tier

    async def size(self, portion: Portion) -> int:
        return await self._tier.size(portion.key)

    async def read_into(self, portion: Portion, offset: int, buffer: memoryview) -> None:
        await self._tier.read_into(portion.key, offset, buffer)


class CopiesPlace(_TierPlace):
    """Local drives that hold copies."""

    def __init__(self, tier: Tier, on_bad_copy: Callable[[str, str], Awaitable[None]]) -> None:
        super().__init__("disk copy", tier)
        self._on_bad_copy = on_bad_copy

    async def refuse(self, portion: Portion, error: SurefootError) -> None:
        if not isinstance(error, ObjectMissingError):
            await self._on_bad_copy(portion.key, error.why if isinstance(error, ShardError) else str(error))


class RunPlace(_TierPlace):
    """The run's own place: what is not good there is lost, unless another node has a copy."""

    def __init__(self, tier: Tier, lost: dict[str, ShardError] | None = None) -> None:
        """`lost`, if there is a place after this one, gets what is not good here, by key."""
        super().__init__(tier.name, tier)
        self._lost = lost

    async def refuse(self, portion: Portion, error: SurefootError) -> None:
        if isinstance(error, ObjectMissingError):
            error = ShardError(portion.key, "is missing", missing=True)
        if self._lost is None or not isinstance(error, ShardError):
            raise error
        self._lost[portion.key] = error


async def memory_place(memory: Memory, manifest: Manifest) -> MemoryPlace:
    """What of a committed step still lies in this machine's memory."""
    parts = await memory.parts(manifest.at, manifest.plan)
    same = {
        shard.key: parts[shard.id.rank]
        for shard in manifest.shards
        if shard.id.rank in parts and parts[shard.id.rank].image_hash == shard.xxh3_128
    }
    return MemoryPlace(memory, same)


def portion_of(shard: Shard, plan: Plan, ranges: Callable[[int], Sequence[Range]]) -> Portion:
    """The blocks of a shard that hold some ranges.

    Args:
        shard: one without sums of its blocks is needed whole.
        plan: its plan.
        ranges: given the length of a block, those that are needed; gaps shorter than a block may be left out.

    Raises:
        ShardError: its size is not the one that its plan gives.
    """
    expected_bytes = plan.image(shard.id.rank).size_bytes
    if expected_bytes != shard.size_bytes:
        raise ShardError(shard.key, f"has {shard.size_bytes} bytes, its plan needs {expected_bytes}")
    sums = shard.blocks
    if sums is None:
        whole = Block(0, shard.size_bytes, lambda data: xxhash.xxh3_128_hexdigest(data) == shard.xxh3_128)
        return Portion(shard.id.rank, shard.key, shard.size_bytes, [whole] if ranges(shard.size_bytes) else [])
    needed = in_blocks(ranges(sums.block_bytes), sums.block_bytes, shard.size_bytes)
    blocks = [
        Block(start, stop, _has_sum(sums.sums[start // sums.block_bytes]))
        for start, stop in cut(needed, sums.block_bytes)
    ]
    return Portion(shard.id.rank, shard.key, shard.size_bytes, blocks)


def _has_sum(expected: int) -> Callable[[memoryview], bool]:
    return lambda data: xxhash.xxh3_64_intdigest(data) == expected


async def fetch_portions(places: Sequence[Place], portions: Sequence[Portion]) -> tuple[list[Fetched], Counter[str]]:
    """Read portions once a node, however many trainers it has; returns also the bytes read by place.

    Args:
        places: nearest first; the last one raises what it refuses.
        portions: those without blocks are left out.

    Raises:
        ShardError: a block is good in no place, or an object is missing everywhere; the message names the block.
        TierError: the run's own place failed to answer.
        AgentError: another node failed to answer.
        ResourceError: too little memory.
    """
    need_bytes = sum(round_up(stop - start) for portion in portions for start, stop in portion.ranges)
    if need_bytes > available_bytes():
        raise ResourceError(
            f"restoring needs {human_bytes(need_bytes)} of memory, {human_bytes(available_bytes())} are available; "
            "use a machine with more memory"
        )
    counts: Counter[str] = Counter()
    turn = asyncio.Semaphore(_READS_AT_ONCE)
    fetched: list[Fetched] = []
    try:
        for portion in portions:
            if portion.blocks:
                fetched.append(await _fetch(places, portion, turn, counts))
    except BaseException:
        close_all(fetched)
        raise
    return fetched, counts


async def _fetch(places: Sequence[Place], portion: Portion, turn: asyncio.Semaphore, counts: Counter[str]) -> Fetched:
    fd = os.memfd_create(f"ranges-{portion.rank}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, round_up(portion.size_bytes))
        for start, stop in portion.ranges:
            os.posix_fallocate(fd, start, stop - start)
        memory = memoryview(mmap.mmap(fd, round_up(portion.size_bytes)))
        left = list(portion.blocks)
        for place in places:
            if left:
                left = await _read(place, portion, left, memory, turn, counts)
        readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)
    return Fetched(portion.rank, readable, 0, portion.size_bytes, owned=True, ranges=tuple(portion.ranges))


async def _read(
    place: Place,
    portion: Portion,
    blocks: Sequence[Block],
    memory: memoryview,
    turn: asyncio.Semaphore,
    counts: Counter[str],
) -> list[Block]:
    """Read blocks from one place. Returns those that it does not have, or not good."""
    try:
        size_bytes = await place.size(portion)
        if size_bytes != portion.size_bytes:
            raise ShardError(portion.key, f"has {size_bytes} bytes, its documents say {portion.size_bytes}")
        answers = await _read_all(place, portion, blocks, memory, turn, counts)
    except (CorruptError, TierError) as error:
        await place.refuse(portion, error)
        return list(blocks)
    if errors := [error for error, _left in answers if error is not None]:
        # A block that is wrong says more of the object than a tier that failed meanwhile.
        await place.refuse(portion, min(errors, key=lambda error: not isinstance(error, CorruptError)))
    return [block for _error, left in answers for block in left]


async def _read_all(
    place: Place,
    portion: Portion,
    blocks: Sequence[Block],
    memory: memoryview,
    turn: asyncio.Semaphore,
    counts: Counter[str],
) -> list[tuple[SurefootError | None, Sequence[Block]]]:
    async def read(run: Sequence[Block]) -> tuple[SurefootError | None, Sequence[Block]]:
        part = memory[run[0].start : run[-1].stop]
        async with turn:
            try:
                await place.read_into(portion, run[0].start, part)
            except (AgentError, CorruptError, TierError) as error:
                return error, run
            counts[place.name] += len(part)
            bad = await asyncio.to_thread(_bad_blocks, run, memory)
        return (_wrong(portion, bad[0]) if bad else None), bad

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(read(run)) for run in _runs(blocks)]
    return [task.result() for task in tasks]


def _runs(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    """Neighbouring blocks together, up to what is read at once."""
    run: list[Block] = []
    for block in blocks:
        if run and (block.start != run[-1].stop or block.stop - run[0].start > _READ_BYTES):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _bad_blocks(run: Sequence[Block], memory: memoryview) -> list[Block]:
    return [block for block in run if not block.is_good(memory[block.start : block.stop])]


def _wrong(portion: Portion, block: Block) -> ShardError:
    if (block.start, block.stop) == (0, portion.size_bytes):
        return ShardError(portion.key, "its bytes do not match their hash")
    return ShardError(portion.key, f"its bytes {block.start} to {block.stop} do not match the sum of their block")
