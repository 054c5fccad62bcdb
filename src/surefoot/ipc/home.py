"""Where a run lives on this machine: its lock, and the private directory with socket, board and segments.

    <base>/surefoot-<euid>-<run>.lock        held by the run's agent; its text names the agent and its directory
    <base>/surefoot-<euid>-<run>-<nonce>/    0700: agent.sock, board, *.seg, in-use

The lock's name is made of user and run alone, so a second launch meets it. `flock` shows whether the holder lives; a
pid does not. The directory's name has a nonce, so that no other process can occupy it in advance.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import AgentError, RunBusyError

BASE_VARIABLE = "SUREFOOT_SHM"
"""Environment variable that names a base directory other than /dev/shm; it must be in memory to be quick."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - entries are private: own user, 0700 or 0600, never followed
_SOCKET_PATH_BYTES = 107
_IN_USE = "in-use"
_LAUNCH_NOTES = "launch"
"""Takes the place of a run's identity in the names of the files by which processes of one launch find their agent."""


def base_directory() -> Path:
    return Path(os.environ.get(BASE_VARIABLE, _SHARED_MEMORY))


@dataclass(frozen=True, slots=True)
class Found:
    """A run's traces on this machine."""

    run: str
    lock: Path
    alive: bool
    info: dict[str, Any]
    directories: tuple[Path, ...]


