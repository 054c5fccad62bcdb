"""Asks the agents that run on this machine, and removes the remains of dead runs."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import AgentError, ConfigError, RunBusyError, SurefootError
from surefoot.ipc import wire
from surefoot.ipc.board import Board, NodeWord, RankWord
from surefoot.ipc.home import Found, base_directory, clean_run, find_runs
from surefoot.records.records import Records
from surefoot.tiers.open import open_tier
from surefoot.tiers.silence import spoken_of

_RUN_ID = re.compile(r"[A-Za-z0-9]{8,64}")
_ANSWER_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Removed:
    """What a dead run left, removed."""

    run: str
    size_bytes: int
    unsaved_step: int | None
    """Step that lay in memory only, as far as the run's board shows."""


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What `clean` did."""

    removed: tuple[Removed, ...]
    alive: tuple[tuple[str, str], ...]
    """Runs left alone, and why."""
    notes: int
    """Forgotten notes of launches that are over."""

    @property
    def size_bytes(self) -> int:
        return sum(removed.size_bytes for removed in self.removed)


def local_runs() -> list[Found]:
    """Runs of this user with traces on this machine."""
    # Notes of launches begin like a run's files; a run's id is longer than "launch".
    return [found for found in find_runs() if _RUN_ID.fullmatch(found.run)]


def live_runs() -> list[Found]:
    """Runs of this user that an agent serves on this machine."""
    return [found for found in local_runs() if found.alive]


async def find_live(run: str) -> Found:
    """The live run on this machine that a person means by a run id or a URI.

    Raises:
        ConfigError: the URI holds no run.
        AgentError: no agent of that run is here.
        TierError: the URI's tier does not answer.
    """
    live = {found.run: found for found in live_runs()}
    if run in live:
        return live[run]
    known = {found.run for found in local_runs()}
    run_id = run if run in known else await _run_id_at(run)
    if run_id not in live:
        raise AgentError(f"no agent of run {run_id} is on this machine ({socket.gethostname()}); ask where it trains")
    return live[run_id]


def ask(found: Found, request: wire.Body) -> wire.Body:
    """One request to a run's agent, and its answer.

    Raises:
        AgentError: it does not answer, or refuses.
    """
    path = socket_path(found)
    try:
        with wire.connect(str(path), _ANSWER_WITHIN_S) as sock:
            sock.settimeout(_ANSWER_WITHIN_S)
            wire.send(sock, {"role": "cli", **request})
            frame = wire.receive(sock)
    except AgentError:
        raise
    except OSError as error:
        raise AgentError(f"the agent of run {found.run} does not answer at {path}: {error or 'timed out'}") from error
    if frame is None:
        raise AgentError(f"the agent of run {found.run} ended without an answer")
    if "error" in frame[0]:
        raise AgentError(f"the agent of run {found.run} refuses: {frame[0]['error']}")
    return frame[0]


def socket_path(found: Found) -> Path:
    """Where a live run's agent listens."""
    told = found.info.get("directory")
    directory = next((d for d in found.directories if str(d) == told), None) or (found.directories or (None,))[-1]
    if directory is None:
        raise AgentError(
            f"run {found.run} has an agent, but no directory in {base_directory()}: it is starting or ending"
        )
    return directory / "agent.sock"


def clean(run: str | None = None) -> Cleaned:
    """Remove what dead runs of this user left on this machine; a live run is never touched.

    Args:
        run: only that one's.

    Raises:
        ConfigError: that run left nothing here.
        RunBusyError: that run lives.
    """
    found = [f for f in local_runs() if run is None or f.run == run]
    if run is not None and not found:
        raise ConfigError(f"run {run} left nothing on this machine ({base_directory()})")
    removed, alive = [], []
    for each in found:
        try:
            removed.append(_remove(each))
        except RunBusyError as error:
            if run is not None:
                raise
            alive.append((each.run, str(error)))
    return Cleaned(tuple(removed), tuple(alive), _remove_notes() if run is None else 0)


def _remove(found: Found) -> Removed:
    users = [pid for directory in found.directories for pid in _users(directory)]
    if users and not found.alive:
        # Between an agent's death and its successor's start nobody holds the lock, and training goes on.
        raise RunBusyError(f"run {found.run} has no agent just now, but process {users[0]} still trains in its memory")
    unsaved = None if found.alive else _unsaved_step(found.directories)
    return Removed(found.run, clean_run(found), unsaved)


def _users(directory: Path) -> list[int]:
    """Processes on the run's board that still have its memory mapped. A pid alone may be somebody else's by now."""
    board = _board(directory)
    if board is None:
        return []
    pids = {board.node(NodeWord.AGENT_PID)} | {board.rank(rank, RankWord.PID) for rank in range(board.num_ranks)}
    return sorted(pid for pid in pids if pid and pid != os.getpid() and _maps(pid, directory))


def _maps(pid: int, directory: Path) -> bool:
    try:
        return f"{directory}/" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def _unsaved_step(directories: Sequence[Path]) -> int | None:
    return max((step for step in map(_unsaved_on, directories) if step is not None), default=None)


def _unsaved_on(directory: Path) -> int | None:
    board = _board(directory)
    if board is None:
        return None
    ranks = [rank for rank in range(board.num_ranks) if board.rank(rank, RankWord.INCARNATION)]
    # Words are a number + 1, or 0 for none; a step that not every rank has sealed does not count.
    sealed, step = min(
        ((board.rank(rank, RankWord.SEALED), board.rank(rank, RankWord.SEALED_STEP)) for rank in ranks), default=(0, 0)
    )
    return step - 1 if sealed > board.node(NodeWord.COMMITTED) else None


def _board(directory: Path) -> Board | None:
    try:
        return Board.open(directory / "board")
    except (AgentError, OSError):
        return None


def _remove_notes() -> int:
    """AFTER the runs' directories: a note whose directory is still there is a live launch's."""
    return sum(_remove_stale(path) for path in sorted(base_directory().glob(f"surefoot-{os.geteuid()}-launch-*.json")))


def _remove_stale(note: Path) -> bool:
    """Remove a launch's note if its run's directory is gone. One whose lock is held is being written."""
    try:
        fd = os.open(note, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_uid != os.geteuid() or _has_directory(os.pread(fd, 65536, 0)):
            return False
        note.unlink()
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _has_directory(note: bytes) -> bool:
    # A launch that still trains has its directory, also while its agent is being replaced.
    try:
        answer: Any = json.loads(note)
        return Path(answer["socket"]).parent.is_dir()
    except (ValueError, TypeError, KeyError):
        return False


async def _run_id_at(uri: str) -> str:
    tier = spoken_of(open_tier(uri))
    try:
        record = await Records(tier).find_run()
    finally:
        await tier.close()
    if record is None:
        hint = "" if not _RUN_ID.fullmatch(uri) else ", and no run of that id is on this machine"
        raise ConfigError(f"there is no run at {uri}{hint}")
    return record.run


def statuses(found: Sequence[Found]) -> list[wire.Body]:
    """Each run's agent's own status; of one that does not answer, why."""
    answers = []
    for each in found:
        try:
            answers.append(ask(each, {"op": "status"}))
        except SurefootError as error:
            answers.append({"run": each.run, "error": str(error)})
    return answers
