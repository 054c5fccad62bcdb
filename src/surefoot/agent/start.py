"""The start of a generation: one choice of what to restore, made here, recorded, and obeyed by all trainers."""

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
from surefoot.agent.frozen_start import FrozenStart
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
from surefoot.core.commit import complete_set, make_manifest
from surefoot.core.copies import Copy
from surefoot.core.layout import StepId, commit_key, generation_key, plan_key
from surefoot.core.lineage import Cuts, counts, cuts, superseding
from surefoot.core.manifest import Generation, Manifest, Parent, Shard
from surefoot.core.plan import Plan
from surefoot.core.ranges import Range
from surefoot.core.recovery import Place, Source, ranking
from surefoot.errors import (
    AgentError,
    CorruptError,
    ObjectExistsError,
    ObjectMissingError,
    RestoreError,
    SupersededError,
    SurefootError,
    TierError,
)
from surefoot.tiers.base import Tier
from surefoot.wire import Body

_LISTED_WITHIN_S = 30.0
"""A shared directory may show a new name to other machines only after a while."""
_LISTED_LOOK_S = 0.5


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


@dataclass(frozen=True, slots=True)
class Beginning:
    """A generation that may train: its record is written."""

    generation: Generation
    image: Image | None
    phases: dict[str, float]


class Starter:
    """Chooses and claims. Remembers nothing between starts but what proved bad."""

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
        launch: str,
        node: str,
        resume: str,
    ) -> None:
        self._fleet = fleet
        self._peers = peers
        self._orders = 0
        self._books = books
        self._disks = disks
        self._memory = memory
        self._frozen = frozen
        self._needs = needs
        self._drives = drives
        self._journal = journal
        self._launch = launch
        self._node = node
        self._resume = resume
        self._refused: dict[str, str] = {}
        """Bad copies met, with the reason; for the message when nothing is left."""

    async def begin(self, world_size: int, give_way: Callable[[], bool]) -> Beginning | None:
        """Choose what to restore, verify it, and claim the next generation. None if `give_way` says so first.

        Raises:
            RestoreError: the run has history, but nothing of it can be restored.
            CorruptError: a record by which it is decided what counts is damaged or missing.
            TierError: a tier did not answer, or not completely. Never taken for "nothing there".
            SupersededError: another launch has taken the run over from this one.
            AgentError: another node is gone, or refuses.
        """
        self._frozen.forget()
        self._needs.forget()
        self._orders = 0
        if not self._fleet.is_first:
            return await self._follow()
        try:
            beginning = await self._choose(world_size, give_way)
        except SurefootError as error:
            self._order({"error": str(error)})
            raise
        if beginning is None:
            self._order({"error": "node of rank 0 is being evicted, or superseded"})
        else:
            claimed = beginning.generation
            self._order({"begin": claimed.number, "record": claimed.to_bytes().decode("ascii")})
        return beginning

    async def _follow(self) -> Beginning | None:
        """Do as the node of rank 0 orders: fetch what it names, until it says what was claimed."""
        began_s = boot_s()
        image: Image | None = None
        while True:
            what = self._next_order()
            order = await self._fleet.from_first(what)
            if order.get("error") is not None:
                self.release(image)
                raise AgentError(str(order["error"]))
            if order.get("begin") is not None:
                key = generation_key(int(order["begin"]))
                generation = Generation.from_bytes(str(order["record"]).encode("ascii"), key)
                if _parent(image) != generation.parent:
                    # What was tried last was passed over, and nothing came after it.
                    self.release(image)
                    image = None
                return Beginning(generation, image, {"fetch": round(boot_s() - began_s, 4)})
            self.release(image)
            image, why = await self._try(order)
            await self._fleet.gather(f"tried {what}", {"error": why})

    async def _try(self, order: Body) -> tuple[Image | None, str | None]:
        """Fetch a step for this node's trainers. With the image, or why there is none."""
        try:
            if "copies" in order:
                spread = await self._load_spread(Spread.from_json(order))
                return (spread, None) if await self._settled(spread) else (None, "its frozen tensors cannot be had")
            at = StepId(int(order["step"]), int(order["generation"]))
            manifest = await self._manifest(at)
            for source in self._stored(manifest):
                image = await self._load(source, None, manifest)
                if image is not None and await self._settled(image):
                    return image, None
        except SurefootError as error:
            return None, str(error)
        return None, "; ".join(f"{what}: {why}" for what, why in self._refused.items()) or "it is not there"

    def _next_order(self) -> str:
        self._orders += 1
        return f"order {self._fleet.round} {self._orders}"

    def _order(self, order: Body) -> None:
        if not self._fleet.alone:
            self._fleet.bring(self._next_order(), order)

    async def _load_spread(self, spread: Spread) -> Image:
        """A step from the memory of all nodes together: from this one's what it has, the rest from the others."""
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

    async def _load_from_all(self, spread: Spread) -> Image | None:
        try:
            return await self._load_spread(spread)
        except (AgentError, CorruptError, ShardError, ObjectMissingError) as error:
            what = f"step {spread.at.step} in the nodes' memory"
            self._refused[what] = str(error)
            self._journal.record("warning", what=f"{what} is passed over: {error}")
            return None

    async def _others_have(self, image: Image, spread: Spread | None = None) -> bool:
        """True if every other node could fetch what its trainers need of an image."""
        if self._fleet.alone:
            return True
        at = image.source.at
        what = self._next_order()
        order: Body = spread.to_json() if spread is not None else {}
        self._fleet.bring(what, {**order, **at.to_json()})
        try:
            answers = await self._fleet.gather(f"tried {what}", {"error": None})
        except BaseException:
            self.release(image)
            raise
        why = next((str(answer["error"]) for answer in answers if answer.get("error") is not None), None)
        if why is not None:
            self.release(image)
            self._refused[f"step {at.step} on another node"] = why
            self._journal.record("warning", what=f"step {at.step} is passed over: {why}")
        return why is None

    async def _choose(self, world_size: int, give_way: Callable[[], bool]) -> Beginning | None:
        began_s = boot_s()
        taken = 0
        while True:
            generations = await self._generations(taken)
            newer = superseding(generations, self._launch)
            if newer is not None and self._fleet.alone:
                # Several nodes are launches of their own, and any of them may have had rank 0 before.
                raise SupersededError(f"generation {newer.number} of launch {newer.launch} on {newer.node}")
            chain = cuts(generations)
            committed = await self._finish_commits(generations, chain)
            chosen_s = boot_s()
            image = None if self._from_scratch(generations) else await self._best(generations, chain, committed)
            fetched_s = boot_s()
            if give_way():
                self.release(image)
                return None
            generation = Generation(
                max(generations, default=0) + 1, self._launch, _parent(image), world_size, self._node, wall_s()
            )
            try:
                await self._books.put_generation(generation)
            except ObjectExistsError:
                # Somebody else began meanwhile: what to restore must be decided again.
                self.release(image)
                taken = generation.number
                continue
            phases = {"choose": round(chosen_s - began_s, 4), "fetch": round(fetched_s - chosen_s, 4)}
            return Beginning(generation, image, phases)

    def release(self, image: Image | None) -> None:
        """Give back what was fetched for a start."""
        if image is not None:
            close_all(image.fetched)

    def _from_scratch(self, generations: Mapping[int, Generation]) -> bool:
        mine = [g for g in generations.values() if g.launch == self._launch]
        # Only this launch's first start ignores what is there; its restarts go on.
        return self._resume == "never" and not mine

    async def _generations(self, taken: int) -> dict[int, Generation]:
        """Every generation's record; the list must show the one whose number was found taken."""
        end_s = boot_s() + _LISTED_WITHIN_S
        while True:
            generations = await self._books.generations()
            if max(generations, default=0) >= taken:
                return generations
            if boot_s() > end_s:
                raise self._books.incomplete(generation_key(taken))
            await asyncio.sleep(_LISTED_LOOK_S)

    async def _finish_commits(self, generations: Mapping[int, Generation], chain: Cuts) -> list[StepId]:
        """Commit what is acknowledged in full: whoever was to do it may have died in between.

        Returns every step whose manifest's key is taken, ascending.
        """
        committed = set(await self._books.commits())
        pieces = await self._books.pieces()
        await self._books.check_records(generations, [*committed, *pieces])
        for at in sorted(set(pieces) - committed):
            if counts(at, chain) and await self._finish_commit(at, pieces[at]):
                committed.add(at)
        return sorted(committed)

    async def _finish_commit(self, at: StepId, ack_keys: Sequence[str]) -> bool:
        shards = complete_set(await self._books.acks(ack_keys), at)
        if shards is None:
            return False
        try:
            sizes = [await self._books.tier.size(shard.key) for shard in shards]
        except ObjectMissingError:
            return False
        if sizes != [shard.size_bytes for shard in shards]:
            return False
        manifest = make_manifest(shards, await self._books.generation(at.generation), wall_s())
        if await self._books.put_manifest(manifest) is manifest:
            self._journal.record(
                "committed",
                step=at.step,
                tier=self._books.tier.name,
                bytes=manifest.size_bytes,
                seconds=0.0,
                trigger=manifest.trigger,
                tag=manifest.tag,
            )
        return True

    async def _best(
        self, generations: Mapping[int, Generation], chain: Cuts, committed: Sequence[StepId]
    ) -> Image | None:
        """The newest image that counts and verifies, nearest place first."""
        whole = await self._memory.whole_sets() if self._fleet.alone else []
        sets = {self._source_of(images): images for images in whole}
        spreads = {} if self._fleet.alone else await self._spreads(chain)
        commits = [at for at in committed if counts(at, chain)]
        in_memory = {source.at for source in (*sets, *spreads) if counts(source.at, chain)}
        steps = sorted({*commits, *in_memory}, reverse=True)
        # A parent that was committed is history, also if nothing of it is left to be listed.
        had_history = any(parent.committed for number in chain if (parent := generations[number].parent) is not None)
        given_up: list[Manifest] = []
        for at in steps:
            manifest = await self._manifest(at) if at in commits else None
            had_history |= manifest is not None or at not in commits
            if manifest is not None and manifest.retired is not None:
                given_up.append(manifest)
                manifest = None
            here = {source: images for source, images in sets.items() if source.at == at}
            there = [source for source in spreads if source.at == at]
            for source in ranking([*here, *there, *self._stored(manifest)], chain):
                spread = spreads.get(source)
                if spread is not None:
                    image = await self._load_from_all(spread)
                else:
                    image = await self._load(source, here.get(source), manifest)
                if image is not None and await self._settled(image) and await self._others_have(image, spread):
                    return image
        image = await self._last_resort(given_up)
        if image is None:
            self._nothing(had_history)
        return image

    async def _spreads(self, chain: Cuts) -> dict[Source, Spread]:
        """What lies in the memory of all nodes together."""
        found = [Spread.of(whole) for whole in await self._peers.whole(chain)]
        return {Source(one.at, "ram", one.plan, committed=False): one for one in found}

    async def _last_resort(self, given_up: Sequence[Manifest]) -> Image | None:
        """Nothing that is kept can be restored: the bytes of one that retention gave up may still be there."""
        for manifest in given_up:
            if not await self._is_there(manifest):
                continue
            for source in self._stored(manifest):
                image = await self._load(source, None, manifest)
                if image is not None and await self._settled(image) and await self._others_have(image):
                    self._journal.record("warning", what=f"step {manifest.at.step} had been given up, but is whole")
                    return image
        return None

    async def _settled(self, image: Image) -> bool:
        """True once every trainer has the frozen tensors that an image needs; else the image is passed over."""
        try:
            why = await self._frozen.settle(image.plan, image.records)
        except BaseException:
            self.release(image)
            raise
        if why is None:
            return True
        self.release(image)
        what, place = f"step {image.source.at.step}", image.source.place
        self._refused[f"{what} on {place}"] = why
        self._journal.record("warning", what=f"{what} on {place} is passed over: {why}")
        return False

    async def _is_there(self, manifest: Manifest) -> bool:
        try:
            for shard in manifest.shards:
                await self._books.tier.size(shard.key)
        except ObjectMissingError:
            return False
        return True

    def _nothing(self, had_history: bool) -> None:
        if self._refused or had_history:
            reasons = "; ".join(f"{what}: {why}" for what, why in self._refused.items()) or "no manifest is left"
            raise RestoreError(
                f"{self._books.tier.uri} has checkpoints, but none can be restored ({reasons}); "
                "repair one, or start over on purpose with --resume never"
            )
        if self._resume == "must":
            raise RestoreError(f"{self._books.tier.uri} has no checkpoint, and --resume must was asked for")

    @staticmethod
    def _source_of(images: ImageSet) -> Source:
        return Source(images.at, "ram", images.plan, committed=False)

    def _stored(self, manifest: Manifest | None) -> Sequence[Source]:
        if manifest is None:
            return []
        place: Place = "object" if self._books.tier.name == "object" else "disk"
        return [Source(manifest.at, place, manifest.plan, committed=True)]

    async def _manifest(self, at: StepId) -> Manifest | None:
        try:
            manifest = await self._books.manifest(at)
        except CorruptError as error:
            await self._quarantine(commit_key(at), self._books.tier.name, str(error))
            return None
        except ObjectMissingError:
            return None
        return manifest

    async def _load(self, source: Source, images: ImageSet | None, manifest: Manifest | None) -> Image | None:
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
        self._refused[f"{what} on {tier}"] = why
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


def _parent(image: Image | None) -> Parent | None:
    if image is None:
        return None
    at = image.source.at
    return Parent(at.generation, at.step, image.source.committed)