class Home:
    """A held lock and the directory that goes with it."""

    def __init__(
        self, run: str, lock_fd: int, lock: Path, directory: Path, info: dict[str, Any], previous: dict[str, Any]
    ) -> None:
        self.run = run
        self.directory = directory
        self.previous_launch: str | None = previous.get("launch")
        """Launch of the previous holder, if it did not release the lock in good order."""
        self._lock_fd = lock_fd
        self._lock = lock
        self._info = info

    @property
    def socket(self) -> Path:
        return self.directory / "agent.sock"

    @property
    def board(self) -> Path:
        return self.directory / "board"

    @classmethod
    def take(cls, run: str, launch: str, node: str) -> Home:
        """Take the run's lock on this machine and its directory, or the directory that an older launch left.

        Raises:
            RunBusyError: another agent holds it; the message names its process.
        """
        lock = _lock_path(run)
        fd = open_private(lock)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            info = _read_info(fd)
            os.close(fd)
            raise RunBusyError(_busy(run, info)) from None
        if not os.fstat(fd).st_nlink:
            os.close(fd)
            return cls.take(run, launch, node)
        try:
            return cls._with_directory(run, launch, node, fd, lock)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def _with_directory(cls, run: str, launch: str, node: str, fd: int, lock: Path) -> Home:
        directories = _directories(run)
        directory = directories[-1] if directories else _make_directory(run)
        for older in directories[:-1]:
            shutil.rmtree(older)
        previous = _read_info(fd)
        info = {"pid": os.getpid(), "launch": launch, "node": node, "directory": str(directory), "draining": False}
        home = cls(run, fd, lock, directory, info, previous)
        home._write_info()
        home.socket.unlink(missing_ok=True)
        if len(os.fsencode(home.socket)) > _SOCKET_PATH_BYTES:
            raise AgentError(f"{home.socket} is too long for a socket; set {BASE_VARIABLE} to a shorter directory")
        # A child that inherited the descriptor would keep the lock for ever.
        os.register_at_fork(after_in_child=home._close)
        return home

    def set_draining(self) -> None:
        """From here on a newcomer waits for the lock instead of being refused."""
        self._info["draining"] = True
        self._write_info()

    def remove(self) -> None:
        """Remove the directory and everything in it."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def release(self) -> None:
        """Release the lock, and remove its name if nothing is left here. A process that opened that name before sees
        by its link count that it must look again."""
        if not self.directory.exists():
            self._lock.unlink(missing_ok=True)
        os.ftruncate(self._lock_fd, 0)
        self._close()

    def _close(self) -> None:
        # Forgotten before it is closed: its number is soon another file's, which a child forked later must not close.
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def _write_info(self) -> None:
        data = json.dumps(self._info).encode()
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, data, 0)


def find_runs() -> list[Found]:
    """Every run of this user that left something on this machine."""
    prefix = f"surefoot-{os.geteuid()}-"
    runs: dict[str, None] = {}
    for path in sorted(base_directory().glob(f"{prefix}*")):
        run = path.name[len(prefix) :].removesuffix(".lock").split("-")[0]
        if run and run != _LAUNCH_NOTES:
            runs[run] = None
    return [_found(run) for run in runs]


def clean_run(found: Found) -> int:
    """Remove what a dead run left; returns the bytes given back.

    Raises:
        RunBusyError: the run is alive.
    """
    fd = open_private(found.lock)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunBusyError(_busy(found.run, _read_info(fd))) from None
        for directory in found.directories:
            _refuse_if_in_use(found.run, directory)
        freed = sum(path.stat().st_blocks * 512 for directory in found.directories for path in directory.iterdir())
        for directory in found.directories:
            shutil.rmtree(directory)
        # Unlinked under the lock: a process that opens the name from now on makes a new file, and one that holds the
        # old file sees that its name is gone (see `open_private`).
        found.lock.unlink(missing_ok=True)
        return freed
    finally:
        os.close(fd)


class Use:
    """A trainer's hold on the run's memory: while its agent is being replaced, no process has the run's lock."""

    def __init__(self, directory: Path) -> None:
        self._fd = open_private(directory / _IN_USE)
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        # A forked child that kept its copy would hold the memory too.
        os.register_at_fork(after_in_child=self.close)

    def close(self) -> None:
        # Forgotten before it is closed, for the same reason as the lock.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _refuse_if_in_use(run: str, directory: Path) -> None:
    fd = open_private(directory / _IN_USE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunBusyError(f"run {run} is being trained on this machine, while its agent is being replaced") from None
    finally:
        os.close(fd)


def is_draining(run: str) -> bool:
    """True if the run's lock is held by an agent that is on its way out."""
    return bool(_found(run).info.get("draining"))


def _found(run: str) -> Found:
    lock = _lock_path(run)
    alive, info = False, {}
    if lock.exists():
        fd = open_private(lock)
        try:
            info = _read_info(fd)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            alive = True
        finally:
            os.close(fd)
    return Found(run, lock, alive, info, tuple(_directories(run)))


def _lock_path(run: str) -> Path:
    return base_directory() / f"surefoot-{os.geteuid()}-{run}.lock"


def open_private(path: Path) -> int:
    """Open a file that belongs to this user alone, making it if need be; never one whose name is gone.

    Raises:
        AgentError: it belongs to another user.
    """
    while True:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        info = os.fstat(fd)
        if info.st_uid != os.geteuid() or not stat.S_ISREG(info.st_mode):
            os.close(fd)
            raise AgentError(f"{path} belongs to user {info.st_uid}: remove it, or set {BASE_VARIABLE}")
        if info.st_nlink:
            return fd
        os.close(fd)


def _directories(run: str) -> list[Path]:
    """This user's private directories of a run, oldest first. Directories of other users are left out."""
    found = []
    for path in base_directory().glob(f"surefoot-{os.geteuid()}-{run}-*"):
        info = path.lstat()
        private = stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077
        if private:
            found.append((info.st_mtime_ns, path))
    return [path for _mtime, path in sorted(found)]


def _make_directory(run: str) -> Path:
    path = base_directory() / f"surefoot-{os.geteuid()}-{run}-{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    return path


def _read_info(fd: int) -> dict[str, Any]:
    try:
        info = json.loads(os.pread(fd, 4096, 0) or b"{}")
    except ValueError:
        return {}
    return info if isinstance(info, dict) else {}


def _busy(run: str, info: dict[str, Any]) -> str:
    return (
        f"run {run} is already being trained on this machine (agent {info.get('pid', 'unknown')}); "
        "wait for it, or stop it with `surefoot evict`"
    )
