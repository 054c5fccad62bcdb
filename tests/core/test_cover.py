"""Blocks of one tensor: an exact cover is accepted, everything else is named; sharded leaves in a plan."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.cover import cover_flaw
from surefoot.core.image import Box
from surefoot.core.plan import Leaf, Plan, Report, make_plan
from surefoot.errors import CorruptError, UnsupportedStateError


def _boxes(whole: tuple[int, ...], places: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[Box]:
    return [Box("w", "float32", shape, offset, whole) for offset, shape in places]


def _counts(boxes: Sequence[Box]) -> set[int]:
    """In how many blocks the elements are: counted one by one."""
    cells = itertools.product(*(range(n) for n in boxes[0].global_shape))
    return {
        sum(all(o <= c < o + n for c, o, n in zip(cell, box.offset, box.shape, strict=True)) for box in boxes)
        for cell in cells
    }


@st.composite
def _cuts(draw: st.DrawFn) -> list[Box]:
    """A tensor cut again and again at random places: blocks that lie in no grid."""
    whole = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    blocks = [((0,) * len(whole), whole)]
    for _ in range(draw(st.integers(0, 5))):
        offset, shape = blocks.pop(draw(st.integers(0, len(blocks) - 1)))
        axis = draw(st.integers(0, len(whole) - 1))
        at = draw(st.integers(0, shape[axis]))
        first = (offset, (*shape[:axis], at, *shape[axis + 1 :]))
        moved = (*offset[:axis], offset[axis] + at, *offset[axis + 1 :])
        blocks += [first, (moved, (*shape[:axis], shape[axis] - at, *shape[axis + 1 :]))]
    return _boxes(whole, draw(st.permutations(blocks)))


@given(_cuts())
def test_a_tensor_cut_into_blocks_is_covered(boxes: list[Box]) -> None:
    """Whatever the cuts and their order, empty blocks among them."""
    assert cover_flaw(boxes) is None


@given(_cuts(), st.randoms(use_true_random=False))
def test_a_block_moved_grown_lost_or_doubled_is_a_flaw_exactly_if_counting_says_so(
    boxes: list[Box], chance: random.Random
) -> None:
    """The sweep agrees with counting every element."""
    spoiled = list(boxes)
    index = chance.randrange(len(spoiled))
    box, axis = spoiled[index], chance.randrange(len(boxes[0].global_shape))
    step = chance.choice([-1, 1])
    deed = chance.choice(["move", "grow", "lose", "double"])
    changed = list(box.offset if deed == "move" else box.shape)
    changed[axis] += step
    if deed == "lose" and len(spoiled) > 1:
        spoiled.pop(index)
    elif deed == "double":
        spoiled.append(box)
    elif changed[axis] >= 0:
        place = {"offset": tuple(changed)} if deed == "move" else {"shape": tuple(changed)}
        spoiled[index] = replace(box, **place)  # type: ignore[arg-type]
    inside = all(o + n <= whole for b in spoiled for o, n, whole in zip(b.offset, b.shape, b.global_shape, strict=True))
    assert (cover_flaw(spoiled) is None) == (inside and _counts(spoiled) == {1})


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ([((0, 0), (2, 4))], "hold 8 of 16"),
        ([((0, 0), (3, 4)), ((2, 0), (2, 4))], "overlap"),
        ([((0, 0), (2, 4)), ((0, 0), (2, 4))], "overlap"),
        ([((0, 0), (2, 4)), ((2, 1), (2, 4))], "not inside"),
        ([((0, 0), (2, 4)), ((2,), (2,))], "not inside"),
        ([((0, 0), (2, 3)), ((2, 0), (2, 4)), ((0, 2), (2, 2))], "overlap"),
    ],
)
def test_flaws_by_name(places: list[tuple[tuple[int, ...], tuple[int, ...]]], says: str) -> None:
    """Holes, overlaps and blocks outside, each with its own words."""
    assert says in str(cover_flaw(_boxes((4, 4), places)))


def test_a_scalar_and_an_empty_tensor() -> None:
    """One block of a 0-dim tensor covers it, two do not; an empty tensor needs no element."""
    assert cover_flaw(_boxes((), [((), ())])) is None
    assert cover_flaw(_boxes((), [((), ()), ((), ())])) is not None
    assert cover_flaw(_boxes((0, 3), [((0, 0), (0, 3))])) is None


def test_blocks_of_different_tensors() -> None:
    """Another type or another whole shape is no block of the same tensor."""
    one = Box("w", "float32", (2,), (0,), (4,))
    for other in (Box("w", "int32", (2,), (2,), (4,)), Box("w", "float32", (2,), (2,), (5,))):
        assert cover_flaw([one, other]) == "its blocks are of different tensors"


# ---------------------------------------------------------------------- in a plan


def _leaf(offset: int, rows: int, whole: int = 7, digest: str = "", dtype: str = "float32") -> Leaf:
    return Leaf("w", dtype, (rows, 3), "sharded", digest, (offset, 0), (whole, 3))


def _plan(*leaves: Leaf | None) -> Plan:
    structure = json.dumps({"$tensor": "w", "whole": [7, 3]})
    return make_plan([Report((leaf,) if leaf else (), structure) for leaf in leaves])


def test_every_rank_keeps_its_own_block_under_one_name() -> None:
    """Four ranks, the last with nothing: three blocks of one name, each at its place; the empty one is no block."""
    plan = _plan(_leaf(0, 3), _leaf(3, 3), _leaf(6, 1), _leaf(7, 0))
    assert [(i.rank, i.spread, i.box.name, i.box.offset, i.box.shape) for i in plan.items] == [
        (0, "sharded", "w", (0, 0), (3, 3)),
        (1, "sharded", "w", (3, 0), (3, 3)),
        (2, "sharded", "w", (6, 0), (1, 3)),
    ]
    assert Plan.from_body(plan.body) == plan
    assert plan.sources(0) == {}
    assert [item.rank for item in plan.blocks["w"]] == [0, 1, 2]


@pytest.mark.holds("replicas-once")
def test_a_block_that_several_ranks_have_is_kept_once_by_balanced_owners() -> None:
    """Two replicas of two blocks: each block once, and the owners share the bytes."""
    leaves = [[Leaf(f"l{k}", "int8", (4,), "sharded", "d", (4 * (r % 2),), (8,)) for k in range(6)] for r in range(4)]
    plan = make_plan([Report(tuple(mine), "[]") for mine in leaves])
    assert len(plan.items) == 12
    assert [sum(item.box.size_bytes for item in plan.items if item.rank == rank) for rank in range(4)] == [12] * 4
    assert all(item.box.offset == (4 * (item.rank % 2),) for item in plan.items)


@pytest.mark.parametrize("digests", [("a", "b"), ("a", ""), ("", "")])
def test_replicas_not_proven_equal_are_kept_by_each_rank_and_named(digests: tuple[str, str]) -> None:
    """Blocks that should be the same and are not, or cannot be shown to be: nobody's is dropped."""
    plan = _plan(_leaf(0, 7, digest=digests[0]), _leaf(0, 7, digest=digests[1]))
    assert plan.mismatched == ("w",)
    assert [(i.rank, i.spread, i.box.name) for i in plan.items] == [
        (0, "local", "w@rank00000"),
        (1, "local", "w@rank00001"),
    ]
    assert all(prod(item.box.shape) == 21 for item in plan.items)


