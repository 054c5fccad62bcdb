"""Finds the processes of a job by a mark in their environment, whatever process is their parent by now.

A supervisor's children leave its session and outlive it, so neither process group nor parent shows what belongs to a
job. The environment a program was started with does: it is inherited, and `/proc` shows it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surefoot.host.clock import boot_s

MARK_VARIABLE = "SUREFOOT_SCENARIO"
_LOOK_EVERY_S = 0.002
_STOPS_WITHIN_S = 10.0
_GONE_WITHIN_S = 20.0


def find_marked(mark: str) -> list[int]:
    """Live processes that were started with this mark. Zombies have no environment, so they are not among them."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    return [pid for pid in _pids() if wanted in _environment(pid)]


def has_mark(pid: int, mark: str) -> bool:
    return pid > 0 and f"{MARK_VARIABLE}={mark}".encode() in _environment(pid)


def kill_marked(mark: str) -> list[int]:
    """SIGKILL every process with this mark, as if at one moment. Returns their pids; of those that live on if any do.

    All are stopped before the first is killed: none can see another's death and act on it.
    """
    found: list[int] = []
    while new := [pid for pid in find_marked(mark) if pid not in found]:
        for pid in new:
            send(pid, signal.SIGSTOP)
        found += new
    end_s = boot_s() + _GONE_WITHIN_S
    while alive := find_marked(mark):
        for pid in alive:
            send(pid, signal.SIGKILL)
        if boot_s() > end_s:
            return alive
        time.sleep(_LOOK_EVERY_S)
    return found


@contextmanager
def stopped(pid: int) -> Iterator[bool]:
    """Stop a process for the time of the block; yields False if it ended instead. What it was doing, it is doing."""
    if not send(pid, signal.SIGSTOP):
        yield False
        return
    try:
        yield _wait_for_stop(pid)
    finally:
        send(pid, signal.SIGCONT)


@contextmanager
def ahead_of_others() -> Iterator[None]:
    """For the time of the block this thread gets a processor whenever it wants one, if the system allows that.

    Some phases last a millisecond and come once; on a machine with more to do than processors they would be slept over.
    Children do not inherit it.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def wait_for_end(pid: int) -> bool:
    """Wait until a process is no more than a zombie. False if it lives on."""
    end_s = boot_s() + _GONE_WITHIN_S
    while state_of(pid) not in ("", "Z", "X"):
        if boot_s() > end_s:
            return False
        time.sleep(_LOOK_EVERY_S / 4)
    return True


def send(pid: int, number: signal.Signals) -> bool:
    """Signal a process. False if it is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def state_of(pid: int) -> str:
    """The kernel's letter for a process's main thread; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _wait_for_stop(pid: int) -> bool:
    end_s = boot_s() + _STOPS_WITHIN_S
    while (state := state_of(pid)) not in ("", "Z", "X"):
        if state == "T":
            return True
        if boot_s() > end_s:
            return False
        time.sleep(0)
    return False


def _pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _environment(pid: int) -> tuple[bytes, ...]:
    try:
        return tuple(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        # Gone, or another user's.
        return ()
