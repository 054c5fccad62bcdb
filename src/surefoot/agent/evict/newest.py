"""Ships the newest step that only memory holds, when no trainer asks any more to save it.

One node chooses, by `core.eviction.newest_to_ship`, and all ship their part. Nodes whose trainers are gone first report
what they still work on: a rank may die after others sealed a step and before it did. Then the others' nodes would wait
for its node's part of that step, and its node for their parts of an older step.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress

from surefoot.agent.clients.pins import Pins
from surefoot.agent.clients.trainers import Trainer
from surefoot.agent.memory.memory import ImageSet
from surefoot.agent.memory.replicas import Replicas
from surefoot.agent.node import Node
from surefoot.agent.nodes.peers import Peers
from surefoot.agent.save.commits import Commits
from surefoot.agent.save.queue import Order
from surefoot.agent.save.shipping import Shipper
from surefoot.core.documents import Fields
from surefoot.core.eviction import newest_to_ship, shipped_elsewhere
from surefoot.core.layout import BoundaryId
from surefoot.errors import AgentError, CorruptError, ObjectMissingError
from surefoot.host.clock import boot_s
from surefoot.ipc.wire import Body

_CHOOSE_WITHIN_S = 10.0
_ENSURE_S = 60.0
"""Given to all ranks to seal the last step, when nothing is being shipped."""


class NewestInMemory:
    """Finds the newest whole step that is not durable, and has every node ship its part of it."""

    def __init__(
        self,
        node: Node,
        peers: Peers,
        replicas: Replicas,
        commits: Commits,
        pins: Pins,
        shipper: Shipper,
    ) -> None:
        self._membership = node.membership
        self._memory = node.memory
        self._status = node.status
        self._journal = node.journal
        self._tasks = node.tasks
        self._peers = peers
        self._replicas = replicas
        self._commits = commits
        self._pins = pins
        self._shipper = shipper
        self._orders = 0
        node.membership.answer("ship newest", self._asked_to_ship_newest)
        node.membership.hear("ship", self._hear_order)
        node.trainers.hear("ensure", self._asked_to_ensure)

    async def _asked_to_ensure(self, trainer: Trainer, body: Body) -> None:
        # What takes time is answered beside the connection, which must go on being read.
        self._tasks.create_task(self._answer_ensure(trainer, body))

    async def _answer_ensure(self, trainer: Trainer, body: Body) -> None:
        why = await self.ensure(BoundaryId.of(Fields(body, "ensure")))
        await trainer.link.reply(body, error=why, ok=why is None)

    async def ensure(self, wanted: BoundaryId) -> str | None:
        """Wait until that boundary or a later one is committed, shipping it if nothing else does. Returns why not."""
        end_s = boot_s() + _ENSURE_S
        while boot_s() < end_s or self._shipper.busy():
            committed = self._status.committed
            if committed is not None and committed.boundary >= wanted.boundary:
                return None
            under_way = self._shipper.newest()
            if under_way is not None and under_way.boundary >= wanted.boundary:
                why = await self._shipper.wait(under_way)
                if why is not None:
                    return f"{wanted.label} could not be made durable: {why}"
            elif not await self.ship_newest("final"):
                await self._shipper.something(0.05)
        return f"{wanted.label} is neither durable nor in memory"

    async def ship_newest(self, trigger: str) -> bool:
        """Ship the newest whole image that is not durable, on all nodes. False if there is none.

        One node chooses: two that chose by themselves could wait for each other's other choice.
        """
        if self._membership.leads or self._membership.apart:
            return await self._choose(trigger)
        leader = self._membership.leader
        try:
            answer = await self._membership.ask(leader, {"op": "ship newest", "trigger": trigger}, _CHOOSE_WITHIN_S)
        except AgentError as error:
            self._journal.record("warning", what=f"the newest step is not shipped yet: {error}")
            return True
        return bool(answer.get("found"))

    async def _asked_to_ship_newest(self, _node: str, body: Body) -> Body:
        return {"found": await self._choose(Fields(body, "ship newest").text("trigger"))}

    async def _choose(self, trigger: str) -> bool:
        if not self._status.has_generation:
            return False
        newest = newest_to_ship(await self._peers.newest(), self._status.committed)
        if newest is None:
            return False
        if not self._shipper.uploading(newest.at):
            name = f"{trigger} {newest.at.boundary} {secrets.token_hex(4)}"
            order = Order(newest.at, newest.plan, trigger, name, shipped_elsewhere(newest, self._membership.node_of))
            self._membership.tell_all({"op": "ship", **order.to_json()})
            await self._ordered(order)
        return True

    def busy(self) -> bool:
        """An order to ship came, and the shipper does not have it yet."""
        return self._orders > 0

    def _hear_order(self, _node: str, body: Body) -> None:
        order = Order.from_json(body)
        self._orders += 1
        self._tasks.create_task(self._ordered_by_another(order))

    async def _ordered_by_another(self, order: Order) -> None:
        try:
            await self._ordered(order)
        finally:
            self._orders -= 1

    async def _ordered(self, order: Order) -> None:
        """Ship this node's images of a step that was chosen for all."""
        parts = await self._memory.parts(order.at, order.plan)
        try:
            for rank, node in order.replicas:
                if node == self._membership.me and rank not in parts:
                    parts[rank] = await self._replicas.find(order.at, order.plan, rank)
        except (ObjectMissingError, CorruptError) as error:
            self._commits.give_up(order.name, str(error))
            return
        images = ImageSet(order.at, order.plan, tuple(parts[rank] for rank in sorted(parts)))
        if not parts and self._membership.alone:
            return
        if not parts or not await self._pins.pin(images):
            self._commits.give_up(order.name, "its image left memory before it could be pinned")
        elif not self._shipper.uploading(order.at):
            self._shipper.ship(images, order.trigger, order.name)

    async def report_left(self, generation: int, within_s: float) -> None:
        """Report what this node still works on, and give up each step of which others report no part, also later.

        Args:
            generation: of the trainers that are gone from here: they contribute nothing more.
            within_s: how long the others' reports are waited for.
        """
        if self._membership.alone or self._membership.apart:
            return
        what = f"left of {generation}"
        self._membership.bring(what, {"names": self._shipper.names()})
        reported = asyncio.Event()
        self._tasks.create_task(self._obey_reports(what, reported))
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await reported.wait()

    async def _obey_reports(self, what: str, reported: asyncio.Event) -> None:
        await asyncio.gather(*(self._obey_report(what, node) for node in self._membership.others))
        reported.set()

    async def _obey_report(self, what: str, node: str) -> None:
        # That node may be gone, or the others train again: then the wait for its part ends with an error of its own.
        with suppress(AgentError):
            names = Fields(await self._membership.brought_by(node, what), what).items("names")
            await self._shipper.will_lack(node, {str(name) for name in names})

    def all_durable(self) -> bool:
        """True if memory holds nothing newer than the newest commit."""
        safe = self._status.committed
        sealed = (s.at for segment in self._memory.segments for s in segment.all_sealed())
        return all(safe is not None and at <= safe for at in sealed)
