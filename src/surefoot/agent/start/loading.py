"""Loads the images and records of the chosen source, verified, from every place that may have them.

An object that proves bad is quarantined by name and remembered with its reason; `Starter` asks for the next choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from surefoot.agent.frozen.transfer import FrozenStart
from surefoot.agent.journal import Journal
from surefoot.agent.memory.memory import ImageSet, Memory
from surefoot.agent.nodes.membership import Membership
from surefoot.agent.nodes.peer_drives import PeerDrives, PeerDrivesPlace
from surefoot.agent.nodes.peers import PeerPlace, Peers
from surefoot.agent.start.needs import Needs, NeedsOfTrainers
from surefoot.agent.start.reading import (
    Fetched,
    Portion,
    ReadPlace,
    Reads,
    ShardError,
    close_all,
    portion_of,
    read_portions,
)
from surefoot.agent.start.sources import CopiesPlace, MemoryPlace, RunPlace, memory_place
from surefoot.core.layout import BoundaryId, commit_key, plan_key
from surefoot.core.manifest import Manifest, Shard
from surefoot.core.plan import Plan
from surefoot.core.ranges import Range
from surefoot.core.recovery import Copy, Place, Source
from surefoot.errors import AgentError, CorruptError, ObjectMissingError, TierError
from surefoot.host.clock import boot_s, wall_s
from surefoot.records.records import Records
from surefoot.tiers.base import Tier

_SHOWN_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Image:
    """What a generation starts from: every rank's bytes, verified, and every rank's record."""

    source: Source
    plan: Plan
    fetched: list[Fetched]
    records: tuple[Mapping[str, Any], ...]
    held: ImageSet | None
    """The set in shared memory that it came from, if it did."""
    reads: Reads | None
    """What was read for it; None if it was not: it is handed out where it lies."""


class Loader:
    """Loads for the trainers of this node."""

    def __init__(
        self,
        membership: Membership,
        peers: Peers,
        records: Records,
        disks: Tier | None,
        memory: Memory,
        frozen: FrozenStart,
        needs: NeedsOfTrainers,
        drives: PeerDrives,
        journal: Journal,
    ) -> None:
        self._membership = membership
        self._peers = peers
        self._records = records
        self._disks = disks
        self._memory = memory
        self._frozen = frozen
        self._needs = needs
        self._drives = drives
        self._journal = journal
        self.refused: dict[str, str] = {}
        """Bad copies met, with the reason; for the message when nothing is left."""

    def forget(self) -> None:
        """A new start begins: other trainers are waiting. What proved bad stays known."""
        self._frozen.forget()
        self._needs.forget()

    async def load(self, source: Source, manifest: Manifest | None) -> Image | None:
        """A step, as far as this node's trainers need it; None if it cannot be used, and why is recorded.

        Args:
            source: what to load.
            manifest: that of a source in the run's place.

        Raises:
            TierError: a tier did not answer.
            AgentError: another node, or a trainer, did not.
        """
        if source.copies:
            return await self._from_memory(source)
        return await self._from_run(source, manifest) if manifest is not None else None

    async def _from_memory(self, source: Source) -> Image | None:
        try:
            held = await self._peers.held(source)
            if self._membership.alone and held is not None and len(held.parts) == len(source.copies):
                return await self._in_place(source, held)
            return await self._put_together(source, held)
        except (AgentError, CorruptError, ObjectMissingError) as error:
            self.pass_over(f"{source.at.label} in the nodes' memory", str(error))
            return None

    async def _put_together(self, source: Source, held: ImageSet | None) -> Image:
        """A step from the memory of all nodes: from this one's what it has, the rest from the others."""
        plan = await self._peers.plan(source)
        needs = await self._needs.ask(plan)
        here = {_image_key(part.segment.rank): part for part in (held.parts if held is not None else ())}
        made: dict[Place, ReadPlace] = {
            "ram": MemoryPlace(self._memory, here),
            "peer": PeerPlace(self._peers, source),
        }
        records = await self._peers.records(source)
        fetched, counts = await read_portions(
            self._in_order(source, made), [_all_or_nothing(copy, needs) for copy in source.holders]
        )
        size_bytes = needs.size_bytes if needs is not None else sum(copy.size_bytes for copy in source.holders)
        return Image(source, plan, fetched, records, held, Reads(size_bytes, counts))

    async def _from_run(self, source: Source, manifest: Manifest) -> Image | None:
        plan = await self._plan(manifest)
        if plan is None:
            return None
        needs = await self._needs.ask(plan)
        lost: dict[str, ShardError] = {}
        made: dict[Place, ReadPlace] = {
            "ram": await memory_place(self._memory, manifest),
            source.place: RunPlace(self._records.tier, None if self._membership.alone else lost),
            "peer disk": PeerDrivesPlace(self._drives, lost),
        }
        if self._disks is not None:
            made["disk copy"] = CopiesPlace(self._disks, self._drop_copy)
        try:
            portions = [portion_of(shard, plan, _wanted(shard, needs)) for shard in manifest.shards]
            fetched, counts = await read_portions(self._in_order(source, made), portions)
        except ShardError as error:
            await self._quarantine(error.key, self._records.tier.name, error.why)
            return None
        for key, bad in lost.items():
            await self._quarantine(key, self._records.tier.name, bad.why)
        reads = Reads(manifest.size_bytes if needs is None else needs.size_bytes, counts)
        return Image(source, plan, fetched, tuple(shard.record for shard in manifest.shards), None, reads)

    def _in_order(self, source: Source, made: Mapping[Place, ReadPlace]) -> list[ReadPlace]:
        places = source.read_from(drives=self._disks is not None, others=not self._membership.alone)
        return [made[place] for place in places]

    async def settled(self, image: Image) -> bool:
        """True once every trainer has the frozen tensors that an image needs; else the image is passed over."""
        try:
            why = await self._frozen.settle(image.plan, image.records)
        except BaseException:
            close_all(image.fetched)
            raise
        if why is None:
            return True
        close_all(image.fetched)
        self.pass_over(f"{image.source.at.label} on {image.source.place}", why)
        return False

    async def manifest(self, at: BoundaryId, within_s: float = 0.0) -> Manifest | None:
        """A checkpoint's manifest; None if it cannot be used, or is not shown in that time."""
        end_s = boot_s() + within_s
        while True:
            try:
                return await self._records.manifest(at)
            except CorruptError as error:
                await self._quarantine(commit_key(at), self._records.tier.name, str(error))
                return None
            except ObjectMissingError:
                if boot_s() > end_s:
                    return None
                await asyncio.sleep(min(_SHOWN_LOOK_S, within_s))

    async def _plan(self, manifest: Manifest) -> Plan | None:
        try:
            return await self._records.plan(manifest.plan)
        except (CorruptError, ObjectMissingError) as error:
            await self._quarantine(plan_key(manifest.plan), self._records.tier.name, str(error))
            return None

    async def _drop_copy(self, key: str, why: str) -> None:
        """A copy on a local drive is a short cut: a bad one must never stop a start."""
        assert self._disks is not None
        await self._quarantine(key, "disk copy", why)
        try:
            await self._disks.delete([key])
        except TierError as error:
            self._journal.record("warning", what=f"a bad copy could not be removed: {error}")

    async def _in_place(self, source: Source, images: ImageSet) -> Image | None:
        try:
            await self._memory.verify(images)
            plan = images.parts[0].segment.plan()
            records = tuple(part.record() for part in images.parts)
        except CorruptError as error:
            await self._quarantine(f"image of {source.at.label}", "ram", str(error))
            return None
        fetched = [
            Fetched(
                part.segment.rank,
                part.segment.fd,
                part.segment.geometry.image_offset(part.sealed.slot),
                part.segment.geometry.image_bytes,
                owned=False,
            )
            for part in images.parts
        ]
        return Image(source, plan, fetched, records, images, None)

    def pass_over(self, what: str, why: str) -> None:
        """A source cannot be used."""
        self.refused[what] = why
        self._journal.record("warning", what=f"{what} is passed over: {why}")

    async def _quarantine(self, what: str, tier: str, why: str) -> None:
        self.refused[f"{what} on {tier}"] = why
        self._journal.record("quarantined", object=what, tier=tier, why=why)
        if tier == self._records.tier.name:
            await self._records.quarantine(what.replace(" ", "-"), why, wall_s())


def _image_key(rank: int) -> str:
    return f"image of rank {rank}"


def _all_or_nothing(copy: Copy, needs: Needs | None) -> Portion:
    """All of an image, of which nothing but the hash of the whole is known; nothing of one that is not needed."""
    needed = needs is None or bool(needs.ranges(copy.rank, copy.size_bytes))
    ranges = ((0, copy.size_bytes),) if needed else ()
    return Portion(copy.rank, _image_key(copy.rank), copy.size_bytes, copy.xxh3_128, None, ranges)


def _wanted(shard: Shard, needs: Needs | None) -> Callable[[int], Sequence[Range]]:
    """Given the length of a block, what this node's trainers need of a shard: all, if they did not answer."""
    if needs is None:
        return lambda _block_bytes: [(0, shard.size_bytes)]
    return partial(needs.ranges, shard.id.rank)
