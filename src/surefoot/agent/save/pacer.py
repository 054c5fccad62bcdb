"""Caps the bandwidth: lets bytes through at a bounded average rate."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from surefoot.host.clock import boot_s


class Pacer:
    """Delays a reader that takes bytes faster than the cap. Without a cap, or once released, delays none."""

    def __init__(self, max_bytes_per_s: float | None) -> None:
        self._max_bytes_per_s = max_bytes_per_s
        self._free_at_s = 0.0
        self.held_s = 0.0
        """For how long bytes were held back, so far and added up."""
        self._released = asyncio.Event()

    async def take(self, size_bytes: int) -> None:
        """Wait until so many bytes may pass."""
        if self._max_bytes_per_s is None:
            return
        now_s = boot_s()
        start_s = max(now_s, self._free_at_s)
        self._free_at_s = start_s + size_bytes / self._max_bytes_per_s
        if start_s > now_s:
            await self._sleep(start_s - now_s)
            self.held_s += boot_s() - now_s

    async def _sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._released.wait()

    def release(self) -> None:
        """No cap any more, not for what is being held back either: an eviction needs every byte per second there is."""
        self._max_bytes_per_s = None
        self._released.set()
