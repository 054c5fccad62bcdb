"""A watch over memory and durability while something is measured, and the cores that each thread may use meanwhile.

The computing thread is pinned to one core, as if it were an accelerator; no other is. A thread begins with the cores of
the thread that started it, so the threads that a save starts would share the computing core for ever, and so would
child processes. On a machine with an accelerator all cores are theirs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOOK_EVERY_S = 0.01
_MEMORY_EVERY = 5
"""Looks from one reading of the memory to the next."""


class Cores:
    """Made in the thread that computes, while it may still use all cores."""

    def __init__(self, *, pin: bool) -> None:
        self._all = os.sched_getaffinity(0)
        self._one = {min(self._all)} if pin else self._all
        self._computing = threading.get_native_id()
        self._spread: set[int] = set()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The calling thread is the accelerator for the time of the block; outside it, it is the host's."""
        if self._one == self._all:
            yield
            return
        os.sched_setaffinity(0, self._one)
        try:
            yield
        finally:
            os.sched_setaffinity(0, self._all)

    def spread(self) -> None:
        """Let every thread but the computing one, and every child process, use all cores."""
        if self._one == self._all:
            return
        mine = os.getpid()
        tasks = _threads_of(mine).union(*map(_threads_of, _children_of(mine)))
        for task in tasks - self._spread - {self._computing}:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(task, self._all)
                self._spread.add(task)


class Watch:
    """Starts at once. Growth of memory counts from then on."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._start_bytes = self._peak_bytes = _memory_bytes()
        self._over = threading.Event()
        self._durable: Callable[[], bool] | None = None
        self.durable_at_s: float | None = None
        """When the save that was last handed over became durable; None while it is not."""
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_for(self, durable: Callable[[], bool]) -> None:
        """Note when `durable` first holds; here and now, if it does."""
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
                self._peak_bytes = max(self._peak_bytes, _memory_bytes())
                self._cores.spread()


def _memory_bytes() -> int:
    """Private and shared memory of this process, and private memory of its children, which map what it shares."""
    own = _fields(os.getpid())
    children = sum(_fields(child).get("RssAnon", 0) for child in _children_of(os.getpid()))
    return own.get("RssAnon", 0) + own.get("RssShmem", 0) + children


def _fields(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if line.startswith("Rss"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def _threads_of(pid: int) -> set[int]:
    """Kernel ids of a process's threads; none if it is gone."""
    try:
        return {int(name) for name in os.listdir(f"/proc/{pid}/task")}
    except OSError:
        return set()


def _children_of(pid: int) -> set[int]:
    """Live descendants of a process."""
    found: set[int] = set()
    for task in _threads_of(pid):
        for child in _children_of_thread(pid, task):
            found |= {child} | _children_of(child)
    return found


def _children_of_thread(pid: int, task: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except OSError:
        return []
