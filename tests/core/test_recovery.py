"""Recovery: the order in which a starting generation tries what there is."""

from __future__ import annotations

import itertools
import random

import pytest
from core_samples import PLAN_A, PLAN_B, generation, history
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.layout import StepId
from surefoot.core.lineage import counts, cuts
from surefoot.core.recovery import Place, Source, ranking

_CHAIN = cuts(history(generation(1), generation(2, (1, 20))))
_PLACES: tuple[Place, ...] = ("ram", "disk", "object")
_sources = st.builds(
    Source,
    st.builds(StepId, st.integers(0, 40), st.integers(1, 3)),
    st.sampled_from(_PLACES),
    st.sampled_from([PLAN_A, PLAN_B]),
    st.booleans(),
)


def _source(step: int, number: int, place: Place = "object", plan: str = PLAN_A, committed: bool = True) -> Source:
    return Source(StepId(step, number), place, plan, committed)


def test_the_newest_step_that_counts_is_tried_first_and_the_nearest_copy_of_it() -> None:
    """Step, then generation, then nearness; what is off the lineage is left out however new it is."""
    dead = [_source(99, 1, "ram"), _source(21, 1), _source(99, 3)]
    order = [
        _source(30, 2, "ram"),
        _source(30, 2, "disk"),
        _source(30, 2, "object"),
        _source(20, 2, "object"),
        _source(20, 1, "ram"),
        _source(10, 1, "disk"),
    ]
    assert ranking([*order[::-1], *dead], _CHAIN) == order


def test_a_dropped_source_is_not_tried_again_but_its_other_copies_are() -> None:
    """Dropping names one copy of one plan; the same step elsewhere stays."""
    ram, disk = _source(30, 2, "ram"), _source(30, 2, "disk")
    assert ranking([ram, disk], _CHAIN, [ram]) == [disk]
    assert ranking([ram, disk], _CHAIN, {ram, disk}) == []


@pytest.mark.holds("lineage-in-memory")
def test_without_a_chain_nothing_is_tried() -> None:
    """An image of unknown lineage is never taken."""
    assert ranking([_source(1, 1)], {}) == []


def test_equals_are_ordered_too() -> None:
    """Two sources of one step and place (two plans, committed or not) have one order, whoever lists them."""
    twins = [_source(30, 2, "ram", plan, committed) for plan in (PLAN_A, PLAN_B) for committed in (True, False)]
    orders = {tuple(ranking(order, _CHAIN)) for order in itertools.permutations(twins)}
    assert len(orders) == 1
    assert [source.committed for source in orders.pop()] == [True, True, False, False]


@pytest.mark.holds("one-choice")
@given(st.lists(_sources, max_size=8), st.sets(_sources, max_size=3), st.randoms(use_true_random=False))
def test_every_agent_ranks_alike(sources: list[Source], dropped: set[Source], shuffler: random.Random) -> None:
    """The ranking holds exactly what counts and was not dropped, best first, and no order of listing changes it."""
    ranked = ranking(sources, _CHAIN, dropped)
    mixed = list(sources)
    shuffler.shuffle(mixed)
    assert ranking(mixed, _CHAIN, dropped) == ranked
    assert sorted(map(repr, ranked)) == sorted(
        repr(source) for source in sources if counts(source.at, _CHAIN) and source not in dropped
    )
    for better, worse in itertools.pairwise(ranked):
        assert (better.at, -_PLACES.index(better.place)) >= (worse.at, -_PLACES.index(worse.place))
