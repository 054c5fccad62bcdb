"""The status: what the agent's parts must all know. Facts only; nothing here acts."""

from __future__ import annotations

import asyncio

from surefoot.agent.journal import Journal
from surefoot.core.layout import BoundaryId
from surefoot.core.manifest import Generation
from surefoot.host.clock import boot_s
from surefoot.ipc.board import Board, NodeWord, Phase, RankWord


class Status:
    """Generation, progress, safety. The board is its memory: what an agent's successor must know stands there."""

    def __init__(self, board: Board, journal: Journal) -> None:
        self.board = board
        self._journal = journal
        self._generation: Generation | None = None
        self.begun_at = 0
        """Boundary at which the current generation started."""
        self.begun_at_step: int | None = 0
        """Label of `begun_at`."""
        self._barren_before = 0
        self.finished_before: int | None = None
        """Boundary that all ranks had reached when the last trainers ended."""
        self.steps_before: int | None = None
        """Label of `finished_before`."""
        self.committed: BoundaryId | None = None
        self.committed_tier = ""
        self.superseded_by: str | None = None
        self.superseded = asyncio.Event()
        self.finished = False
        """The script said that all steps are done."""

    @property
    def generation(self) -> Generation:
        assert self._generation is not None
        return self._generation

    @property
    def has_generation(self) -> bool:
        return self._generation is not None

    def enter(self, generation: Generation, begun_at: BoundaryId | None) -> None:
        """A generation begins, or is continued by an agent that replaces another."""
        if self._generation is not None:
            self._barren_before = self._barren_before + 1 if self._was_barren() else 0
        self._generation = generation
        self.begun_at = begun_at.boundary if begun_at is not None else 0
        self.begun_at_step = begun_at.step if begun_at is not None else 0
        self._journal.generation = generation.number
        self.board.set_node(NodeWord.GENERATION, generation.number)

    def barren(self) -> int:
        """Generations in a row, the current one included, that finished no step beyond what they began with."""
        return self._barren_before + 1 if self._was_barren() else 0

    def _was_barren(self) -> bool:
        # The word of finished steps is old until a generation has restored; then it is at least what it began with.
        finished = self.finished_before if self.finished_before is not None else self.finished_on_all()
        return (finished or 0) <= self.begun_at

    def rebase(self, start: BoundaryId | None, *, committed: bool) -> None:
        """A generation starts from an image: what was committed beyond it is not of its history."""
        if start is None or (not committed and self.committed is not None and self.committed > start):
            self.committed = None
        elif committed:
            self.committed = start

    def note_commit(self, at: BoundaryId, tier: str, staged_ns: int) -> None:
        """A step is durable. An older one that comes late, overtaken by an emergency's, changes nothing."""
        if self.committed is not None and at <= self.committed:
            return
        self.committed = at
        self.committed_tier = tier
        self.board.set_node(NodeWord.COMMITTED_NS, staged_ns)
        self.board.set_node(NodeWord.COMMITTED_STEP, 0 if at.step is None else at.step + 1)
        self.board.set_node(NodeWord.COMMITTED, at.boundary + 1)

    def finished_on_all(self) -> int | None:
        """Newest boundary that every local rank has reached; None if no rank was ever here."""
        return self._on_all(RankWord.FINISHED)

    def steps_on_all(self) -> int | None:
        """Optimizer steps finished by every local rank; None if no rank was ever here."""
        return self._on_all(RankWord.STEP)

    def note_end(self) -> None:
        """The last trainers have ended: how far they had come."""
        self.finished_before, self.steps_before = self.finished_on_all(), self.steps_on_all()

    def _on_all(self, word: RankWord) -> int | None:
        ranks = [r for r in range(self.board.num_ranks) if self.board.rank(r, RankWord.INCARNATION)]
        return min((max(0, self.board.rank(rank, word) - 1) for rank in ranks), default=None)

    def is_safe(self) -> bool:
        """True if a machine that vanished now would take nothing finished along."""
        finished = self.finished_on_all()
        return not finished or (self.committed is not None and self.committed.boundary >= finished)

    def past_deadline(self) -> bool:
        deadline_ns = self.board.node(NodeWord.DEADLINE_NS)
        return bool(deadline_ns) and boot_s() > deadline_ns / 1e9

    def durable_age_s(self) -> float | None:
        """Age of the newest committed step; None before there is one."""
        staged_ns = self.board.node(NodeWord.COMMITTED_NS)
        return boot_s() - staged_ns / 1e9 if staged_ns else None

    def supersede(self, why: str) -> None:
        """A newer launch owns the run: this one must stop writing and training, for good."""
        if self.superseded_by is None:
            self.superseded_by = why
            self._journal.record("superseded", by=why)
            self.board.set_node(NodeWord.SUPERSEDED, 1)
            self.superseded.set()

    def set_phase(self, phase: Phase) -> None:
        self.board.set_node(NodeWord.PHASE, phase)

    def forget_ranks(self, from_rank: int) -> None:
        """Forget ranks beyond the current ones: an older, larger launch wrote their words, which mean nothing now."""
        for rank in range(from_rank, self.board.num_ranks):
            if self.board.rank(rank, RankWord.INCARNATION):
                self.board.set_rank(rank, RankWord.INCARNATION, 0)
