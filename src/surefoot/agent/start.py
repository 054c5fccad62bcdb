"""The start of a generation: one choice of what to restore, made here, recorded, and obeyed by all trainers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from surefoot.agent.books import Books
from surefoot.agent.fetch import close_all
from surefoot.agent.fleet import Fleet
from surefoot.agent.journal import Journal
from surefoot.agent.loading import Image, Loader
from surefoot.agent.memory import ImageSet, Memory
from surefoot.agent.peers import Peers, Spread
from surefoot.agent.unfinished import Unfinished
from surefoot.clock import boot_s, wall_s
from surefoot.core.documents import Fields
from surefoot.core.layout import StepId, generation_key
from surefoot.core.lineage import Cuts, counts, cuts, superseding
from surefoot.core.manifest import Generation, Manifest, Parent
from surefoot.core.recovery import Source, ranking
from surefoot.errors import (
    AgentError,
    ObjectExistsError,
    ObjectMissingError,
    RestoreError,
    SupersededError,
    SurefootError,
)
from surefoot.wire import Body

_LISTED_WITHIN_S = 30.0
"""A shared directory may show a new name to other machines only after a while."""
_LISTED_LOOK_S = 0.5


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
        memory: Memory,
        loader: Loader,
        journal: Journal,
        launch: str,
        node: str,
        resume: str,
    ) -> None:
        self._fleet = fleet
        self._peers = peers
        self._books = books
        self._memory = memory
        self._loader = loader
        self._unfinished = Unfinished(books, journal)
        self._journal = journal
        self._launch = launch
        self._node = node
        self._resume = resume
        self._orders = 0

    async def begin(self, world_size: int, give_way: Callable[[], bool]) -> Beginning | None:
        """Choose what to restore, verify it, and claim the next generation. None if `give_way` says so first.

        Raises:
            RestoreError: the run has history, but nothing of it can be restored.
            CorruptError: a record by which it is decided what counts is damaged or missing.
            TierError: a tier did not answer, or not completely. Never taken for "nothing there".
            SupersededError: another launch has taken the run over from this one.
            AgentError: another node is gone, or refuses.
        """
        self._loader.forget()
        self._orders = 0
        brought = await self._fleet.gather(f"launch {self._fleet.round}", {"launch": self._launch})
        launches = [Fields(one, "launch").text("launch") for one in brought]
        if not self._fleet.is_first:
            return await self._follow()
        try:
            beginning = await self._choose(world_size, launches, give_way)
        except SurefootError as error:
            self._order({"error": str(error), "superseded": isinstance(error, SupersededError)})
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
                release(image)
                kind = SupersededError if order.get("superseded") else AgentError
                raise kind(str(order["error"]))
            if order.get("begin") is not None:
                key = generation_key(int(order["begin"]))
                generation = Generation.from_bytes(str(order["record"]).encode("ascii"), key)
                if _parent(image) != generation.parent:
                    # What was tried last was passed over, and nothing came after it.
                    release(image)
                    image = None
                return Beginning(generation, image, {"fetch": round(boot_s() - began_s, 4)})
            release(image)
            image, why = await self._try(order)
            await self._fleet.gather(f"tried {what}", {"error": why})

    async def _try(self, order: Body) -> tuple[Image | None, str | None]:
        """Fetch a step for this node's trainers. With the image, or why there is none."""
        try:
            if "copies" in order:
                spread = await self._loader.load_spread(Spread.from_json(order))
                settled = await self._loader.settled(spread)
                return (spread, None) if settled else (None, "its frozen tensors cannot be had")
            at = StepId(int(order["step"]), int(order["generation"]))
            # The node that orders it has seen it.
            manifest = await self._loader.manifest(at, _LISTED_WITHIN_S)
            for source in self._loader.stored(manifest):
                image = await self._loader.load(source, None, manifest)
                if image is not None and await self._loader.settled(image):
                    return image, None
        except SurefootError as error:
            return None, str(error)
        return None, "; ".join(f"{what}: {why}" for what, why in self._loader.refused.items()) or "it is not there"

    def _next_order(self) -> str:
        self._orders += 1
        return f"order {self._fleet.round} {self._orders}"

    def _order(self, order: Body) -> None:
        if not self._fleet.alone:
            self._fleet.bring(self._next_order(), order)

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
            release(image)
            raise
        why = next((str(answer["error"]) for answer in answers if answer.get("error") is not None), None)
        if why is not None:
            release(image)
            self._loader.refused[f"step {at.step} on another node"] = why
            self._journal.record("warning", what=f"step {at.step} is passed over: {why}")
        return why is None

    async def _choose(self, world_size: int, launches: Sequence[str], give_way: Callable[[], bool]) -> Beginning | None:
        began_s = boot_s()
        taken = 0
        while True:
            generations = await self._generations(taken)
            newer = superseding(generations, launches)
            if newer is not None:
                raise SupersededError(newer.owner)
            chain = cuts(generations)
            committed = await self._unfinished.commit(generations, chain)
            chosen_s = boot_s()
            image = (
                None if self._from_scratch(generations, launches) else await self._best(generations, chain, committed)
            )
            fetched_s = boot_s()
            if give_way():
                release(image)
                return None
            generation = Generation(
                max(generations, default=0) + 1,
                self._launch,
                _parent(image),
                world_size,
                self._node,
                wall_s(),
                () if self._fleet.alone else tuple(launches),
            )
            try:
                await self._books.put_generation(generation)
            except ObjectExistsError:
                # Somebody else began meanwhile: what to restore must be decided again.
                release(image)
                taken = generation.number
                continue
            phases = {"choose": round(chosen_s - began_s, 4), "fetch": round(fetched_s - chosen_s, 4)}
            return Beginning(generation, image, phases)

    def _from_scratch(self, generations: Mapping[int, Generation], launches: Sequence[str]) -> bool:
        mine = [generation for generation in generations.values() if generation.is_of(launches)]
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

    async def _best(
        self, generations: Mapping[int, Generation], chain: Cuts, committed: Sequence[StepId]
    ) -> Image | None:
        """The newest image that counts and verifies, nearest place first."""
        whole = await self._memory.whole_sets() if self._fleet.alone else []
        sets = {_source_of(images): images for images in whole}
        spreads = {source: one for source, one in (await self._spreads(chain)).items() if source not in sets}
        commits = [at for at in committed if counts(at, chain)]
        in_memory = {source.at for source in (*sets, *spreads) if counts(source.at, chain)}
        steps = sorted({*commits, *in_memory}, reverse=True)
        # A parent that was committed is history, also if nothing of it is left to be listed.
        had_history = any(parent.committed for number in chain if (parent := generations[number].parent) is not None)
        given_up: list[Manifest] = []
        for at in steps:
            manifest = await self._loader.manifest(at) if at in commits else None
            had_history |= manifest is not None or at not in commits
            if manifest is not None and manifest.retired is not None:
                given_up.append(manifest)
                manifest = None
            here = {source: images for source, images in sets.items() if source.at == at}
            there = [source for source in spreads if source.at == at]
            for source in ranking([*here, *there, *self._loader.stored(manifest)], chain):
                spread = spreads.get(source)
                if spread is not None:
                    image = await self._best_of_memory(source, spread, chain)
                else:
                    image = await self._taken(await self._loader.load(source, here.get(source), manifest))
                if image is not None:
                    return image
        image = await self._last_resort(given_up)
        if image is None:
            self._nothing(had_history)
        return image

    async def _best_of_memory(self, source: Source, spread: Spread, chain: Cuts) -> Image | None:
        """A step from the memory of all nodes. What proves bad is given up where it lies, and a second copy may take
        its place: so again, until nothing new is found."""
        tried: list[Spread] = []
        found: Spread | None = spread
        while found is not None and found not in tried:
            tried.append(found)
            image = await self._taken(await self._loader.load_from_all(found), found)
            if image is not None:
                return image
            await self._peers.sift(found)
            found = (await self._spreads(chain)).get(source)
        return None

    async def _taken(self, image: Image | None, spread: Spread | None = None) -> Image | None:
        """The image, if every trainer of every node can be given what it needs of it."""
        if image is not None and await self._loader.settled(image) and await self._others_have(image, spread):
            return image
        return None

    async def _spreads(self, chain: Cuts) -> dict[Source, Spread]:
        """What lies in the memory of all nodes together."""
        found = [Spread.of(whole) for whole in await self._peers.whole(chain)]
        return {Source(one.at, "ram", one.plan, committed=False): one for one in found}

    async def _last_resort(self, given_up: Sequence[Manifest]) -> Image | None:
        """Nothing that is kept can be restored: the bytes of one that retention gave up may still be there."""
        for manifest in given_up:
            if not await self._is_there(manifest):
                continue
            for source in self._loader.stored(manifest):
                image = await self._taken(await self._loader.load(source, None, manifest))
                if image is not None:
                    self._journal.record("warning", what=f"step {manifest.at.step} had been given up, but is whole")
                    return image
        return None

    async def _is_there(self, manifest: Manifest) -> bool:
        try:
            for shard in manifest.shards:
                await self._books.tier.size(shard.key)
        except ObjectMissingError:
            return False
        return True

    def _nothing(self, had_history: bool) -> None:
        if self._loader.refused or had_history:
            reasons = "; ".join(f"{what}: {why}" for what, why in self._loader.refused.items()) or "no manifest is left"
            raise RestoreError(
                f"{self._books.tier.uri} has checkpoints, but none can be restored ({reasons}); "
                "repair one, or start over on purpose with --resume never"
            )
        if self._resume == "must":
            raise RestoreError(f"{self._books.tier.uri} has no checkpoint, and --resume must was asked for")


def release(image: Image | None) -> None:
    """Give back what was fetched for a start."""
    if image is not None:
        close_all(image.fetched)


def _source_of(images: ImageSet) -> Source:
    return Source(images.at, "ram", images.plan, committed=False)


def _parent(image: Image | None) -> Parent | None:
    if image is None:
        return None
    at = image.source.at
    return Parent(at.generation, at.step, image.source.committed)
