"""Recovery: what a starting generation restores, whoever lists the facts in whatever order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from core_samples import PLAN_A, PLAN_B, generation, history, manifest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.layout import BoundaryId
from surefoot.core.lineage import counts, cuts
from surefoot.core.manifest import Manifest
from surefoot.core.recovery import Copy, Facts, Look, Place, Restore, Source, decide, ranking, wholes
from surefoot.errors import CorruptError

_GENERATIONS = history(generation(1), generation(2, (1, 20)))
_CHAIN = cuts(_GENERATIONS)
_PLACES: tuple[Place, ...] = ("ram", "disk", "object")
_sources = st.builds(
    Source,
    st.builds(BoundaryId, st.integers(0, 40), st.integers(1, 3)),
    st.sampled_from(_PLACES),
    st.sampled_from([PLAN_A, PLAN_B]),
    st.booleans(),
    given_up=st.booleans(),
)
_rows = st.tuples(
    st.integers(1, 30), st.integers(1, 3), st.integers(0, 2), st.sampled_from("abc"), st.sampled_from([PLAN_A, PLAN_B])
)


def _source(step: int, number: int, place: Place = "object", plan: str = PLAN_A, committed: bool = True) -> Source:
    return Source(BoundaryId(step, number), place, plan, committed)


def _copy(step: int, rank: int, node: str = "a", **other: object) -> Copy:
    made = Copy(BoundaryId(step, 1), PLAN_A, 2, rank, f"{step:04d}{rank}", 100 + rank, node)
    return replace(made, **other)  # type: ignore[arg-type]


def _facts(
    copies: Sequence[Copy] = (), manifests: Sequence[Manifest] = (), failed: Sequence[Source] = (), read: bool = True
) -> Facts:
    return Facts(
        generations=_GENERATIONS,
        chain=_CHAIN,
        launches=["launch2"],
        resume="auto",
        uri="file:///run",
        place="disk",
        copies=copies,
        silent=(),
        commits=[one.at for one in manifests],
        manifests={one.at: one for one in manifests} if read else {},
        failed=failed,
        refused={},
    )


# ---------------------------------------------------------------------- in memory


@pytest.mark.holds("one-plan-in-memory")
def test_ranks_on_several_nodes_make_one_whole() -> None:
    """Rank 0 on one node and rank 1 on another are a step; rank 0 twice is none."""
    apart = [_copy(7, 0, "a"), _copy(7, 1, "b")]
    (whole,) = wholes(apart, _CHAIN)
    assert whole == Source(BoundaryId(7, 1), "ram", PLAN_A, False, ((apart[0],), (apart[1],)))
    assert wholes([apart[0], replace(apart[0], node="b")], _CHAIN) == []


@pytest.mark.holds("one-plan-in-memory", "ranks-load-different-steps")
@pytest.mark.parametrize(
    "other",
    [
        {"plan": PLAN_B},
        {"at": BoundaryId(8, 1)},
        {"at": BoundaryId(7, 2)},
        {"world_size": 3},
        {"rank": 2},
        {"at": BoundaryId(7, 3)},
    ],
)
def test_what_differs_in_plan_step_generation_or_number_of_ranks_is_never_mixed(other: dict[str, object]) -> None:
    """Rank 1's image is another plan's, step's, generation's or world's: there is no whole step."""
    assert wholes([_copy(7, 0), replace(_copy(7, 1), **other)], _CHAIN) == []  # type: ignore[arg-type]


def test_copies_that_contradict_each_other_are_not_believed() -> None:
    """Two hashes for one rank's image: no whole step. Two copies of one hash: the same nodes' order, always."""
    right, other = _copy(7, 0, "b"), _copy(7, 1, "b")
    assert wholes([right, replace(right, xxh3_128="f" * 32, node="a"), other], _CHAIN) == []
    (whole,) = wholes([right, replace(right, node="a"), other], _CHAIN)
    assert whole.copies == ((replace(right, node="a"), right), (other,))
    assert whole.holders == (replace(right, node="a"), other)


@pytest.mark.holds("lineage-in-memory")
def test_what_an_abandoned_branch_holds_in_memory_does_not_count() -> None:
    """Step 21 of generation 1 is beyond the step at which generation 2 branched off; step 20 counts."""
    have = [_copy(step, rank) for step in (20, 21) for rank in (0, 1)]
    assert [w.at for w in wholes(have, _CHAIN)] == [BoundaryId(20, 1)]


@pytest.mark.holds("one-choice")
@given(st.lists(_rows, max_size=24), st.randoms(use_true_random=False))
def test_the_order_of_reports_decides_nothing(
    rows: list[tuple[int, int, int, str, str]], shuffler: random.Random
) -> None:
    """Every node that knows the same copies chooses the same; each choice counts and has every rank of one plan."""
    have = [Copy(BoundaryId(s, g), plan, 2, rank, f"{s}{g}{rank}", 1, node) for s, g, rank, node, plan in rows]
    first = wholes(have, _CHAIN)
    shuffler.shuffle(have)
    assert wholes(have, _CHAIN) == first
    for whole in first:
        assert counts(whole.at, _CHAIN)
        assert [{copy.rank for copy in of_rank} for of_rank in whole.copies] == [{0}, {1}]
        assert {(c.at, c.plan) for of_rank in whole.copies for c in of_rank} == {(whole.at, whole.plan)}
    assert [w.at for w in first] == sorted((w.at for w in first), reverse=True)


# ---------------------------------------------------------------------- the order


