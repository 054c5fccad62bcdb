"""The agreement of one machine's trainers, by the words of their board (see core/agreement.py for what is agreed).

It needs no collective, no thread and no time-out: each rank writes its vector into its page as one word, and all ranks
read it at the next boundary, which they reach together because of their step's own collective. So it costs
microseconds on any number of ranks, and a rank that is gone is known at once. A word is written and read whole, and its
tag names the boundary to which it belongs: so the order of the writes does not matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from surefoot.core.agreement import LARGEST_PACKED, Vector, merge, pack, tag, unpack
from surefoot.host.clock import boot_s
from surefoot.ipc.board import RankWord
from surefoot.trainer.boundary.page import Page

_FIRST_PAUSE_S = 0.00002
_LONGEST_PAUSE_S = 0.002
_GONE_AFTER_S = 0.02
"""Ranks that have not come by then may never come: from then on the waiting rank checks whether they are gone."""
_TURNS = (RankWord.BROUGHT_EVEN, RankWord.BROUGHT_ODD)


class BoardAgreement:
    """One rank's part in one generation."""

    def __init__(self, page: Page, generation: int) -> None:
        self._page = page
        self._ranks = range(page.ranks.local_world_size)
        self._generation = generation
        self._posted = 0
        self._settled = 0
        self._over = False
        self._brought: list[int] = []
        self._agreed = Vector(free_slots=1)

    def settle(self, mine: Callable[[], Vector]) -> Vector:
        if self._over:
            return mine()
        if self._settled == self._posted:
            return Vector(free_slots=1)
        brought = self._vectors() or self._wait()
        if brought is None:
            # As with a broken group: from here on each rank acts by itself, and the agent ends all ranks.
            self._over = True
            return Vector(free_slots=1)
        self._settled += 1
        # Seldom: the ranks' vectors change with a notice, a plan or a busy slot.
        if brought != self._brought:
            self._brought, self._agreed = brought, merge(unpack(vector) for vector in brought)
            self._over = self._agreed.leaving
        return self._agreed

    def post(self, vector: Vector) -> None:
        # Each rank has two words, so vector n overwrites vector n - 2. This rank has settled vector n - 1, so every
        # rank had written its own vector n - 1 by then, which a rank does only once it has read vector n - 2 of all.
        if not self._over:
            self._page.set(_TURNS[self._posted % 2], tag(self._generation, self._posted) | pack(vector))
            self._posted += 1

    def leave(self) -> None:
        self.settle(Vector)
        self.post(Vector(leaving=True))
        self._over = True

    def abandon(self) -> None:
        self._over = True

    def _vectors(self) -> list[int] | None:
        """Every rank's next vector, without its tag; None as long as one is missing."""
        board, expected = self._page.board, tag(self._generation, self._settled)
        turn = _TURNS[self._settled % 2]
        # A word with any other tag leaves some of it behind.
        vectors = [board.rank(rank, turn) ^ expected for rank in self._ranks]
        return vectors if max(vectors) <= LARGEST_PACKED else None

    def _wait(self) -> list[int] | None:
        """Wait until every rank has written its vector; None if a rank is gone without writing one."""
        began_s, pause_s = boot_s(), _FIRST_PAUSE_S
        while (vectors := self._vectors()) is None:
            if boot_s() - began_s > _GONE_AFTER_S and any(self._is_gone(rank) for rank in self._ranks):
                return None
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        return vectors

    def _is_gone(self, rank: int) -> bool:
        if not self._page.has_left(rank):
            return False
        # Read once more after that: the last word that the rank wrote may have been this vector.
        word = self._page.board.rank(rank, _TURNS[self._settled % 2])
        return word ^ tag(self._generation, self._settled) > LARGEST_PACKED
