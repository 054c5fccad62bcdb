"""The hasher: hashes the slots that trainers seal, behind them. Only the newest sealed slot of a rank is worth it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from surefoot.agent.memory.memory import Held, Memory
from surefoot.core.layout import BoundaryId
from surefoot.core.plan import Plan
from surefoot.ipc.segment import Segment


class Hasher:
    """One task. If a rank seals faster than this task hashes, its older steps are skipped."""

    def __init__(
        self, memory: Memory, pinned: Callable[[], list[tuple[Segment, int]]], on_hashed: Callable[[Held], None]
    ) -> None:
        self._memory = memory
        self._on_hashed = on_hashed
        self._pinned = pinned
        self._plan: Plan | None = None
        self._pending: dict[int, tuple[Segment, int]] = {}
        self._wake = asyncio.Event()

    def note(self, segment: Segment, slot: int) -> None:
        """Queue a slot that was sealed."""
        self._pending[segment.rank] = (segment, slot)
        self._wake.set()

    def set_plan(self, plan: Plan) -> None:
        """Take the plan under which trainers seal from here on."""
        self._plan = plan

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._pending = self._pending, {}
            hashed = await asyncio.gather(*(self._memory.hash_slot(*item) for item in batch.values()))
            for held in hashed:
                if held is not None:
                    self._on_hashed(held)
            if any(hashed):
                self._drop_older_plans(hashed)

    def _drop_older_plans(self, hashed: list[Held | None]) -> None:
        """Once a step of the current plan is whole, drop the segments of older plans, which are history."""
        plan = self._plan
        if plan is None or not any(held is not None and held.segment.plan_hash == plan.hash for held in hashed):
            return
        older = [segment for segment in self._memory.segments if segment.plan_hash != plan.hash]
        ranks = {segment.rank for segment in self._memory.segments if segment.plan_hash == plan.hash}
        newest = {self._newest_hashed(rank, plan.hash) for rank in ranks} if older else set()
        if len(newest) == 1 and None not in newest:
            pinned = {id(segment) for segment, _slot in self._pinned()}
            self._memory.drop(segment for segment in older if id(segment) not in pinned)

    def _newest_hashed(self, rank: int, plan_hash: str) -> BoundaryId | None:
        segment = self._memory.find(rank, plan_hash)
        sealed = segment.all_sealed() if segment is not None else []
        return max((s.at for s in sealed if s.image_hash is not None), default=None)
