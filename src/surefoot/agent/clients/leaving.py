"""Leaving: how trainers come to an end, in good order or not, and who else must end with them."""

from __future__ import annotations

import asyncio

from surefoot.agent.clients.supervisor import Supervisor
from surefoot.agent.clients.trainers import Trainer
from surefoot.agent.evict.eviction import Eviction
from surefoot.agent.node import Node
from surefoot.agent.nodes.relay import Relay
from surefoot.agent.save.shipping import Shipper
from surefoot.core.documents import Fields
from surefoot.ipc.board import RankWord
from surefoot.ipc.home import Home
from surefoot.ipc.wire import Body

_LOOK_EVERY_S = 0.02


class Leaving:
    """Goodbyes and deaths of this node's trainers, and those of other nodes that they cannot train without."""

    def __init__(
        self, node: Node, home: Home, relay: Relay, shipper: Shipper, eviction: Eviction, supervisor: Supervisor
    ) -> None:
        self._membership = node.membership
        self._trainers = node.trainers
        self._status = node.status
        self._journal = node.journal
        self._tasks = node.tasks
        self._home = home
        self._relay = relay
        self._shipper = shipper
        self._eviction = eviction
        self._supervisor = supervisor
        node.trainers.hear("bye", self._bye)
        node.trainers.when_gone(self._trainer_gone)
        node.membership.hear("stop", self._hear_stop)
        node.membership.when_dead(self._node_dead)

    async def _bye(self, trainer: Trainer, body: Body) -> None:
        # What takes time is answered beside the connection, which must go on being read.
        self._tasks.create_task(self._answer_bye(trainer, body))

    async def _answer_bye(self, trainer: Trainer, body: Body) -> None:
        trainer.leaving = True
        trainer.failed = bool(body.get("failed"))
        self._relay.tell()
        await self._shipper.left(trainer.rank)
        self._journal.record("left", step=body.get("step"), finished=bool(body.get("finished")))
        self._status.finished = self._status.finished or bool(body.get("finished"))
        if self._eviction.noticed.is_set() and all(other.leaving for other in self._trainers.live):
            # From here on torchrun could only start trainers that are refused.
            await self._supervisor.tell({"op": "trainers_gone"})
        if body.get("wait_safe"):
            self._home.set_draining()
            while not (self._status.is_safe() or self._status.past_deadline()):  # noqa: ASYNC110 - several causes
                await asyncio.sleep(_LOOK_EVERY_S)
        await trainer.link.reply(body, safe=self._status.is_safe())

    def _trainer_gone(self, trainer: Trainer) -> None:
        status = self._status
        if not self._trainers.live:
            status.note_end()
        if (trainer.leaving and not trainer.failed) or trainer.stopping:
            return
        step = max(0, status.board.rank(trainer.local_rank, RankWord.STEP) - 1)
        self._journal.record("trainer_lost", rank=trainer.rank, pid=trainer.pid, step=step)
        # The other nodes' ranks would wait for it in a collective until that times out.
        self._membership.tell_on({"op": "stop", "why": f"rank {trainer.rank} died"})
        self._stop_trainers(f"rank {trainer.rank} died")

    def _hear_stop(self, node: str, body: Body) -> None:
        self._stop_trainers(f"{Fields(body, 'stop').text('why')} on node {node}")

    def _node_dead(self, node: str) -> None:
        self._stop_trainers(f"node {node} is gone")

    def _stop_trainers(self, why: str) -> None:
        trainers = self._trainers.live
        if any(trainer.hello.get("round", "") != self._membership.round for trainer in trainers):
            # Others than those of the round that this is about.
            return
        ranks = self._trainers.stop_all()
        if ranks:
            self._journal.record("stopped", ranks=ranks, why=why)
