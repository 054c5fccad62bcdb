"""Plans of many ranks: what is looked up once is what a search through everything finds, and is looked up once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from surefoot.core import cover
from surefoot.core.cover import cover_flaw
from surefoot.core.documents import compact
from surefoot.core.image import Box, build_image
from surefoot.core.plan import Item, Leaf, Plan, Report, check_cover, make_plan, structure_leaves
from surefoot.errors import CorruptError


def _reports(seed: int, ranks: int) -> list[Report]:
    """Replicated, local and sharded leaves, some of them frozen; two structures."""
    dice = random.Random(seed)
    common = [Leaf(f"r{n}", "float32", (dice.randint(1, 9),), "replicated", "d", frozen=n == 0) for n in range(4)]
    reports = []
    for rank in range(ranks):
        blocks = [Leaf(f"s{n}", "bfloat16", (2, 3), "sharded", "", (2 * rank, 0), (2 * ranks, 3)) for n in range(3)]
        own = [Leaf(f"own{n}", "int64", (rank + 1,), "local") for n in range(1 + rank % 2)]
        leaves = [*common, *blocks, *own]
        structure = compact({leaf.name: {"$tensor": leaf.name} for leaf in leaves}).decode()
        reports.append(Report(tuple(leaves), structure))
    return reports


def _sources_by_search(plan: Plan, rank: int) -> dict[str, Item]:
    mine: dict[str, Item] = {}
    for item in plan.items:
        if item.spread == "replicated" or (item.spread == "local" and item.rank == rank):
            mine[item.leaf] = item
    return mine


@pytest.mark.parametrize("seed", range(20))
def test_what_is_looked_up_is_what_a_search_finds(seed: int) -> None:
    """Sources, images and frozen images of every rank, against going through all items for each."""
    plan = make_plan(_reports(seed, 1 + seed % 7))
    for rank in range(plan.world_size):
        assert plan.sources(rank) == _sources_by_search(plan, rank)
        boxes = [item.box for item in plan.items if item.rank == rank and not item.frozen]
        assert plan.image(rank) == build_image(boxes, plan.hash, rank)
        frozen = [item.box for item in plan.items if item.rank == rank and item.frozen]
        assert plan.frozen_image(rank) == (build_image(frozen, None, rank) if frozen else None)
        assert list(plan.kept_by(rank)) == [item for item in plan.items if item.rank == rank]
        for name in structure_leaves(plan.structure(rank)):
            assert name in plan.sources(rank) or name in plan.blocks


@pytest.mark.parametrize("seed", range(10))
def test_a_leaf_that_one_rank_lacks_is_named_with_the_rank(seed: int) -> None:
    """Of two structures, that of one rank names a tensor of its own that nobody keeps for it."""
    plan = make_plan(_reports(seed, 5))
    victim = next(item for item in plan.items if item.spread == "local" and item.rank == 3)
    spoiled = replace(plan, items=tuple(item for item in plan.items if item is not victim))
    with pytest.raises(CorruptError, match=f"no rank keeps {victim.leaf!r} of rank 3"):
        check_cover(spoiled, "plan")


class _Counting(tuple[Item, ...]):
    """Items that count how often they are gone through."""

    times = 0

    def __iter__(self) -> Iterator[Item]:
        type(self).times += 1
        return super().__iter__()


def test_items_are_gone_through_as_often_for_many_ranks_as_for_few() -> None:
    """Checking the cover and laying out every rank's image: the same number of passes at 3 and at 60 ranks."""
    passes = []
    for ranks in (3, 60):
        plan = make_plan(_reports(1, ranks))
        _Counting.times = 0
        counted = replace(plan, items=_Counting(plan.items))
        check_cover(counted, "plan")
        assert sum(counted.image(rank).size_bytes > 0 for rank in range(ranks)) == ranks
        passes.append(_Counting.times)
    assert passes[0] == passes[1]


def _mesh(down: int, across: int) -> list[Box]:
    whole = (2 * down, 3 * across)
    return [Box("w", "float32", (2, 3), (2 * y, 3 * x), whole) for y in range(down) for x in range(across)]


def test_blocks_of_a_mesh_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one pair is looked at if they lie in slabs; a pair that overlaps is still found and named."""
    compared: list[Any] = []
    meet = cover._meet
    monkeypatch.setattr(cover, "_meet", lambda one, other: compared.append(one) or meet(one, other))
    boxes = _mesh(16, 16)
    random.Random(1).shuffle(boxes)
    assert cover_flaw(boxes) is None
    assert compared == []
    moved = [replace(box, offset=(2, 2)) if box.offset == (2, 3) else box for box in boxes]
    assert cover_flaw(moved) in ("the blocks at [2, 0] and [2, 2] overlap", "the blocks at [2, 2] and [2, 0] overlap")


def test_blocks_in_no_slabs_are_swept() -> None:
    """A pinwheel has no slab along any axis, and is a cover all the same."""
    places = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    boxes = [Box("w", "float32", shape, offset, (3, 3)) for offset, shape in places]
    assert cover_flaw(boxes) is None
