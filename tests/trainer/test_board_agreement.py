"""The agreement of one machine's ranks by their board: real processes, of which some end, stop or leave."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import group_scenes as scenes
import pytest
from mortal_ranks import MortalRanks, check_one_leaves

from surefoot.core.agreement import Vector, merge
from surefoot.ipc.board import Board
from surefoot.scenario.processes import stopped

_RANKS = 3
_BOUNDARIES = 3000


@pytest.fixture
def board() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="sf-test-", dir="/dev/shm") as directory:
        path = Path(directory) / "board"
        Board.create(path, 8)
        yield str(path)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_all_get_the_same_at_every_boundary(board: str, seed: int) -> None:
    """Thousands of boundaries at unlike paces: each rank gets what all of that boundary's vectors come to."""
    with MortalRanks(_RANKS, scenes.agreement_of_many, board, seed, _BOUNDARIES) as ranks:
        heard = [ranks.hear(rank) for rank in range(_RANKS)]
        for rank in range(_RANKS):
            ranks.say(rank)
        assert [ranks.hear(rank) for rank in range(_RANKS)] == ["left"] * _RANKS
    expected = [
        merge(scenes.drawn(seed, rank, boundary) for rank in range(_RANKS)) for boundary in range(_BOUNDARIES - 1)
    ]
    for agreed in heard:
        assert agreed == expected


@pytest.mark.holds("lost-agreement-is-silent")
@pytest.mark.parametrize("how", ["killed", "exception", "pending"])
def test_a_rank_that_ended_is_waited_for_no_longer(board: str, how: str) -> None:
    """Whether its end was seen by anybody or not: the others raise nothing, and act by what they know themselves."""
    with MortalRanks(2, scenes.agreement_of_mortals, how, board) as ranks:
        assert [ranks.hear(0), ranks.hear(1)] == [3, 3]
        if how == "killed":
            ranks.signal(1, signal.SIGKILL)
        heard = [ranks.hear(0) for _boundary in range(6)]
        if how == "pending":
            # What it had brought before it ended counts.
            assert heard.pop(0) == Vector(notice=True, free_slots=2, stage_every=7)
        assert heard[0] == Vector(free_slots=1)
        assert set(heard[1:]) == {Vector(stage_every=5, free_slots=2)}
        assert ranks.hear(0) == "left"


def test_a_rank_that_leaves_is_heard_once(board: str) -> None:
    """Its last word reaches the other one at a boundary; from then on that one agrees with itself, and ends."""
    with MortalRanks(2, scenes.agreement_of_mortals, "leaves", board) as ranks:
        check_one_leaves(ranks)


def test_a_rank_whose_process_lives_on(board: str) -> None:
    """It left the run because of an error of its own, as in a notebook: known from the board, without its end."""
    with MortalRanks(2, scenes.agreement_with_one_that_lives_on, board) as ranks:
        assert [ranks.hear(0), ranks.hear(1)] == [Vector(free_slots=2)] * 2
        assert [ranks.hear(0), ranks.hear(0)] == [Vector(free_slots=1), Vector(stage_every=9)]
        assert ranks.processes[1].is_alive()


@pytest.mark.holds("vector-is-waited-for")
def test_a_rank_that_stands_still_is_waited_for(board: str) -> None:
    """It is not gone: nothing is agreed without it, however long it takes."""
    with MortalRanks(2, scenes.agreement_with_one_that_stands_still, board) as ranks:
        assert [ranks.hear(0), ranks.hear(1)] == [2, 2]
        with stopped(ranks.processes[1].pid or 0) as still:
            assert still
            ranks.say(0)
            ranks.say(1)
            # Longer than it takes to look whether a rank is gone.
            assert not ranks.speaks(0, within_s=0.5)
        assert [ranks.hear(0), ranks.hear(1)] == [12, 12]
        for rank in (0, 1):
            ranks.say(rank)
        assert [ranks.hear(0), ranks.hear(1)] == [22, 22]
        for rank in (0, 1):
            ranks.say(rank)
