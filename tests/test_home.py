"""A run's lock on a machine: its descriptor is closed once, in this process and in each child."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.errors import RunBusyError
from surefoot.ipc import home
from surefoot.ipc.home import Home, Use


def _lock(base: Path) -> Path:
    (lock,) = base.glob("*.lock")
    return lock


def _number_of(path: Path) -> int:
    """Number of this process's only descriptor of a file."""
    (fd,) = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is(fd, path)]
    return fd


def _is(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def _said_by_a_child(say: Callable[[], bytes]) -> bytes:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, say())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as told:
        answer = told.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return answer


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SUREFOOT_SHM", str(tmp_path))
    return tmp_path


def test_a_child_has_no_copy_of_what_is_held(base: Path) -> None:
    """Else it would hold the lock, or the memory, after this process's death."""
    held = Home.take("run", "launch", "node")
    use = Use(held.directory)
    lock, in_use = _number_of(_lock(base)), _number_of(held.directory / "in-use")
    there = _said_by_a_child(lambda: bytes([_is(lock, _lock(base)), _is(in_use, held.directory / "in-use")]))
    assert there == b"\0\0"
    assert _is(lock, _lock(base))
    use.close()
    held.remove()
    held.release()
    assert list(base.iterdir()) == []


def test_a_child_keeps_the_file_that_has_the_number_now(base: Path, tmp_path: Path) -> None:
    """What was let go of is closed in no later child: its number is another file's."""
    held = Home.take("run", "launch", "node")
    use = Use(held.directory)
    numbers = {_number_of(_lock(base)), _number_of(held.directory / "in-use")}
    use.close()
    held.release()
    other = tmp_path / "other"
    opened = [os.open(other, os.O_CREAT | os.O_RDWR) for _ in range(32)]
    try:
        assert numbers <= set(opened)
        assert _said_by_a_child(lambda: bytes(_is(fd, other) for fd in opened)) == bytes([True]) * len(opened)
    finally:
        for fd in opened:
            os.close(fd)


def test_a_name_that_is_gone_and_then_another_agents(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor of the name that is gone is closed once; the other agent is told of."""
    theirs = Home.take("run", "launch", "node")
    gone = os.open(base / "gone", os.O_CREAT | os.O_RDWR)
    (base / "gone").unlink()
    opened = iter([gone, os.open(_lock(base), os.O_RDWR)])
    monkeypatch.setattr(home, "open_private", lambda _path: next(opened))
    with pytest.raises(RunBusyError, match="already being trained"):
        Home.take("run", "launch", "node")
    with pytest.raises(BlockingIOError), (_lock(base)).open() as again:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    theirs.remove()
    theirs.release()
