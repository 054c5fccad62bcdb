"""A thread that looks on while something is measured: memory, cores, and when a save became durable."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from surefoot.bench.cores import Cores, children_of

_LOOK_EVERY_S = 0.01
_MEMORY_EVERY = 5
"""Looks from one reading of the memory to the next."""


class Watch:
    """Starts at once. Growth of memory counts from then on."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._start_bytes = self._peak_bytes = memory_bytes()
        self._over = threading.Event()
        self._durable: Callable[[], bool] | None = None
        self.durable_at_s: float | None = None
        """When the save that was last handed over became durable; None while it is not."""
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_for(self, durable: Callable[[], bool]) -> None:
        """Note when `durable` first says yes; here and now, if it does."""
        done = durable()
        self.durable_at_s = time.perf_counter() if done else None
        self._durable = None if done else durable

    def close(self) -> int:
        """Stop; the largest growth of this process's memory and its children's, in bytes."""
        self._over.set()
        self._thread.join()
        return self._peak_bytes - self._start_bytes

    def _look_on(self) -> None:
        looks = 0
        while not self._over.wait(_LOOK_EVERY_S):
            durable = self._durable
            if durable is not None and durable():
                self.durable_at_s = time.perf_counter()
                self._durable = None
            looks += 1
            if looks % _MEMORY_EVERY == 0:
                self._peak_bytes = max(self._peak_bytes, memory_bytes())
                self._cores.spread()


def memory_bytes() -> int:
    """Private and shared memory of this process, and private memory of its children, which map what it shares."""
    own = _fields(os.getpid())
    children = sum(_fields(child).get("RssAnon", 0) for child in children_of(os.getpid()))
    return own.get("RssAnon", 0) + own.get("RssShmem", 0) + children


def _fields(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if line.startswith("Rss"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}
