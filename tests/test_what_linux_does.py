"""Facts about Linux on which locks, memory and conditional writes stand."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_PAGE = mmap.PAGESIZE
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE, from linux/falloc.h."""


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def _private(path: Path) -> int:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.posix_fallocate(fd, 0, 256 * _PAGE)
    return fd


def _is_free(path: Path) -> bool:
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


_HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_EX)
child = os.fork() if len(sys.argv) > 2 else 0
if child or len(sys.argv) == 2:
    print(child, flush=True)
sys.stdin.read()
"""


def _holder(path: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _HOLDER, str(path), *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.holds("locks-tell-lives")
def test_a_lock_lives_exactly_as_long_as_its_holder(memory: Path) -> None:
    """Busy while the process lives, free as soon as SIGKILL has ended it, with nobody having cleaned up."""
    path = memory / "x"
    os.close(_private(path))
    with _holder(path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"0\n"
        assert not _is_free(path)
        holder.kill()
        holder.wait()
        assert _is_free(path)


@pytest.mark.holds("locks-tell-lives")
def test_a_forked_child_keeps_its_parent_s_lock(memory: Path) -> None:
    """The descriptor came along: so forked children close those that hold locks, or the dead would seem to live."""
    path = memory / "x"
    os.close(_private(path))
    with _holder(path, "fork") as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        pidfd = os.pidfd_open(child)
        holder.kill()
        holder.wait()
        assert not _is_free(path)
        os.kill(child, signal.SIGKILL)
        # Whoever adopted it collects it; the lock is free when the process has ended.
        assert select.select([pidfd], [], [], 60)[0]
        os.close(pidfd)
        assert _is_free(path)


@pytest.mark.holds("memory-reserved")
def test_memory_without_a_name_is_there_until_nobody_has_it(memory: Path) -> None:
    """An unlinked file stays usable through its descriptor and its mapping, for a process that gets the descriptor,
    too; and it lies in memory, reserved from the beginning."""
    path = memory / "x"
    fd = _private(path)
    assert os.fstat(fd).st_blocks * 512 == 256 * _PAGE
    view = mmap.mmap(fd, 256 * _PAGE)
    path.unlink()
    view[5:8] = b"abc"
    other = subprocess.run([sys.executable, "-c", f"import os; os.pwrite({fd}, b'xyz', 8)"], pass_fds=[fd], check=True)
    assert other.returncode == 0
    assert view[5:11] == b"abcxyz"
    assert os.fstat(fd).st_nlink == 0
    view.close()
    os.close(fd)


@pytest.mark.holds("memory-reserved")
def test_holes_take_no_memory_and_read_as_zeros() -> None:
    """What is as long as a shard and filled in one place costs that place; a hole that is punched gives its memory
    back and changes nothing beside it."""
    fd = os.memfd_create("x")
    os.ftruncate(fd, 256 * _PAGE)
    assert os.fstat(fd).st_blocks == 0
    os.pwrite(fd, b"\x07" * 2 * _PAGE, 100 * _PAGE)
    assert os.fstat(fd).st_blocks * 512 == 2 * _PAGE
    assert os.pread(fd, 4, 0) == bytes(4)
    _punch(fd, 100 * _PAGE, _PAGE)
    assert os.fstat(fd).st_blocks * 512 == _PAGE
    assert os.pread(fd, _PAGE, 100 * _PAGE) == bytes(_PAGE)
    assert os.pread(fd, _PAGE, 101 * _PAGE) == b"\x07" * _PAGE
    os.close(fd)


def _punch(fd: int, offset: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_longlong(offset), ctypes.c_longlong(length))
    assert done == 0, os.strerror(ctypes.get_errno())


@pytest.mark.holds("put-if-absent")
def test_a_link_is_a_put_if_absent(tmp_path: Path) -> None:
    """Of eight that give one name to files of their own exactly one succeeds, and the name has that one's bytes."""
    script = """
import os, sys
name = f"{sys.argv[1]}/+{sys.argv[2]}"
with open(name, "w") as file:
    file.write(sys.argv[2])
sys.stdin.read()
try:
    os.link(name, f"{sys.argv[1]}/x")
except FileExistsError:
    sys.exit(1)
"""
    reader, writer = os.pipe()
    racers = [
        subprocess.Popen([sys.executable, "-S", "-c", script, str(tmp_path), str(number)], stdin=reader)
        for number in range(8)
    ]
    os.close(reader)
    # All that wait for the end of their input begin at once.
    os.close(writer)
    winners = [str(number) for number, racer in enumerate(racers) if racer.wait() == 0]
    assert len(winners) == 1
    assert (tmp_path / "x").read_text() == winners[0]


@pytest.mark.holds("deaf-workers")
def test_deafness_to_a_signal_is_inherited() -> None:
    """A program that is started with SIGTERM ignored ignores it, and so do the programs that it starts."""
    ask = "import signal; print(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)"
    nested = f"import subprocess, sys; {ask}; subprocess.run([sys.executable, '-c', {ask!r}])"

    def deaf() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    told = subprocess.run([sys.executable, "-u", "-c", nested], preexec_fn=deaf, capture_output=True, check=True)
    assert told.stdout.split() == [b"True", b"True"]
