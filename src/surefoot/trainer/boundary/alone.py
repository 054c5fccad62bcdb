"""A rank that takes an image which the others do not take waits in vain; this says so to its user."""

from __future__ import annotations

from surefoot.core.layout import BoundaryId
from surefoot.host.clock import boot_s
from surefoot.ipc.board import RankWord
from surefoot.trainer.boundary.page import Page

_ALONE_AFTER_S = 5.0
"""All ranks finished the step that one wants to save, and some have not asked for it within this: they will not."""


class Alone:
    """Whether a rank waits in vain for the others to take the image that it takes."""

    def __init__(self, page: Page, at: BoundaryId) -> None:
        self._board = page.board
        ranks = page.ranks
        self._rank = ranks.rank
        self._others = [rank for rank in range(ranks.local_world_size) if rank != ranks.local_rank]
        self._all_are_local = ranks.world_size == ranks.local_world_size
        self._at = at
        self._all_here_s: float | None = None

    def why(self) -> str | None:
        """What to tell the user; None as long as the others may still come."""
        past = [rank for rank in self._others if self._word(rank, RankWord.SEALED) > self._at.boundary]
        past += [rank for rank in self._others if self._word(rank, RankWord.FINISHED) > self._at.boundary + 1]
        here = all(self._word(rank, RankWord.FINISHED) > self._at.boundary for rank in self._others)
        if here and self._all_here_s is None:
            self._all_here_s = boot_s()
        # Where another machine's ranks are its words do not tell: the agents see to those.
        waited = self._all_are_local and self._all_here_s is not None and boot_s() - self._all_here_s > _ALONE_AFTER_S
        if not past and not waited:
            return None
        who = f"rank(s) {sorted(set(past))}" if past else "some other rank"
        return (
            f"rank {self._rank} takes {self._at.label} (save(), or its last step), and {who} does not: "
            "call save() on every rank, and give every rank the same total"
        )

    def _word(self, rank: int, word: RankWord) -> int:
        return self._board.rank(rank, word)
