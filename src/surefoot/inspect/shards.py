"""Checks one shard: its bytes against the manifest, its header against the plan, its acknowledgement against both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import xxhash

from surefoot.core.frozen import named_by
from surefoot.core.manifest import Shard
from surefoot.core.plan import Plan
from surefoot.core.ranges import Range, cut
from surefoot.errors import CorruptError
from surefoot.inspect.progress import Progress
from surefoot.records.image_hash import BlockHash
from surefoot.tiers.base import Tier
from surefoot.tiers.read_ahead import read_ahead

CHUNK_BYTES = 8 * 1024 * 1024


async def check_shard(tier: Tier, shard: Shard, plan: Plan | None, progress: Progress) -> None:
    """Read a shard through. Keeps two chunks of 8 MiB: one is hashed while the next is read.

    Args:
        tier: where it lies.
        shard: as its manifest has it.
        plan: the plan it follows; None if that cannot be read, which is said elsewhere.
        progress: hears of each chunk.

    Raises:
        CorruptError: with what is wrong.
        ObjectMissingError: it is not there.
        TierError: the tier failed to answer.
    """
    header = _expected_header(shard, plan)
    sums = shard.blocks
    blocks = None if sums is None else BlockHash(sums.block_bytes)
    also = None if blocks is None else blocks.update
    await check_bytes(tier, shard.key, shard.size_bytes, shard.xxh3_128, header, progress, also)
    if sums is not None and blocks is not None and sums.sums != tuple(blocks.finish()):
        raise CorruptError("the sums of its blocks that stand in its documents are not those of its bytes")


async def check_bytes(
    tier: Tier,
    key: str,
    expected_bytes: int,
    xxh3_128: str,
    header: bytes,
    progress: Progress,
    also: Callable[[memoryview], None] | None = None,
) -> None:
    """Read an object through: its size, its hash, and how it begins. `also` sees each chunk, in a thread.

    Raises: as `check_shard`.
    """
    size_bytes = await tier.size(key)
    if size_bytes != expected_bytes:
        raise CorruptError(f"has {size_bytes} bytes, the manifest says {expected_bytes}")
    digest = xxhash.xxh3_128()
    differs = False
    buffers = [memoryview(bytearray(min(CHUNK_BYTES, max(1, size_bytes)))) for _ in range(2)]

    async def read(piece: Range) -> memoryview:
        start, stop = piece
        chunk = buffers[start // CHUNK_BYTES % 2][: stop - start]
        await tier.read_into(key, start, chunk)
        return chunk

    async with read_ahead(read, cut([(0, size_bytes)], CHUNK_BYTES), len(buffers)) as chunks:
        async for (start, stop), chunk in chunks:
            expected = header[start:stop]
            differs |= chunk[: len(expected)] != expected
            await asyncio.to_thread(digest.update, chunk)
            if also is not None:
                await asyncio.to_thread(also, chunk)
            progress.advance(len(chunk))
    if digest.hexdigest() != xxh3_128:
        raise CorruptError("its bytes do not match their hash")
    if differs:
        raise CorruptError("its header is not the one that its plan gives")


async def check_ack(tier: Tier, shard: Shard) -> None:
    """Read a shard's acknowledgement.

    Raises:
        CorruptError: it is damaged, or contradicts the manifest.
        ObjectMissingError: it is not there.
        TierError: the tier failed to answer.
    """
    if Shard.from_ack(await tier.get(shard.ack), shard.ack) != shard:
        raise CorruptError("does not describe its shard as the manifest does")


def check_record(shard: Shard, world_size: int) -> None:
    """The rank's record belongs to this shard, and names its frozen file as a file is named.

    Raises:
        CorruptError: it is another's.
    """
    at = shard.id.at
    due = {
        "boundary": at.boundary,
        "step": at.step,
        "generation": at.generation,
        "rank": shard.id.rank,
        "world_size": world_size,
    }
    for name, value in due.items():
        if shard.record.get(name) != value:
            raise CorruptError(f"the record of rank {shard.id.rank} has {name} {shard.record.get(name)!r}, not {value}")
    named_by(shard.record)


def _expected_header(shard: Shard, plan: Plan | None) -> bytes:
    if plan is None or shard.id.rank >= plan.world_size:
        return b""
    image = plan.image(shard.id.rank)
    if image.size_bytes != shard.size_bytes:
        raise CorruptError(f"has {shard.size_bytes} bytes, its plan needs {image.size_bytes}")
    return image.header
