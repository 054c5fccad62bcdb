"""Loading: a step's images and records, verified, from where they lie: memory, drives, the run's place.

What proves bad is quarantined by name and remembered with its reason; whoever chooses takes the next candidate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import xxhash

from surefoot.agent.books import Books
from surefoot.agent.fetch import Fetched, ShardError, close_all, fetch_step
from surefoot.agent.fleet import Fleet
from surefoot.agent.frozen import FrozenStart
from surefoot.agent.journal import Journal
from surefoot.agent.memory import ImageSet, Memory
from surefoot.agent.needs import Needs, NeedsDesk
from surefoot.agent.peer_drives import PeerDrives, PeerDrivesPlace
from surefoot.agent.peers import PeerPlace, Peers, Spread
from surefoot.agent.ranges import (
    Block,
    CopiesPlace,
    MemoryPlace,
    Portion,
    Reads,
    RunPlace,
    fetch_portions,
    memory_place,
    portion_of,
)
from surefoot.agent.ranges import Place as NearPlace
from surefoot.clock import boot_s, wall_s
from surefoot.core.copies import Copy
from surefoot.core.layout import StepId, commit_key, plan_key
from surefoot.core.manifest import Manifest, Shard
from surefoot.core.plan import Plan
from surefoot.core.ranges import Range
from surefoot.core.recovery import Place, Source
from surefoot.errors import AgentError, CorruptError, ObjectMissingError, TierError
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
    reads: Reads | None = None
    """What was read of its shards; None if all of them were taken whole."""


class Loader:
    """Loads for the trainers of this node."""

    def __init__(
        self,
        fleet: Fleet,
        peers: Peers,
        books: Books,
        disks: Tier | None,
        memory: Memory,
        frozen: FrozenStart,
        needs: NeedsDesk,
        drives: PeerDrives,
        journal: Journal,
    ) -> None:
        self._fleet = fleet
        self._peers = peers
        self._books = books
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

    async def load_spread(self, spread: Spread) -> Image:
        """A step from the memory of all nodes together: from this one's what it has, the rest from the others.

        Raises:
            SurefootError: a part of it cannot be had, or is bad.
        """
        plan = await self._peers.plan(spread)
        needs = await self._needs.ask(plan)
        held = await self._peers.held(spread)
        here = {_image_key(part.segment.rank): part for part in (held.parts if held is not None else ())}
        places: list[NearPlace] = [MemoryPlace(self._memory, here), PeerPlace(self._peers, spread)]
        portions = [_whole_portion(copy, needs) for copy in spread.holders]
        records = await self._peers.records(spread)
        fetched, counts_by_place = await fetch_portions(places, portions)
        size_bytes = sum(copy.size_bytes for copy in spread.holders)
        reads = Reads(needs.size_bytes if needs is not None else size_bytes, counts_by_place)
        source = Source(spread.at, "ram", spread.plan, committed=False)
        return Image(source, plan, fetched, records, held, reads)

    async def load_from_all(self, spread: Spread) -> Image | None:
        """The same; None if it cannot be had, and why is said."""
        try:
            return await self.load_spread(spread)
        except (AgentError, CorruptError, ShardError, ObjectMissingError) as error:
            what = f"step {spread.at.step} in the nodes' memory"
            self.refused[what] = str(error)
            self._journal.record("warning", what=f"{what} is passed over: {error}")
            return None

    async def load(self, source: Source, images: ImageSet | None, manifest: Manifest | None) -> Image | None:
        """A step from this node's memory, or from the run's place and what is nearer; None if it cannot be used.

        Raises:
            TierError: a tier did not answer.
            AgentError: another node, or a trainer, did not.
        """
        if images is not None:
            return await self._load_held(source, images)
        assert manifest is not None
        plan = await self._plan(manifest)
        if plan is None:
            return None
        needs = await self._needs.ask(plan)
        try:
            fetched, reads = await self._fetch(manifest, plan, needs)
        except ShardError as error:
            await self._quarantine(error.key, self._books.tier.name, error.why)
            return None
        return Image(source, plan, fetched, tuple(shard.record for shard in manifest.shards), None, reads)

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
        what, place = f"step {image.source.at.step}", image.source.place
        self.refused[f"{what} on {place}"] = why
        self._journal.record("warning", what=f"{what} on {place} is passed over: {why}")
        return False

    def stored(self, manifest: Manifest | None) -> Sequence[Source]:
        """The run's place as a source of a checkpoint; nothing if there is none."""
        if manifest is None:
            return []
        place: Place = "object" if self._books.tier.name == "object" else "disk"
        return [Source(manifest.at, place, manifest.plan, committed=True)]

    async def manifest(self, at: StepId, within_s: float = 0.0) -> Manifest | None:
        """A checkpoint's manifest; None if it cannot be used, or is not shown in that time."""
        end_s = boot_s() + within_s
        while True:
            try:
                return await self._books.manifest(at)
            except CorruptError as error:
                await self._quarantine(commit_key(at), self._books.tier.name, str(error))
                return None
            except ObjectMissingError:
                if boot_s() > end_s:
                    return None
                await asyncio.sleep(min(_SHOWN_LOOK_S, within_s))

    async def _plan(self, manifest: Manifest) -> Plan | None:
        try:
            return await self._books.plan(manifest.plan)
        except (CorruptError, ObjectMissingError) as error:
            await self._quarantine(plan_key(manifest.plan), self._books.tier.name, str(error))
            return None

    async def _fetch(self, manifest: Manifest, plan: Plan, needs: Needs | None) -> tuple[list[Fetched], Reads | None]:
        """The shards whole, or what is needed of them."""
        if needs is None and self._fleet.alone:
            return await fetch_step(self._books.tier, self._disks, manifest, plan, self._drop_copy), None
        lost: dict[str, ShardError] = {}
        places: list[NearPlace] = [await memory_place(self._memory, manifest)]
        if self._disks is not None:
            places.append(CopiesPlace(self._disks, self._drop_copy))
        if self._fleet.alone:
            places.append(RunPlace(self._books.tier))
        else:
            places += [RunPlace(self._books.tier, lost), PeerDrivesPlace(self._drives, lost)]
        portions = [portion_of(shard, plan, _wanted(shard, needs)) for shard in manifest.shards]
        fetched, counts = await fetch_portions(places, portions)
        for key, error in lost.items():
            await self._quarantine(key, self._books.tier.name, error.why)
        return fetched, Reads(manifest.size_bytes if needs is None else needs.size_bytes, counts)

    async def _drop_copy(self, key: str, why: str) -> None:
        """A copy on a local drive is a short cut: a bad one must never stop a start."""
        assert self._disks is not None
        await self._quarantine(key, "disk copy", why)
        try:
            await self._disks.delete([key])
        except TierError as error:
            self._journal.record("warning", what=f"a bad copy could not be removed: {error}")

    async def _load_held(self, source: Source, images: ImageSet) -> Image | None:
        try:
            await self._memory.verify(images)
            plan = images.parts[0].segment.plan()
            records = tuple(part.record() for part in images.parts)
        except CorruptError as error:
            await self._quarantine(f"image of step {source.at.step}", "ram", str(error))
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
        return Image(source, plan, fetched, records, images)

    async def _quarantine(self, what: str, tier: str, why: str) -> None:
        self.refused[f"{what} on {tier}"] = why
        self._journal.record("quarantined", object=what, tier=tier, why=why)
        if tier == self._books.tier.name:
            await self._books.quarantine(what.replace(" ", "-"), why, wall_s())


def _image_key(rank: int) -> str:
    return f"image of rank {rank}"


def _whole_portion(copy: Copy, needs: Needs | None) -> Portion:
    """All of an image, of which nothing but the hash of the whole is known; nothing of one that is not needed."""
    whole = Block(0, copy.size_bytes, lambda data: xxhash.xxh3_128_hexdigest(data) == copy.xxh3_128)
    needed = needs is None or bool(needs.ranges(copy.rank, copy.size_bytes))
    return Portion(copy.rank, _image_key(copy.rank), copy.size_bytes, [whole] if needed else [])


def _wanted(shard: Shard, needs: Needs | None) -> Callable[[int], Sequence[Range]]:
    """Given the length of a block, what this node's trainers need of a shard: all, if they did not say."""
    if needs is None:
        return lambda _block_bytes: [(0, shard.size_bytes)]
    return partial(needs.ranges, shard.id.rank)
