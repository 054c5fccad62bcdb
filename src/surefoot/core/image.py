"""The image: one rank's state of one step, as the exact bytes of one .safetensors file.

Layout: 8 bytes little-endian header length, JSON header padded with spaces so that the data starts at a multiple of
4096, then the tensors without gaps, sorted by element size, descending. Why that order: every tensor is then aligned
to its own element size without padding, which the format forbids. The bytes in a slot are the bytes of the file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from surefoot.core.documents import FORMAT_VERSION
from surefoot.core.dtypes import ITEM_BYTES, SAFETENSORS_NAME

PAGE_BYTES = 4096
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class Box:
    """One block of one tensor: its name, type, place in the whole tensor, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True, slots=True)
class Image:
    """Where each box lies in a rank's image."""

    header: bytes
    """The file's first bytes, up to the data."""
    places: tuple[tuple[Box, int], ...]
    """Boxes in file order, each with the offset of its first byte in the image."""
    size_bytes: int


def build_image(boxes: Sequence[Box], plan_hash: str | None, rank: int) -> Image:
    """Lay out a rank's boxes. Names must be unique within the image.

    Args:
        boxes: in any order.
        plan_hash: None for a file that several plans, and any rank, may name: its header names neither.
        rank: whose image it is.
    """
    ordered = sorted(boxes, key=lambda box: (-ITEM_BYTES[box.dtype], box.name))
    entries: dict[str, object] = {}
    offsets: list[int] = []
    end = 0
    for box in ordered:
        offsets.append(end)
        entries[box.name] = _entry(box, end)
        end += box.size_bytes
    header = _header(entries, ordered, plan_hash, rank)
    places = tuple((box, len(header) + offset) for box, offset in zip(ordered, offsets, strict=True))
    return Image(header, places, len(header) + end)


def is_tensor_name(name: str) -> bool:
    """False for the two kinds of text that stock readers of the file take for no tensor's name."""
    return name != _METADATA and not any("\ud800" <= char <= "\udfff" for char in name)


def round_up(size_bytes: int, multiple: int = PAGE_BYTES) -> int:
    return -(-size_bytes // multiple) * multiple


def _entry(box: Box, start: int) -> dict[str, object]:
    name = SAFETENSORS_NAME.get(box.dtype)
    shape = list(box.shape) if name else [box.size_bytes]
    return {"dtype": name or "U8", "shape": shape, "data_offsets": [start, start + box.size_bytes]}


def _header(entries: dict[str, object], boxes: Sequence[Box], plan_hash: str | None, rank: int) -> bytes:
    # torch's stock reader takes a block's place in the whole tensor from this key.
    places = {box.name: {"saved_offsets": list(box.offset) if box.dtype in SAFETENSORS_NAME else [0]} for box in boxes}
    metadata = {
        "format": "pt",
        "surefoot_format": str(FORMAT_VERSION),
        **({} if plan_hash is None else {"surefoot_plan": plan_hash, "surefoot_rank": str(rank)}),
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": json.dumps(places, separators=(",", ":")),
    }
    text = json.dumps({_METADATA: metadata, **entries}, separators=(",", ":")).encode("ascii")
    total = round_up(8 + len(text))
    return struct.pack("<Q", total - 8) + text + b" " * (total - 8 - len(text))
