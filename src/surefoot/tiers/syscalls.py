"""Puts the calls by which a disk tier changes a file system behind one small object.

The default is the real thing. A test hands in a subclass that counts, fails or ends the process at the n-th
call: the code under test is the same.
"""

from __future__ import annotations

import os

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Syscalls:
    """Each method is one system call, relative to an open directory where a name is involved."""

    def create(self, name: str, dir_fd: int) -> int:
        """A new file, never an existing one and never through a symbolic link. The umask decides who may
        read."""
        return os.open(name, _CREATE, 0o666, dir_fd=dir_fd)

    def restrict(self, fd: int) -> None:
        """Only the owner may read or write it."""
        os.fchmod(fd, 0o600)

    def allocate(self, fd: int, size_bytes: int) -> None:
        os.posix_fallocate(fd, 0, size_bytes)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, name: str, new_name: str, dir_fd: int) -> None:
        os.rename(name, new_name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def link(self, name: str, new_name: str, dir_fd: int) -> None:
        os.link(name, new_name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)

    def unlink(self, name: str, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def mkdir(self, name: str, dir_fd: int) -> None:
        os.mkdir(name, 0o777, dir_fd=dir_fd)

    def rmdir(self, name: str, dir_fd: int) -> None:
        os.rmdir(name, dir_fd=dir_fd)
