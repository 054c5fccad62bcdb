"""Writes one file so that it is there whole and durable, or not at all.

Order: temporary file beside the target, data, fsync(file), rename or link onto the name, fsync(directory).
BEFORE the rename no reader can see the data; AFTER it every reader sees all of it. A temporary file has a name that
is not a key, and an flock that its writer holds: a process that gets the lock knows that the writer is gone.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from surefoot.core.layout import PRIVATE_KEYS
from surefoot.tiers.disk_tree import Tree
from surefoot.tiers.syscalls import Syscalls

PAGE_BYTES = 4096
FOREIGN_TEMPORARY_AGE_S = 3600.0
"""A temporary file of another machine is left alone until nothing was written to it for so long: locks do not
cross machines on every shared file system."""

_TEMPORARY = re.compile(r"^\+([0-9a-f]{8})-[0-9a-f]{16}\.tmp$")
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def _boot() -> str:
    """This machine since it was started: containers on it share it, other machines do not."""
    return _BOOT_ID.read_text(encoding="ascii").strip()[:8]


class FileWriter:
    """One object on its way to its name. `discard` is safe at any point, and after success does nothing."""

    def __init__(self, tree: Tree, syscalls: Syscalls, key: str, size_bytes: int) -> None:
        *parts, self._name = key.split("/")
        self._parts = tuple(parts)
        self._tree = tree
        self._sys = syscalls
        self._size_bytes = size_bytes
        self._offset = 0
        self._temporary = ""
        self._fd = -1
        self._dir_fd = -1
        self._direct = False

    def open(self, *, direct: bool) -> None:
        """Make the temporary file and reserve its space, so that a full disk is known before the first
        byte."""
        self._create()
        if "/".join((*self._parts, self._name)) in PRIVATE_KEYS:
            # BEFORE the first byte.
            self._sys.restrict(self._fd)
        if self._size_bytes:
            _allocate(self._sys, self._fd, self._size_bytes)
        self._direct = direct and _set_direct(self._fd, on=True)

    @property
    def written_bytes(self) -> int:
        return self._offset

    def write(self, data: memoryview) -> None:
        """Append. Only the last call may have a length that is not a multiple of the page."""
        body = len(data) - len(data) % PAGE_BYTES if self._direct else len(data)
        self._write_all(data[:body], self._offset)
        if body < len(data):
            self._write_tail(data[body:], self._offset + body)
        self._offset += len(data)

    def settle(self) -> None:
        """Data and length reach the device."""
        if self._direct or self._offset != self._size_bytes:
            self._sys.truncate(self._fd, self._offset)
        self._sys.sync(self._fd)

    def publish(self) -> None:
        """Take the name, from an older object if there is one. AFTER `settle`."""
        self._sys.rename(self._temporary, self._name, self._dir_fd)
        self._temporary = ""
        self._sys.sync(self._dir_fd)
        self.discard()

    def publish_if_absent(self) -> bool:
        """Take the name if it is free; False if it is taken. AFTER `settle`.

        The directory is synced for the loser too: it will act on what the winner wrote.
        """
        won = self._link()
        self._sys.sync(self._dir_fd)
        self.discard()
        return won

    def discard(self) -> None:
        """Remove what is not published and let go of the descriptors."""
        try:
            if self._temporary:
                with suppress(FileNotFoundError):
                    self._sys.unlink(self._temporary, self._dir_fd)
                self._temporary = ""
        finally:
            for fd in (self._fd, self._dir_fd):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._dir_fd = -1

    def _create(self) -> None:
        """A file that is ours: a sweeper may take the lock, or even the name, before we hold the lock."""
        while True:
            self._temporary = f"+{_boot()}-{secrets.token_hex(8)}.tmp"
            try:
                self._fd, self._dir_fd = self._tree.open_new(self._parts, self._temporary)
            except BaseException:
                self._temporary = ""
                raise
            if _lock(self._fd) is not False and os.fstat(self._fd).st_nlink:
                return
            self.discard()

    def _write_all(self, data: memoryview, offset: int) -> None:
        while len(data):
            written = self._write_some(data, offset)
            data, offset = data[written:], offset + written

    def _write_some(self, data: memoryview, offset: int) -> int:
        """One write; memory, length or file system that direct I/O refuses are written the plain way."""
        try:
            return self._sys.write(self._fd, data, offset)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
        self._direct = _set_direct(self._fd, on=False)
        return self._sys.write(self._fd, data, offset)

    def _write_tail(self, data: memoryview, offset: int) -> None:
        """Direct I/O writes whole pages: the last, partial one goes through a page of our own, cut off in
        `settle`."""
        page = mmap.mmap(-1, PAGE_BYTES)
        page[: len(data)] = data
        self._write_all(memoryview(page), offset)

    def _link(self) -> bool:
        try:
            self._sys.link(self._temporary, self._name, self._dir_fd)
        except FileExistsError:
            # NFS may lose the answer of a link that went through, and a repeated request then meets its own
            # name.
            return os.fstat(self._fd).st_nlink > 1
        return True


def is_temporary(name: str) -> bool:
    return _TEMPORARY.match(name) is not None


def sweep(tree: Tree, syscalls: Syscalls) -> int:
    """Remove the temporary files that belong to nobody: how many."""
    return sum(_sweep_one(tree, syscalls, parts, name) for parts, name in list(tree.files()) if is_temporary(name))


def probe(tree: Tree, syscalls: Syscalls) -> str | None:
    """What the root's file system lacks of what whole-or-nothing needs, or None.

    Buckets mounted as file systems and some FAT-like ones have no hard links, no atomic rename or no
    directory sync.
    """
    with tree.directory(()) as dir_fd:
        while True:
            name, linked = (f"+{_boot()}-{secrets.token_hex(8)}.tmp" for _ in range(2))
            fd = syscalls.create(name, dir_fd)
            try:
                # As in `FileWriter`: a sweeper may take the lock, or even the name, before we hold the lock.
                if _lock(fd) is not False and os.fstat(fd).st_nlink:
                    return _first_missing(syscalls, fd, dir_fd, name, linked)
            finally:
                os.close(fd)
                for leftover in (name, linked):
                    with suppress(FileNotFoundError):
                        syscalls.unlink(leftover, dir_fd)


def _first_missing(syscalls: Syscalls, fd: int, dir_fd: int, name: str, linked: str) -> str | None:
    needs: tuple[tuple[str, Callable[[], None]], ...] = (
        ("fsync of files", lambda: syscalls.sync(fd)),
        ("hard links (link)", lambda: syscalls.link(name, linked, dir_fd)),
        ("rename over an existing file", lambda: syscalls.rename(name, linked, dir_fd)),
        ("fsync of directories", lambda: syscalls.sync(dir_fd)),
    )
    for what, need in needs:
        try:
            need()
        except OSError as error:
            if error.errno not in (*_UNSUPPORTED, errno.EPERM, errno.EMLINK, errno.EISDIR, errno.EBADF):
                raise
            return f"{what}: {os.strerror(error.errno or 0)}"
    return None


def _sweep_one(tree: Tree, syscalls: Syscalls, parts: tuple[str, ...], name: str) -> int:
    """1 if the file was nobody's and is gone. What we may not open or no longer find is not ours to
    remove."""
    with suppress(FileNotFoundError, PermissionError), tree.directory(parts) as dir_fd:
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
        try:
            if _is_abandoned(fd, name):
                syscalls.unlink(name, dir_fd)
                return 1
        finally:
            os.close(fd)
    return 0


def _is_abandoned(fd: int, name: str) -> bool:
    match = _TEMPORARY.match(name)
    locked = _lock(fd)
    if match is not None and match[1] == _boot() and locked is not None:
        return locked
    age_s = time.time() - os.fstat(fd).st_mtime
    return locked is not False and age_s > FOREIGN_TEMPORARY_AGE_S


def _lock(fd: int) -> bool | None:
    """True: we hold it. False: another descriptor does. None: this file system has no such locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (*_UNSUPPORTED, errno.ENOLCK):
            return None
        raise
    return True


def _allocate(syscalls: Syscalls, fd: int, size_bytes: int) -> None:
    try:
        syscalls.allocate(fd, size_bytes)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def _set_direct(fd: int, *, on: bool) -> bool:
    """Turn direct I/O on or off: whether it is on. Not at open(2): some file systems refuse there, yet
    create."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return on
