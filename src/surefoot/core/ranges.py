"""Ranges: which bytes of an image a region of one of its boxes is, and which blocks of sums they lie in.

A range is a pair of byte offsets, the second not included. Lists of ranges are ascending and disjoint.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from surefoot.core.dtypes import ITEM_BYTES
from surefoot.core.image import Box

Range = tuple[int, int]


@dataclass(frozen=True, order=True, slots=True)
class Region:
    """A part of a box: offsets within the box, and lengths."""

    offset: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.lengths)

    def is_inside(self, box: Box) -> bool:
        if not len(self.offset) == len(self.lengths) == len(box.shape):
            return False
        return all(
            o >= 0 and n >= 0 and o + n <= s for o, n, s in zip(self.offset, self.lengths, box.shape, strict=True)
        )


def whole_of(box: Box) -> Region:
    return Region((0,) * len(box.shape), box.shape)


def region_ranges(box: Box, start: int, region: Region, gap_bytes: int = 0) -> list[Range]:
    """The bytes of a region, of a box whose first byte is at `start`.

    Runs that are less than `gap_bytes` apart are given as one: a region of many narrow rows would come to a list as
    long as the tensor. Nothing is hidden by that from whoever looks at blocks of `gap_bytes` and more: a gap shorter
    than a block holds no whole block.
    """
    if not region.elements:
        return []
    item_bytes = ITEM_BYTES[box.dtype]
    return merged(_runs(box.shape, region.offset, region.lengths, item_bytes, start, gap_bytes), gap_bytes)


def _runs(
    shape: Sequence[int], offset: Sequence[int], lengths: Sequence[int], item_bytes: int, start: int, gap_bytes: int
) -> Iterator[Range]:
    if not shape:
        yield start, start + item_bytes
        return
    row_bytes = item_bytes * prod(shape[1:])
    first = start + offset[0] * row_bytes
    inner = list(_runs(shape[1:], offset[1:], lengths[1:], item_bytes, 0, gap_bytes))
    low, high = inner[0][0], inner[-1][1]
    # From a row's last byte to the next row's first one.
    between = row_bytes - (high - low)
    if len(inner) == 1 and (between == 0 or between < gap_bytes):
        yield first + low, first + (lengths[0] - 1) * row_bytes + high
        return
    for row in range(lengths[0]):
        yield from ((first + row * row_bytes + a, first + row * row_bytes + b) for a, b in inner)


def merged(ranges: Iterable[Range], gap_bytes: int = 0) -> list[Range]:
    """Ranges in any order, those that touch or are less than `gap_bytes` apart made one."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and (start <= found[-1][1] or start - found[-1][1] < gap_bytes):
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def in_blocks(ranges: Iterable[Range], block_bytes: int, size_bytes: int) -> list[Range]:
    """The blocks that ranges touch, as ranges; the last block of `size_bytes` may be shorter."""
    rounded = (
        (start // block_bytes * block_bytes, min(size_bytes, -(-stop // block_bytes) * block_bytes))
        for start, stop in ranges
    )
    return merged(rounded)


def cut(ranges: Iterable[Range], piece_bytes: int) -> Iterator[Range]:
    """Ranges in pieces that end at multiples of `piece_bytes`."""
    for start, stop in ranges:
        while start < stop:
            end = min(stop, (start // piece_bytes + 1) * piece_bytes)
            yield start, end
            start = end


def total_bytes(ranges: Iterable[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def first_hole(have: Sequence[Range], want: Iterable[Range]) -> Range | None:
    """The first wanted range that is not wholly within one that is there."""
    for start, stop in want:
        place = bisect_right(have, start, key=lambda one: one[0]) - 1
        if place < 0 or stop > have[place][1]:
            return start, stop
    return None


def union_elements(regions: Iterable[Region]) -> int:
    """How many elements lie in at least one of the regions of one box."""
    return _union([tuple(zip(r.offset, r.lengths, strict=True)) for r in set(regions) if r.elements])


def _union(boxes: Sequence[tuple[tuple[int, int], ...]]) -> int:
    """By slabs along the first axis: between two neighbouring edges the same boxes are there throughout."""
    if not boxes or not boxes[0]:
        return len(boxes[:1])
    edges = sorted({edge for (start, length), *_rest in boxes for edge in (start, start + length)})
    count = 0
    for low, high in pairwise(edges):
        inside = {tuple(rest) for (start, length), *rest in boxes if start <= low and high <= start + length}
        count += (high - low) * _union(sorted(inside))
    return count
