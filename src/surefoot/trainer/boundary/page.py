"""Reads and writes the board for one trainer."""

from __future__ import annotations

import os
import select

from surefoot.exits import EVICTED, SUPERSEDED
from surefoot.ipc.board import Board, NodeWord, Phase, RankWord
from surefoot.trainer.boundary.environment import Ranks

_NEVER_BEHIND = 1 << 62
"""SEALED of a rank that has left: no rank waits for it any more."""


class Page:
    """Reads the node's words and its neighbours', writes its own."""

    def __init__(self, board: Board, ranks: Ranks, incarnation: int) -> None:
        self.board = board
        self.ranks = ranks
        self._incarnation = incarnation

    def open(self, generation: int, pid: int) -> None:
        """Claim the page for this incarnation."""
        self.set(RankWord.INCARNATION, self._incarnation)
        self.set(RankWord.PID, pid)
        self.set(RankWord.SEALED, 0)
        self.set(RankWord.SEALED_STEP, 0)
        self.set(RankWord.PASSED, 0)
        self.set(RankWord.ENTERED, 0)
        self.set(RankWord.BROUGHT_EVEN, 0)
        self.set(RankWord.BROUGHT_ODD, 0)
        self.set(RankWord.SEALED_GENERATION, generation)

    def set(self, word: RankWord, value: int) -> None:
        self.board.set_rank(self.ranks.local_rank, word, value)

    def phase(self, phase: Phase) -> None:
        self.set(RankWord.PHASE, phase)

    def leave(self) -> None:
        self.set(RankWord.SEALED, _NEVER_BEHIND)
        self.set(RankWord.PASSED, _NEVER_BEHIND)

    def has_left(self, local_rank: int) -> bool:
        """True if a rank of this machine takes part in nothing any more: it has left, or its process has ended."""
        if self.board.rank(local_rank, RankWord.SEALED) == _NEVER_BEHIND:
            return True
        return _has_ended(self.board.rank(local_rank, RankWord.PID))

    @property
    def noticed(self) -> bool:
        """True once an eviction was announced."""
        return self.board.node(NodeWord.NOTICE) == 1

    def sealed_on_all(self, generation: int) -> int:
        return self.board.sealed_on_all(generation, self.ranks.local_world_size)

    @property
    def passed(self) -> int:
        """Newest boundary that this rank has sealed or given up, or -1."""
        return self.board.rank(self.ranks.local_rank, RankWord.PASSED) - 1

    def passed_on_all(self, generation: int) -> int:
        """Newest boundary that every rank has sealed or given up, or -1."""
        return self.board.passed_on_all(generation, self.ranks.local_world_size)

    def must_stage_late(self, boundary: int) -> bool:
        """True if the agent wants this boundary, which was not due, in memory."""
        return self._held and self.board.node(NodeWord.LATE_TARGET) == boundary + 1

    def must_stay(self, boundary: int) -> bool:
        """True if the agent has ordered not to go beyond a boundary that is not known to be later than this."""
        return self._held and self.board.node(NodeWord.LATE_TARGET) <= boundary + 1

    @property
    def _held(self) -> bool:
        return self.board.rank(self.ranks.local_rank, RankWord.HOLD) == self._incarnation

    def must_end(self) -> bool:
        """True if the agent's stop word names this incarnation."""
        return self.board.rank(self.ranks.local_rank, RankWord.STOP) == self._incarnation

    def end_code(self) -> int:
        """Exit code of a trainer that is ended."""
        if self.board.node(NodeWord.SUPERSEDED):
            return SUPERSEDED
        return EVICTED if self.noticed else 1


def _has_ended(pid: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        # A pidfd is readable from the process's end on, whether its parent has reaped it or not.
        look = select.poll()
        look.register(pidfd, select.POLLIN)
        return bool(look.poll(0))
    finally:
        os.close(pidfd)
