"""Whether a rank waits in vain for the others to take the image that it takes, by the words on its machine's board."""

from __future__ import annotations

from pathlib import Path

import pytest

import surefoot.trainer.boundary.alone as alone_module
from surefoot.core.layout import BoundaryId
from surefoot.ipc.board import Board, RankWord
from surefoot.trainer.boundary.alone import Alone
from surefoot.trainer.boundary.environment import Ranks
from surefoot.trainer.boundary.page import Page

_STEP = 7


class Clock:
    """Read instead of the machine's."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(alone_module, "boot_s", clock)
    return clock


def _alone(place: Path, local: int, world: int) -> tuple[Board, Alone]:
    """Rank 0 of `local` on this machine."""
    board = Board.create(place / "board", local)
    return board, Alone(Page(board, Ranks(0, world, 0, local), 1), BoundaryId(_STEP, 1, _STEP))


def test_all_here_are_past_the_step_and_silent(tmp_path: Path, clock: Clock) -> None:
    """Where all ranks are on one machine, those that finished the step come within seconds, or never."""
    board, alone = _alone(tmp_path, 2, 2)
    clock.now_s += 1000
    assert alone.why() is None
    board.set_rank(1, RankWord.FINISHED, _STEP + 1)
    assert alone.why() is None
    clock.now_s += 6
    assert "some other rank does not: call save() on every rank" in str(alone.why())


@pytest.mark.parametrize("local", [1, 2])
def test_another_machine_s_ranks_may_take_their_time(tmp_path: Path, clock: Clock, local: int) -> None:
    """That all ranks of this machine have finished the step says nothing of the others, who may be evaluating."""
    board, alone = _alone(tmp_path, local, 4)
    for rank in range(1, local):
        board.set_rank(rank, RankWord.FINISHED, _STEP + 1)
    for _ in range(3):
        assert alone.why() is None
        clock.now_s += 1000


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_here_that_went_on(tmp_path: Path, clock: Clock, world: int) -> None:
    """It is named at once, on however many machines the others are."""
    board, alone = _alone(tmp_path, 2, world)
    board.set_rank(1, RankWord.SEALED, _STEP + 1)
    assert "rank(s) [1] does not" in str(alone.why())
