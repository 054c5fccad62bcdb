"""An image is a file that stock readers open: the format's own library and torch's reader, bit by bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from surefoot.core.dtypes import ITEM_BYTES, SAFETENSORS_NAME
from surefoot.core.image import Box, Image, build_image
from surefoot.core.plan import Leaf, Plan, Report, make_plan

_SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (7,), (2, 3), (5, 1, 3)]


def _bits(dtype: str, shape: tuple[int, ...], seed: int) -> bytes:
    """Random bytes for a tensor: every bit pattern that its type allows, NaN payloads among them."""
    count = torch.Size(shape).numel() * ITEM_BYTES[dtype]
    data = random.Random(seed).randbytes(count)
    return bytes(byte & 1 for byte in data) if dtype == "bool" else data


def _boxes() -> list[Box]:
    return [
        Box(f"layer.{dtype}.{index}", dtype, shape, (0,) * len(shape), shape)
        for dtype in sorted(ITEM_BYTES)
        for index, shape in enumerate(_SHAPES)
    ]


def _file(image: Image) -> tuple[bytes, dict[str, bytes]]:
    data = bytearray(image.size_bytes)
    data[: len(image.header)] = image.header
    contents = {}
    for seed, (box, start) in enumerate(image.places):
        contents[box.name] = _bits(box.dtype, box.shape, seed)
        data[start : start + box.size_bytes] = contents[box.name]
    return bytes(data), contents


def _raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


@pytest.mark.holds("stock-readers")
def test_the_formats_library_reads_every_type_and_shape_bit_by_bit() -> None:
    """The format's parser accepts the file and finds every tensor's name, type, shape and bytes."""
    data, contents = _file(build_image(_boxes(), "a" * 32, 0))
    found = dict(safetensors.deserialize(data))
    assert found.keys() == contents.keys()
    for box in _boxes():
        entry = found[box.name]
        known = SAFETENSORS_NAME.get(box.dtype)
        assert bytes(entry["data"]) == contents[box.name]
        assert entry["dtype"] == (known or "U8")
        assert tuple(entry["shape"]) == (box.shape if known else (box.size_bytes,))


def test_torch_gets_every_tensor_from_the_formats_library(tmp_path: Path) -> None:
    """Opened with torch tensors, each known type has its own dtype and exact bits; the others are bytes."""
    image = build_image(_boxes(), "a" * 32, 5)
    data, contents = _file(image)
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with safetensors.safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
        for box in _boxes():
            tensor = opened.get_tensor(box.name)
            known = box.dtype in SAFETENSORS_NAME
            assert tensor.dtype == (getattr(torch, box.dtype) if known else torch.uint8)
            assert tuple(tensor.shape) == (box.shape if known else (box.size_bytes,))
            assert _raw(tensor) == contents[box.name]
    assert (metadata["surefoot_plan"], metadata["surefoot_rank"]) == ("a" * 32, "5")


@pytest.mark.holds("gapless-format")
def test_a_type_that_the_format_lacks_comes_back_by_a_view() -> None:
    """Tensors kept as bytes are themselves again when viewed as the type that the plan names."""
    data, contents = _file(build_image(_boxes(), "a" * 32, 0))
    found = dict(safetensors.deserialize(data))
    for dtype in ("complex128", "complex32", "float8_e8m0fnu", "float8_e4m3fnuz", "float4_e2m1fn_x2"):
        for index, shape in enumerate(_SHAPES):
            raw = bytearray(found[f"layer.{dtype}.{index}"]["data"])
            whole = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
            tensor = whole.view(getattr(torch, dtype)).reshape(shape)
            assert _raw(tensor) == contents[f"layer.{dtype}.{index}"]


def test_names_of_every_kind_are_read(tmp_path: Path) -> None:
    """Dots, quotes, newlines, other alphabets and 400 characters are names like any other, to both readers."""
    names = ["a.b.c", "重み", "😀", "line\nbreak", 'quote"\\', "x" * 400, "", " ", "\u2028", "../up", "a/b"]
    data, contents = _file(build_image([Box(name, "int16", (2,), (0,), (2,)) for name in names], "a" * 32, 0))
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with safetensors.safe_open(path, framework="pt") as opened:
        assert set(opened.keys()) == set(names)
        assert {name: _raw(opened.get_tensor(name)) for name in names} == contents


def test_a_file_that_lost_or_gained_a_byte_is_refused() -> None:
    """The layout leaves no slack: the format's parser refuses the file with one byte less or more."""
    data, _contents = _file(build_image(_boxes(), "a" * 32, 0))
    for bad in (data[:-1], data + b"\0", data[:100], b""):
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(bad)


def _two_rank_plan() -> Plan:
    shared = [
        Leaf(f"model.{dtype}.{index}", dtype, shape, "replicated", "d")
        for dtype in sorted(SAFETENSORS_NAME)
        for index, shape in enumerate(_SHAPES)
    ]
    reports = [Report((*shared, Leaf("own", "float32", (3 + rank,), "local")), "[]") for rank in range(2)]
    return make_plan(reports)


@pytest.mark.holds("stock-readers")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_stock_reader_loads_a_two_rank_directory_bit_by_bit(tmp_path: Path) -> None:
    """`HuggingFaceStorageReader` loads what two ranks wrote, into a plain dictionary, with every bit in place."""
    plan = _two_rank_plan()
    expected: dict[str, bytes] = {}
    boxes: dict[str, Box] = {}
    for rank in range(2):
        image = plan.image(rank)
        data, contents = _file(image)
        assert image.places, "both ranks must have a part"
        expected |= contents
        boxes |= {box.name: box for box, _start in image.places}
        (tmp_path / f"rank-{rank:05d}-a3f2.safetensors").write_bytes(data)
    state = {
        name: torch.full(box.shape, 1, dtype=torch.uint8).to(getattr(torch, box.dtype)) for name, box in boxes.items()
    }
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert set(state) == set(expected)
    assert {name for name in state if _raw(state[name]) != expected[name]} == set()
    assert {"own@rank00000", "own@rank00001"} <= set(state)
