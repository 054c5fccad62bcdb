"""The plan: same reports, same plan; exact cover; nothing but CorruptError from foreign bytes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from core_samples import damaged, json_values
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.documents import compact, seal, unseal
from surefoot.core.dtypes import ITEM_BYTES
from surefoot.core.plan import Leaf, Plan, Report, Spread, make_plan, structure_leaves
from surefoot.errors import CorruptError, UnsupportedStateError

_NAMES = [
    "model.weight",
    "model.weight.",
    "a.b",
    "a",
    "",
    " ",
    "é",
    "重み",
    "😀",
    "line\nbreak",
    "nul\0byte",
    'quote"\\',
    "x" * 400,
    "x" * 399,
    "../up",
    "a/b",
    "@",
]
_leaves = st.builds(
    Leaf,
    st.sampled_from(_NAMES),
    st.sampled_from(sorted(ITEM_BYTES)),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.sampled_from(["replicated", "local"]),
    st.sampled_from(["", "d1", "d2"]),
)


def _report(leaves: Sequence[Leaf]) -> Report:
    return Report(tuple(leaves), json.dumps([{"$tensor": leaf.name} for leaf in leaves]))


_reports = st.lists(
    st.lists(_leaves, max_size=6, unique_by=lambda leaf: leaf.name).map(_report), min_size=1, max_size=4
)


def _leaf(name: str, size: int = 1, spread: Spread = "replicated", digest: str = "") -> Leaf:
    return Leaf(name, "float32", (size,), spread, digest)


def _bytes_of(plan: Plan, spread: Spread) -> list[int]:
    load = [0] * plan.world_size
    for item in plan.items:
        if item.spread == spread:
            load[item.rank] += item.box.size_bytes
    return load


@given(_reports)
def test_a_plan_comes_back_by_value(reports: list[Report]) -> None:
    """A plan written to its object and read again is equal, with the same hash."""
    plan = make_plan(reports)
    back = Plan.from_body(unseal(seal(plan.body), "x"))
    assert back == plan
    assert back.hash == plan.hash
    assert [back.image(rank) for rank in range(plan.world_size)] == [
        plan.image(rank) for rank in range(plan.world_size)
    ]


@given(_reports)
def test_a_report_comes_back_by_value(reports: list[Report]) -> None:
    """A report sent as JSON is equal when it is read again."""
    for report in reports:
        assert Report.from_json(json.loads(compact(report.to_json()))) == report


@pytest.mark.holds("plan-is-exact")
@given(_reports)
def test_every_leaf_of_every_rank_is_kept_exactly_once(reports: list[Report]) -> None:
    """For each rank and leaf there is one item with its type and shape: its own, or one that all ranks agree on."""
    plan = make_plan(reports)
    names = [item.box.name for item in plan.items]
    assert len(set(names)) == len(names)
    wanted = 0
    for rank, report in enumerate(reports):
        sources = plan.sources(rank)
        assert set(sources) >= {leaf.name for leaf in report.leaves}
        for leaf in report.leaves:
            item = sources[leaf.name]
            assert (item.box.dtype, item.box.shape) == (leaf.dtype, leaf.shape)
            assert item.box.global_shape == leaf.shape
            if item.spread == "local":
                assert item.rank == rank
                wanted += 1
            else:
                assert all(leaf in other.leaves for other in reports)
        assert plan.structure(rank) == report.structure
    replicated = [item for item in plan.items if item.spread == "replicated"]
    assert len(plan.items) == wanted + len(replicated)


@given(_reports, st.randoms(use_true_random=False))
def test_the_order_of_replicated_leaves_in_a_report_does_not_matter(
    reports: list[Report], shuffler: random.Random
) -> None:
    """Ranks that list the same replicated leaves in different orders make the same plan."""
    same = [leaf for leaf in reports[0].leaves if leaf.spread == "replicated"]
    plans = set()
    for _ in range(3):
        mixed = []
        for _report_of_rank in range(3):
            shuffler.shuffle(same)
            mixed.append(Report(tuple(same), "[]"))
        plans.add(make_plan(mixed).hash)
    assert len(plans) == 1


@pytest.mark.holds("replicas-once")
@given(st.lists(st.integers(0, 2000), max_size=40), st.integers(1, 7))
def test_replicated_leaves_are_spread_evenly(sizes: list[int], world_size: int) -> None:
    """The heaviest owner holds at most the largest leaf more than the lightest."""
    leaves = [_leaf(f"l{index}", size) for index, size in enumerate(sizes)]
    load = _bytes_of(make_plan([_report(leaves)] * world_size), "replicated")
    assert sum(load) == 4 * sum(sizes)
    assert max(load) - min(load) <= 4 * max(sizes, default=0)


@given(st.lists(st.integers(1, 50), min_size=20, max_size=40), st.integers(0, 300))
def test_an_uneven_rank_gets_fewer_replicated_bytes(sizes: list[int], own: int) -> None:
    """What a rank must keep anyway counts: the sums, local and replicated together, are even as far as they can be."""
    shared = [_leaf(f"l{index}", size) for index, size in enumerate(sizes)]
    reports = [_report([*shared, _leaf("own", own, "local")]), _report([*shared, _leaf("own", 0, "local")])]
    plan = make_plan(reports)
    local, total = _bytes_of(plan, "local"), [plan_bytes(plan, 0), plan_bytes(plan, 1)]
    assert local == [4 * own, 0]
    assert abs(total[0] - total[1]) <= max(4 * max(sizes), 4 * own - 4 * sum(sizes))


def plan_bytes(plan: Plan, rank: int) -> int:
    return sum(item.box.size_bytes for item in plan.items if item.rank == rank)


def test_ties_go_to_the_lowest_rank_and_names_decide_among_equals() -> None:
    """The owners of a small example, written out."""
    leaves = [_leaf("d", 1), _leaf("c", 2), _leaf("b", 2), _leaf("a", 5)]
    plan = make_plan([_report(leaves)] * 3)
    assert [(item.leaf, item.rank) for item in plan.items] == [("a", 0), ("b", 1), ("c", 2), ("d", 1)]


@pytest.mark.holds("values-collapse")
@pytest.mark.parametrize(
    "other",
    [
        Leaf("w", "float32", (3,), "replicated", "d2"),
        Leaf("w", "float32", (4,), "replicated", "d1"),
        Leaf("w", "int32", (3,), "replicated", "d1"),
        Leaf("w", "float32", (3,), "local", "d1"),
        None,
    ],
    ids=["bytes", "shape", "type", "spread", "absent"],
)
@pytest.mark.parametrize("flip", [False, True])
def test_a_false_claim_of_equality_is_kept_by_each_rank_and_named(other: Leaf | None, flip: bool) -> None:
    """A leaf that differs in anything between ranks becomes local, is named, and nothing of it is lost."""
    mine = Leaf("w", "float32", (3,), "replicated", "d1")
    shared = Leaf("ok", "float32", (1,), "replicated", "d")
    reports = [_report([mine, shared]), _report([shared] if other is None else [other, shared])]
    if flip:
        reports.reverse()
    plan = make_plan(reports)
    assert plan.mismatched == ("w",)
    for rank, report in enumerate(reports):
        for leaf in report.leaves:
            item = plan.sources(rank)[leaf.name]
            assert item.spread == ("replicated" if leaf.name == "ok" else "local")
            assert (item.box.dtype, item.box.shape) == (leaf.dtype, leaf.shape)
    assert {item.box.name for item in plan.items if item.leaf == "w"} <= {"w@rank00000", "w@rank00001"}


def test_mismatched_names_are_sorted_and_no_part_of_the_identity() -> None:
    """What mismatched is for the log: two plans that keep the same are the same plan."""
    leaves = [Leaf(name, "float32", (1,), "replicated", "d1") for name in "bca"]
    changed = [replace(leaf, digest="d2") for leaf in leaves]
    claimed = make_plan([_report(leaves), _report(changed)])
    local = make_plan([_report([replace(leaf, spread="local") for leaf in leaves])] * 2)
    assert claimed.mismatched == ("a", "b", "c")
    assert local.mismatched == ()
    assert claimed == local
    assert claimed.hash == local.hash


_SCRIPT = """
import sys
from surefoot.core.plan import Leaf, Report, make_plan
leaves = tuple(Leaf(f"l{i}", "float32", (i % 7, 3), "replicated" if i % 3 else "local", str(i % 2)) for i in range(60))
other = tuple(Leaf(f"l{i}", "float32", (i % 7, 3), "replicated", str(i % 5 % 2)) for i in range(60))
plan = make_plan([Report(leaves, "[1]"), Report(other, "[2]"), Report(leaves, "[1]")])
print(plan.hash, ",".join(plan.mismatched))
"""


def test_every_process_makes_the_same_plan() -> None:
    """Hash and named leaves do not depend on the process's hash seed, and the hash stays what it is."""
    answers = {
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(answers) == 1
    assert answers.pop().split()[0] == "c1e5a6ad81173369d152f4221e311fe5"


def test_names_that_meet_are_refused_with_the_name() -> None:
    """A leaf that is called as another rank's own copy would be cannot be kept beside it; the message says which."""
    reports = [_report([_leaf("w", 1, "local"), _leaf("w@rank00001", 1)])] * 2
    with pytest.raises(UnsupportedStateError, match="'w@rank00001'"):
        make_plan(reports)


def test_a_leaf_that_is_reported_twice_is_refused() -> None:
    """Two leaves of one name in one report are refused, whatever they claim, never merged."""
    for spreads in (("replicated", "replicated"), ("local", "replicated"), ("local", "local")):
        twice = Report(tuple(_leaf("w", 1 + index, spread) for index, spread in enumerate(spreads)), "[]")
        for reports in ([twice], [twice, twice], [_report([_leaf("w")]), twice]):
            with pytest.raises(CorruptError, match="'w'"):
                make_plan(reports)


@pytest.mark.parametrize("name", ["__metadata__", "lone \ud800 surrogate"])
def test_a_name_that_no_file_can_hold_is_refused(name: str) -> None:
    """A name that would replace the file's metadata, or make it unreadable: refused at planning and at reading."""
    for spread in ("replicated", "local"):
        with pytest.raises(UnsupportedStateError, match="cannot be a tensor's name"):
            make_plan([_report([_leaf(name, 1, spread)])] * 2)
    body = make_plan([_report([_leaf("w")])]).body
    body["items"][0][0] = name
    with pytest.raises(CorruptError, match="cannot be a tensor's name"):
        Plan.from_body(body)


def test_a_type_that_cannot_be_kept_is_named() -> None:
    """An unknown element type is an `UnsupportedStateError` with the leaf's name, on every spread."""
    for spread in ("local", "replicated"):
        with pytest.raises(UnsupportedStateError, match=r"^model\.q: tensors of type qint8 cannot be checkpointed"):
            make_plan([Report((Leaf("model.q", "qint8", (1,), spread),), "[]")] * 2)


def _body(**changes: Any) -> dict[str, Any]:
    shared, own = _leaf("w", 3), _leaf("o", 2, "local")
    return {**make_plan([_report([shared, own])] * 2).body, **changes}


def test_a_hole_and_an_overlap_are_named() -> None:
    """A plan that keeps a leaf twice or not at all is refused with the leaf's name."""
    items = _body()["items"]
    with pytest.raises(CorruptError, match="'w' is kept twice"):
        Plan.from_body(_body(items=[*items, items[-1]]))
    with pytest.raises(CorruptError, match="'w' is kept twice"):
        Plan.from_body(_body(items=[*items, ["w", 0, "local", "float32", [3], [0], [3]]]))
    with pytest.raises(CorruptError, match="no rank keeps 'w' of rank 0"):
        Plan.from_body(_body(items=[item for item in items if item[0] != "w"]))
    with pytest.raises(CorruptError, match="no rank keeps 'o' of rank 1"):
        Plan.from_body(_body(items=[item for item in items if item[:2] != ["o", 1]]))
    for place in (4, 5, 6):
        partial = [list(item) for item in items]
        partial[-1][place] = [1]
        with pytest.raises(CorruptError, match="'w' is not a whole tensor"):
            Plan.from_body(_body(items=partial))


@given(damaged(make_plan([_report([_leaf("w", 3), _leaf("o", 2, "local")])] * 2).body))
@settings(max_examples=300)
def test_a_damaged_plan_is_corrupt_or_a_plan(body: dict[str, Any]) -> None:
    """One thing changed anywhere in a plan's body: `CorruptError`, or a plan that covers what it says it does."""
    try:
        plan = Plan.from_body(body)
    except CorruptError:
        return
    assert Plan.from_body(json.loads(compact(plan.body))) == plan
    for rank in range(plan.world_size):
        assert set(plan.sources(rank)) >= set(structure_leaves(plan.structure(rank)))
        plan.image(rank)


@given(json_values)
def test_any_json_is_no_plan_and_no_report(value: Any) -> None:
    """Arbitrary JSON in the place of a plan, a report or a leaf raises `CorruptError` only."""
    for read in (Plan.from_body, Report.from_json, Leaf.from_json):
        with pytest.raises(CorruptError):
            read(value)


@given(damaged(_report([_leaf("w", 3), _leaf("o", 2, "local", "d")]).to_json()))
def test_a_damaged_report_is_corrupt_or_a_report(data: dict[str, Any]) -> None:
    """One thing changed anywhere in a report: `CorruptError`, or a report that comes back by value."""
    try:
        report = Report.from_json(data)
    except CorruptError:
        return
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report


@pytest.mark.parametrize("text", ["", "{", "[1", "nope", "[" * 100_000, "[NaN]"])
def test_a_structure_that_is_no_json_is_corrupt(text: str) -> None:
    """A structure that cannot be read, or only by a deeper stack, is `CorruptError`."""
    with pytest.raises(CorruptError, match="structure"):
        structure_leaves(text)


def test_leaves_of_a_structure_are_found_in_order_and_once() -> None:
    """Tensors are found at any depth, in the order of the text, aliases once; other dictionaries are walked."""
    tree = {
        "z": [{"$tensor": "c"}, {"deep": {"x": [{"$tensor": "a"}]}}],
        "y": {"$tensor": "b", "ignored": {"$tensor": "never"}},
        "x": {"$tensor": 5, "inner": {"$tensor": "d"}},
        "w": {"$tensor": "c"},
        "v": "plain",
    }
    assert structure_leaves(json.dumps(tree)) == ["c", "a", "b", "d"]
