"""The image: where each tensor lies in the file."""

from __future__ import annotations

import json
import struct
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.dtypes import ITEM_BYTES, SAFETENSORS_NAME
from surefoot.core.image import PAGE_BYTES, Box, build_image, round_up

_shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
_boxes = st.lists(
    st.builds(
        lambda name, dtype, shape: Box(name, dtype, shape, (0,) * len(shape), shape),
        st.text(max_size=12).filter(lambda name: name != "__metadata__"),
        st.sampled_from(sorted(ITEM_BYTES)),
        _shapes,
    ),
    max_size=12,
    unique_by=lambda box: box.name,
)


@pytest.mark.holds("gapless-format")
@given(_boxes, st.integers(0, 99999))
def test_tensors_lie_aligned_and_without_gaps(boxes: list[Box], rank: int) -> None:
    """Data starts at a page, every tensor at a multiple of its element size, each where the one before it ends."""
    image = build_image(boxes, "a" * 32, rank)
    assert len(image.header) % PAGE_BYTES == 0
    place = len(image.header)
    for box, start in image.places:
        assert start == place
        assert start % ITEM_BYTES[box.dtype] == 0
        assert box.size_bytes == ITEM_BYTES[box.dtype] * prod(box.shape)
        place += box.size_bytes
    assert image.size_bytes == place
    assert sorted(box.name for box, _start in image.places) == sorted(box.name for box in boxes)


@given(_boxes)
def test_the_header_describes_the_places(boxes: list[Box]) -> None:
    """Length word, JSON and padding are exact; each entry has the range of `places` and a type known to all."""
    image = build_image(boxes, "b" * 32, 3)
    (length,) = struct.unpack("<Q", image.header[:8])
    assert length == len(image.header) - 8
    text = image.header[8:]
    header = json.loads(text)
    assert text.rstrip(b" ") == json.dumps(header, separators=(",", ":")).encode()
    metadata = header.pop("__metadata__")
    assert metadata["surefoot_plan"] == "b" * 32
    assert metadata["surefoot_rank"] == "3"
    assert all(type(value) is str for value in metadata.values())
    assert len(header) == len(boxes)
    for box, start in image.places:
        offset = start - len(image.header)
        known = box.dtype in SAFETENSORS_NAME
        assert header[box.name] == {
            "dtype": SAFETENSORS_NAME.get(box.dtype, "U8"),
            "shape": list(box.shape) if known else [box.size_bytes],
            "data_offsets": [offset, offset + box.size_bytes],
        }


@given(_boxes, st.randoms())
def test_the_layout_does_not_depend_on_the_order_of_the_boxes(boxes: list[Box], shuffler: object) -> None:
    """The same boxes in any order make the same bytes."""
    mixed = list(boxes)
    shuffler.shuffle(mixed)  # type: ignore[attr-defined]
    assert build_image(mixed, "a" * 32, 0) == build_image(boxes, "a" * 32, 0)


def test_an_image_of_nothing_is_one_page() -> None:
    """A rank that keeps no tensor has an image of a header alone."""
    image = build_image([], "a" * 32, 0)
    assert (image.size_bytes, image.places) == (PAGE_BYTES, ())
    assert image.header[-1:] == b" "


def test_a_header_that_fills_a_page_is_not_padded_further() -> None:
    """Header lengths around a page's end: never short, never a page too many."""
    sizes = set()
    for length in range(3400, 3800):
        box = Box("x" * length, "uint8", (1,), (0,), (1,))
        header = build_image([box], "a" * 32, 0).header
        used = len(header.rstrip(b" "))
        assert len(header) == round_up(used)
        assert len(header) - used < PAGE_BYTES
        sizes.add(len(header) // PAGE_BYTES)
    assert sizes == {2}


@given(st.integers(0, 2**70), st.integers(1, 2**20))
def test_rounding_up_is_exact(size_bytes: int, multiple: int) -> None:
    """The result is the smallest multiple that is not less."""
    rounded = round_up(size_bytes, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - size_bytes < multiple


def test_the_formats_types_are_a_part_of_ours() -> None:
    """Every type with a name in the format has a size, and sizes are what the names say."""
    for dtype, name in SAFETENSORS_NAME.items():
        bits = 8 if name == "BOOL" else int("".join(c for c in name.split("_")[0] if c.isdigit()))
        assert ITEM_BYTES[dtype] * 8 == bits
