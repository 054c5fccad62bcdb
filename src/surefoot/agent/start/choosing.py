"""Chooses what to restore: the node of rank 0 makes the choice, all nodes try it, and it is recorded, then obeyed.

`surefoot.core.recovery.decide` chooses; this module gathers its facts and carries out its choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from surefoot.agent.journal import Journal
from surefoot.agent.nodes.membership import Membership
from surefoot.agent.nodes.peers import Peers
from surefoot.agent.start.loading import Image, Loader
from surefoot.agent.start.orders import Begin, GiveUp, StartOrder, Try, order_from_json
from surefoot.agent.start.reading import close_all
from surefoot.core.documents import Fields
from surefoot.core.layout import BoundaryId, generation_key
from surefoot.core.lineage import Cuts, cuts, superseding
from surefoot.core.manifest import Generation, Manifest, Parent
from surefoot.core.recovery import Facts, Look, Refuse, Restore, Scratch, Source, decide
from surefoot.errors import AgentError, ObjectExistsError, SupersededError, SurefootError
from surefoot.host.clock import boot_s, wall_s
from surefoot.records.records import Records
from surefoot.records.unfinished import Unfinished

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
        membership: Membership,
        peers: Peers,
        records: Records,
        loader: Loader,
        journal: Journal,
        launch: str,
        node: str,
        resume: str,
    ) -> None:
        self._membership = membership
        self._peers = peers
        self._records = records
        self._loader = loader
        self._unfinished = Unfinished(records, journal)
        self._journal = journal
        self._launch = launch
        self._node = node
        self._resume = resume
        self._orders = 0

    async def begin(self, world_size: int, give_way: Callable[[], bool]) -> Beginning | None:
        """Choose what to restore, verify it, and claim the next generation. None if `give_way` returns true first.

        Raises:
            RestoreError: the run has history, but nothing of it can be restored.
            CorruptError: a record by which it is decided what counts is damaged or missing.
            TierError: a tier did not answer, or not completely. Never taken for "nothing there".
            SupersededError: another launch has taken the run over from this one.
            AgentError: another node is gone, or refuses.
        """
        self._loader.forget()
        self._orders = 0
        brought = await self._membership.gather(f"launch {self._membership.round}", {"launch": self._launch})
        launches = [Fields(one, "launch").text("launch") for one in brought]
        if not self._membership.is_first:
            return await self._follow()
        try:
            beginning = await self._choose(world_size, launches, give_way)
        except SurefootError as error:
            self._order(GiveUp(str(error), isinstance(error, SupersededError)))
            raise
        if beginning is None:
            self._order(GiveUp("node of rank 0 is being evicted, or superseded"))
        else:
            self._order(Begin(beginning.generation))
        return beginning

    async def _follow(self) -> Beginning:
        """Do as the node of rank 0 orders: load what it names, until it reports what was claimed."""
        began_s = boot_s()
        image: Image | None = None
        while True:
            what = self._next_order()
            match order_from_json(await self._membership.from_first(what)):
                case GiveUp(why, superseded):
                    release(image)
                    raise SupersededError(why) if superseded else AgentError(why)
                case Begin(generation):
                    if _parent(image) != generation.parent:
                        # What was tried last was passed over, and nothing came after it.
                        release(image)
                        image = None
                    return Beginning(generation, image, {"fetch": round(boot_s() - began_s, 4)})
                case Try(source):
                    release(image)
                    image, error = await self._try(source)
                    await self._membership.gather(f"tried {what}", {"error": error})

    async def _try(self, source: Source) -> tuple[Image | None, str | None]:
        """Load a source for this node's trainers. With the image, or why there is none."""
        try:
            # The node that orders it has seen its manifest.
            manifest = await self._loader.manifest(source.at, _LISTED_WITHIN_S) if not source.copies else None
            image = await self._loader.load(source, manifest)
            if image is not None and await self._loader.settled(image):
                return image, None
        except SurefootError as error:
            return None, str(error)
        return None, "; ".join(f"{what}: {why}" for what, why in self._loader.refused.items()) or "it is not there"

    def _next_order(self) -> str:
        self._orders += 1
        return f"order {self._membership.round} {self._orders}"

    def _order(self, order: StartOrder) -> str:
        what = self._next_order()
        if not self._membership.alone:
            self._membership.bring(what, order.to_json())
        return what

    async def _others_have(self, image: Image) -> bool:
        """True if every other node could load what its trainers need of an image."""
        what = self._order(Try(image.source))
        try:
            answers = await self._membership.gather(f"tried {what}", {"error": None})
        except BaseException:
            release(image)
            raise
        why = next((str(answer["error"]) for answer in answers if answer.get("error") is not None), None)
        if why is not None:
            release(image)
            self._loader.pass_over(f"{image.source.at.label} on another node", why)
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
            image = await self._restore(generations, chain, committed, launches)
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
                () if self._membership.alone else tuple(launches),
            )
            try:
                await self._records.put_generation(generation)
            except ObjectExistsError:
                # Another launch began meanwhile: what to restore must be decided again.
                release(image)
                taken = generation.number
                continue
            phases = {"choose": round(chosen_s - began_s, 4), "fetch": round(fetched_s - chosen_s, 4)}
            return Beginning(generation, image, phases)

    async def _generations(self, taken: int) -> dict[int, Generation]:
        """Every generation's record; the list must show the one whose number was found taken."""
        end_s = boot_s() + _LISTED_WITHIN_S
        while True:
            generations = await self._records.generations()
            if max(generations, default=0) >= taken:
                return generations
            if boot_s() > end_s:
                raise self._records.incomplete(generation_key(taken))
            await asyncio.sleep(_LISTED_LOOK_S)

    async def _restore(
        self, generations: Mapping[int, Generation], chain: Cuts, commits: Sequence[BoundaryId], launches: Sequence[str]
    ) -> Image | None:
        """The image that is chosen, loaded on all nodes; None to start at step 0."""
        manifests: dict[BoundaryId, Manifest | None] = {}
        failed: list[Source] = []
        copies, silent = await self._peers.in_memory()
        while True:
            facts = Facts(
                generations=generations,
                chain=chain,
                launches=launches,
                resume=self._resume,
                uri=self._records.tier.uri,
                place="object" if self._records.tier.name == "object" else "disk",
                copies=copies,
                silent=silent,
                commits=commits,
                manifests=manifests,
                failed=failed,
                refused=self._loader.refused,
            )
            match decide(facts):
                case Look(at):
                    manifests[at] = await self._loader.manifest(at)
                case Restore(source):
                    image = await self._loaded(source, manifests.get(source.at))
                    if image is not None:
                        return image
                    failed.append(source)
                    if source.copies:
                        # What is bad is given up where it lies, and another copy may take its place.
                        await self._peers.sift(source)
                        copies, silent = await self._peers.in_memory()
                case Scratch():
                    return None
                case Refuse(why, error):
                    raise error(why)

    async def _loaded(self, source: Source, manifest: Manifest | None) -> Image | None:
        """The image, if every trainer of every node can be given what it needs of it."""
        image = await self._loader.load(source, manifest)
        if image is None or not await self._loader.settled(image) or not await self._others_have(image):
            return None
        if source.given_up:
            self._journal.record("warning", what=f"{source.at.label} had been given up, but is whole")
        return image


def release(image: Image | None) -> None:
    """Give back what was fetched for a start."""
    if image is not None:
        close_all(image.fetched)


def _parent(image: Image | None) -> Parent | None:
    if image is None:
        return None
    at = image.source.at
    return Parent(at.generation, at.boundary, image.source.committed, at.step)
