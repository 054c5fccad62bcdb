"""Walks a disk tier's directory without ever leaving it.

Every component below the root is opened relative to its parent's descriptor and without following symbolic
links, so nothing that lies in the tree can lead a read or a write elsewhere. The root itself is the user's
word: links in it are followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from surefoot.core.layout import is_safe_key
from surefoot.tiers.base import Entry
from surefoot.tiers.syscalls import Syscalls

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_BELOW_ROOT = _DIRECTORY | os.O_NOFOLLOW
# O_NONBLOCK: a FIFO in the tree must not hang the reader; it has no effect on regular files.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_RACE_TRIES = 8


class OddFileError(OSError):
    """Something in the tree that is not a regular file where an object is expected."""


class Tree:
    """The directories of one disk tier."""

    def __init__(self, root: Path, syscalls: Syscalls) -> None:
        self.root = root
        self._sys = syscalls
        self._durable: set[tuple[str, ...]] = set()

    @contextmanager
    def directory(self, parts: tuple[str, ...], *, create: bool = False) -> Iterator[int]:
        """An open descriptor of the directory `parts` below the root."""
        fd = self._walk(parts, create=create)
        try:
            yield fd
        finally:
            os.close(fd)

    def open_new(self, parts: tuple[str, ...], name: str) -> tuple[int, int]:
        """Create `name` in the directory `parts`, made where missing: (its descriptor, the directory's).

        A deleter may remove an empty directory between our walk and our first file in it: walk again.
        """
        for _ in range(_RACE_TRIES):
            dir_fd = self._walk(parts, create=True)
            try:
                return self._sys.create(name, dir_fd), dir_fd
            except FileNotFoundError:
                os.close(dir_fd)
            except BaseException:
                os.close(dir_fd)
                raise
        raise OSError(f"directory keeps disappearing: {'/'.join(parts)}")

    @contextmanager
    def object(self, key: str) -> Iterator[int]:
        """An open descriptor of the regular file of `key`, for reading."""
        *parts, name = key.split("/")
        with self.directory(tuple(parts)) as dir_fd:
            fd = os.open(name, _READ, dir_fd=dir_fd)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OddFileError(f"not a regular file: {key}")
                yield fd
            finally:
                os.close(fd)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Objects under `prefix`. A directory that is not there is empty; one that cannot be read is an
        error."""
        parts = tuple(prefix.split("/")[:-1])
        try:
            with self.directory(parts) as fd:
                yield from self._entries_of(fd, prefix)
        except FileNotFoundError:
            return

    def unlink(self, key: str) -> None:
        """Remove a file, and the directories that it leaves empty. A missing file is not an error."""
        *parts, name = key.split("/")
        with suppress(FileNotFoundError):
            with self.directory(tuple(parts)) as dir_fd:
                self._sys.unlink(name, dir_fd)
            self._prune(tuple(parts))

    def files(self, parts: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
        """Every (directory, name) of a file in the tree, whatever its name."""
        try:
            with self.directory(parts) as fd, os.scandir(fd) as scan:
                found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in scan]
        except FileNotFoundError:
            return
        for name, is_directory in found:
            if not is_directory:
                yield parts, name
            elif is_safe_key(name):
                yield from self.files((*parts, name))

    def make_root(self) -> None:
        """Make the root and its missing parents, each entry synced in its own parent."""
        missing = []
        place = self.root
        while not place.is_dir() and place != place.parent:
            missing.append(place)
            place = place.parent
        for child in reversed(missing):
            parent_fd = os.open(child.parent, _DIRECTORY)
            try:
                with suppress(FileExistsError):
                    self._sys.mkdir(child.name, parent_fd)
                self._sys.sync(parent_fd)
            finally:
                os.close(parent_fd)

    def _walk(self, parts: tuple[str, ...], *, create: bool) -> int:
        fd = os.open(self.root, _DIRECTORY)
        try:
            for depth, part in enumerate(parts, start=1):
                child = self._enter(fd, parts[:depth], part, create=create)
                os.close(fd)
                fd = child
            return fd
        except BaseException:
            os.close(fd)
            raise

    def _enter(self, fd: int, path: tuple[str, ...], name: str, *, create: bool) -> int:
        """Open the directory `name` in `fd`; when creating, its entry in `fd` is durable on return.

        Invariant: a path is in `_durable` only after its parent was synced by us since we saw it there. A
        directory that another writer made a moment ago may not be synced yet, so "it exists" is not enough.
        """
        made = False
        for _ in range(_RACE_TRIES):
            try:
                child = os.open(name, _BELOW_ROOT, dir_fd=fd)
            except FileNotFoundError:
                if not create:
                    raise
                made = self._make(fd, name)
                continue
            if create and (made or path not in self._durable):
                self._sync_entry(fd, child, path)
            return child
        raise OSError(f"directory keeps disappearing: {'/'.join(path)}")

    def _make(self, fd: int, name: str) -> bool:
        try:
            self._sys.mkdir(name, fd)
        except FileExistsError:
            return False
        return True

    def _sync_entry(self, fd: int, child: int, path: tuple[str, ...]) -> None:
        try:
            self._sys.sync(fd)
        except BaseException:
            os.close(child)
            raise
        self._durable.add(path)

    def _prune(self, parts: tuple[str, ...]) -> None:
        """Remove empty directories upwards. One that is in use, or that we may not remove, stays: it is only
        empty."""
        for depth in range(len(parts), 0, -1):
            try:
                with self.directory(parts[: depth - 1]) as fd:
                    self._sys.rmdir(parts[depth - 1], fd)
            except OSError:
                return
            self._durable.discard(parts[:depth])

    def _entries_of(self, fd: int, prefix: str) -> Iterator[Entry]:
        with os.scandir(fd) as scan:
            names = [entry.name for entry in scan if is_safe_key(entry.name)]
        for name in names:
            try:
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                continue  # deleted since the scan
            if stat.S_ISREG(found.st_mode):
                yield Entry(f"{prefix}{name}", found.st_size)
            elif stat.S_ISDIR(found.st_mode):
                yield from self.entries(f"{prefix}{name}/")
