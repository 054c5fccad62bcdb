"""Dispatches the requests of trainers, of the supervisor and of commands to the parts of the agent that answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from surefoot.agent.clients.checks import Checks
from surefoot.agent.clients.pins import Pins
from surefoot.agent.clients.server import Link
from surefoot.agent.clients.trainers import Trainer, Trainers
from surefoot.agent.evict.eviction import Eviction
from surefoot.agent.evict.newest import NewestInMemory
from surefoot.agent.frozen.transfer import FrozenSaver, answered
from surefoot.agent.journal import Journal
from surefoot.agent.memory.hasher import Hasher
from surefoot.agent.memory.memory import Memory
from surefoot.agent.memory.planning import Planner
from surefoot.agent.nodes.membership import Membership
from surefoot.agent.nodes.relay import Relay
from surefoot.agent.save.shipping import Shipper
from surefoot.agent.start.needs import NeedsOfTrainers
from surefoot.agent.status import Status
from surefoot.core.documents import Fields
from surefoot.core.layout import BoundaryId
from surefoot.errors import AgentError, SurefootError
from surefoot.exits import EVICTED, SUPERSEDED
from surefoot.host.clock import boot_s
from surefoot.ipc.wire import Body

_LOOK_EVERY_S = 0.02
_SAMPLE_EVERY_S = 1.0


class Surroundings(Protocol):
    """The parts of the agent's own life that dispatch needs."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> object: ...
    def status(self) -> Body: ...
    def draining(self) -> None: ...


