"""Ranges against the bytes themselves: every element of a small box written down by number."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.image import Box
from surefoot.core.ranges import (
    Region,
    cut,
    first_hole,
    in_blocks,
    merged,
    region_ranges,
    total_bytes,
    union_elements,
    whole_of,
)

_DTYPES = {"float32": 4, "uint8": 1, "complex128": 16}


@st.composite
def _regions(draw: st.DrawFn, several: int = 1) -> tuple[Box, list[Region]]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    box = Box("t", draw(st.sampled_from(sorted(_DTYPES))), shape, (0,) * len(shape), shape)
    regions = []
    for _ in range(several):
        offset = tuple(draw(st.integers(0, length)) for length in shape)
        lengths = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
        regions.append(Region(offset, lengths))
    return box, regions


def _bytes_of(box: Box, start: int, region: Region) -> set[int]:
    """Every byte, from numpy's own idea of where an element lies."""
    places = np.arange(prod(box.shape)).reshape(box.shape)
    part = places[tuple(slice(o, o + n) for o, n in zip(region.offset, region.lengths, strict=True))]
    size = _DTYPES[box.dtype]
    return {start + size * int(number) + k for number in part.reshape(-1) for k in range(size)}


def _spread(ranges: list[tuple[int, int]]) -> list[int]:
    return [place for start, stop in ranges for place in range(start, stop)]


@given(_regions(), st.integers(0, 5000))
def test_a_region_s_ranges_are_its_bytes(case: tuple[Box, list[Region]], start: int) -> None:
    """Exactly the region's bytes, each once, ascending, and no two ranges touch."""
    box, (region,) = case
    ranges = region_ranges(box, start, region)
    assert _spread(ranges) == sorted(_bytes_of(box, start, region))
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))


@given(_regions(), st.integers(0, 5000), st.integers(1, 64))
def test_short_gaps_change_no_block(case: tuple[Box, list[Region]], start: int, block_bytes: int) -> None:
    """Runs joined over gaps shorter than a block touch the same blocks as the runs themselves."""
    box, (region,) = case
    size_bytes = start + box.size_bytes + 7
    joined = in_blocks(region_ranges(box, start, region, block_bytes), block_bytes, size_bytes)
    touched = {place // block_bytes for place in _bytes_of(box, start, region)}
    assert {place // block_bytes for place in _spread(joined)} == touched
    whole = {p for number in touched for p in range(number * block_bytes, min(size_bytes, (number + 1) * block_bytes))}
    assert _spread(joined) == sorted(whole)


@given(_regions(several=5))
def test_a_union_counts_each_element_once(case: tuple[Box, list[Region]]) -> None:
    """However the regions of several ranks overlap."""
    box, regions = case
    size = _DTYPES[box.dtype]
    union = set[int]().union(*(_bytes_of(box, 0, region) for region in regions))
    assert union_elements(regions) * size == len(union)


_ranges = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 30)).map(lambda r: (r[0], r[0] + r[1])), max_size=8)


@given(_ranges, st.integers(1, 40))
def test_cut_and_merged_keep_every_byte(ranges: list[tuple[int, int]], piece_bytes: int) -> None:
    """Pieces lie within one multiple of the piece's length, and put together they are what was cut."""
    whole = merged(ranges)
    pieces = list(cut(whole, piece_bytes))
    assert _spread(pieces) == _spread(whole) == sorted(set(_spread(ranges)))
    assert all(start // piece_bytes == (stop - 1) // piece_bytes for start, stop in pieces)
    assert total_bytes(whole) == len(set(_spread(ranges)))


@given(_ranges, _ranges)
def test_a_hole_is_seen(have: list[tuple[int, int]], want: list[tuple[int, int]]) -> None:
    """The first hole is a wanted range with a byte that is not there; none means that every byte is."""
    there = set(_spread(have))
    hole = first_hole(merged(have), want)
    missing = [one for one in want if not set(range(*one)) <= there]
    assert hole == (missing[0] if missing else None)


def test_many_narrow_rows_are_one_range() -> None:
    """A column of a tall tensor is no list as long as the tensor, where nobody could tell the difference."""
    box = Box("t", "float32", (1_000_000, 64), (0, 0), (1_000_000, 64))
    column = Region((0, 3), (1_000_000, 2))
    assert region_ranges(box, 4096, column, 1 << 20) == [(4096 + 12, 4096 + 256 * 999_999 + 20)]
    assert column.is_inside(box)
    assert not Region((0, 63), (1, 2)).is_inside(box)
    assert not Region((0,), (1,)).is_inside(box)
    assert region_ranges(box, 0, whole_of(box)) == [(0, box.size_bytes)]
