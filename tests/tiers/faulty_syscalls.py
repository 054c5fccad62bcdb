"""System calls that are counted and go wrong at a chosen one."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from surefoot.tiers.syscalls import Syscalls

T = TypeVar("T")


class CountedSyscalls(Syscalls):
    """Every call passes `_at`, in order. Subclasses make one of them go wrong."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._lock = threading.Lock()

    def _at(self, what: str, call: Callable[[], T]) -> T:
        with self._lock:
            self.calls.append(what)
        return call()

    def create(self, name: str, dir_fd: int) -> int:
        return self._at("create", lambda: super(CountedSyscalls, self).create(name, dir_fd))

    def allocate(self, fd: int, size_bytes: int) -> None:
        self._at("allocate", lambda: super(CountedSyscalls, self).allocate(fd, size_bytes))

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return self._at("write", lambda: super(CountedSyscalls, self).write(fd, data, offset))

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._at("truncate", lambda: super(CountedSyscalls, self).truncate(fd, size_bytes))

    def sync(self, fd: int) -> None:
        what = "sync directory" if os.path.isdir(f"/proc/self/fd/{fd}") else "sync file"
        self._at(what, lambda: super(CountedSyscalls, self).sync(fd))

    def rename(self, name: str, new_name: str, dir_fd: int) -> None:
        self._at("rename", lambda: super(CountedSyscalls, self).rename(name, new_name, dir_fd))

    def link(self, name: str, new_name: str, dir_fd: int) -> None:
        self._at("link", lambda: super(CountedSyscalls, self).link(name, new_name, dir_fd))

    def unlink(self, name: str, dir_fd: int) -> None:
        self._at("unlink", lambda: super(CountedSyscalls, self).unlink(name, dir_fd))

    def mkdir(self, name: str, dir_fd: int) -> None:
        self._at("mkdir", lambda: super(CountedSyscalls, self).mkdir(name, dir_fd))

    def rmdir(self, name: str, dir_fd: int) -> None:
        self._at("rmdir", lambda: super(CountedSyscalls, self).rmdir(name, dir_fd))


class FailingSyscalls(CountedSyscalls):
    """The n-th call fails, before or after it has done its work."""

    def __init__(self, number: int, *, done: bool, code: int = errno.EIO) -> None:
        super().__init__()
        self._number = number
        self._done = done
        self._code = code

    def _at(self, what: str, call: Callable[[], T]) -> T:
        here = len(self.calls) == self._number
        if here and not self._done:
            self.calls.append(what)
            self._go_wrong()
        try:
            result = super()._at(what, call)
            if here and what == "create" and isinstance(result, int):
                os.close(result)
        finally:
            if here:  # also where the call itself had an error to tell
                self._go_wrong()
        return result

    def _go_wrong(self) -> None:
        raise OSError(self._code, os.strerror(self._code))


class DeadlySyscalls(FailingSyscalls):
    """The process ends at the n-th call, before or after it."""

    def _go_wrong(self) -> None:
        os._exit(9)


class ShortWrites(Syscalls):
    """Writes fewer bytes than asked, as a nearly full disk or a signal may."""

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return super().write(fd, data[: max(1, len(data) // 3)], offset)


class Refusing(Syscalls):
    """A file system that lacks one call."""

    def __init__(self, call: str, code: int) -> None:
        self._call = call
        self._code = code

    def link(self, name: str, new_name: str, dir_fd: int) -> None:
        self._refuse("link")
        super().link(name, new_name, dir_fd)

    def rename(self, name: str, new_name: str, dir_fd: int) -> None:
        self._refuse("rename")
        super().rename(name, new_name, dir_fd)

    def sync(self, fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            self._refuse("sync directory")
        super().sync(fd)

    def allocate(self, fd: int, size_bytes: int) -> None:
        self._refuse("allocate")
        super().allocate(fd, size_bytes)

    def _refuse(self, call: str) -> None:
        if call == self._call:
            raise OSError(self._code, os.strerror(self._code))
