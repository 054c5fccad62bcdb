"""Reads images from the places that this node itself reaches: its memory, its drives, the run's place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from surefoot.agent.memory.memory import Held, Memory
from surefoot.agent.start.reading import Portion, ShardError
from surefoot.core.manifest import Manifest
from surefoot.errors import ObjectMissingError, SurefootError
from surefoot.tiers.base import Tier


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
    """The run's own place: an image that is not good there is lost, unless another node has a copy."""

    def __init__(self, tier: Tier, lost: dict[str, ShardError] | None = None) -> None:
        """`lost`, if there is a place after this one, gets what is not good here, by key."""
        super().__init__(tier.name, tier)
        self._lost = lost

    async def refuse(self, portion: Portion, error: SurefootError) -> None:
        if isinstance(error, ObjectMissingError):
            error = ShardError(portion.key, "is missing")
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
