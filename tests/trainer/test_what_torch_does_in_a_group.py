"""Facts about gloo groups on which the trainers' agreement stands, and how the agreement takes a group that breaks."""

from __future__ import annotations

import signal
from multiprocessing.connection import wait

import group_scenes as scenes
import pytest
from mortal_ranks import PATIENCE_S, MortalRanks, check_one_leaves

from surefoot.core.agreement import Vector

_TIMEOUT_S = 4.0
"""Of a group that is to time out: longer than a loaded machine keeps a rank waiting that is there."""


@pytest.mark.holds("own-group")
def test_a_group_that_timed_out_once_is_broken_for_good() -> None:
    """A rank comes late (it evaluated alone): the other one's reduction fails, and so do all later ones of that group
    on both, although both take part; the group of all is unharmed. So the agreement has a group and a long time."""
    with MortalRanks(2, scenes.one_is_late, _TIMEOUT_S) as ranks:
        assert [ranks.hear(0), ranks.hear(1)] == ["2", "2"]
        assert ranks.hear(0) == "RuntimeError"
        ranks.say(1)
        assert ranks.hear(1) == "RuntimeError"
        for rank in (0, 1):
            ranks.say(rank)
        assert [ranks.hear(0), ranks.hear(1)] == ["RuntimeError", "RuntimeError"]
        assert [ranks.hear(0), ranks.hear(1)] == ["2", "2"]


@pytest.mark.holds("own-group")
def test_a_stopped_rank_is_noticed_by_the_timeout_alone() -> None:
    """SIGSTOP sends nothing: the other one hears of it when its time is over. Awake again, the group of all works."""
    with MortalRanks(2, scenes.one_stands_still, _TIMEOUT_S) as ranks:
        assert [ranks.hear(0), ranks.hear(1)] == ["2", "2"]
        ranks.signal(1, signal.SIGSTOP)
        ranks.say(0)
        assert ranks.hear(0) == "RuntimeError"
        ranks.signal(1, signal.SIGCONT)
        ranks.say(1)
        assert ranks.hear(1) == "RuntimeError"
        for rank in (0, 1):
            ranks.say(rank)
        assert [ranks.hear(0), ranks.hear(1)] == ["2", "2"]


@pytest.mark.holds("death-noticed-at-once")
@pytest.mark.parametrize("how", ["killed", "exception", "pending"])
def test_a_rank_that_ends_is_noticed_without_a_timeout(how: str) -> None:
    """SIGKILL, an exception, an end with a reduction pending: the other one's reduction fails long before its day is
    over, and so does the next."""
    with MortalRanks(2, scenes.one_ends, how) as ranks:
        assert [ranks.hear(0), ranks.hear(1)] == ["2", "2"]
        if how == "killed":
            ranks.signal(1, signal.SIGKILL)
        assert wait([ranks.processes[1].sentinel], PATIENCE_S)
        first = ranks.hear(0)
        # The last reduction of a rank that ended with it pending may still have been complete.
        assert first == "RuntimeError" or (how, first) == ("pending", "2")
        assert ranks.hear(0) == "RuntimeError"


@pytest.mark.holds("lost-agreement-is-silent")
@pytest.mark.parametrize("how", ["killed", "exception", "pending"])
def test_a_lost_agreement_raises_nothing_and_takes_the_own_vector(how: str) -> None:
    """Rank 1 is gone: rank 0's boundaries go on without an error and without waiting, by what it knows itself."""
    with MortalRanks(2, scenes.agreement_of_mortals, how) as ranks:
        assert [ranks.hear(0), ranks.hear(1)] == [3, 3]
        if how == "killed":
            ranks.signal(1, signal.SIGKILL)
        heard = [ranks.hear(0) for _boundary in range(6)]
        own = Vector(stage_every=5, free_slots=2)
        if how == "pending" and heard[0].notice:
            # What was pending was complete all the same.
            heard.pop(0)
        # The boundary at which it broke: nothing is agreed, and nothing is forced; unless it was known before.
        assert heard[0] in (Vector(free_slots=1), own)
        assert set(heard[1:]) == {own}
        assert ranks.hear(0) == "left"


@pytest.mark.holds("early-leavers")
def test_a_rank_that_leaves_is_waited_for_no_longer() -> None:
    """Its last word reaches the other one at a boundary; from then on that one agrees with itself, and ends."""
    with MortalRanks(2, scenes.agreement_of_mortals, "leaves") as ranks:
        check_one_leaves(ranks)


@pytest.mark.holds("own-group")
def test_a_broken_agreement_leaves_the_users_group_alone() -> None:
    """Both ranks go on reducing in the group of all after the agreement's own group has timed out."""
    with MortalRanks(2, scenes.agreement_beside_the_users_group) as ranks:
        assert ranks.hear(0) == Vector(free_slots=1)
        for rank in (0, 1):
            ranks.say(rank)
        assert [ranks.hear(0), ranks.hear(1)] == ["2", "2"]
        assert ranks.hear(0) == Vector()
        # Known when the late one posts, or when it waits.
        assert ranks.hear(1) in (Vector(), Vector(free_slots=1))
        assert [ranks.hear(0), ranks.hear(1)] == ["2", "2"]
