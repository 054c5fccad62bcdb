"""Planning: when every rank has reported what it registered, one plan and one segment for each."""

from __future__ import annotations

from collections.abc import Callable

from surefoot.agent.crew import Worker
from surefoot.agent.journal import Journal
from surefoot.agent.memory import Memory
from surefoot.core.documents import Fields
from surefoot.core.image import round_up
from surefoot.core.plan import Plan, Report, make_plan
from surefoot.errors import ResourceError, SurefootError
from surefoot.segment import Segment
from surefoot.wire import Body

_RECORD_SPARE_BYTES = 64 * 1024
"""Room for a record to grow before a new plan is needed."""


class Planner:
    """Gathers one report a rank. A report that comes twice (the agent was replaced) replaces the first."""

    def __init__(
        self,
        memory: Memory,
        journal: Journal,
        num_slots: int,
        pinned: Callable[[], list[tuple[Segment, int]]],
        on_planned: Callable[[Plan], None],
    ) -> None:
        self._memory = memory
        self._journal = journal
        self._num_slots = num_slots
        self._pinned = pinned
        self._on_planned = on_planned
        self._reports: dict[int, tuple[Worker, Body, Report]] = {}

    def forget(self) -> None:
        self._reports.clear()

    async def report(self, worker: Worker, request: Body) -> None:
        """Take a rank's report; with the last one, answer all."""
        try:
            self._reports[worker.rank] = (worker, request, Report.from_json(request.get("report")))
            if len(self._reports) < worker.world_size:
                return
            await self._answer_all(worker.world_size)
        except SurefootError as error:
            for other, asked, _report in list(self._reports.values()):
                await other.link.reply(asked, error=str(error), kind=type(error).__name__)
            self._reports.clear()

    async def _answer_all(self, world_size: int) -> None:
        # Kept until the plan stands: whoever reported is answered, whatever comes of it.
        entries = [self._reports[rank] for rank in range(world_size)]
        plan = make_plan([report for _worker, _request, report in entries])
        record_bytes = max(Fields(request, "report").integer("record_bytes") for _w, request, _r in entries)
        asked = [Fields(request, "report").integer("slots") for _w, request, _r in entries]
        num_slots = max(self._num_slots, *asked)
        segments = self._reserve(plan, round_up(2 * record_bytes + _RECORD_SPARE_BYTES), num_slots)
        self._say(plan, segments, num_slots)
        self._on_planned(plan)
        pinned = self._pinned()
        self._reports.clear()
        for (worker, request, _report), segment in zip(entries, segments, strict=True):
            mine = [slot for other, slot in pinned if other is segment]
            await worker.link.send({"id": request["id"], "plan": plan.hash, "pinned": mine}, (segment.fd,))

    def _reserve(self, plan: Plan, record_capacity: int, num_slots: int) -> list[Segment]:
        try:
            return self._memory.reserve(plan, record_capacity, num_slots)
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
            return self._memory.reserve(plan, record_capacity, num_slots)

    def _say(self, plan: Plan, segments: list[Segment], num_slots: int) -> None:
        slots = min(segment.num_slots for segment in segments)
        self._journal.record(
            "planned",
            items=len(plan.items),
            bytes=sum(segment.geometry.image_bytes for segment in segments),
            slots=slots,
            slot_bytes=[segment.geometry.slot_stride for segment in segments],
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
