"""Tiers whose system calls go wrong as a test orders it, from a moment on that the test chooses.

An order is plain JSON. `arm`: a path; as long as no file lies there every call is the real one and none is counted.

    {"kind": "count", "trace": PATH}                 writes down the name of every call
    {"kind": "fail", "number": n, "done": b, "code": e}      the n-th call fails, before or after its work
    {"kind": "die", "number": n, "done": b}          the process ends at the n-th call
    {"kind": "full"}                                 no space for anything new while `arm` is there
    {"kind": "stop", "call": NAME, "name": NAME}     the process stops itself (SIGSTOP) before this call on this name
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from faulty_syscalls import CountedSyscalls, DeadlySyscalls, FailingSyscalls

from surefoot.tiers.base import Tier
from surefoot.tiers.disk import DiskTier
from surefoot.tiers.object_store import ObjectTier
from surefoot.tiers.open import open_tier
from surefoot.tiers.syscalls import Syscalls

T = TypeVar("T")


def opener(order: dict[str, Any]) -> Callable[[str], Tier]:
    """What opens an agent's tier instead of `open_tier`."""

    def open_with_faults(uri: str) -> Tier:
        tier = open_tier(uri)
        if isinstance(tier, DiskTier):
            return DiskTier(Path(tier.uri), syscalls=_syscalls(order))
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        return ObjectTier.open("s3", bucket, prefix, stall_s=order.get("stall_s", 20.0))

    return open_with_faults


def _syscalls(order: dict[str, Any]) -> Syscalls:
    kind = order.get("kind")
    if kind is None:
        return Syscalls()
    if kind == "stop":
        return _Stopping(order["call"], order["name"])
    arm = Path(order["arm"])
    if kind == "count":
        return _Traced(arm, Path(order["trace"]))
    if kind == "full":
        return _Full(arm)
    if kind == "die":
        return _ArmedDeadly(arm, order["number"], done=order["done"])
    return _ArmedFailing(arm, order["number"], done=order["done"], code=order.get("code", errno.EIO))


class _Traced(CountedSyscalls):
    def __init__(self, arm: Path, trace: Path) -> None:
        super().__init__()
        self._arm = arm
        self._trace = trace

    def _at(self, what: str, call: Callable[[], T]) -> T:
        if self._arm.exists():
            with self._trace.open("a") as file:
                file.write(what + "\n")
        return call()


class _ArmedFailing(FailingSyscalls):
    def __init__(self, arm: Path, number: int, *, done: bool, code: int = errno.EIO) -> None:
        super().__init__(number, done=done, code=code)
        self._arm = arm

    def _at(self, what: str, call: Callable[[], T]) -> T:
        return super()._at(what, call) if self._arm.exists() else call()


class _ArmedDeadly(DeadlySyscalls):
    def __init__(self, arm: Path, number: int, *, done: bool) -> None:
        super().__init__(number, done=done)
        self._arm = arm

    def _at(self, what: str, call: Callable[[], T]) -> T:
        return super()._at(what, call) if self._arm.exists() else call()


class _Full(CountedSyscalls):
    """A disk on which nothing can be made or grow; names can still be removed."""

    def __init__(self, arm: Path) -> None:
        super().__init__()
        self._arm = arm

    def _at(self, what: str, call: Callable[[], T]) -> T:
        if what in ("create", "allocate", "write", "mkdir") and self._arm.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call()


class _Stopping(Syscalls):
    """Stops the whole process before one call on one name, and does the call when it is woken."""

    def __init__(self, call: str, name: str) -> None:
        self._call = call
        self._name = name

    def link(self, name: str, new_name: str, dir_fd: int) -> None:
        self._stop_at("link", new_name)
        super().link(name, new_name, dir_fd)

    def rename(self, name: str, new_name: str, dir_fd: int) -> None:
        self._stop_at("rename", new_name)
        super().rename(name, new_name, dir_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        self._stop_at("unlink", name)
        super().unlink(name, dir_fd)

    def _stop_at(self, call: str, name: str) -> None:
        if call == self._call and self._name in name:
            self._call = ""
            # To this thread: it does not come back from the call before the process has stopped.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
