"""Makes a directory a tier: a local drive, or a directory that the nodes share."""

from __future__ import annotations

import builtins
import errno
import fcntl
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from surefoot.core.layout import is_safe_key
from surefoot.errors import (
    ObjectExistsError,
    ObjectMissingError,
    TierDeniedError,
    TierError,
    TierFullError,
)
from surefoot.tiers.base import Entry
from surefoot.tiers.disk_tree import Tree
from surefoot.tiers.disk_write import PAGE_BYTES, FileWriter, probe, sweep
from surefoot.tiers.pool import Pool
from surefoot.tiers.syscalls import Syscalls

_DIRECT_READ_BYTES = 1 << 20
_READ_PIECE_BYTES = 16 << 20
# EFBIG: the process's or the file system's limit on the size of one file; to the run it is the same as
# "full".
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


class DiskTier:
    """Objects as files under `root`, which is made at the first write.

    Files and directories get the permissions that the umask leaves: a team's shared directory stays readable.
    The first write also removes temporary files that dead writers left, and refuses a file system that cannot
    keep the promises of `Tier`.
    """

    def __init__(
        self, root: Path, *, direct: bool = True, num_threads: int = 4, syscalls: Syscalls | None = None
    ) -> None:
        self._sys = syscalls or Syscalls()
        self._tree = Tree(root.absolute(), self._sys)
        self._direct = direct
        self._pool = Pool(f"disk tier {root}", num_threads)
        self._ready = threading.Lock()
        self._is_ready = False

    @property
    def name(self) -> str:
        return "disk"

    @property
    def uri(self) -> str:
        return str(self._tree.root)

    async def put_stream(self, key: str, chunks: AsyncIterator[memoryview], size_bytes: int) -> None:
        """See `Tier.put_stream`. Direct I/O straight from the chunks' memory where that is page-aligned."""
        writer = FileWriter(self._tree, self._sys, self._checked(key), size_bytes)
        try:
            await self._pool.run(self._open, writer, key, direct=self._direct)
            async for chunk in chunks:
                self._check_room(key, writer, len(chunk), size_bytes)
                await self._pool.run(self._write, writer, key, chunk)
            self._check_complete(key, writer, size_bytes)
            await self._pool.run(self._settle, writer, key)
            await self._pool.run(self._publish, writer, key)
        except BaseException:
            await self._pool.run(self._discard, writer, key)
            raise

    async def put(self, key: str, data: bytes) -> None:
        await self._pool.run(self._put, self._checked(key), data)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        await self._pool.run(self._put_if_absent, self._checked(key), data)

    async def get(self, key: str) -> bytes:
        return await self._pool.run(self._get, self._checked(key))

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._checked(key)
        for start in range(0, max(len(buffer), 1), _READ_PIECE_BYTES):
            piece = buffer[start : start + _READ_PIECE_BYTES]
            await self._pool.run(self._read_into, key, offset + start, piece)

    async def size(self, key: str) -> int:
        return await self._pool.run(self._size, self._checked(key))

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._checked(key)
        await self._pool.run(self._delete, keys)

    async def free_bytes(self) -> int | None:
        return await self._pool.run(self._free_bytes)

    async def sweep(self) -> int:
        """Remove temporary files that belong to nobody: how many. The first write of a tier does it
        unasked."""
        return await self._pool.run(self._sweep)

    async def close(self) -> None:
        self._pool.close()

    # What follows runs in the pool's threads.

    def _open(self, writer: FileWriter, key: str, *, direct: bool) -> None:
        with self._errors("write", key):
            self._prepare()
            writer.open(direct=direct)

    def _write(self, writer: FileWriter, key: str, chunk: memoryview) -> None:
        with self._errors("write", key):
            writer.write(chunk.cast("B"))

    def _settle(self, writer: FileWriter, key: str) -> None:
        with self._errors("sync", key):
            writer.settle()

    def _publish(self, writer: FileWriter, key: str) -> None:
        with self._errors("rename", key):
            writer.publish()

    def _discard(self, writer: FileWriter, key: str) -> None:
        with self._errors("remove the temporary file of", key):
            writer.discard()

    def _put(self, key: str, data: bytes) -> None:
        with self._errors("write", key), self._filled(key, data) as writer:
            writer.publish()

    def _put_if_absent(self, key: str, data: bytes) -> None:
        with self._errors("write", key), self._filled(key, data) as writer:
            if not writer.publish_if_absent():
                raise ObjectExistsError(f"disk {self.uri}: {key} exists already")

    @contextmanager
    def _filled(self, key: str, data: bytes) -> Iterator[FileWriter]:
        """A small object, on the device but not yet under its name."""
        self._prepare()
        writer = FileWriter(self._tree, self._sys, key, len(data))
        try:
            writer.open(direct=False)
            writer.write(memoryview(data))
            writer.settle()
            yield writer
        finally:
            writer.discard()

    def _get(self, key: str) -> bytes:
        with self._errors("read", key), self._tree.object(key) as fd:
            data = bytearray(os.fstat(fd).st_size)
            self._fill(fd, key, 0, memoryview(data))
            return bytes(data)

    def _read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        with self._errors("read", key), self._tree.object(key) as fd:
            body = len(buffer) - len(buffer) % PAGE_BYTES
            if self._direct and body >= _DIRECT_READ_BYTES:
                done = _read_direct(fd, offset, buffer[:body])
                buffer, offset = buffer[done:], offset + done
            self._fill(fd, key, offset, buffer)

    def _fill(self, fd: int, key: str, offset: int, buffer: memoryview) -> None:
        while len(buffer):
            got = os.preadv(fd, [buffer], offset)
            if not got:
                raise TierError(f"disk {self.uri}: {key} ends at byte {offset}, {len(buffer)} bytes too early")
            buffer, offset = buffer[got:], offset + got

    def _size(self, key: str) -> int:
        with self._errors("look at", key), self._tree.object(key) as fd:
            return os.fstat(fd).st_size

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with self._errors("delete", key):
                self._tree.unlink(key)

    def _free_bytes(self) -> int:
        place = self._tree.root
        while not place.exists() and place != place.parent:
            place = place.parent
        with self._errors("look at the free space of", ""):
            found = os.statvfs(place)
            return found.f_bavail * found.f_frsize

    def _sweep(self) -> int:
        with self._errors("sweep", ""):
            return sweep(self._tree, self._sys)

    def _prepare(self) -> None:
        """Once before the first write; tried again after a failure."""
        with self._ready:
            if self._is_ready:
                return
            self._tree.make_root()
            sweep(self._tree, self._sys)
            missing = probe(self._tree, self._sys)
            if missing:
                raise TierError(
                    f"disk {self.uri}: this file system cannot keep whole files safely, it lacks {missing}; "
                    "use a local or NFS directory, or give the bucket itself (s3://…) instead of its mount"
                )
            self._is_ready = True

    def _checked(self, key: str) -> str:
        if not is_safe_key(key):
            raise TierError(f"disk {self.uri}: unsafe key {key!r}")
        return key

    def _check_room(self, key: str, writer: FileWriter, chunk_bytes: int, size_bytes: int) -> None:
        if writer.written_bytes + chunk_bytes > size_bytes:
            raise TierError(f"disk {self.uri}: {key} was announced with {size_bytes} bytes, but more came")

    def _check_complete(self, key: str, writer: FileWriter, size_bytes: int) -> None:
        got = writer.written_bytes
        if got != size_bytes:
            raise TierError(f"disk {self.uri}: {key} was announced with {size_bytes} bytes, but {got} came")

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        """Foreign errors become ours here, and nowhere else."""
        try:
            yield
        except TierError:
            raise
        except OSError as error:
            raise _translated(error, verb, f"{self.uri}/{key}") from error

    # Last in the class: below it, `list` no longer names the built-in type.
    async def list(self, prefix: str) -> list[Entry]:
        if prefix and not (prefix.endswith("/") and is_safe_key(prefix[:-1])):
            raise TierError(f"disk {self.uri}: unsafe prefix {prefix!r}")
        return await self._pool.run(self._entries, prefix)

    def _entries(self, prefix: str) -> builtins.list[Entry]:
        with self._errors("list", prefix):
            return sorted(self._tree.entries(prefix), key=lambda entry: entry.key)


def _read_direct(fd: int, offset: int, buffer: memoryview) -> int:
    """Read past the page cache as far as file system, memory and offset allow: how many bytes."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    done = 0
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < len(buffer):
            got = os.preadv(fd, [buffer[done:]], offset + done)
            done += got
            if got % PAGE_BYTES or not got:
                break
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return done


def _translated(error: OSError, verb: str, place: str) -> TierError:
    reads = verb in ("read", "look at")
    text = f"disk: cannot {verb} {place}: {error.strerror or error}"
    kind: type[TierError] = TierError
    if reads and error.errno == errno.ENOENT:
        kind, text = ObjectMissingError, f"disk: no such object: {place}"
    elif error.errno in _FULL:
        kind, text = TierFullError, f"{text}; free some space or choose another place"
    elif error.errno in _DENIED:
        kind, text = TierDeniedError, f"{text}; check owner, mode and mount options"
    elif error.errno in (errno.ENOTDIR, errno.ELOOP):
        text = f"{text}; a symbolic link or a file lies where a directory or an object is expected"
    translated = kind(text)
    translated.errno = error.errno
    return translated
