"""Planning: once every rank has reported its registered state, makes the plan, and a segment for each rank here.

Every node makes the plan by itself, from all reports, by a pure function: the result is the same on every node, so the
nodes need not agree on it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from surefoot.agent.clients.trainers import Trainer
from surefoot.agent.journal import Journal
from surefoot.agent.memory.memory import Memory, slot_bytes
from surefoot.agent.nodes.membership import Membership
from surefoot.core.documents import Fields
from surefoot.core.image import round_up
from surefoot.core.plan import Plan, Report, make_plan
from surefoot.core.replicas import with_replicas
from surefoot.errors import AgentError, ResourceError, SurefootError
from surefoot.events import human_bytes
from surefoot.ipc.segment import Segment
from surefoot.ipc.wire import Body

_RECORD_SPARE_BYTES = 64 * 1024
"""Room for a record to grow before a new plan is needed."""


_Entry = tuple[Trainer, Body, Report]


class Planner:
    """Gathers one report per rank. A report that comes twice (the agent was replaced) replaces the first."""

    def __init__(
        self,
        membership: Membership,
        memory: Memory,
        journal: Journal,
        num_slots: int,
        pinned: Callable[[], list[tuple[Segment, int]]],
        on_planned: Callable[[Plan], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._membership = membership
        self._spawn = spawn
        self._memory = memory
        self._journal = journal
        self._num_slots = num_slots
        self._pinned = pinned
        self._on_planned = on_planned
        self._reports: dict[int, _Entry] = {}

    def forget(self) -> None:
        self._reports.clear()

    async def report(self, trainer: Trainer, request: Body) -> None:
        """Take a rank's report. After this node's last one, a task answers all, so that connections go on being
        read."""
        try:
            self._reports[trainer.rank] = (trainer, request, Report.from_json(request.get("report")))
        except SurefootError as error:
            await self._refuse([*self._reports.values(), (trainer, request, Report((), ""))], error)
            return
        if len(self._reports) == trainer.local_world_size:
            # The task keeps them until the plan stands: every rank that reported gets an answer, even an error.
            entries = [self._reports[rank] for rank in sorted(self._reports)]
            self._reports.clear()
            self._spawn(self._answer_all(entries))

    async def _answer_all(self, entries: Sequence[_Entry]) -> None:
        try:
            await self._plan(entries)
        except SurefootError as error:
            await self._refuse(entries, error)

    async def _refuse(self, entries: Sequence[_Entry], error: SurefootError) -> None:
        self._reports.clear()
        for trainer, request, _report in entries:
            await trainer.link.reply(request, error=str(error), kind=type(error).__name__)

    async def _plan(self, entries: Sequence[_Entry]) -> None:
        asked = [Fields(request, "report") for _worker, request, _report in entries]
        what = f"plan {asked[0].integer('generation')} {asked[0].integer('step')}"
        mine: Body = {
            "reports": [[trainer.rank, request["report"]] for trainer, request, _report in entries],
            "record_bytes": max(fields.integer("record_bytes") for fields in asked),
            "slots": max(fields.integer("slots") for fields in asked),
            "room_bytes": self._memory.room_bytes(),
        }
        brought = [Fields(one, what) for one in await self._membership.gather(what, mine)]
        record_capacity = round_up(2 * max(one.integer("record_bytes") for one in brought) + _RECORD_SPARE_BYTES)
        num_slots = max(self._num_slots, *(one.integer("slots") for one in brought))
        plan = self._plan_for(brought, self._reports_of(brought, entries), record_capacity, num_slots)
        ranks = [trainer.rank for trainer, _request, _report in entries]
        segments = await self._reserve_all(what, plan, ranks, record_capacity, num_slots)
        self._say(plan, segments, num_slots)
        self._on_planned(plan)
        pinned = self._pinned()
        for (trainer, request, _report), segment in zip(entries, segments, strict=True):
            slots = [slot for other, slot in pinned if other is segment]
            await trainer.link.send({"id": request["id"], "plan": plan.hash, "pinned": slots}, (segment.fd,))

    def _plan_for(
        self, brought: Sequence[Fields], reports: Sequence[Report], record_capacity: int, num_slots: int
    ) -> Plan:
        """A plan with replicas if every machine has memory for them; else without any, since all nodes share it."""
        plan = make_plan(reports)
        nodes = [self._membership.node_of(rank) for rank in range(len(reports))]
        replicated = with_replicas(plan, reports, nodes)
        if not replicated.replicas:
            return plan
        for node, one in zip(self._membership.nodes, brought, strict=True):
            ranks = [rank for rank, its_node in enumerate(nodes) if its_node == node]
            need_bytes = num_slots * sum(slot_bytes(replicated, rank, record_capacity) for rank in ranks)
            if need_bytes > one.integer("room_bytes"):
                self._journal.record(
                    "warning",
                    what=f"node {node} has no memory for second copies of other machines' "
                    f"images ({human_bytes(need_bytes)} in all): if a machine is lost, its newest steps are, too",
                )
                return plan
        return replicated

    def _reports_of(self, brought: Sequence[Fields], entries: Sequence[_Entry]) -> list[Report]:
        """In rank order."""
        reports = {trainer.rank: report for trainer, _request, report in entries}
        for one in brought:
            for rank, report in one.items("reports"):
                if rank not in reports:
                    reports[rank] = Report.from_json(report)
        world_size = entries[0][0].world_size
        if sorted(reports) != list(range(world_size)):
            raise AgentError(f"only ranks {sorted(reports)} of {world_size} sent reports")
        return [reports[rank] for rank in range(world_size)]

    async def _reserve_all(
        self, what: str, plan: Plan, ranks: Sequence[int], record_capacity: int, num_slots: int
    ) -> list[Segment]:
        """Reserve on every node, or on none: a rank without a segment could not take part in any save."""
        try:
            segments, error = self._reserve(plan, ranks, record_capacity, num_slots), None
        except ResourceError as caught:
            segments, error = [], caught
        answers = await self._membership.gather(f"{what} reserved", {"error": None if error is None else str(error)})
        if error is not None:
            raise error
        for node, answer in zip(self._membership.nodes, answers, strict=True):
            if answer.get("error"):
                raise ResourceError(f"node {node}: {answer['error']}")
        return segments

    def _reserve(self, plan: Plan, ranks: Sequence[int], record_capacity: int, num_slots: int) -> list[Segment]:
        try:
            return self._memory.reserve(plan, ranks, record_capacity, num_slots)
        except ResourceError:
            older = [segment for segment in self._memory.segments if segment.plan_hash != plan.hash]
            if not older:
                raise
            self._journal.record(
                "warning",
                what="memory is too small for the old and the new plan at once: until the next step is staged "
                "no image is in memory",
            )
            self._memory.drop(older)
            return self._memory.reserve(plan, ranks, record_capacity, num_slots)

    def _say(self, plan: Plan, segments: list[Segment], num_slots: int) -> None:
        slots = min(segment.num_slots for segment in segments)
        self._journal.record(
            "planned",
            items=len(plan.items),
            bytes=sum(segment.geometry.image_bytes for segment in segments),
            slots=slots,
            slot_bytes=[segment.geometry.slot_stride for segment in segments],
            replicas_bytes=sum(segment.geometry.replicas_bytes for segment in segments),
            place="shm" if all(segment.path for segment in segments) else "memfd",
        )
        if slots < num_slots:
            self._journal.record(
                "warning",
                what=f"memory allows {slots} of {num_slots} slots: while an upload runs, no step is staged, and "
                "a crash goes back to the step under upload",
            )
        for name in plan.mismatched:
            self._journal.record("warning", what=f"{name} differs between ranks: each rank keeps its own")
