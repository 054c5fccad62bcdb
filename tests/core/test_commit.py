"""Commit: the same manifest from any order of the same acknowledgements, and never from too few."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from core_samples import PLAN_A, PLAN_B, generation, json_values, shard
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.commit import complete_set, make_manifest
from surefoot.core.layout import BoundaryId
from surefoot.core.manifest import Manifest, Shard, Trigger

_AT = BoundaryId(1200, 7)


def _ranks(world_size: int, **fields: Any) -> list[Shard]:
    return [shard(_AT, rank, world_size=world_size, **fields) for rank in range(world_size)]


@pytest.mark.holds("part-missing-declared-whole")
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_one_acknowledgement_a_rank_is_a_set(world_size: int) -> None:
    """The set has every rank once, in rank order; with any rank missing there is none."""
    acks = _ranks(world_size)
    assert complete_set(reversed(acks), _AT) == tuple(acks)
    for missing in range(world_size):
        assert complete_set([ack for ack in acks if ack.id.rank != missing], _AT) is None


def test_nothing_is_no_set() -> None:
    """No acknowledgement, or only those of other steps and generations, make no set."""
    assert complete_set([], _AT) is None
    others = [
        replace(ack, id=replace(ack.id, at=at))
        for ack in _ranks(2)
        for at in (BoundaryId(1200, 6), BoundaryId(1201, 7))
    ]
    assert complete_set(others, _AT) is None
    assert complete_set([*others, *_ranks(2)], _AT) == tuple(_ranks(2))


@pytest.mark.holds("whole-or-absent")
def test_plans_are_never_mixed() -> None:
    """Rank 0 of one plan and rank 1 of another are no set, though both are there; the plan that is whole is taken."""
    a, b = _ranks(2, plan=PLAN_A), _ranks(2, plan=PLAN_B)
    assert complete_set([a[0], b[1]], _AT) is None
    assert complete_set([a[0], *b], _AT) == tuple(b)
    assert complete_set([*a, b[1]], _AT) == tuple(a)


def test_steps_of_two_generations_are_never_mixed() -> None:
    """The same step number of another generation does not fill a gap."""
    foreign = shard(BoundaryId(1200, 6), 1)
    assert complete_set([shard(_AT, 0), foreign], _AT) is None


@pytest.mark.holds("commit-is-pure")
def test_any_attempt_of_a_rank_will_do_and_always_the_same_one() -> None:
    """Several attempts of a rank: one is taken, whatever the order in which they are seen."""
    acks = [*_ranks(2, attempt="bbbb"), shard(_AT, 0, attempt="cccc"), shard(_AT, 1, attempt="aaaa")]
    results = {tuple(found or ()) and tuple(s.key for s in found or ()) for found in _in_every_order(acks)}
    assert len(results) == 1
    assert len(results.pop()) == 2


def _in_every_order(acks: list[Shard]) -> list[tuple[Shard, ...] | None]:
    return [complete_set(order, _AT) for order in itertools.permutations(acks)]


def test_a_replica_with_other_content_does_not_make_the_order_matter() -> None:
    """Two acknowledgements of one name that differ (a forgery, a second tier): the order still does not matter."""
    replica = replace(shard(_AT, 0), xxh3_128="f" * 32, size_bytes=1)
    assert len({found and found[0].xxh3_128 for found in _in_every_order([*_ranks(2), replica])}) == 1


@pytest.mark.parametrize("claimed", [1, 3, 0, -1, None, "2", 2.0, True, [], {"a": 1}])
def test_a_claim_of_another_world_size_makes_no_set(claimed: Any) -> None:
    """Ranks that do not agree on an integer world size are no set: neither a smaller nor a larger one."""
    honest = _ranks(2)
    forged = [replace(ack, record={"world_size": claimed}) for ack in honest]
    assert complete_set([forged[0], honest[1]], _AT) is None
    assert complete_set(forged, _AT) is None


def test_ranks_beyond_the_world_make_no_set() -> None:
    """Two shards of a world of two, of the wrong ranks, are no set."""
    assert complete_set([shard(_AT, 0), shard(_AT, 2)], _AT) is None
    assert complete_set([shard(_AT, 1), shard(_AT, 2)], _AT) is None


_acks = st.builds(
    shard,
    st.sampled_from([_AT, _AT, _AT, BoundaryId(1200, 6)]),
    st.integers(0, 2),
    world_size=st.sampled_from([2, 2, 2, 3, 1]),
    attempt=st.sampled_from(["aaaa", "bbbb"]),
    plan=st.sampled_from([PLAN_A, PLAN_B]),
)


@pytest.mark.holds("commit-is-pure")
@given(st.lists(_acks, max_size=9), st.randoms(use_true_random=False))
def test_a_set_is_whole_of_one_kind_and_independent_of_order(acks: list[Shard], shuffler: random.Random) -> None:
    """A set has each rank of its own world once, of one plan and step; order and repeats are nothing."""
    found = complete_set(acks, _AT)
    mixed = [*acks, *acks]
    shuffler.shuffle(mixed)
    assert complete_set(mixed, _AT) == found
    if found is not None:
        assert {part.id.at for part in found} == {_AT}
        assert len({part.plan for part in found}) == 1
        assert [part.id.rank for part in found] == list(range(len(found)))
        assert {part.record["world_size"] for part in found} == {len(found)}
        assert all(part in acks for part in found)


@given(st.lists(st.sampled_from(["aaaa", "bbbb", "cccc"]), min_size=1, max_size=3), st.integers(1, 4))
def test_an_honest_whole_set_is_always_found(attempts: list[str], world_size: int) -> None:
    """If all ranks acknowledged one plan, there is a set, however many half-finished plans and attempts lie about."""
    acks = [ack for attempt in attempts for ack in _ranks(world_size, attempt=attempt)]
    noise = [shard(_AT, 0, world_size=9, plan=PLAN_B), shard(BoundaryId(1, 1), 0)]
    found = complete_set([*noise, *acks], _AT)
    assert found is not None
    assert len(found) == world_size


def _made(*records: dict[str, Any]) -> Manifest:
    acks = [shard(_AT, rank, world_size=len(records), record=record) for rank, record in enumerate(records)]
    return make_manifest(acks, generation(7, (6, 1100)), 17.5)


def test_a_manifest_says_what_its_shards_and_its_generation_say() -> None:
    """Step, plan, size, launch, parent, time and shards are taken over as they are, and it can be read back."""
    made = _made({}, {}, {})
    origin = generation(7, (6, 1100))
    assert (made.at, made.plan, made.world_size, made.created) == (_AT, PLAN_A, 3, 17.5)
    assert (made.launch, made.parent, made.retired) == (origin.launch, origin.parent, None)
    assert [part.id.rank for part in made.shards] == [0, 1, 2]
    assert Manifest.from_bytes(made.to_bytes(), made.key) == made


@pytest.mark.parametrize(
    ("triggers", "expected"),
    [
        (["periodic", "periodic"], "periodic"),
        (["periodic", "emergency"], "emergency"),
        (["emergency", "periodic"], "emergency"),
        (["manual", "final"], "manual"),
        (["agent", "periodic"], "periodic"),
        (["final", "periodic"], "final"),
        ([None, "manual"], "manual"),
        ([None, None], "agent"),
        (["unknown", "periodic"], "periodic"),
        ([["manual"], {"a": 1}], "agent"),
        ([True, 0], "agent"),
    ],
)
def test_the_weightiest_trigger_of_the_ranks_is_the_manifests(triggers: list[Any], expected: Trigger) -> None:
    """Ranks may differ in why they saved; the weightiest known reason stands, and none at all means the agent."""
    assert _made(*({"trigger": trigger} for trigger in triggers)).trigger == expected


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ([None, None], None),
        (["best", None], "best"),
        ([None, "best"], "best"),
        (["a", "b"], "a"),
        ([5, "b"], "b"),
        ([["x"], {}], None),
    ],
)
def test_the_first_tag_of_the_ranks_is_the_manifests(tags: list[Any], expected: str | None) -> None:
    """One rank's tag is enough to keep a checkpoint; of several the lowest rank's stands; what is no text is none."""
    assert _made(*({"tag": tag} for tag in tags)).tag == expected


def test_metrics_of_the_ranks_are_merged_and_the_lowest_rank_wins() -> None:
    """Metrics that ranks give apart are all there; one that two give is the lowest rank's; no mapping is no metrics."""
    made = _made({"metrics": {"loss": 1.0}}, {"metrics": None}, {"metrics": {"loss": 2.0, "acc": 0.5}}, {"metrics": []})
    assert made.metrics == {"loss": 1.0, "acc": 0.5}


_hostile = st.fixed_dictionaries({}, optional=dict.fromkeys(("trigger", "tag", "metrics"), json_values))


@given(st.lists(_hostile, min_size=1, max_size=3))
def test_hostile_records_never_stop_a_commit(records: list[dict[str, Any]]) -> None:
    """Whatever JSON stands in the ranks' records, a manifest of a known trigger and a text or no tag is made."""
    made = _made(*records)
    assert made.trigger in ("agent", "periodic", "final", "manual", "emergency")
    assert made.tag is None or type(made.tag) is str
    assert isinstance(made.metrics, dict)
