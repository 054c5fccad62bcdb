"""Frozen tensors: planned apart, named by manifests, and deleted only when nobody names them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from core_samples import PLAN_A, damaged, json_values, manifest, shard
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.documents import compact
from surefoot.core.frozen import FrozenFile, files_of, frozen_ranks, named_by, needed_by, unnamed
from surefoot.core.layout import BoundaryId, frozen_key, parse_frozen
from surefoot.core.plan import Leaf, Plan, Report, Spread, make_plan
from surefoot.errors import CorruptError

_H1, _H2, _H3 = ("1" * 32, "2" * 32, "3" * 32)


def _leaf(name: str, size: int, spread: Spread = "replicated", *, frozen: bool = True, digest: str = "d") -> Leaf:
    return Leaf(name, "float32", (size,), spread, digest, frozen=frozen)


def _report(*leaves: Leaf) -> Report:
    return Report(leaves, json.dumps([{"$tensor": leaf.name} for leaf in leaves]))


_BASE = [_leaf("base.a", 5), _leaf("base.b", 4), _leaf("base.c", 3)]
_LORA = _leaf("lora", 2, frozen=False)


def test_frozen_leaves_lie_in_the_frozen_file_and_nowhere_else() -> None:
    """Every leaf is in exactly one of the two files of its rank, the frozen ones in the frozen file."""
    plan = make_plan([_report(*_BASE, _LORA), _report(*_BASE, _LORA)])
    images = [name for rank in range(2) for name in _names(plan.image(rank))]
    frozen = [name for rank in range(2) for name in _names(plan.frozen_image(rank))]
    assert images == ["lora"]
    assert sorted(frozen) == ["base.a", "base.b", "base.c"]
    assert frozen_ranks(plan) == [0, 1]
    assert [item.leaf for item in needed_by(plan, 1)] == ["base.a", "base.b", "base.c"]


def test_nothing_frozen_is_no_file_and_the_plan_of_old() -> None:
    """A plan without frozen leaves has no frozen file, and its body does not speak of any: old hashes stay."""
    plan = make_plan([_report(_LORA)])
    assert plan.frozen_image(0) is None
    assert "frozen" not in plan.body
    assert needed_by(plan, 0) == []


def test_frozen_files_do_not_depend_on_what_is_planned_beside_them() -> None:
    """Optimizer state that is born later, or a new step's plan hash, leaves every frozen file as it is."""
    before = make_plan([_report(*_BASE, _LORA)] * 2)
    state = [_leaf(f"adam{number}", 50, frozen=False) for number in range(3)] + [_leaf("own", 9, "local", frozen=False)]
    after = make_plan([_report(*_BASE, _LORA, *state)] * 2)
    assert before.hash != after.hash
    assert [before.frozen_image(rank) for rank in range(2)] == [after.frozen_image(rank) for rank in range(2)]


def test_a_leaf_that_moves_on_one_rank_is_frozen_on_none() -> None:
    """One rank's word that a leaf changes is enough, and it is still kept once."""
    thawed = replace(_BASE[1], frozen=False)
    plan = make_plan([_report(*_BASE), _report(_BASE[0], thawed, _BASE[2])])
    assert plan.mismatched == ()
    assert [item.leaf for item in plan.items if not item.frozen] == ["base.b"]
    assert [item.leaf for item in needed_by(plan, 0)] == ["base.a", "base.c"]


def test_each_rank_keeps_frozen_tensors_of_its_own() -> None:
    """Local frozen leaves are in each rank's file under its mark, and each rank needs only its own."""
    plan = make_plan([_report(_leaf("own", 3, "local")), _report(_leaf("own", 3, "local"))])
    assert _names(plan.frozen_image(0)) == ["own@rank00000"]
    assert _names(plan.frozen_image(1)) == ["own@rank00001"]
    assert [(item.leaf, item.rank) for item in needed_by(plan, 1)] == [("own", 1)]


def test_a_plan_with_frozen_leaves_comes_back_by_value() -> None:
    """Body and hash survive JSON; a number that points nowhere, or a list in another order, is another plan or none."""
    plan = make_plan([_report(*_BASE, _LORA)])
    body = json.loads(compact(plan.body))
    assert Plan.from_body(body) == plan
    assert Plan.from_body(body).hash == plan.hash
    assert body["frozen"] == [0, 1, 2]
    with pytest.raises(CorruptError, match="item 4 is said to be frozen, there are 4"):
        Plan.from_body({**body, "frozen": [0, 4]})
    with pytest.raises(CorruptError, match="frozen"):
        Plan.from_body({**body, "frozen": [True]})
    assert Plan.from_body({**body, "frozen": [0, 1]}).hash != plan.hash


def _names(image: Any) -> list[str]:
    return [box.name for box, _start in image.places]


@given(json_values)
def test_any_json_names_no_file(value: Any) -> None:
    """Arbitrary JSON in the place of a record's file raises `CorruptError` only."""
    if value is not None:
        with pytest.raises(CorruptError):
            named_by({"frozen": value})


@given(damaged(FrozenFile(_H1, 5000).to_json()))
@settings(max_examples=200)
def test_a_damaged_name_is_corrupt_or_a_name(data: dict[str, Any]) -> None:
    """One thing changed anywhere: `CorruptError`, or a file that comes back by value."""
    try:
        file = FrozenFile.from_json(data, "x")
    except CorruptError:
        return
    assert FrozenFile.from_json(file.to_json(), "x") == file


def _checkpoint(step: int, *hashes: str | None) -> Any:
    at = BoundaryId(step, 1)
    records = [None if each is None else FrozenFile(each, 7).to_json() for each in hashes]
    shards = tuple(shard(at, rank, record={"frozen": record}) for rank, record in enumerate(records))
    return replace(manifest(at), shards=shards, plan=PLAN_A)


def test_a_checkpoint_names_its_frozen_files_once() -> None:
    """Two ranks that name one file need it once; a rank without one needs none; old records say nothing."""
    assert files_of(_checkpoint(1, _H2, _H1)) == (FrozenFile(_H1, 7), FrozenFile(_H2, 7))
    assert files_of(_checkpoint(1, _H2, _H2)) == (FrozenFile(_H2, 7),)
    assert files_of(_checkpoint(1, None, _H2)) == (FrozenFile(_H2, 7),)
    assert files_of(manifest(BoundaryId(1, 1))) == ()


@given(
    st.lists(st.lists(st.sampled_from([_H1, _H2, _H3, None]), min_size=2, max_size=2), max_size=3),
    st.sets(st.sampled_from([_H1, _H2, _H3])),
    st.sets(st.sampled_from([_H1, _H2, _H3])),
)
def test_only_what_nobody_names_may_go(named: list[list[str | None]], present: set[str], held: set[str]) -> None:
    """Neither a file of a manifest, given up or not, nor one that a trainer announced is ever among those to delete."""
    manifests = [_checkpoint(step, *hashes) for step, hashes in enumerate(named)]
    manifests = [made if index % 2 else made.retire(3.0) for index, made in enumerate(manifests)]
    going = set(unnamed(present, manifests, held))
    assert going == {each for each in present if each not in held and all(each not in hashes for hashes in named)}


def test_keys_of_frozen_files_are_told_from_others() -> None:
    """The key of a file gives its hash; nothing else does."""
    assert parse_frozen(frozen_key(_H1)) == _H1
    for key in (
        f"frozen/{_H1}.json",
        f"frozen/{_H1}.ok.json",
        "frozen/x.json",
        f"frozen/{'A' * 32}.json",
        f"plans/{_H1}.json",
        "",
    ):
        assert parse_frozen(key) is None
