"""Eviction: from a notice to a committed step, or to an honest "not saved", before the deadline."""

from __future__ import annotations

import asyncio

from surefoot.agent.crew import Crew
from surefoot.agent.fleet import Fleet
from surefoot.agent.journal import Journal
from surefoot.agent.leftovers import Leftovers
from surefoot.agent.memory import Memory
from surefoot.agent.shipping import Shipper
from surefoot.agent.situation import Situation
from surefoot.barrier import full_barrier
from surefoot.board import NodeWord, RankWord
from surefoot.clock import boot_s
from surefoot.core.documents import Fields
from surefoot.core.emergency import Count, late_target
from surefoot.core.layout import StepId
from surefoot.wire import Body

_ASSUMED_BYTES_PER_S = 100e6
"""Before anything was measured."""
_MARGIN_S = 2.0
"""Left before the deadline for the commit and for the trainers to leave; at most a quarter of the window."""
_COPIED_BYTES_PER_S = 1e9
"""What staging a step late is reckoned with, and `_LATE_SPARE_S` beside it."""
_LATE_SPARE_S = 1.0
_LATE_SHARE = 8
"""Part of the window that is left for it at least."""
_LEAVE_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.05
_COUNT_WITHIN_S = 2.0
"""For the other nodes to say where their ranks are, once they are held."""


