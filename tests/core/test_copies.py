"""Copies: what several nodes and tiers hold, put together; every way in which they may not be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_samples import PLAN_A, PLAN_B, generation, history, manifest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.copies import Copy, at_risk, copies_of, nearest, newest_that_fits, wholes
from surefoot.core.layout import StepId
from surefoot.core.lineage import counts, cuts

_CHAIN = cuts(history(generation(1), generation(2, (1, 20))))


def _copy(step: int, rank: int, node: str = "a", **other: object) -> Copy:
    made = Copy(StepId(step, 1), PLAN_A, 2, rank, f"{step:04d}{rank}", 100 + rank, "ram", node)
    return replace(made, **other)  # type: ignore[arg-type]


@pytest.mark.holds("one-plan-in-memory")
def test_ranks_on_several_nodes_make_one_whole() -> None:
    """Rank 0 on one node and rank 1 on another are a step; rank 0 twice is none."""
    apart = [_copy(7, 0, "a"), _copy(7, 1, "b")]
    (whole,) = wholes(apart, [], _CHAIN)
    assert whole.copies == ((apart[0],), (apart[1],))
    assert (whole.at, whole.plan, whole.committed, whole.only_in_memory) == (StepId(7, 1), PLAN_A, False, True)
    assert wholes([apart[0], replace(apart[0], node="b")], [], _CHAIN) == []


@pytest.mark.holds("one-plan-in-memory", "ranks-load-different-steps")
@pytest.mark.parametrize(
    "other",
    [
        {"plan": PLAN_B},
        {"at": StepId(8, 1)},
        {"at": StepId(7, 2)},
        {"world_size": 3},
        {"rank": 2},
        {"at": StepId(7, 3)},
    ],
)
def test_what_differs_in_plan_step_generation_or_number_of_ranks_is_never_mixed(other: dict[str, object]) -> None:
    """Rank 1's image is another plan's, step's, generation's or world's: there is no whole step."""
    assert wholes([_copy(7, 0), replace(_copy(7, 1), **other)], [], _CHAIN) == []  # type: ignore[arg-type]


def test_copies_that_contradict_each_other_are_believed_by_nobody_but_a_manifest() -> None:
    """Two hashes for one rank's image: no whole step; with a manifest, the ones that it names."""
    made = manifest(StepId(7, 1))
    stored = copies_of(made, "object")
    right = Copy(StepId(7, 1), PLAN_A, 2, 0, stored[0].xxh3_128, stored[0].size_bytes, "ram", "a")
    wrong = replace(right, xxh3_128="f" * 32, node="b")
    assert wholes([right, wrong, *stored[1:]], [], _CHAIN) == []
    (whole,) = wholes([right, wrong, *stored], [made], _CHAIN)
    assert whole.copies == ((right, stored[0]), (stored[1],))
    assert whole.committed
    assert not whole.only_in_memory
    foreign = replace(right, rank=5)
    assert wholes([foreign, *stored], [made], _CHAIN)[0].copies == ((stored[0],), (stored[1],))


@pytest.mark.holds("bad-copy-passed-over")
def test_a_bad_copy_is_dropped_for_all_and_the_next_one_taken() -> None:
    """One bad copy of two: still whole. Both bad: the older step is first, and with it bad too there is nothing."""
    one, two, other = _copy(7, 0, "a"), _copy(7, 0, "b"), _copy(7, 1, "b")
    older = [_copy(5, 0, "c"), _copy(5, 1, "c")]
    have = [one, two, other, *older]
    assert [w.at.step for w in wholes(have, [], _CHAIN)] == [7, 5]
    assert wholes(have, [], _CHAIN, [one])[0].copies == ((two,), (other,))
    assert [w.at.step for w in wholes(have, [], _CHAIN, [one, two])] == [5]
    assert wholes(have, [], _CHAIN, [one, two, older[0]]) == []


@pytest.mark.holds("lineage-in-memory")
def test_what_an_abandoned_branch_holds_in_memory_does_not_count() -> None:
    """Step 21 of generation 1 is beyond the step at which generation 2 branched off; step 20 counts."""
    have = [_copy(step, rank) for step in (20, 21) for rank in (0, 1)]
    assert [w.at for w in wholes(have, [], _CHAIN)] == [StepId(20, 1)]


@pytest.mark.holds("one-choice")
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3), st.integers(0, 2), st.sampled_from("abc"),
                          st.sampled_from([PLAN_A, PLAN_B])), max_size=24), st.randoms())  # fmt: skip
def test_the_order_of_reports_decides_nothing(rows: list[tuple[int, int, int, str, str]], mixer: object) -> None:
    """Every node that knows the same copies chooses the same; each choice counts and has every rank of one plan."""
    have = [Copy(StepId(s, g), plan, 2, rank, f"{s}{g}{rank}", 1, "ram", node) for s, g, rank, node, plan in rows]
    first = wholes(have, [], _CHAIN)
    mixer.shuffle(have)  # type: ignore[attr-defined]
    assert wholes(have, [], _CHAIN) == first
    for whole in first:
        assert counts(whole.at, _CHAIN)
        assert [{copy.rank for copy in of_rank} for of_rank in whole.copies] == [{0}, {1}]
        assert {(c.at, c.plan) for of_rank in whole.copies for c in of_rank} == {(whole.at, whole.plan)}
    assert [w.at for w in first] == sorted((w.at for w in first), reverse=True)


def test_each_node_tries_its_own_memory_then_its_disk_then_others() -> None:
    """Own before others', memory before disk before bucket."""
    shared = replace(_copy(7, 0), place="object", node="", path="steps/x")
    own_disk, own, others = _copy(7, 0, "b", place="disk"), _copy(7, 0, "b"), _copy(7, 0, "a")
    assert nearest([shared, others, own_disk, own], "b") == [own, own_disk, others, shared]


@pytest.mark.holds("at-risk")
@pytest.mark.parametrize(
    ("leaving", "lost"),
    [((), {}), (("a",), {0: 100}), (("b",), {}), (("a", "b"), {0: 100, 1: 101}), (("a", "b", "c"), {0: 100, 1: 101})],
)
def test_at_risk_is_what_no_node_that_stays_and_no_tier_has(leaving: tuple[str, ...], lost: dict[int, int]) -> None:
    """Rank 1 is on two nodes, rank 2 on the bucket too: they are lost only with all of their places."""
    have = [_copy(7, 0, "a"), _copy(7, 1, "a"), _copy(7, 1, "b"), _copy(7, 2, "a")]
    have.append(replace(_copy(7, 2), place="object", node=""))
    assert at_risk(have, leaving) == lost


@pytest.mark.holds("newest-alone")
def test_the_newest_step_that_fits_is_sent() -> None:
    """Exactly as many bytes as the time allows still fit; nothing fits when no time is left."""
    sizes = {StepId(9, 1): 1001, StepId(8, 1): 1000, StepId(7, 1): 10}
    assert newest_that_fits(sizes, 100.0, 10.0) == StepId(8, 1)
    assert newest_that_fits(sizes, 100.0, 100.0) == StepId(9, 1)
    assert newest_that_fits(sizes, 100.0, -1.0) is None
    assert newest_that_fits({}, 100.0, 10.0) is None