def test_the_newest_step_that_counts_is_tried_first_and_the_nearest_copy_of_it() -> None:
    """Step, then generation, then nearness; what is off the lineage is left out however new it is, and what was given
    up comes last."""
    dead = [_source(99, 1, "ram"), _source(21, 1), _source(99, 3)]
    order = [
        _source(30, 2, "ram"),
        _source(30, 2, "disk"),
        _source(30, 2, "object"),
        _source(20, 2, "object"),
        _source(20, 1, "ram"),
        _source(10, 1, "disk"),
        replace(_source(29, 2), given_up=True),
    ]
    assert ranking([*order[::-1], *dead], _CHAIN) == order


@pytest.mark.holds("lineage-in-memory")
def test_without_a_chain_nothing_is_tried() -> None:
    """An image of unknown lineage is never taken."""
    assert ranking([_source(1, 1)], {}) == []


def test_equals_are_ordered_too() -> None:
    """Two sources of one step and place (two plans, committed or not) have one order, whoever lists them."""
    equals = [_source(30, 2, "ram", plan, committed) for plan in (PLAN_A, PLAN_B) for committed in (True, False)]
    orders = {tuple(ranking(order, _CHAIN)) for order in itertools.permutations(equals)}
    assert len(orders) == 1
    assert [source.committed for source in orders.pop()] == [True, True, False, False]


@pytest.mark.holds("one-choice")
@given(st.lists(_sources, max_size=8), st.randoms(use_true_random=False))
def test_every_agent_ranks_alike(sources: list[Source], shuffler: random.Random) -> None:
    """The ranking holds exactly what counts, best first, and no order of listing changes it."""
    ranked = ranking(sources, _CHAIN)
    mixed = list(sources)
    shuffler.shuffle(mixed)
    assert ranking(mixed, _CHAIN) == ranked
    assert sorted(map(repr, ranked)) == sorted(repr(source) for source in sources if counts(source.at, _CHAIN))
    for better, worse in itertools.pairwise(ranked):
        assert (not better.given_up, better.at, -_PLACES.index(better.place)) >= (
            not worse.given_up,
            worse.at,
            -_PLACES.index(worse.place),
        )


# ---------------------------------------------------------------------- the decision


@given(st.lists(_rows, max_size=24), st.sets(st.integers(1, 30), max_size=4), st.randoms(use_true_random=False))
def test_the_order_of_facts_decides_nothing(
    rows: list[tuple[int, int, int, str, str]], steps: set[int], shuffler: random.Random
) -> None:
    """However often what was chosen fails, the next choice is the same for the same facts, and none comes twice."""
    copies = [Copy(BoundaryId(s, g), plan, 2, rank, f"{s}{g}{rank}", 1, node) for s, g, rank, node, plan in rows]
    manifests = [manifest(BoundaryId(step, 2), retired=None if step % 3 else 5.0) for step in sorted(steps)]
    failed: list[Source] = []
    while isinstance(chosen := decide(_facts(copies, manifests, failed)), Restore):
        mixed, others = list(copies), list(manifests)
        shuffler.shuffle(mixed)
        shuffler.shuffle(others)
        assert decide(_facts(mixed, others, failed[::-1])) == chosen
        assert chosen.source not in failed
        failed.append(chosen.source)
    assert {source.at for source in failed if not source.copies} == {one.at for one in manifests}


def test_a_manifest_is_read_only_when_nothing_in_memory_is_as_new() -> None:
    """A restart from memory costs no reading of manifests, and of older ones none is read before its turn."""
    stored = [manifest(BoundaryId(step, 2)) for step in (25, 30)]
    in_memory = [_copy(30, rank, at=BoundaryId(30, 2)) for rank in (0, 1)]
    assert decide(_facts(in_memory, stored, read=False)) == Restore(wholes(in_memory, _CHAIN)[0])
    assert decide(_facts([], stored, read=False)) == Look(BoundaryId(30, 2))
    older = [_copy(29, rank, at=BoundaryId(29, 2)) for rank in (0, 1)]
    assert decide(_facts(older, stored, read=False)) == Look(BoundaryId(30, 2))


@pytest.mark.parametrize(
    ("source", "drives", "others", "places"),
    [
        (_source(3, 1, "object"), False, False, ["ram", "object"]),
        (_source(3, 1, "disk"), True, False, ["ram", "disk copy", "disk"]),
        (_source(3, 1, "object"), True, True, ["ram", "disk copy", "object", "peer disk"]),
        (replace(_source(3, 1, "ram"), copies=((_copy(3, 0),),)), True, False, ["ram"]),
        (replace(_source(3, 1, "ram"), copies=((_copy(3, 0),),)), True, True, ["ram", "peer"]),
    ],
)
def test_the_nearest_place_is_read_first(source: Source, drives: bool, others: bool, places: list[Place]) -> None:
    """Memory, this node's drives, the run's place, another node's drives; what only memory has is nowhere else."""
    assert source.read_from(drives=drives, others=others) == places


def test_another_node_is_given_the_same_source() -> None:
    """What travels comes back, with the copies that are to be read; what is neither is refused."""
    (whole,) = wholes([_copy(7, 0, "a"), _copy(7, 0, "b"), _copy(7, 1, "b")], _CHAIN)
    there = Source.from_json(whole.to_json())
    assert (there.holders, there.at, there.place) == (whole.holders, whole.at, "ram")
    stored = _source(30, 2, "object")
    assert Source.from_json(stored.to_json()) == stored
    for wrong in ({"place": "tape"}, {"place": "ram"}, {"boundary": -1}, {"copies": [{}]}):
        with pytest.raises(CorruptError):
            Source.from_json({**stored.to_json(), **wrong})
