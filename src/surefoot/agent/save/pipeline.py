"""Turns hashed images in shared memory into a committed checkpoint on the run's URI.

The order is the promise: plan, then shards, then their acknowledgements, then the manifest; each durable before the
next is begun. An agent that dies in between leaves objects that no reader believes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import xxhash

from surefoot.agent.memory.memory import Held, ImageSet
from surefoot.agent.save.pacer import Pacer
from surefoot.core.commit import make_manifest
from surefoot.core.layout import ShardId
from surefoot.core.manifest import Generation, Manifest, Shard
from surefoot.core.plan import Plan
from surefoot.errors import AgentError, CorruptError, SupersededError, TierError, TierFullError
from surefoot.ipc.board import Phase
from surefoot.records.image_hash import ImageHash
from surefoot.records.records import Records
from surefoot.tiers.base import Tier

CHUNK_BYTES = 8 * 1024 * 1024
_INLINE_HASH_BYTES = 1024 * 1024
_SHARDS_AT_ONCE = 4


class Pipeline:
    """Ships this node's images, and commits. Stateless in between, but for the bandwidth cap."""

    def __init__(self, records: Records, disks: Tier | None, pacer: Pacer, on_phase: Callable[[Phase], None]) -> None:
        self._records = records
        self._disks = disks
        self._pacer = pacer
        self._on_phase = on_phase
        self._slots = asyncio.Semaphore(_SHARDS_AT_ONCE)

    @property
    def tier_name(self) -> str:
        return self._records.tier.name

    @property
    def copies(self) -> bool:
        """True if there are local drives to copy to."""
        return self._disks is not None

    def hurry(self) -> None:
        """No bandwidth cap any more."""
        self._pacer.release()

    @property
    def uri(self) -> str:
        return self._records.tier.uri

    @property
    def held_s(self) -> float:
        """For how long the bandwidth cap has held bytes back, so far and added up."""
        return self._pacer.held_s

    async def ship(self, images: ImageSet, plan: Plan, override: dict[str, Any], shipped: dict[int, Shard]) -> None:
        """Write this node's shards of one step, and acknowledge them.

        Args:
            images: the step; its slots are pinned by the caller.
            plan: the plan that the images follow.
            override: fields that replace those of the ranks' records (why the agent ships by itself).
            shipped: by rank, what an earlier try of these very images acknowledged; this one's is added. A tier that is
                nearly full, or fails now and then, need not take a shard twice.

        Raises:
            CorruptError: what was streamed does not match the hash: the image is bad.
            TierError: the tier failed; nothing is visible, and it may be tried again.
        """
        self._on_phase(Phase.FLUSHING)
        try:
            await self._records.put_plan(plan)
            async with asyncio.TaskGroup() as group:
                for part in images.parts:
                    if part.segment.rank not in shipped:
                        group.create_task(self._ship_shard(part, override, shipped))
        except* (CorruptError, OSError) as errors:
            raise _first(errors) from None
        finally:
            self._on_phase(Phase.IDLE)

    async def commit(self, shards: Sequence[Shard], current: Generation, now: float) -> Manifest:
        """Commit a step whose shards are all acknowledged.

        Args:
            shards: one a rank, a complete set.
            current: the generation that this agent works in; the images may be of an older one.
            now: wall time for the manifest.

        Raises:
            AgentError: the step was given up meanwhile; the message gives the reason.
            SupersededError: a newer launch owns the run.
            CorruptError: a record by which this is decided is damaged.
            TierError: the tier failed; it may be tried again.
        """
        at = shards[0].id.at
        self._on_phase(Phase.COMMITTING)
        try:
            await self._refuse_if_superseded(current)
            manifest = make_manifest(shards, await self._records.generation(at.generation), now)
            standing = await self._records.put_manifest(manifest)
            # An agent that slept between the check and the put has changed nothing that counts, but must not train on.
            await self._refuse_if_superseded(current)
            if standing is None:
                # By this job's own agents, once a newer one was safe: this one slept meanwhile, and the job goes on.
                raise AgentError("it was given up by another node before it was whole, with a newer step safe")
            return standing
        finally:
            self._on_phase(Phase.IDLE)

    async def copy_to_disks(self, images: ImageSet, manifest: Manifest) -> None:
        """Put copies of a committed step's shards on the local drives.

        Raises:
            TierError: a drive failed or is full; the commit stands.
        """
        assert self._disks is not None
        for part in images.parts:
            shard = manifest.shards[part.segment.rank]
            size_bytes = part.segment.geometry.image_bytes
            chunks = stream(part, xxhash.xxh3_128(), Pacer(None))
            await self._disks.put_stream(shard.key, chunks, size_bytes)

    async def _ship_shard(self, part: Held, override: dict[str, Any], shipped: dict[int, Shard]) -> None:
        record = {**part.record(), **override}
        shard = Shard(
            # The attempt belongs to the shard: a later try never touches the bytes that an earlier one wrote.
            ShardId(part.sealed.at, part.segment.rank, secrets.token_hex(4)),
            part.segment.plan_hash,
            part.segment.geometry.image_bytes,
            part.image_hash,
            record,
        )
        digest = ImageHash()
        async with self._slots:
            chunks = stream(part, digest, self._pacer)
            await self._records.tier.put_stream(shard.key, chunks, shard.size_bytes)
        if digest.hexdigest() != part.image_hash or not part.unchanged():
            await self._records.tier.delete([shard.key])
            raise CorruptError(f"rank {part.segment.rank}, {part.sealed.at.label}: the image changed while it was sent")
        shard = replace(shard, blocks=digest.sums())
        try:
            await self._records.tier.put(shard.ack, shard.ack_bytes())
        except TierFullError:
            # It must not take the room that is missing. First the name by which others could believe in it.
            await self._records.tier.delete([shard.ack])
            await self._records.tier.delete([shard.key])
            raise
        shipped[part.segment.rank] = shard

    async def _refuse_if_superseded(self, current: Generation) -> None:
        # An economy, not the guard: readers decide by lineage (see core/lineage.py).
        try:
            newer = await self._records.newer_generation(current.number)
        except CorruptError as error:
            raise TierError(f"cannot determine whether a newer launch owns the run: {error}") from error
        if newer is not None and not newer.same_job(current):
            raise SupersededError(newer.owner)


class Digest(Protocol):
    """Sees bytes in order."""

    def update(self, data: memoryview, /) -> None: ...


async def stream(part: Held, digest: Digest, pacer: Pacer) -> AsyncIterator[memoryview]:
    """An image in chunks; `digest` sees exactly what is handed out."""
    image = part.segment.image(part.sealed.slot)
    for start in range(0, len(image), CHUNK_BYTES):
        chunk = image[start : start + CHUNK_BYTES]
        await pacer.take(len(chunk))
        if len(chunk) <= _INLINE_HASH_BYTES:
            digest.update(chunk)
            yield chunk
            continue
        # Beside the writing of the same bytes; they are pinned, and whether they stood still is asked at the end.
        hashing = asyncio.ensure_future(asyncio.to_thread(digest.update, chunk))
        try:
            yield chunk
        finally:
            await hashing


def _first(errors: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
