"""Detects that a rank takes an image which the other ranks do not take, and so would wait for them in vain."""

from __future__ import annotations

from surefoot.core.layout import BoundaryId
from surefoot.host.clock import boot_s
from surefoot.ipc.board import RankWord
from surefoot.trainer.boundary.page import Page

_ALONE_AFTER_S = 5.0
"""All ranks finished the step that one wants to save. Ranks that have not asked for it within this time never will."""


class Alone:
    """Decides whether a rank waits in vain for the others to take the image that it takes."""

    def __init__(self, page: Page, at: BoundaryId) -> None:
        self._board = page.board
        ranks = page.ranks
        self._rank = ranks.rank
        self._others = [rank for rank in range(ranks.local_world_size) if rank != ranks.local_rank]
        self._all_are_local = ranks.world_size == ranks.local_world_size
        self._at = at
        self._all_here_s: float | None = None

    def why(self) -> str | None:
        """The error message for the user; None as long as the other ranks may still come."""
        past = [rank for rank in self._others if self._word(rank, RankWord.SEALED) > self._at.boundary]
        past += [rank for rank in self._others if self._word(rank, RankWord.FINISHED) > self._at.boundary + 1]
        here = all(self._word(rank, RankWord.FINISHED) > self._at.boundary for rank in self._others)
        if here and self._all_here_s is None:
            self._all_here_s = boot_s()
        # The board does not show how far another machine's ranks are: the agents see to those.
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
