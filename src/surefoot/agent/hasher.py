"""The hasher: hashes what trainers seal, behind them. Only the newest sealed slot of a rank is worth the work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from surefoot.agent.memory import Held, Memory
from surefoot.segment import Segment


class Hasher:
    """One task; a rank that seals faster than this hashes has its older steps passed over."""

    def __init__(self, memory: Memory, on_hashed: Callable[[Held], None]) -> None:
        self._memory = memory
        self._on_hashed = on_hashed
        self._pending: dict[int, tuple[Segment, int]] = {}
        self._wake = asyncio.Event()

    def note(self, segment: Segment, slot: int) -> None:
        """A slot was sealed."""
        self._pending[segment.rank] = (segment, slot)
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._pending = self._pending, {}
            for held in await asyncio.gather(*(self._memory.hash_slot(*item) for item in batch.values())):
                if held is not None:
                    self._on_hashed(held)
