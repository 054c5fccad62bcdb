"""Which cores a process's threads may use: the computing one is pinned, as if it were an accelerator, no other is.

A thread is born with the cores of whoever started it, so the threads that a save starts would share the computing
core for ever, and so would child processes. On a machine with an accelerator all cores are theirs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
        threads = {self._computing} | self._spread
        for task in threads_of(os.getpid()) - threads:
            self._free(task)
        for child in children_of(os.getpid()):
            for task in threads_of(child) - self._spread:
                self._free(task)

    def _free(self, task: int) -> None:
        with suppress(ProcessLookupError):
            os.sched_setaffinity(task, self._all)
            self._spread.add(task)


def threads_of(pid: int) -> set[int]:
    """Kernel ids of a process's threads; none if it is gone."""
    try:
        return {int(name) for name in os.listdir(f"/proc/{pid}/task")}
    except OSError:
        return set()


def children_of(pid: int) -> set[int]:
    """Live descendants of a process."""
    found: set[int] = set()
    for task in threads_of(pid):
        for child in _children_of_thread(pid, task):
            found |= {child} | children_of(child)
    return found


def _children_of_thread(pid: int, task: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except OSError:
        return []