@pytest.mark.holds("plan-is-exact")
@pytest.mark.parametrize(
    ("leaves", "says"),
    [
        ((_leaf(0, 3), _leaf(4, 3)), "w: its blocks hold 18 of 21 elements"),
        ((_leaf(0, 4), _leaf(3, 4)), r"w: the blocks at \[0, 0\] and \[3, 0\] overlap"),
        ((_leaf(0, 3), _leaf(3, 4, whole=8)), "w: its blocks are of different tensors"),
        ((_leaf(0, 3), _leaf(3, 4, dtype="int32")), "w: its blocks are of different tensors"),
        ((_leaf(0, 3), None), "w: its blocks hold 9 of 21"),
        ((_leaf(0, 7, digest="d"), Leaf("w", "float32", (7, 3), "local")), "w: is sharded on some ranks"),
    ],
)
def test_a_sharding_that_is_no_cover_is_refused_by_name(leaves: tuple[Leaf | None, ...], says: str) -> None:
    """When the plan is made: before anything is written."""
    with pytest.raises(UnsupportedStateError, match=says):
        _plan(*leaves)


def test_an_empty_tensor_has_one_block() -> None:
    """Nothing to keep, but its name and shape stay."""
    plan = _plan(*(Leaf("w", "float32", (0, 3), "sharded", "", (0, 0), (0, 3)) for _ in range(3)))
    assert [(item.rank, item.box.shape) for item in plan.items] == [(0, (0, 3))]


def test_types_that_stock_readers_do_not_know_keep_blocks_apart() -> None:
    """Kept as bytes at offset 0, blocks of one name would be taken for one another."""
    plan = _plan(_leaf(0, 3, dtype="complex128"), _leaf(3, 4, dtype="complex128"))
    assert [item.box.name for item in plan.items] == ["w@rank00001", "w@rank00000"]
    assert Plan.from_body(plan.body) == plan
    assert len(plan.blocks["w"]) == 2


@pytest.mark.holds("plan-is-exact")
@pytest.mark.parametrize("deed", ["lose", "move", "double", "rename", "shrink"])
def test_a_damaged_cover_is_refused_when_a_plan_is_read(deed: str) -> None:
    """A block lost, moved, doubled, put under another leaf, or cut: CorruptError, not a hole in a tensor."""
    body = json.loads(json.dumps(_plan(_leaf(0, 3), _leaf(3, 3), _leaf(6, 1)).body))
    item = body["items"][1]
    if deed == "lose":
        body["items"].remove(item)
    elif deed == "move":
        item[5] = [2, 0]
    elif deed == "double":
        body["items"].append(item)
    elif deed == "rename":
        item[0] = "v"
    else:
        item[4] = [3, 2]
    with pytest.raises(CorruptError, match="w"):
        Plan.from_body(body)
