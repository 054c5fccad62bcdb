"""The board: one small shared file per node, with the words that its processes read without asking each other.

Page 0 belongs to the agent, page r + 1 to local rank r. Every word is an aligned, native 64-bit integer with exactly
one writer (named below), so a read is never torn and no lock is needed. The board outlives the processes: when one of
them dies, its page still shows what it was doing.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from enum import IntEnum
from pathlib import Path

from surefoot.errors import AgentError

PAGE_BYTES = 4096
_WORDS = PAGE_BYTES // 8
_MAGIC = int.from_bytes(b"SFBOARD1", "little")


class Phase(IntEnum):
    """What a process is doing, for the processes that watch it."""

    NONE = 0
    STARTING = 1
    RESTORING = 2
    TRAINING = 3
    FILLING = 4
    SEALED = 5
    LEAVING = 6
    IDLE = 7
    FLUSHING = 8
    COMMITTING = 9


class NodeWord(IntEnum):
    """Words of page 0; the agent writes them."""

    MAGIC = 0
    NUM_RANKS = 1
    GENERATION = 2
    NOTICE = 3
    """1 once an eviction was announced; never goes back."""
    DEADLINE_NS = 4
    """CLOCK_BOOTTIME at which the node may vanish."""
    DURABLE_WANTED = 5
    """Serial number of the newest durable save that is due."""
    PHASE = 6
    COMMITTED = 7
    """Newest committed boundary + 1; 0 if none."""
    COMMITTED_NS = 8
    """CLOCK_BOOTTIME at which that boundary was staged."""
    SUPERSEDED = 9
    """1 once a newer launch owns the run."""
    AGENT_PID = 10
    LATE_TARGET = 11
    """The boundary that every rank is to have in memory + 1, if it is held; 0 as long as that is not known."""
    OTHERS = 12
    """How many other nodes have ranks of this generation."""
    OTHERS_GENERATION = 13
    """The generation to which the next two words belong."""
    OTHERS_SEALED = 14
    """Newest boundary known to be sealed by every rank of the other nodes + 1. It may lag, and never runs ahead."""
    OTHERS_PASSED = 15
    """Newest boundary known to be sealed or given up by every rank of the other nodes + 1."""
    COMMITTED_STEP = 16
    """Label of COMMITTED: optimizer steps finished there + 1; 0 if none."""


class RankWord(IntEnum):
    """Words of a rank's page; the trainer writes them, except STOP and HOLD, which the agent writes."""

    INCARNATION = 0
    STOP = 1
    """Incarnation that its watcher thread must end now. It names one, or a stale word would kill every restart."""
    HOLD = 2
    """Incarnation that must not pass its next fence."""
    SEALED = 3
    """Newest boundary sealed by this incarnation + 1. Monotone within an incarnation."""
    FINISHED = 4
    """Newest boundary reached + 1."""
    PHASE = 5
    PID = 6
    SEALED_GENERATION = 7
    PASSED = 8
    """Newest boundary that this incarnation has sealed or given up + 1."""
    ENTERED = 9
    """Newest boundary towards which an optimizer may have begun + 1; counted only where a held rank could stay."""
    BROUGHT_EVEN = 10
    """This rank's vector for the agreement at its newest boundary of an even number, see core/agreement.py."""
    BROUGHT_ODD = 11
    STEP = 12
    """Label of FINISHED: optimizer steps finished + 1."""
    SEALED_STEP = 13
    """Label of SEALED: optimizer steps finished there + 1."""


