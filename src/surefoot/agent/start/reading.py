"""Reads the needed parts of the shards of a step, once per node, from the nearest places where they are good.

A shard that is needed whole is verified by its hash, a part of one by the sums of its blocks. Bytes that are bad in one
place are taken from the next, block by block where there are sums. The image handed out is as long as the shard and may
have holes: a tensor lies where it lies in the whole image.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import xxhash

from surefoot.core.block_sums import BlockSums
from surefoot.core.image import round_up
from surefoot.core.manifest import Shard
from surefoot.core.plan import Plan
from surefoot.core.ranges import Range, cut, in_blocks, merged
from surefoot.errors import AgentError, CorruptError, ResourceError, SurefootError, TierError
from surefoot.events import human_bytes
from surefoot.host.memory import available_bytes
from surefoot.tiers.read_ahead import read_ahead

_PIECE_BYTES = 16 * 1024 * 1024
_AT_ONCE = 8


class ShardError(CorruptError):
    """A shard that cannot be used; `key` names it."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"{key}: {why}")
        self.key = key
        self.why = why


@dataclass(frozen=True, slots=True)
class Fetched:
    """One rank's image, readable through a descriptor that every trainer of this node maps."""

    rank: int
    fd: int
    offset: int
    size_bytes: int
    owned: bool
    """The descriptor is to be closed after use (not a segment's own)."""
    ranges: tuple[Range, ...] | None = None
    """What of it is there; None for all."""


def close_all(fetched: Sequence[Fetched]) -> None:
    for image in fetched:
        if image.owned:
            os.close(image.fd)