class Dispatch:
    """Takes connections of trainers, of the supervisor and of commands."""

    def __init__(
        self,
        membership: Membership,
        relay: Relay,
        trainers: Trainers,
        memory: Memory,
        planner: Planner,
        pins: Pins,
        shipper: Shipper,
        newest_in_memory: NewestInMemory,
        hasher: Hasher,
        eviction: Eviction,
        frozen: FrozenSaver,
        needs: NeedsOfTrainers,
        status: Status,
        journal: Journal,
        grace_s: float,
        around: Surroundings,
    ) -> None:
        self._membership = membership
        self._relay = relay
        self._trainers = trainers
        self._memory = memory
        self._planner = planner
        self._pins = pins
        self._shipper = shipper
        self._newest_in_memory = newest_in_memory
        self._hasher = hasher
        self._eviction = eviction
        self._status = status
        self._journal = journal
        self._grace_s = grace_s
        self._around = around
        self._checks = Checks(membership, trainers, status, journal, around.spawn)
        self._recorded_sealed_s = 0.0
        self._supervisor: Link | None = None
        self.supervisor_done = asyncio.Event()
        """Set once the supervisor has reported that its launch is over, or has died."""
        self._trainer_operations: dict[str, Callable[[Trainer, Body], Awaitable[None]]] = {
            "sealed": self._sealed,
            "dropped": self._dropped,
            "report": self._report,
            "check": self._checks.ask,
            "loaded": self._loaded,
            "granted": self._granted,
            "wait": self._wait,
            "ensure": self._ensure,
            "event": self._event,
            "notice": self._notice,
            "need_slot": self._need_slot,
            "bye": self._bye,
            "frozen": frozen.announced,
            "frozen_done": answered,
            "needs": needs.answered,
        }

    async def converse(self, link: Link, first: Body, fds: list[int]) -> None:
        """Serve one connection, from its first frame to its end."""
        role = first.get("role")
        if role == "trainer":
            await self._serve_trainer(link, first, fds)
        elif role == "supervisor":
            await self._serve_supervisor(link)
        elif role == "cli":
            await self._serve_command(link, first)
        else:
            await link.send({"error": "the first frame names no role"})

    def refusal(self) -> Body | None:
        """The refusal, if no trainer may start here now."""
        if self._status.superseded_by is not None:
            return {"refused": f"superseded by {self._status.superseded_by}", "code": SUPERSEDED}
        if self._eviction.noticed.is_set():
            return {"refused": "this machine is being evicted", "code": EVICTED}
        return None

    def trainers_gone(self) -> None:
        """Forget requests that only some trainers made: the last trainer is gone."""
        self._planner.forget()
        self._checks.forget()
        if self._eviction.noticed.is_set():
            self._around.spawn(self.tell_supervisor({"op": "trainers_gone"}))

    async def tell_supervisor(self, body: Body) -> None:
        if self._supervisor is not None:
            await self._supervisor.send(body)

    @property
    def has_supervisor(self) -> bool:
        return self._supervisor is not None

    # ------------------------------------------------------------------ commands and the supervisor

    async def _serve_command(self, link: Link, first: Body) -> None:
        operation = first.get("op")
        if operation == "evict":
            grace_s = Fields(first, "evict").optional_number("grace_s") or self._grace_s
            self._eviction.notice("surefoot evict", grace_s)
            await link.send({"ok": True})
        elif operation == "status":
            await link.send(self._around.status())
        else:
            await link.send({"error": f"unknown operation {operation!r}"})

    async def _serve_supervisor(self, link: Link) -> None:
        self._supervisor = link
        await link.send({"ok": True})
        while (frame := await link.receive()) is not None:
            await self._receive_from_supervisor(link, frame[0])
        self._supervisor = None

    async def supervisor_lost(self) -> None:
        """End the job here: the supervisor died, before or after it connected, and nothing may train without it."""
        if self.supervisor_done.is_set():
            return
        # The next launch of the run waits for this agent's end.
        self._around.draining()
        self._journal.record("warning", what="the supervisor died: this node stops training")
        self._trainers.kill_launcher()
        self._trainers.stop_all()
        await self._trainers.gone(5.0)
        self.supervisor_done.set()

    async def _receive_from_supervisor(self, link: Link, body: Body) -> None:
        operation = body.get("op")
        if operation == "notice":
            fields = Fields(body, "notice")
            self._eviction.notice(fields.text("source"), fields.optional_number("grace_s") or self._grace_s)
        elif operation == "torchrun":
            self._trainers.set_launcher(Fields(body, "torchrun").integer("pid", 1))
        elif operation == "progress":
            status = self._status
            generation = status.generation.number if status.has_generation else 0
            ending = self._eviction.noticed.is_set() or status.superseded_by is not None
            await link.reply(body, generation=generation, barren=status.barren(), ending=ending)
        elif operation == "done":
            self._status.finished = self._status.finished or bool(body.get("finished"))
            self.supervisor_done.set()

    # ------------------------------------------------------------------ trainers

    async def _serve_trainer(self, link: Link, hello: Body, fds: list[int]) -> None:
        trainer = await self._admit(link, hello, fds)
        if trainer is None:
            return
        while (frame := await link.receive()) is not None:
            body = frame[0]
            operation = self._trainer_operations.get(str(body.get("op")))
            if operation is None:
                raise AgentError(f"rank {trainer.rank} sent the unknown operation {body.get('op')!r}")
            await operation(trainer, body)
        self._trainers.hung_up(trainer)

    async def _admit(self, link: Link, hello: Body, fds: list[int]) -> Trainer | None:
        refusal = None if hello.get("reconnect") else self.refusal()
        if refusal is not None:
            await link.reply(hello, **refusal)
            return None
        try:
            trainer = self._trainers.register(link, hello)
            self._take_over(fds)
        except SurefootError as error:
            await link.reply(hello, error=str(error), kind=type(error).__name__)
            return None
        return trainer

    def _take_over(self, fds: list[int]) -> None:
        """Take over the segment of a trainer that outlived the previous agent, in case this one does not have it."""
        for fd in fds:
            self._memory.adopt_descriptor(fd)

    async def _sealed(self, trainer: Trainer, body: Body) -> None:
        fields = Fields(body, "sealed")
        slot, seq = fields.integer("slot"), fields.integer("seq")
        at = BoundaryId.of(fields)
        self._relay.tell()
        segment = self._memory.find(trainer.rank, fields.text("plan"))
        if segment is None:
            raise AgentError(f"rank {trainer.rank} sealed a slot of a segment that the agent does not have")
        trigger = fields.optional_text("trigger")
        if trigger is not None:
            tag = fields.optional_text("tag")
            self._shipper.sealed(segment, slot, seq, at, trigger, tag, trainer.local_world_size)
        await self._shipper.passed(trainer.rank, at)
        self._hasher.note(segment, slot)
        self._record_sealed(trainer.rank, at, segment.geometry.image_bytes, trigger)

    async def _dropped(self, trainer: Trainer, body: Body) -> None:
        """Note that a rank has no good image of a step: the images of it that others sealed are not shipped."""
        self._relay.tell()
        fields = Fields(body, "dropped")
        at = BoundaryId.of(fields)
        await self._shipper.dropped(trainer.rank, at, fields.text("why"))

    def _record_sealed(self, rank: int, at: BoundaryId, size_bytes: int, trigger: str | None) -> None:
        """Record each image that is to be shipped, and a sample of the others."""
        now_s = boot_s()
        if trigger is not None or now_s - self._recorded_sealed_s >= _SAMPLE_EVERY_S:
            self._recorded_sealed_s = now_s
            self._journal.record("sealed", rank=rank, **at.names, bytes=size_bytes, trigger=trigger)

    async def _report(self, trainer: Trainer, body: Body) -> None:
        self._checks.reported(trainer, body)
        await self._planner.report(trainer, body)

    async def _loaded(self, trainer: Trainer, body: Body) -> None:
        future = trainer.answers.get("loaded")
        if future is None:
            # The previous agent asked for this; a rank that could not load ends by itself, and all ranks with it.
            await trainer.link.reply(body, ok=True)
        elif not future.done():
            future.set_result(body)

    async def _granted(self, trainer: Trainer, body: Body) -> None:
        self._pins.granted(trainer, body)

    async def _event(self, _worker: Trainer, body: Body) -> None:
        fields = Fields(body, "event")
        self._journal.record(fields.text("event"), **fields.mapping("fields"))

    async def _notice(self, trainer: Trainer, body: Body) -> None:
        if trainer.stopping:
            # torchrun passes SIGTERM to the others when a trainer has died: that is not an eviction.
            return
        self._eviction.notice(Fields(body, "notice").text("source"), self._grace_s)

    async def _need_slot(self, _worker: Trainer, _body: Body) -> None:
        await self._shipper.make_room()

    # Requests that take time are answered in tasks of their own: the connection must go on being read.

    async def _wait(self, trainer: Trainer, body: Body) -> None:
        self._around.spawn(self._answer_wait(trainer, body))

    async def _ensure(self, trainer: Trainer, body: Body) -> None:
        self._around.spawn(self._answer_ensure(trainer, body))

    async def _bye(self, trainer: Trainer, body: Body) -> None:
        self._around.spawn(self._answer_bye(trainer, body))

    async def _answer_wait(self, trainer: Trainer, body: Body) -> None:
        fields = Fields(body, "wait")
        why = await self._shipper.wait(BoundaryId.of(fields))
        await trainer.link.reply(body, error=why, ok=why is None)

    async def _answer_ensure(self, trainer: Trainer, body: Body) -> None:
        why = await self._newest_in_memory.ensure(BoundaryId.of(Fields(body, "ensure")))
        await trainer.link.reply(body, error=why, ok=why is None)

    async def _answer_bye(self, trainer: Trainer, body: Body) -> None:
        trainer.leaving = True
        trainer.failed = bool(body.get("failed"))
        self._relay.tell()
        await self._shipper.left(trainer.rank)
        self._journal.record("left", step=body.get("step"), finished=bool(body.get("finished")))
        self._status.finished = self._status.finished or bool(body.get("finished"))
        if self._eviction.noticed.is_set() and all(other.leaving for other in self._trainers.live):
            # From here on torchrun could only start trainers that are refused.
            await self.tell_supervisor({"op": "trainers_gone"})
        if body.get("wait_safe"):
            self._around.draining()
            while not (self._status.is_safe() or self._status.past_deadline()):  # noqa: ASYNC110 - several causes
                await asyncio.sleep(_LOOK_EVERY_S)
        await trainer.link.reply(body, safe=self._status.is_safe())