class Eviction:
    """One notice and what follows from it. The first notice counts; a later one can only bring the deadline nearer."""

    def __init__(
        self,
        fleet: Fleet,
        crew: Crew,
        memory: Memory,
        shipper: Shipper,
        leftovers: Leftovers,
        situation: Situation,
        journal: Journal,
    ) -> None:
        self._fleet = fleet
        self._crew = crew
        self._memory = memory
        self._shipper = shipper
        self._leftovers = leftovers
        self._situation = situation
        self._journal = journal
        self._noticed_s = 0.0
        self._deadline_s = 0.0
        self._margin_s = 0.0
        self.noticed = asyncio.Event()
        self._late_ordered = False
        self._late_step: int | None = None
        """What every rank was told to take late."""
        self._nothing_to_ship = False
        fleet.hear("notice", self._hear_notice)
        fleet.answer("hold", self._asked_to_hold)
        fleet.hear("target", self._hear_target)

    def notice(self, source: str, grace_s: float) -> None:
        """An eviction of this node was announced: say it to every trainer, here and on the other nodes, at once."""
        self._fleet.leaving.add(self._fleet.me)
        self._fleet.tell_on({"op": "notice", "source": source, "grace_s": grace_s})
        self._take_notice(source, grace_s)

    def _hear_notice(self, node: str, body: Body) -> None:
        # This node stays, but what it trains cannot go on: it is saved with all others, and its trainers leave.
        self._fleet.leaving.add(node)
        fields = Fields(body, "notice")
        self._take_notice(f"{fields.text('source')} on node {node}", fields.number("grace_s"))

    def _take_notice(self, source: str, grace_s: float) -> None:
        deadline_s = boot_s() + grace_s
        if self.noticed.is_set():
            if deadline_s < self._deadline_s - 1.0 and source != "sigterm":
                self._deadline_s = deadline_s
                self._shipper.hurry(deadline_s - self._margin_s)
                self._situation.board.set_node(NodeWord.DEADLINE_NS, int(deadline_s * 1e9))
                self._journal.record("notice", source=source, grace_s=round(grace_s, 3))
            return
        self._set_window(deadline_s)
        board = self._situation.board
        board.set_node(NodeWord.DEADLINE_NS, int(deadline_s * 1e9))
        board.set_node(NodeWord.NOTICE, 1)
        self._journal.record("notice", source=source, grace_s=round(grace_s, 3))
        self.noticed.set()

    def resume_notice(self) -> None:
        """This agent replaces one that died during an eviction: notice and deadline stand on the board."""
        board = self._situation.board
        if board.node(NodeWord.NOTICE):
            self._set_window(board.node(NodeWord.DEADLINE_NS) / 1e9)
            self.noticed.set()

    def _set_window(self, deadline_s: float) -> None:
        self._noticed_s, self._deadline_s = boot_s(), deadline_s
        self._margin_s = min(_MARGIN_S, max(0.0, deadline_s - self._noticed_s) / 4)
        self._shipper.hurry(deadline_s - self._margin_s)

    async def see_through(self) -> bool:
        """Wait for a notice, then for the end of what it starts. True if the newest finished step is safe."""
        await self.noticed.wait()
        while not self._done():
            if not self._crew.workers:
                await self._shipper.drop_incomplete()
            if self._must_stage_late():
                await self._stage_late()
            if self._must_ship_alone():
                self._nothing_to_ship = not await self._leftovers.ship_newest("agent")
            await self._shipper.something(_LOOK_EVERY_S)
        safe = self._situation.is_safe()
        step = self._situation.finished_on_all()
        self._journal.record(
            "evicted",
            step=step if step is not None else 0,
            safe=safe,
            committed=self._situation.committed and self._situation.committed.step,
            seconds=round(boot_s() - self._noticed_s, 3),
        )
        return safe

    async def clear_crew(self) -> None:
        """See the trainers off: they leave by themselves once they hear of the notice, else they are ended."""
        # A machine that stays has no deadline, and its trainers' exit codes matter to whoever starts them again.
        stays = self._fleet.me not in self._fleet.leaving
        left_s = _LEAVE_WITHIN_S if stays else max(0.5, min(_LEAVE_WITHIN_S, self._deadline_s - boot_s()))
        if not await self._crew.gone(left_s):
            ranks = self._crew.stop_all()
            self._journal.record("stopped", ranks=ranks, why="they did not leave by themselves")
            await self._crew.gone(5.0)

    def _done(self) -> bool:
        if boot_s() >= self._deadline_s - (self._margin_s if self._situation.is_safe() else 0.0):
            return True
        if not self._situation.is_safe():
            # Nothing in memory to be shipped, nobody who could still make it: that is all there will be.
            return not self._crew.workers and not self._shipper.busy() and self._nothing_to_ship
        # Trainers still here will finish further steps, and stop at the boundary of the last.
        return not self._crew.workers

    def _must_stage_late(self) -> bool:
        """No boundary has come, and the newest finished step is not in memory because it was not due."""
        workers = self._crew.workers
        if self._late_ordered or not workers or self._situation.is_safe() or self._fleet.apart:
            return False
        board = self._situation.board
        sealed = min(board.rank(worker.local_rank, RankWord.SEALED) for worker in workers)
        finished = max(board.rank(worker.local_rank, RankWord.FINISHED) for worker in workers)
        # A machine on which no boundary comes may be slow in everything: a long window is not used to its last seconds.
        spare_s = max(_LATE_SPARE_S, (self._deadline_s - self._noticed_s) / _LATE_SHARE)
        copy_s = self._image_bytes() / _COPIED_BYTES_PER_S + spare_s
        return sealed < finished and boot_s() >= self._deadline_s - self._ship_s() - self._margin_s - copy_s

    async def _stage_late(self) -> None:
        """Have the newest finished step taken, whatever the trainers' main threads are doing.

        Hold first, count after: a rank that passes its fence says so BEFORE it looks whether it is held, and is
        counted here AFTER it was. So the step that is named here is one that every rank can still take or reach.
        """
        counted = {self._fleet.me: self._hold()}
        for node, answer in (await self._fleet.ask_all({"op": "hold"}, _COUNT_WITHIN_S)).items():
            pairs = Fields(answer, f"count of node {node}").items("counts")
            counted[node] = [Count(int(finished), int(entered)) for finished, entered in pairs]
        target = late_target(counted, self._fleet.nodes)
        if target is None:
            self._journal.record("warning", what="not every node could be held and counted: no step is staged late")
            return
        self._fleet.tell_all({"op": "target", "target": target})
        self._aim(target)

    def _hold(self) -> list[Count]:
        """No rank of this node passes its next fence; returns where each is."""
        board, workers = self._situation.board, self._crew.workers
        if not self._late_ordered:
            # A target of an earlier launch; one that two nodes come to at once is the same.
            self._late_ordered = True
            board.set_node(NodeWord.LATE_TARGET, 0)
        for worker in workers:
            board.set_rank(worker.local_rank, RankWord.HOLD, worker.incarnation)
        full_barrier()
        return [
            Count(
                board.rank(worker.local_rank, RankWord.FINISHED) - 1,
                board.rank(worker.local_rank, RankWord.ENTERED) - 1,
            )
            for worker in workers
        ]

    async def _asked_to_hold(self, _node: str, _body: Body) -> Body:
        return {"counts": [[count.finished, count.entered] for count in self._hold()]}

    def _hear_target(self, _node: str, body: Body) -> None:
        self._aim(Fields(body, "target").integer("target"))

    def _aim(self, target: int) -> None:
        self._late_step = target
        self._situation.board.set_node(NodeWord.LATE_TARGET, target + 1)
        self._journal.record("late", step=target)

    def _must_ship_alone(self) -> bool:
        if self._situation.is_safe():
            return False
        if not self._crew.workers or self._late_step_waits():
            return True
        # As long as a boundary may still come and its image be shipped in time, it is waited for.
        return boot_s() >= self._deadline_s - self._ship_s() - self._margin_s

    def _late_step_waits(self) -> bool:
        """True if what was taken late is in every rank's memory, and nobody ships it. No rank passes it: it can go."""
        workers = self._crew.workers
        if self._late_step is None or not workers:
            return False
        generation = self._situation.generation.number
        sealed = self._situation.board.sealed_on_all(generation, workers[0].local_world_size)
        return sealed >= self._late_step and not self._shipper.delivering(StepId(self._late_step, generation))

    def _ship_s(self) -> float:
        return 1.5 * self._image_bytes() / (self._shipper.rate_bytes_per_s or _ASSUMED_BYTES_PER_S)

    def _image_bytes(self) -> int:
        return sum(segment.geometry.image_bytes for segment in self._memory.segments)
