"""Eviction: gathers the facts that `core/eviction.py` decides by, and carries its orders out."""

from __future__ import annotations

import asyncio

from surefoot.agent.clients.trainers import Trainer
from surefoot.agent.evict.newest import NewestInMemory
from surefoot.agent.node import Node
from surefoot.agent.save.shipping import Shipper
from surefoot.core.documents import Fields
from surefoot.core.eviction import (
    Count,
    Done,
    Facts,
    ShipNewest,
    StageLate,
    Wait,
    decide,
    late_target,
    margin_s,
)
from surefoot.core.layout import BoundaryId
from surefoot.exits import EVICTED, SUPERSEDED
from surefoot.host.clock import boot_s
from surefoot.ipc.barrier import full_barrier
from surefoot.ipc.board import NodeWord, RankWord
from surefoot.ipc.wire import Body

_LEAVE_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.05
_COUNT_WITHIN_S = 2.0
"""Time for the other nodes to report where their ranks are, once they are held."""


class Eviction:
    """One notice and what follows from it. The first notice counts; a later one can only make the deadline earlier."""

    def __init__(
        self,
        node: Node,
        shipper: Shipper,
        newest_in_memory: NewestInMemory,
        grace_s: float,
    ) -> None:
        self._membership = node.membership
        self._trainers = node.trainers
        self._memory = node.memory
        self._status = node.status
        self._journal = node.journal
        self._shipper = shipper
        self._newest_in_memory = newest_in_memory
        self._grace_s = grace_s
        self._noticed_s = 0.0
        self._deadline_s = 0.0
        self.noticed = asyncio.Event()
        self._held = False
        self._late_step: int | None = None
        """The step that every rank was ordered to take late."""
        self._nothing_left = False
        node.membership.hear("notice", self._hear_notice)
        node.membership.answer("hold", self._asked_to_hold)
        node.membership.hear("target", self._hear_target)
        node.trainers.hear("notice", self._trainer_noticed)

    def refusal(self) -> Body | None:
        """Why no trainer may start here now."""
        if self._status.superseded_by is not None:
            return {"refused": f"superseded by {self._status.superseded_by}", "code": SUPERSEDED}
        if self.noticed.is_set():
            return {"refused": "this machine is being evicted", "code": EVICTED}
        return None

    async def _trainer_noticed(self, trainer: Trainer, body: Body) -> None:
        if trainer.stopping:
            # torchrun passes SIGTERM to the others when a trainer has died: that is no eviction.
            return
        self.notice(Fields(body, "notice").text("source"))

    def notice(self, source: str, grace_s: float | None = None) -> None:
        """An eviction of this node was announced: say it to every trainer, here and on the other nodes, at once."""
        grace_s = grace_s or self._grace_s
        self._membership.leaving.add(self._membership.me)
        self._membership.tell_on({"op": "notice", "source": source, "grace_s": grace_s})
        self._take_notice(source, grace_s)

    def _hear_notice(self, node: str, body: Body) -> None:
        # This node stays, but what it trains cannot go on: it is saved with all others, and its trainers leave.
        self._membership.leaving.add(node)
        fields = Fields(body, "notice")
        self._take_notice(f"{fields.text('source')} on node {node}", fields.number("grace_s"))

    def _take_notice(self, source: str, grace_s: float) -> None:
        deadline_s = boot_s() + grace_s
        if self.noticed.is_set():
            if deadline_s < self._deadline_s - 1.0 and source != "sigterm":
                self._set_deadline(deadline_s)
                self._status.board.set_node(NodeWord.DEADLINE_NS, int(deadline_s * 1e9))
                self._journal.record("notice", source=source, grace_s=round(grace_s, 3))
            return
        self._set_window(deadline_s)
        board = self._status.board
        board.set_node(NodeWord.DEADLINE_NS, int(deadline_s * 1e9))
        board.set_node(NodeWord.NOTICE, 1)
        self._journal.record("notice", source=source, grace_s=round(grace_s, 3))
        self.noticed.set()

    def resume_notice(self) -> None:
        """This agent replaces one that died during an eviction: notice and deadline stand on the board."""
        board = self._status.board
        if board.node(NodeWord.NOTICE):
            self._set_window(board.node(NodeWord.DEADLINE_NS) / 1e9)
            self.noticed.set()

    def _set_window(self, deadline_s: float) -> None:
        self._noticed_s = boot_s()
        self._set_deadline(deadline_s)

    def _set_deadline(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._shipper.hurry(deadline_s - margin_s(self._noticed_s, deadline_s))

    async def see_through(self) -> bool:
        """Wait for a notice, then for the end of what it starts. True if the newest finished step is safe."""
        await self.noticed.wait()
        while not isinstance(order := decide(self._facts(), boot_s()), Done):
            await self._obey(order)
        self._journal.record(
            "evicted",
            step=self._status.steps_on_all() or 0,
            safe=order.safe,
            why=order.why,
            committed=self._status.committed and self._status.committed.step,
            seconds=round(boot_s() - self._noticed_s, 3),
        )
        return order.safe

    async def _obey(self, order: Wait | StageLate | ShipNewest) -> None:
        if not self._trainers.live:
            await self._shipper.drop_incomplete()
        if isinstance(order, StageLate):
            await self._stage_late()
            return
        if isinstance(order, ShipNewest):
            self._nothing_left = not await self._newest_in_memory.ship_newest("agent")
        await self._shipper.something(_LOOK_EVERY_S)

    async def clear_trainers(self) -> None:
        """See the trainers off: they leave by themselves once they learn of the notice, otherwise they are ended."""
        # A machine that stays has no deadline, and the launcher that starts its trainers again needs their exit codes.
        stays = self._membership.me not in self._membership.leaving
        left_s = _LEAVE_WITHIN_S if stays else max(0.5, min(_LEAVE_WITHIN_S, self._deadline_s - boot_s()))
        if not await self._trainers.gone(left_s):
            ranks = self._trainers.stop_all()
            self._journal.record("stopped", ranks=ranks, why="they did not leave by themselves")
            await self._trainers.gone(5.0)

    async def _stage_late(self) -> None:
        """Have the newest finished step taken, whatever the trainers' main threads are doing.

        Hold first, count after: a rank that passes its fence reports it BEFORE it looks whether it is held, and is
        counted here AFTER it was. So the step that is named here is one that every rank can still take or reach.
        """
        counted = {self._membership.me: self._hold()}
        for node, answer in (await self._membership.ask_all({"op": "hold"}, _COUNT_WITHIN_S)).items():
            pairs = Fields(answer, f"count of node {node}").items("counts")
            counted[node] = [Count(int(finished), int(entered)) for finished, entered in pairs]
        target = late_target(counted, self._membership.nodes)
        if target is None:
            self._journal.record("warning", what="not every node could be held and counted: no step is staged late")
            return
        self._membership.tell_all({"op": "target", "target": target})
        self._aim(target)

    def _hold(self) -> list[Count]:
        """No rank of this node passes its next fence; returns where each is."""
        board, trainers = self._status.board, self._trainers.live
        if not self._held:
            # A target of an earlier launch; one that two nodes come to at once is the same.
            self._held = True
            board.set_node(NodeWord.LATE_TARGET, 0)
        for trainer in trainers:
            board.set_rank(trainer.local_rank, RankWord.HOLD, trainer.incarnation)
        full_barrier()
        return [
            Count(
                board.rank(trainer.local_rank, RankWord.FINISHED) - 1,
                board.rank(trainer.local_rank, RankWord.ENTERED) - 1,
            )
            for trainer in trainers
        ]

    async def _asked_to_hold(self, _node: str, _body: Body) -> Body:
        return {"counts": [[count.finished, count.entered] for count in self._hold()]}

    def _hear_target(self, _node: str, body: Body) -> None:
        self._aim(Fields(body, "target").integer("target"))

    def _aim(self, target: int) -> None:
        self._late_step = target
        self._status.board.set_node(NodeWord.LATE_TARGET, target + 1)
        self._journal.record("late", **BoundaryId(target, self._journal.generation, self._step_at(target)).names)

    def _step_at(self, boundary: int) -> int | None:
        """The label of a boundary that a rank of this node has just reached; None if none has."""
        board = self._status.board
        here = [
            one.local_rank
            for one in self._trainers.live
            if board.rank(one.local_rank, RankWord.FINISHED) == boundary + 1
        ]
        return board.rank(here[0], RankWord.STEP) - 1 if here else None

    def _facts(self) -> Facts:
        board, trainers, status = self._status.board, self._trainers.live, self._status
        generation = status.generation.number if status.has_generation else 0
        late = None if self._late_step is None else BoundaryId(self._late_step, generation)
        return Facts(
            noticed_s=self._noticed_s,
            deadline_s=self._deadline_s,
            finished=status.finished_on_all() or 0,
            durable=status.committed.boundary if status.committed is not None else 0,
            trainers=bool(trainers),
            foremost=max((board.rank(one.local_rank, RankWord.FINISHED) - 1 for one in trainers), default=0),
            sealed=min((board.rank(one.local_rank, RankWord.SEALED) - 1 for one in trainers), default=0),
            sealed_on_all=board.sealed_on_all(generation, trainers[0].local_world_size) if trainers else 0,
            held=self._held,
            late_step=self._late_step,
            late_ships=late is not None and self._shipper.uploading(late),
            shipping=self._shipper.busy(),
            nothing_left=self._nothing_left,
            apart=self._membership.apart,
            image_bytes=sum(segment.geometry.image_bytes for segment in self._memory.segments),
            bytes_per_s=self._shipper.rate_bytes_per_s,
        )
