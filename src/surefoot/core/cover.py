"""Cover: do the blocks of one tensor make up the whole of it, each element once?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from surefoot.core.image import Box


def cover_flaw(boxes: Sequence[Box]) -> str | None:
    """The fault of the blocks of one tensor; None if every element is in exactly one of them.

    Blocks that lie within the whole, do not overlap, and add up to its size leave no hole.
    """
    first = boxes[0]
    for box in boxes:
        if (box.dtype, box.global_shape) != (first.dtype, first.global_shape):
            return "its blocks are of different tensors"
        if not _is_inside(box):
            return f"a block at {list(box.offset)} of shape {list(box.shape)} is not inside {list(box.global_shape)}"
    if (pair := _overlapping(boxes)) is not None:
        return f"the blocks at {list(pair[0].offset)} and {list(pair[1].offset)} overlap"
    have, want = sum(prod(box.shape) for box in boxes), prod(first.global_shape)
    return None if have == want else f"its blocks hold {have} of {want} elements"


def _is_inside(box: Box) -> bool:
    if not len(box.offset) == len(box.shape) == len(box.global_shape):
        return False
    return all(o + n <= whole for o, n, whole in zip(box.offset, box.shape, box.global_shape, strict=True))


def _overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two blocks that share an element, found by a sweep along the axis in which most blocks begin apart."""
    solid = [box for box in boxes if prod(box.shape)]
    if len(solid) < 2 or _lie_in_slabs(solid, range(len(solid[0].shape))):
        return None
    axis = max(range(len(solid[0].shape)), key=lambda axis: len({box.offset[axis] for box in solid}), default=None)
    if axis is None:
        return solid[0], solid[1]
    under_way: list[Box] = []
    for box in sorted(solid, key=lambda box: box.offset[axis]):
        under_way = [other for other in under_way if other.offset[axis] + other.shape[axis] > box.offset[axis]]
        for other in under_way:
            if _meet(box, other):
                return other, box
        under_way.append(box)
    return None


def _lie_in_slabs(boxes: Sequence[Box], axes: Sequence[int]) -> bool:
    """True if the blocks lie in slabs side by side along an axis, and within each again, down to single ones.

    The blocks of a mesh of ranks lie so; then no two of them share an element. False proves nothing. The check is worth
    its lines because a sweep compares each block with all those beside it, which in a mesh are many.
    """
    if len(boxes) < 2:
        return True
    axis = max(axes, key=lambda axis: len({box.offset[axis] for box in boxes}), default=None)
    if axis is None:
        return False
    slabs: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        slabs.setdefault((box.offset[axis], box.shape[axis]), []).append(box)
    edges = sorted(slabs)
    if any(start + length > after for (start, length), (after, _length) in pairwise(edges)):
        return False
    rest = [other for other in axes if other != axis]
    return all(_lie_in_slabs(slab, rest) for slab in slabs.values())


def _meet(one: Box, other: Box) -> bool:
    axes = zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in axes)
