"""Shipping: which steps become durable, when, and who is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from surefoot.agent.clients.pins import Pins
from surefoot.agent.evict.precedence import goes_first
from surefoot.agent.frozen.transfer import FrozenSaver
from surefoot.agent.journal import Journal
from surefoot.agent.memory.memory import Held, ImageSet, Memory
from surefoot.agent.nodes.membership import Fleet
from surefoot.agent.save.clock import SaveClock
from surefoot.agent.save.commits import Commits
from surefoot.agent.save.pipeline import Pipeline
from surefoot.agent.save.queue import Deliveries, Delivery, Outcomes, Part
from surefoot.agent.save.retention import Keeper
from surefoot.agent.status import Situation
from surefoot.core.eviction import Link, Uploads
from surefoot.core.layout import StepId
from surefoot.core.manifest import Manifest
from surefoot.errors import (
    AgentError,
    CorruptError,
    SupersededError,
    TierError,
    TierFullError,
)
from surefoot.host.clock import boot_ns, boot_s
from surefoot.ipc.board import NodeWord
from surefoot.ipc.segment import Segment

_ATTEMPTS = {"periodic": 3, "manual": 8, "final": 8}
"""Tries before a save is given up. Emergency ones are tried until the deadline ends everything."""
_LONGEST_PAUSE_S = 20.0
_FIRST_PAUSE_S = 0.5
_RETENTION_EVERY_S = 5.0


class Shipper:
    """A queue of deliveries and the one task that works it off, the most urgent first."""

    def __init__(
        self,
        fleet: Fleet,
        memory: Memory,
        pipeline: Pipeline,
        commits: Commits,
        pins: Pins,
        keeper: Keeper,
        frozen: FrozenSaver,
        journal: Journal,
        situation: Situation,
        clock: SaveClock,
        copies: bool,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._fleet = fleet
        self._memory = memory
        self._pipeline = pipeline
        self._commits = commits
        self._pins = pins
        self._keeper = keeper
        self._frozen = frozen
        self._journal = journal
        self._situation = situation
        self._clock = clock
        self._copies = copies
        self._deliveries = Deliveries()
        self._task: asyncio.Task[None] | None = None
        """At work on the running delivery."""
        self._wake = asyncio.Event()
        self._outcomes = Outcomes()
        self._retained_s = 0.0
        self._changed = asyncio.Event()
        self._dropped: dict[int, tuple[StepId, str]] = {}
        """By rank, what it gave up last: others may seal that step only later."""
        self._spare: list[tuple[int, Part]] = []
        """Pins that nobody needs."""
        self._spawn = spawn
        self.rate_bytes_per_s = 0.0
        """At which the last delivery went, from hashing to the commit, pauses included; 0 before there is one."""
        self._link = Link()
        self._upload_until_s: float | None = None
        """When an eviction's uploads must be done."""

    # ------------------------------------------------------------------ what comes in

    def sealed(
        self, segment: Segment, slot: int, seq: int, at: StepId, trigger: str, tag: str | None, num_parts: int
    ) -> None:
        """A rank sealed an image that is to be shipped; its slot is pinned."""
        if at == self._situation.committed and trigger == "periodic":
            # Told again to an agent whose predecessor died between the commit and the release.
            self._spare.append((segment.rank, (segment, slot, seq)))
            self._wake.set()
            return
        delivery = self._deliveries.incomplete(at, trigger)
        if delivery is None:
            delivery = Delivery(at, trigger, tag, num_parts, f"{trigger} {at.step} {at.generation}")
            self._deliveries.add(delivery)
        delivery.parts[segment.rank] = (segment, slot, seq)
        if delivery.complete:
            self._whole(delivery)
            for older in self._deliveries.overtaken(delivery):
                self._deliveries.remove(older)
                self._spawn(self._let_go(older, f"step {at.step} overtook it"))

    async def passed(self, rank: int, at: StepId) -> None:
        """A rank went past `at` without taking part in what others asked to be saved there: that cannot complete."""
        for delivery in self._deliveries.waiting:
            if delivery.at <= at and rank not in delivery.parts and delivery.at.generation == at.generation:
                await self._give_up(delivery, self._why_missing(rank, delivery))

    def _why_missing(self, rank: int, delivery: Delivery) -> str:
        at, why = self._dropped.get(rank, (None, ""))
        if at == delivery.at:
            return f"rank {rank}: {why}"
        return (
            f"save() at step {delivery.at.step} was called on rank(s) {sorted(delivery.parts)}, but not on rank "
            f"{rank}: call it on every rank"
        )

    async def dropped(self, rank: int, at: StepId, why: str) -> None:
        """A rank gave its image of `at` up: nothing that needs it can complete."""
        self._dropped[rank] = (at, why)
        for delivery in [delivery for delivery in self._deliveries.waiting if delivery.at == at]:
            await self._give_up(delivery, f"rank {rank}: {why}")

    async def left(self, rank: int) -> None:
        """A rank will seal nothing more: what still lacks its part cannot become whole."""
        for delivery in self._deliveries.waiting:
            if not delivery.complete and rank not in delivery.parts:
                await self._give_up(delivery, f"rank {rank} left before it took part")

    def ship(self, images: ImageSet, trigger: str, name: str) -> None:
        """Deliver images that this node has kept, under a name that all nodes know."""
        delivery = Delivery.of(images, trigger, name)
        self._deliveries.add(delivery)
        self._whole(delivery)

    def _whole(self, delivery: Delivery) -> None:
        """All of this node's parts of it are here."""
        if delivery.preempts:
            self._spawn(self._take_precedence(delivery))
        self._wake.set()

    async def wait(self, at: StepId) -> str | None:
        """Wait until that step is committed (None) or given up (why)."""
        if self._situation.committed == at:
            return None
        # What nobody is at work on any more nobody would ever answer for.
        return await self._outcomes.wait(at) if self._deliveries.delivering(at) else self._outcomes.of(at)

    async def something(self, within_s: float) -> None:
        """Wait until a delivery ended, well or not, or the time is up."""
        self._changed.clear()
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def hurry(self, until_s: float) -> None:
        """An eviction needs every byte per second there is; what is not uploaded until `until_s` is lost."""
        self._upload_until_s = until_s
        self._pipeline.hurry()

    def pinned(self) -> list[tuple[Segment, int]]:
        """Slots that a delivery still reads."""
        return [
            (segment, slot) for delivery in self._deliveries.all() for segment, slot, _seq in delivery.parts.values()
        ]

    def busy(self) -> bool:
        return bool(self._deliveries.all())

    def delivering(self, at: StepId) -> bool:
        return self._deliveries.delivering(at)

    def newest(self) -> StepId | None:
        """The newest step that is being delivered."""
        return max((delivery.at for delivery in self._deliveries.all()), default=None)

    async def drop_incomplete(self) -> None:
        """Forget what can no longer complete, because the trainers that were to complete it are gone."""
        for delivery in [d for d in self._deliveries.waiting if not d.complete]:
            await self._give_up(delivery, "a rank ended before it was whole")

    def names(self) -> list[str]:
        """Of what this node has a part of, and has not done with it yet."""
        return [delivery.name for delivery in self._deliveries.all()]

    async def will_lack(self, node: str, names: Collection[str]) -> None:
        """Another node's trainers are gone, and of what trainers asked for it has only these under way."""
        for delivery in self._deliveries.all():
            known = delivery.name in names or self._fleet.has_brought(node, delivery.name)
            # What agents chose to ship is told to all, and may have been told since.
            if not known and not delivery.committed and delivery.trigger != "agent":
                await self._abandon(delivery, f"node {node} has no part of it, and no trainers any more")

    async def make_room(self) -> None:
        """A trainer has no slot for an image that must be taken: the least urgent delivery gives way."""
        periodic = [delivery for delivery in self._deliveries.all() if delivery.trigger == "periodic"]
        for delivery in periodic:
            await self._abandon(delivery, "an image that must be taken needed its slot")

    # ------------------------------------------------------------------ the work

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._release_spare()
            while (delivery := self._deliveries.next()) is not None:
                await self._work_on(delivery)
                await self._release_spare()

    async def _release_spare(self) -> None:
        while self._spare:
            rank, part = self._spare.pop()
            await self._pins.unpin(rank, *part)

    async def _work_on(self, delivery: Delivery) -> None:
        self._deliveries.remove(delivery)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._deliver(delivery))
            self._deliveries.running, self._task = delivery, task
            try:
                await asyncio.wait([task])
            finally:
                self._deliveries.running = self._task = None
        self._changed.set()

    async def _deliver(self, delivery: Delivery) -> None:
        await asyncio.sleep(max(0.0, delivery.not_before_s - boot_s()))
        committed = self._situation.committed
        if delivery.trigger == "periodic" and committed is not None and committed > delivery.at:
            await self._give_up(delivery, "a newer step is durable already")
            return
        delivery.attempt += 1
        started_s, started_ns = boot_s(), boot_ns()
        try:
            images = await self._hashed(delivery)
            why = await self._frozen.hold_back(images, delivery.trigger)
            if why is not None:
                self._journal.record("skipped", step=delivery.at.step, why=why)
                await self._give_up(delivery, why)
                return
            plan = images.parts[0].segment.plan()
            override = {"trigger": "agent"} if delivery.trigger == "agent" else {}
            size_bytes, begun_s, held_s = delivery.unshipped_bytes(), boot_s(), self._pipeline.held_s
            delivery.upload = (begun_s, size_bytes)
            await self._pipeline.ship(images, plan, override, delivery.shipped)
            self._link.uploaded(size_bytes, boot_s() - begun_s, self._pipeline.held_s - held_s)
            current = self._situation.generation
            manifest = await self._commits.commit(delivery.name, delivery.at, delivery.shipped, current)
        except CorruptError as error:
            self._journal.record("quarantined", object=f"step {delivery.at.step}", tier="ram", why=str(error))
            await self._give_up(delivery, str(error))
        except SupersededError as error:
            self._situation.supersede(str(error))
            await self._give_up(delivery, str(error))
        except AgentError as error:
            self._journal.record("skipped", step=delivery.at.step, why=str(error))
            await self._give_up(delivery, str(error))
        except TierError as error:
            await self._retry(delivery, error)
        else:
            await self._committed(delivery, images, manifest, boot_s() - started_s, started_ns)

    async def _committed(
        self, delivery: Delivery, images: ImageSet, manifest: Manifest, took_s: float, started_ns: int
    ) -> None:
        self.rate_bytes_per_s = images.size_bytes / max(took_s, 1e-6)
        staged_ns = min(part.sealed.staged_ns for part in images.parts)
        delivery.committed = True
        self._situation.note_commit(manifest.at, self._pipeline.tier_name, staged_ns)
        self._journal.record(
            "committed",
            step=manifest.at.step,
            tier=self._pipeline.tier_name,
            bytes=manifest.size_bytes,
            seconds=round(took_s, 4),
            trigger=manifest.trigger,
            tag=manifest.tag,
        )
        self._outcomes.resolve(delivery.at, None)
        if self._copies and not delivery.preempts and not self._deliveries.urgent():
            await self._copy(images, manifest)
        await self._unpin(delivery)
        self._clock.saved(started_ns / 1e9, manifest.size_bytes, again=delivery.trigger == "periodic")
        await self._retain(manifest)

    async def _retain(self, manifest: Manifest) -> None:
        noticed = bool(self._situation.board.node(NodeWord.NOTICE))
        if boot_s() - self._retained_s < _RETENTION_EVERY_S or noticed or not self._fleet.leads:
            return
        self._retained_s = boot_s()
        try:
            await self._keeper.note(manifest, self._situation.generation, self._under_way())
        except (TierError, CorruptError) as error:
            self._journal.record("warning", what=f"old checkpoints could not be given up: {error}")
        except SupersededError as error:
            self._situation.supersede(str(error))

    async def _copy(self, images: ImageSet, manifest: Manifest) -> None:
        started_s = boot_s()
        try:
            await self._pipeline.copy_to_disks(images, manifest)
        except TierError as error:
            self._journal.record("save_failed", step=manifest.at.step, tier="disk", why=str(error), attempt=1)
        else:
            took_s = round(boot_s() - started_s, 4)
            self._journal.record(
                "copied", step=manifest.at.step, tier="disk", bytes=manifest.size_bytes, seconds=took_s
            )

    async def _hashed(self, delivery: Delivery) -> ImageSet:
        parts: list[Held] = []
        for rank in sorted(delivery.parts):
            segment, slot, seq = delivery.parts[rank]
            held = await self._memory.hash_slot(segment, slot)
            if held is None or held.sealed.seq != seq:
                raise CorruptError(f"the image of rank {rank} at step {delivery.at.step} is gone")
            parts.append(held)
        return ImageSet(delivery.at, parts[0].segment.plan_hash, tuple(parts))

    async def _retry(self, delivery: Delivery, error: TierError) -> None:
        self._journal.record(
            "save_failed",
            step=delivery.at.step,
            tier=self._pipeline.tier_name,
            why=str(error),
            attempt=delivery.attempt,
        )
        if isinstance(error, TierFullError):
            await self._make_space()
        if delivery.attempt >= _ATTEMPTS.get(delivery.trigger, 1 << 30):
            await self._give_up(delivery, str(error))
            return
        delivery.not_before_s = boot_s() + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**delivery.attempt)
        delivery.upload = None
        self._deliveries.failed(delivery)
        self._wake.set()

    async def _make_space(self) -> None:
        """A tier is full: what was given up goes now instead of an hour later."""
        try:
            freed = await self._keeper.run(self._situation.generation, self._under_way(), sweep_delay_s=0.0)
        except (TierError, CorruptError, SupersededError) as error:
            self._journal.record("warning", what=f"no space could be made: {error}")
            return
        if not freed:
            self._journal.record(
                "warning", what=f"{self._pipeline.uri} is full and holds nothing to delete: free some space there"
            )

    async def _give_up(self, delivery: Delivery, why: str) -> None:
        await self._let_go(delivery, why)
        if delivery.trigger == "periodic":
            # Training goes on; a fresher step is taken instead.
            self._clock.wish_in(_FIRST_PAUSE_S * 2**delivery.attempt)

    async def _let_go(self, delivery: Delivery, why: str) -> None:
        self._deliveries.remove(delivery)
        self._commits.give_up(delivery.name, why)
        self._outcomes.resolve(delivery.at, why)
        await self._unpin(delivery)
        self._changed.set()

    async def _abandon(self, delivery: Delivery, why: str) -> None:
        if self._task is not None and self._deliveries.running is delivery:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._journal.record("skipped", step=delivery.at.step, why=why)
        await self._give_up(delivery, why)

    # ------------------------------------------------------------------ what is under way when an eviction comes

    async def _take_precedence(self, delivery: Delivery) -> None:
        """What is older is interrupted, unless it fits into the time left and this does not."""
        first = await goes_first(self._fleet, self._journal, delivery.name, delivery.at, self._uploads(delivery))
        if first is not None:
            self._deliveries.favour(first)
        running, task = self._deliveries.running, self._task
        if running is None or task is None or delivery not in self._deliveries.waiting:
            return
        # What is committed is only copied to local drives any more.
        goes_on = running.preempts or running.at >= delivery.at or (running.at == first and not running.committed)
        # A task that was cancelled takes a moment to end: what the tier has begun is taken back.
        if not goes_on and not task.cancelling():
            task.cancel()
            task.add_done_callback(lambda done: self._preempted(done, running))

    def _uploads(self, newest: Delivery) -> Uploads:
        now_s, speed = boot_s(), self._link.bytes_per_s
        left_s = None if self._upload_until_s is None else self._upload_until_s - now_s
        if speed is None:
            return Uploads(None, left_s)
        older = [d for d in self._deliveries.all() if d.complete and not d.preempts and d.at < newest.at]
        older_s = {d.at: d.left_s(speed, now_s) for d in older if not d.committed}
        if self._situation.committed is not None:
            older_s[self._situation.committed] = 0.0
        return Uploads(newest.left_s(speed, now_s), left_s, older_s)

    def _preempted(self, task: asyncio.Task[None], delivery: Delivery) -> None:
        if not task.cancelled():
            return
        if not delivery.committed and delivery.trigger != "periodic":
            # A waiting save() is not forgotten: it is shipped again, should there be time left.
            delivery.upload = None
            self._deliveries.add(delivery)
            self._wake.set()
            return
        if not delivery.committed:
            why = "an eviction's newer step took its place"
            if not delivery.whole_here:
                # Else the others have all they need from here, and may still commit it.
                self._commits.give_up(delivery.name, why)
            self._outcomes.resolve(delivery.at, why)
        self._spare.extend(delivery.parts.items())
        self._wake.set()

    def _under_way(self) -> set[StepId]:
        return {delivery.at for delivery in self._deliveries.all()}

    async def _unpin(self, delivery: Delivery) -> None:
        for rank, part in delivery.parts.items():
            await self._pins.unpin(rank, *part)

    def status(self) -> dict[str, Any]:
        """For `surefoot status`."""
        return {
            "under_way": [[d.at.step, d.trigger, d.attempt] for d in self._deliveries.all()],
            "bytes_per_s": round(self.rate_bytes_per_s),
        }