@dataclass(frozen=True, slots=True)
class Portion:
    """What is needed of one rank's image."""

    rank: int
    key: str
    size_bytes: int
    xxh3_128: str
    """Of all its bytes."""
    sums: BlockSums | None
    """Without them it is needed whole, or not at all."""
    ranges: tuple[Range, ...]
    """Whole blocks."""

    @property
    def whole(self) -> tuple[Range, ...]:
        return ((0, self.size_bytes),)

    @property
    def piece_bytes(self) -> int:
        """What is read at once: whole blocks."""
        block_bytes = self.sums.block_bytes if self.sums is not None else 1
        return max(1, _PIECE_BYTES // block_bytes) * block_bytes

    def is_good(self, memory: memoryview) -> bool:
        """By the hash of all its bytes."""
        return xxhash.xxh3_128_hexdigest(memory) == self.xxh3_128

    def bad_blocks(self, piece: Range, memory: memoryview) -> list[Range]:
        """By their sums; without sums all of it may be bad."""
        sums = self.sums
        if sums is None:
            return list(self.whole)
        return [
            (start, stop)
            for start, stop in cut([piece], sums.block_bytes)
            if xxhash.xxh3_64_intdigest(memory[start:stop]) != sums.sums[start // sums.block_bytes]
        ]


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
    block_bytes = shard.blocks.block_bytes if shard.blocks is not None else shard.size_bytes
    needed = in_blocks(ranges(block_bytes), block_bytes, shard.size_bytes)
    return Portion(shard.id.rank, shard.key, shard.size_bytes, shard.xxh3_128, shard.blocks, tuple(needed))


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


class ReadPlace(Protocol):
    """Where an image may lie."""

    name: str

    async def size(self, portion: Portion) -> int: ...
    async def read_into(self, portion: Portion, offset: int, buffer: memoryview) -> None: ...
    async def refuse(self, portion: Portion, error: SurefootError) -> None:
        """It is not there, or cannot be used. Raises if there is no place after this one."""


async def read_portions(places: Sequence[ReadPlace], portions: Sequence[Portion]) -> tuple[list[Fetched], Counter[str]]:
    """Read portions once per node, however many trainers it has; returns also the bytes read by place.

    Args:
        places: nearest first; the last one may raise what it refuses, with its own reason.
        portions: those without ranges are left out.

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
    fetched: list[Fetched] = []
    try:
        for portion in portions:
            if portion.ranges:
                fetched.append(await _read_portion(places, portion, counts))
    except BaseException:
        close_all(fetched)
        raise
    return fetched, counts


async def _read_portion(places: Sequence[ReadPlace], portion: Portion, counts: Counter[str]) -> Fetched:
    whole = portion.ranges == portion.whole
    fd = os.memfd_create(f"image-{portion.rank}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, round_up(portion.size_bytes))
        for start, stop in portion.ranges:
            os.posix_fallocate(fd, start, stop - start)
        memory = memoryview(mmap.mmap(fd, round_up(portion.size_bytes)))[: portion.size_bytes]
        left, in_one_go = portion.ranges, True
        for place in places:
            if left:
                in_one_go = left == portion.ranges
                left = await _read_from(place, portion, left, memory, counts)
        if left:
            raise ShardError(portion.key, f"its bytes {left[0][0]} to {left[0][1]} are good in no place")
        # Bytes from several places were verified block by block.
        if whole and not in_one_go and not await asyncio.to_thread(portion.is_good, memory):
            raise ShardError(portion.key, "its bytes do not match their hash")
        readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)
    return Fetched(portion.rank, readable, 0, portion.size_bytes, owned=True, ranges=None if whole else portion.ranges)


async def _read_from(
    place: ReadPlace, portion: Portion, ranges: Sequence[Range], memory: memoryview, counts: Counter[str]
) -> tuple[Range, ...]:
    """Read ranges from one place. Returns those that it does not have, or not good."""
    try:
        size_bytes = await place.size(portion)
        if size_bytes != portion.size_bytes:
            raise ShardError(portion.key, f"has {size_bytes} bytes, its documents say {portion.size_bytes}")
        fault, bad = await _read_and_verify(place, portion, ranges, memory, counts)
    except (CorruptError, TierError) as error:
        await place.refuse(portion, error)
        return tuple(ranges)
    if fault is not None:
        await place.refuse(portion, fault)
    return tuple(merged(bad))


async def _read_and_verify(
    place: ReadPlace, portion: Portion, ranges: Sequence[Range], memory: memoryview, counts: Counter[str]
) -> tuple[SurefootError | None, list[Range]]:
    """Bytes are verified while the next ones are read: one hash of all where all are, else sums."""
    faults: list[SurefootError] = []

    async def read(piece: Range) -> SurefootError | None:
        start, stop = piece
        # A place that failed once may fail at every piece, each time after a long wait.
        if faults:
            return faults[0]
        try:
            await place.read_into(portion, start, memory[start:stop])
        except (AgentError, CorruptError, TierError) as error:
            faults.append(error)
            return error
        counts[place.name] += stop - start
        return None

    unread: list[Range] = []
    bad: list[Range] = []
    hashing = xxhash.xxh3_128() if tuple(ranges) == portion.whole else None
    there: list[Range] = []
    async with read_ahead(read, cut(ranges, portion.piece_bytes), _AT_ONCE) as pieces:
        async for (start, stop), error in pieces:
            if error is not None:
                unread.append((start, stop))
            elif hashing is not None:
                there.append((start, stop))
                await asyncio.to_thread(hashing.update, memory[start:stop])
            else:
                bad += await asyncio.to_thread(portion.bad_blocks, (start, stop), memory)
    if hashing is not None and (unread or hashing.hexdigest() != portion.xxh3_128):
        for piece in there:
            bad += await asyncio.to_thread(portion.bad_blocks, piece, memory)
        if not unread and not bad:
            # Its documents contradict themselves.
            bad = list(portion.whole)
    if bad and (portion.sums is not None or not unread):
        # A wrong block is better evidence about the object than a tier that failed meanwhile.
        faults.insert(0, _wrong(portion, bad[0]))
    return next(iter(faults), None), [*bad, *unread]


def _wrong(portion: Portion, block: Range) -> ShardError:
    if block == portion.whole[0]:
        return ShardError(portion.key, "its bytes do not match their hash")
    return ShardError(portion.key, f"its bytes {block[0]} to {block[1]} do not match the sum of their block")
