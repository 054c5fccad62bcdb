"""Facts about torch's stock reader and the safetensors format: what "stock tools open it" means, and what it does not.

The reader opens; it does not verify, and it brings tensors only. So `surefoot verify` comes first, and values stand in
the manifest.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException

from surefoot.core.plan import Leaf, Report, make_plan

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


_WHOLE = torch.arange(12.0).view(4, 3)


def _two_shards(directory: Path) -> list[Path]:
    """A tensor of four rows in two ranks' files, laid out as every shard is."""
    blocks = _WHOLE.split(2)
    reports = [
        Report((Leaf("model.w", "float32", (2, 3), "sharded", f"d{rank}", (2 * rank, 0), (4, 3)),), "[]")
        for rank in range(2)
    ]
    plan = make_plan(reports)
    paths = []
    for rank, block in enumerate(blocks):
        image = plan.image(rank)
        data = bytearray(image.size_bytes)
        data[: len(image.header)] = image.header
        ((_box, start),) = image.places
        data[start : start + block.nbytes] = block.contiguous().numpy().tobytes()
        paths.append(directory / f"rank-{rank:05d}-a3f2.safetensors")
        paths[-1].write_bytes(data)
    return paths


def _load(directory: Path, state: dict[str, Any], **planner: Any) -> None:
    reader = HuggingFaceStorageReader(str(directory))
    dcp.load(state, storage_reader=reader, planner=DefaultLoadPlanner(**planner), no_dist=True)


@pytest.mark.holds("readers-do-not-verify")
def test_a_missing_first_file_is_loaded_in_silence(tmp_path: Path) -> None:
    """The reader takes a tensor's size from what it finds: rows of the file that is gone keep what was there."""
    first, _second = _two_shards(tmp_path)
    whole = {"model.w": torch.full((4, 3), -7.0)}
    _load(tmp_path, whole)
    assert torch.equal(whole["model.w"], _WHOLE)
    first.unlink()
    torn = {"model.w": torch.full((4, 3), -7.0)}
    _load(tmp_path, torn)
    assert torn["model.w"][:2].eq(-7.0).all()
    assert torch.equal(torn["model.w"][2:], _WHOLE[2:])


@pytest.mark.holds("values-are-json")
def test_a_value_is_missing_or_stays_what_it_was(tmp_path: Path) -> None:
    """A learning rate is no tensor, so it is in no shard: a strict load refuses, a partial one keeps the old one."""
    _two_shards(tmp_path)
    with pytest.raises(CheckpointException, match="Missing key"):
        _load(tmp_path, {"model.w": torch.zeros(4, 3), "lr": 0.5})
    partly = {"model.w": torch.zeros(4, 3), "lr": 0.5}
    _load(tmp_path, partly, allow_partial_load=True)
    assert torch.equal(partly["model.w"], _WHOLE)
    assert partly["lr"] == 0.5


def _file(path: Path, header: dict[str, Any], data: bytes) -> Path:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def _entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


_REFUSED: dict[str, tuple[dict[str, Any], bytes]] = {
    "a gap": ({"a": _entry("U8", [2], 0, 2), "b": _entry("U8", [2], 3, 5)}, bytes(5)),
    "padding at the end": ({"a": _entry("U8", [2], 0, 2)}, bytes(3)),
    "two names on one range": ({"a": _entry("U8", [2], 0, 2), "b": _entry("U8", [2], 0, 2)}, bytes(2)),
    "metadata that is no text": ({"__metadata__": {"n": 1}, "a": _entry("U8", [2], 0, 2)}, bytes(2)),
    "complex128": ({"a": _entry("C128", [1], 0, 16)}, bytes(16)),
}


@pytest.mark.holds("gapless-format")
@pytest.mark.parametrize("what", _REFUSED)
def test_the_format_refuses(what: str, tmp_path: Path) -> None:
    """Why shards have no gaps and no tail, tied tensors one name, typed metadata only text, odd types as bytes."""
    header, data = _REFUSED[what]
    with pytest.raises(safetensors.SafetensorError):
        load_file(_file(tmp_path / "x.safetensors", header, data))


_TAKEN: dict[str, tuple[dict[str, Any], bytes]] = {
    "no dimension": ({"a": _entry("F32", [], 0, 4)}, bytes(4)),
    "complex64": ({"a": _entry("C64", [1], 0, 8)}, bytes(8)),
    "unsigned words": ({"a": _entry("U16", [1], 0, 2)}, bytes(2)),
    "a gap that a tensor fills": (
        {"a": _entry("U8", [3], 0, 3), "fill": _entry("U8", [1], 3, 4), "b": _entry("F32", [1], 4, 8)},
        bytes(8),
    ),
    "a misaligned tensor": ({"a": _entry("U8", [3], 0, 3), "b": _entry("F32", [1], 3, 7)}, bytes(7)),
}


@pytest.mark.holds("gapless-format")
@pytest.mark.parametrize("what", _TAKEN)
def test_the_format_takes(what: str, tmp_path: Path) -> None:
    """Misaligned ones too: alignment is the writer's own care, by descending element size."""
    header, data = _TAKEN[what]
    assert load_file(_file(tmp_path / "x.safetensors", header, data)).keys() == header.keys()


@pytest.mark.holds("gapless-format")
def test_a_view_into_memory_must_be_aligned_by_its_maker() -> None:
    """torch makes a misaligned view of a buffer without a word: alignment is ours to keep."""
    view = torch.frombuffer(bytearray(struct.pack("<3xf", 1.5)), dtype=torch.float32, offset=3)
    assert view.data_ptr() % 4 == 3
    assert view.tolist() == [1.5]
