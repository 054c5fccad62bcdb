"""Sealing: what trainers report of their images, passed to the parts that act on it, in an order that holds."""

from __future__ import annotations

from surefoot.agent.clients.trainers import Trainer
from surefoot.agent.memory.hasher import Hasher
from surefoot.agent.node import Node
from surefoot.agent.nodes.relay import Relay
from surefoot.agent.save.shipping import Shipper
from surefoot.core.documents import Fields
from surefoot.core.layout import BoundaryId
from surefoot.errors import AgentError
from surefoot.host.clock import boot_s
from surefoot.ipc.wire import Body

_SAMPLE_EVERY_S = 1.0


class Sealing:
    """Images that were sealed or dropped, those that are waited for, and those that have no slot."""

    def __init__(self, node: Node, relay: Relay, shipper: Shipper, hasher: Hasher) -> None:
        self._memory = node.memory
        self._journal = node.journal
        self._tasks = node.tasks
        self._relay = relay
        self._shipper = shipper
        self._hasher = hasher
        self._said_sealed_s = 0.0
        node.trainers.hear("sealed", self._sealed)
        node.trainers.hear("dropped", self._dropped)
        node.trainers.hear("need_slot", self._need_slot)
        node.trainers.hear("wait", self._wait)

    async def _sealed(self, trainer: Trainer, body: Body) -> None:
        fields = Fields(body, "sealed")
        slot, seq = fields.integer("slot"), fields.integer("seq")
        at = BoundaryId.of(fields)
        self._relay.tell()
        segment = self._memory.find(trainer.rank, fields.text("plan"))
        if segment is None:
            raise AgentError(f"rank {trainer.rank} sealed a slot of a segment that nobody knows")
        trigger = fields.optional_text("trigger")
        if trigger is not None:
            tag = fields.optional_text("tag")
            self._shipper.sealed(segment, slot, seq, at, trigger, tag, trainer.local_world_size)
        await self._shipper.passed(trainer.rank, at)
        self._hasher.note(segment, slot)
        self._say_sealed(trainer.rank, at, segment.geometry.image_bytes, trigger)

    async def _dropped(self, trainer: Trainer, body: Body) -> None:
        """A rank has no good image of a step: what others sealed of it is shipped to nobody."""
        self._relay.tell()
        fields = Fields(body, "dropped")
        at = BoundaryId.of(fields)
        await self._shipper.dropped(trainer.rank, at, fields.text("why"))

    def _say_sealed(self, rank: int, at: BoundaryId, size_bytes: int, trigger: str | None) -> None:
        """Each image that is to be shipped; of the others a sample."""
        now_s = boot_s()
        if trigger is not None or now_s - self._said_sealed_s >= _SAMPLE_EVERY_S:
            self._said_sealed_s = now_s
            self._journal.record("sealed", rank=rank, **at.names, bytes=size_bytes, trigger=trigger)

    async def _need_slot(self, _worker: Trainer, _body: Body) -> None:
        await self._shipper.make_room()

    async def _wait(self, trainer: Trainer, body: Body) -> None:
        # What takes time is answered beside the connection, which must go on being read.
        self._tasks.create_task(self._answer_wait(trainer, body))

    async def _answer_wait(self, trainer: Trainer, body: Body) -> None:
        fields = Fields(body, "wait")
        why = await self._shipper.wait(BoundaryId.of(fields))
        await trainer.link.reply(body, error=why, ok=why is None)
