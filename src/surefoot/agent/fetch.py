"""Fetch: a committed step's shards, from a tier into anonymous memory, every byte verified before anybody sees it."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import xxhash

from surefoot.core.image import round_up
from surefoot.core.manifest import Manifest, Shard
from surefoot.core.plan import Plan
from surefoot.core.ranges import Range
from surefoot.errors import CorruptError, ObjectMissingError, ResourceError, TierError
from surefoot.events import human_bytes
from surefoot.memory_room import available_bytes
from surefoot.tiers.base import Tier

_CHUNK_BYTES = 16 * 1024 * 1024
_READS_AT_ONCE = 4


class ShardError(CorruptError):
    """A shard that cannot be used; `key` names it."""

    def __init__(self, key: str, why: str, *, missing: bool = False) -> None:
        super().__init__(f"{key}: {why}")
        self.key = key
        self.why = why
        self.missing = missing


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


async def fetch_step(
    tier: Tier, copies: Tier | None, manifest: Manifest, plan: Plan, on_bad_copy: Callable[[str, str], Awaitable[None]]
) -> list[Fetched]:
    """Read all shards of a step, once a node however many trainers it has.

    Args:
        tier: the run's own.
        copies: where a shard may lie nearer. One that is there and cannot be used is told to `on_bad_copy`, by key and
            reason, and the run's own is read.
        manifest: names the shards.
        plan: the manifest's.
        on_bad_copy: hears of bad copies.

    Raises:
        ShardError: a shard is missing or its bytes are wrong.
        TierError: the run's own tier failed to answer: not the shard's fault.
        ResourceError: too little memory.
    """
    need_bytes = sum(round_up(shard.size_bytes) for shard in manifest.shards)
    if need_bytes > available_bytes():
        raise ResourceError(
            f"restoring step {manifest.at.step} needs {human_bytes(need_bytes)} of memory, "
            f"{human_bytes(available_bytes())} are available; use a machine with more memory"
        )
    fetched: list[Fetched] = []
    try:
        for shard in manifest.shards:
            near = await _fetch_copy(copies, shard, plan, on_bad_copy) if copies is not None else None
            fetched.append(near or await _fetch_shard(tier, shard, plan))
    except BaseException:
        close_all(fetched)
        raise
    return fetched


def close_all(fetched: list[Fetched]) -> None:
    for image in fetched:
        if image.owned:
            os.close(image.fd)


async def verify_shard(tier: Tier, shard: Shard) -> str | None:
    """Read a shard through and say what is wrong with it; None if nothing is. Keeps 16 MiB at a time.

    Raises:
        TierError: the tier failed to answer.
    """
    try:
        size_bytes = await tier.size(shard.key)
        if size_bytes != shard.size_bytes:
            return f"has {size_bytes} bytes, the manifest says {shard.size_bytes}"
        digest = xxhash.xxh3_128()
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(1, size_bytes))))
        for start in range(0, size_bytes, _CHUNK_BYTES):
            part = buffer[: min(_CHUNK_BYTES, size_bytes - start)]
            await tier.read_into(shard.key, start, part)
            await asyncio.to_thread(digest.update, part)
    except ObjectMissingError:
        return "is missing"
    return None if digest.hexdigest() == shard.xxh3_128 else "its bytes do not match their hash"


async def _fetch_copy(
    copies: Tier, shard: Shard, plan: Plan, on_bad_copy: Callable[[str, str], Awaitable[None]]
) -> Fetched | None:
    try:
        return await _fetch_shard(copies, shard, plan)
    except ShardError as error:
        if not error.missing:
            await on_bad_copy(shard.key, error.why)
    except TierError as error:
        await on_bad_copy(shard.key, str(error))
    return None


async def _fetch_shard(tier: Tier, shard: Shard, plan: Plan) -> Fetched:
    image = plan.image(shard.id.rank)
    if image.size_bytes != shard.size_bytes:
        raise ShardError(shard.key, f"has {shard.size_bytes} bytes, its plan needs {image.size_bytes}")
    fd = os.memfd_create(f"fetch-{shard.id.rank}", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, round_up(shard.size_bytes))
        memory = memoryview(mmap.mmap(fd, round_up(shard.size_bytes)))[: shard.size_bytes]
        await _fill(tier, shard, memory)
        digest = await asyncio.to_thread(xxhash.xxh3_128_hexdigest, memory)
        if digest != shard.xxh3_128:
            raise ShardError(shard.key, "its bytes do not match their hash")
    except BaseException:
        os.close(fd)
        raise
    return Fetched(shard.id.rank, fd, 0, shard.size_bytes, owned=True)


async def _fill(tier: Tier, shard: Shard, memory: memoryview) -> None:
    try:
        size_bytes = await tier.size(shard.key)
        if size_bytes != shard.size_bytes:
            raise ShardError(shard.key, f"has {size_bytes} bytes, the manifest says {shard.size_bytes}")
        reads = asyncio.Semaphore(_READS_AT_ONCE)

        async def read(start: int) -> None:
            async with reads:
                await tier.read_into(shard.key, start, memory[start : start + _CHUNK_BYTES])

        async with asyncio.TaskGroup() as group:
            for start in range(0, shard.size_bytes, _CHUNK_BYTES):
                group.create_task(read(start))
    except ObjectMissingError as error:
        raise ShardError(shard.key, "is missing", missing=True) from error
    except BaseExceptionGroup as errors:
        raise _cause(errors, shard) from errors


def _cause(errors: BaseExceptionGroup[BaseException], shard: Shard) -> BaseException:
    missing = errors.subgroup(ObjectMissingError)
    if missing is not None:
        return ShardError(shard.key, "is missing", missing=True)
    faults = errors.subgroup(TierError)
    return faults.exceptions[0] if faults is not None else errors
