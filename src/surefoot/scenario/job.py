"""One node's job: the supervisor that is started again and again, its processes, its board, its memory."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from surefoot.errors import SurefootError
from surefoot.exits import EVICTED
from surefoot.ipc.board import Board, NodeWord, Phase, RankWord
from surefoot.ipc.home import BASE_VARIABLE
from surefoot.scenario.processes import (
    MARK_VARIABLE,
    command_of,
    find_marked,
    has_mark,
    kill_marked,
    send,
    state_of,
    wait_for_end,
)

_BOARD = "*/board"
_TAIL_BYTES = 6000
_NODE_MOVES = (NodeWord.GENERATION, NodeWord.COMMITTED, NodeWord.AGENT_PID)
_TRAINERS_MOVE = (RankWord.INCARNATION, RankWord.PID, RankWord.FINISHED, RankWord.SEALED)


class Link(Protocol):
    """What joins a machine to the others."""

    def cut(self) -> None: ...

    def heal(self) -> None: ...

    def limit(self, bytes_per_s: float) -> None: ...

    def unlimit(self) -> None: ...


class Pausable(Protocol):
    """A server that can be made to stand still."""

    def pause(self) -> None: ...

    def go_on(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine, as far as a job can see."""

    name: str
    command: Sequence[str]
    """The supervisor's command line, the same at each start."""
    memory: Path
    """An empty directory in shared memory, this node's alone: jobs never meet there, and wiping it is losing it."""
    output: Path
    """An existing directory for what the processes print."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside the caller's own."""
    link: Link | None = None
    """None: it cannot be cut."""
    copies: Path | None = None
    """Directory of a small file system of its own, which may be filled; None: there is none."""
    clock: Path | None = None
    """File that holds how wrong its clock is, in seconds, if its processes obey it; None: they do not."""


class Job:
    """The processes of a node, and its board's figures about them."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.furthest = 0
        """Largest number of finished steps ever seen on the board."""
        self.starts = 0
        self._mark = secrets.token_hex(8)
        self._board: Board | None = None
        self._board_inode = 0

    def start(self) -> None:
        """Start the supervisor. What it and its children print goes to a file of this start."""
        self.starts += 1
        environment = {
            **os.environ,
            "PYTHONFAULTHANDLER": "1",
            **self.node.environment,
            BASE_VARIABLE: str(self.node.memory),
            MARK_VARIABLE: self._mark,
        }
        with self.output.open("ab") as output:
            self.supervisor = subprocess.Popen(
                self.node.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def output(self) -> Path:
        """What the newest start printed."""
        return self.node.output / f"{self.node.name}-start{self.starts}.out"

    def output_tail(self) -> str:
        if not self.output.exists():
            return ""
        return self.output.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")

    def exit_code(self) -> int | None:
        """The supervisor's, None while it lives."""
        return None if self.supervisor is None else self.supervisor.poll()

    def was_evicted(self, code: int) -> bool:
        """Whether this end is that of an eviction, after which the same command is started again."""
        return code == EVICTED

    def noticed_pid(self, _rank: int) -> int | None:
        """The process that gets the notice of an eviction, if it lives."""
        return self.supervisor.pid if self.supervisor is not None and self.supervisor.poll() is None else None

    def members(self) -> list[int]:
        """Every live process of this job."""
        return find_marked(self._mark)

    def describe_members(self) -> list[str]:
        return [f"{pid} ({state_of(pid)}) {command_of(pid)[:160]}" for pid in self.members()]

    def pause(self) -> list[int]:
        """Everything stands still. Returns the processes' ids."""
        pids = self.members()
        for pid in pids:
            send(pid, signal.SIGSTOP)
        return pids

    def go_on(self) -> None:
        """The inverse of `pause`."""
        for pid in self.members():
            send(pid, signal.SIGCONT)

    def kill(self) -> list[int]:
        """End everything at one moment. Returns the processes' ids."""
        killed = kill_marked(self._mark)
        if self.supervisor is not None:
            self.supervisor.wait()
        return killed

    def kill_trainers(self) -> list[int]:
        """End every trainer at one moment. Returns their ids."""
        board = self.board()
        ranks = self._ranks(board) if board is not None else []
        pids = [pid for rank in ranks if (pid := self.trainer_pid(rank)) is not None]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                send(pid, number)
        for pid in pids:
            wait_for_end(pid)
        return pids

    def wipe(self) -> None:
        """Lose the node's memory: what lay there of the run is gone."""
        for path in self.node.memory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        self._board = None

    def left_behind(self) -> list[str]:
        """What an ended job should not have left in memory. The locks' empty files stay by design."""
        return [path.name for path in self.node.memory.iterdir() if path.is_dir()]

    # ------------------------------------------------------------------ the board

    def board(self) -> Board | None:
        """The newest board; the last one known if a start is between two. It outlives its file."""
        try:
            if self._board is not None and self._board.path.stat().st_ino == self._board_inode:
                return self._board
        except OSError:
            pass
        for path in self.node.memory.glob(_BOARD):
            try:
                self._board, self._board_inode = Board.open(path), path.stat().st_ino
            except (OSError, SurefootError):
                # In the making, or on its way out.
                continue
        return self._board

    def finished(self) -> int:
        """Steps finished on every rank, as the board has it."""
        board = self.board()
        if board is None:
            return 0
        words = [board.rank(rank, RankWord.STEP) for rank in self._ranks(board)]
        finished = min((max(0, word - 1) for word in words), default=0)
        self.furthest = max(self.furthest, finished)
        return finished

    def trainer_phase(self, rank: int) -> str:
        board = self.board()
        return _name(board.rank(rank, RankWord.PHASE)) if board is not None else "none"

    def agent_phase(self) -> str:
        board = self.board()
        return _name(board.node(NodeWord.PHASE)) if board is not None else "none"

    def trainer_pid(self, rank: int) -> int | None:
        """The trainer of a local rank, if it lives. The board alone does not show that: it outlives the processes."""
        board = self.board()
        return self._alive(board.rank(rank, RankWord.PID)) if board is not None else None

    def agent_pid(self) -> int | None:
        """The agent, if it lives."""
        board = self.board()
        return self._alive(board.node(NodeWord.AGENT_PID)) if board is not None else None

    def signs_of_life(self) -> tuple[int, ...]:
        """Changes as long as the job gets anywhere. An agent that tries the same again and again does not."""
        board = self.board()
        if board is None:
            return (self.starts,)
        words = [board.rank(rank, word) for rank in self._ranks(board) for word in _TRAINERS_MOVE]
        return (self.starts, *(board.node(word) for word in _NODE_MOVES), *words)

    def _ranks(self, board: Board) -> list[int]:
        return [rank for rank in range(board.num_ranks) if board.rank(rank, RankWord.PID)]

    def _alive(self, pid: int) -> int | None:
        return pid if has_mark(pid, self._mark) else None


def _name(phase: int) -> str:
    try:
        return Phase(phase).name.lower()
    except ValueError:
        return f"unknown phase {phase}"