class Board:
    """A mapped board. Cheap to read; indexes are words, not bytes."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self._words = memoryview(mapping).cast("Q")

    @classmethod
    def create(cls, path: Path, num_ranks: int) -> Board:
        """Make a board for `num_ranks` local ranks, or take over the one that lies there if it is big enough.

        Only one process may do this at a time (the agent, which holds the run's lock).

        Raises:
            AgentError: the file that lies there is not this user's, or is not a board.
        """
        if os.path.lexists(path):
            board = cls.open(path)
            if board.num_ranks >= num_ranks:
                return board
        # Made under another name: a process that dies here leaves no half board, and readers of a smaller one keep it.
        unfinished = path.with_name(f"{path.name}.new")
        unfinished.unlink(missing_ok=True)
        mapping = _reserve(unfinished, (num_ranks + 1) * PAGE_BYTES)
        board = cls(path, mapping)
        board.set_node(NodeWord.NUM_RANKS, num_ranks)
        board.set_node(NodeWord.MAGIC, _MAGIC)
        unfinished.rename(path)
        return board

    @classmethod
    def open(cls, path: Path) -> Board:
        """Map an existing board.

        Raises:
            AgentError: it is not this user's, or not a board.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise AgentError(f"{path} is not a board ({error.strerror})") from error
            raise
        try:
            info = os.fstat(fd)
            private = info.st_uid == os.geteuid() and stat.S_ISREG(info.st_mode) and not info.st_mode & 0o077
            if not private or info.st_nlink > 1 or info.st_size < 2 * PAGE_BYTES or info.st_size % PAGE_BYTES:
                raise AgentError(f"{path} is not a board of this user")
            board = cls(path, mmap.mmap(fd, info.st_size))
        finally:
            os.close(fd)
        if board.node(NodeWord.MAGIC) != _MAGIC or (board.num_ranks + 1) * PAGE_BYTES > info.st_size:
            raise AgentError(f"{path} is not a board")
        return board

    @property
    def num_ranks(self) -> int:
        return self.node(NodeWord.NUM_RANKS)

    def node(self, word: NodeWord) -> int:
        return self._words[word]

    def set_node(self, word: NodeWord, value: int) -> None:
        self._words[word] = value

    def rank(self, local_rank: int, word: RankWord) -> int:
        return self._words[(local_rank + 1) * _WORDS + word]

    def set_rank(self, local_rank: int, word: RankWord, value: int) -> None:
        self._words[(local_rank + 1) * _WORDS + word] = value

    def set_others(self, generation: int, sealed: int, passed: int) -> None:
        """Write the progress known of the other nodes' ranks: steps, or -1."""
        if self.node(NodeWord.OTHERS_GENERATION) != generation:
            self.set_node(NodeWord.OTHERS_SEALED, 0)
            self.set_node(NodeWord.OTHERS_PASSED, 0)
            self.set_node(NodeWord.OTHERS_GENERATION, generation)
        self.set_node(NodeWord.OTHERS_SEALED, sealed + 1)
        self.set_node(NodeWord.OTHERS_PASSED, passed + 1)

    def sealed_on_all(self, generation: int, local_world_size: int) -> int:
        """Newest step known to be sealed in this generation on every rank, or -1."""
        here = self.lowest(RankWord.SEALED, generation, local_world_size)
        return self._with_others(here, NodeWord.OTHERS_SEALED, generation)

    def passed_on_all(self, generation: int, local_world_size: int) -> int:
        """Newest step that every rank is known to have sealed or given up in this generation, or -1."""
        here = self.lowest(RankWord.PASSED, generation, local_world_size)
        return self._with_others(here, NodeWord.OTHERS_PASSED, generation)

    def _with_others(self, here: int, word: NodeWord, generation: int) -> int:
        if not self.node(NodeWord.OTHERS):
            return here
        # Read in the same order as a rank's words in `lowest`.
        before = self.node(NodeWord.OTHERS_GENERATION)
        there = self.node(word) - 1
        known = before == generation and self.node(NodeWord.OTHERS_GENERATION) == generation
        return min(here, there) if known else -1

    def lowest(self, word: RankWord, generation: int, local_world_size: int) -> int:
        """The lowest step in that word among this node's ranks in this generation, or -1."""
        # A rank that enters a generation sets these words to 0 BEFORE it sets SEALED_GENERATION; read the other way
        # round, and the generation once more, so that the step is one of that generation.
        steps = []
        for rank in range(local_world_size):
            before = self.rank(rank, RankWord.SEALED_GENERATION)
            steps.append(self.rank(rank, word) - 1)
            if before != generation or self.rank(rank, RankWord.SEALED_GENERATION) != generation:
                return -1
        return min(steps)


def _reserve(path: Path, size_bytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        return mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)
