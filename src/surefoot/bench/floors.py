"""What the machine itself can do: the copies and writes that everything else is held against."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from pathlib import Path

_DIRECT_PIECE_BYTES = 8 * 1024 * 1024
_PAGE_BYTES = 4096


def memory(size_bytes: int) -> mmap.mmap:
    """Private memory whose pages are there."""
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)


def copy_s(target: memoryview, source: memoryview) -> float:
    """Seconds of one memcpy by one thread."""
    start_s = time.perf_counter()
    target[:] = source
    return time.perf_counter() - start_s


def write_fsync_s(path: Path, data: memoryview) -> float:
    """Seconds of one write through the page cache, with fsync. The file is removed."""
    start_s = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        left = data
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    took_s = time.perf_counter() - start_s
    path.unlink()
    return took_s


def write_direct(path: Path, data: memoryview) -> bool:
    """Write page-aligned `data` past the page cache into reserved space, and sync it. The file stays.

    Returns:
        False if this file system knows no direct writes: then it was written through the page cache.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(fd, 0, len(data))
        direct = _set_direct(fd)
        offset = 0
        while offset < len(data):
            offset += os.pwrite(fd, data[offset : offset + _DIRECT_PIECE_BYTES], offset)
        os.fsync(fd)
    finally:
        os.close(fd)
    return direct


def _set_direct(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True
