"""Every kind of tensor and value through a slot and back: the same bits, the same types."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from through_a_slot import bits, flatten, register, report, round_trip, stage

from surefoot.core.plan import make_plan
from surefoot.errors import ConfigError, UnsupportedStateError

_F8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


def _from_bytes(data: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(data, dtype=torch.uint8).view(dtype)


def _zoo() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    raw = torch.randint(0, 256, (4096,), generator=generator, dtype=torch.uint8)
    image = torch.randn(2, 3, 4, 5, generator=generator)
    zoo = {
        "scalar": torch.tensor(1.5),
        "scalar_int": torch.tensor(-(2**63)),
        "empty": torch.empty(0),
        "empty_rows": torch.empty(0, 5, dtype=torch.int16),
        "bool": torch.tensor([True, False, True]),
        "uint8": raw[:7],
        "uint16": torch.tensor([0, 1, 65535], dtype=torch.uint16),
        "uint32": torch.tensor([0, 2**32 - 1], dtype=torch.uint32),
        "uint64": torch.tensor([2**63 + 5, 0], dtype=torch.uint64),
        "int8": torch.arange(-128, 128, dtype=torch.int8),
        "complex32": raw[:64].view(torch.complex32),
        "complex64": torch.tensor([1 + 2j, complex(math.nan, -0.0)]),
        "complex128": torch.tensor([1e300 - 2j], dtype=torch.complex128),
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "conj128": torch.tensor([[1 + 2j, 3 - 4j]], dtype=torch.complex128).t().conj(),
        "conj32": torch.tensor([1 + 2j, 3 - 4j]).to(torch.complex32).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "bfloat16_nans": _from_bytes([0x01, 0x7F, 0xAB, 0xFF, 0x00, 0x80, 0xC1, 0x7F], torch.bfloat16),
        "float16_nans": _from_bytes([0x01, 0x7C, 0xFF, 0xFF, 0x00, 0x80], torch.float16),
        "float32_nans": _from_bytes([1, 0, 0x80, 0x7F, 0xAB, 0xCD, 0xEF, 0xFF, 0, 0, 0, 0x80], torch.float32),
        "float64_nans": _from_bytes([1, 2, 3, 4, 5, 6, 0xF0, 0x7F], torch.float64),
        "transposed": torch.arange(6).view(2, 3).t(),
        "channels_last": image.to(memory_format=torch.channels_last),
        "stride2": torch.arange(10, dtype=torch.float64)[::2],
        "expanded": torch.ones(1).expand(5),
        "offset_view": torch.arange(100, dtype=torch.int32)[90:],
        "parameter": torch.nn.Parameter(torch.randn(3, generator=generator)),
        "buffer": torch.nn.Buffer(torch.randn(3, generator=generator)),
        "high_dim": torch.arange(2, dtype=torch.uint8).view([1] * 20 + [2]),
    }
    for dtype in _F8:
        name = str(dtype).removeprefix("torch.")
        zoo[name] = raw[:256].view(dtype)
        zoo[f"{name}_strided"] = raw[:256].view(dtype).view(16, 16).t()
    zoo["float4"] = raw[:16].view(torch.float4_e2m1fn_x2)
    return zoo


@pytest.mark.holds("unusual-tensors")
@pytest.mark.parametrize("name", _zoo())
def test_a_tensor_comes_back_with_the_same_bits(name: str) -> None:
    """Each kind of tensor, alone as a registered value: dtype, shape and every bit."""
    tensor = _zoo()[name]
    before = bits(tensor)
    state = round_trip({"x": {"t": tensor}}, {"x": {}})
    assert bits(state["x"]["t"]) == before
    assert bits(tensor) == before


def test_the_whole_zoo_comes_back_from_one_image() -> None:
    """All kinds side by side, so that alignment and order in the image matter; loaded in place where tensors exist."""
    zoo = _zoo()
    loadable = {name: value for name, value in zoo.items() if name not in ("expanded", "float4")}
    fresh = {
        name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype) for name, value in loadable.items()
    }
    before = {name: bits(value) for name, value in loadable.items()}
    round_trip(loadable, fresh)
    assert {name: bits(value) for name, value in fresh.items()} == before
    assert fresh["channels_last"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("depth", [1, 7, 40])
def test_tensors_at_odd_depths_keep_their_places(depth: int) -> None:
    """Dicts, lists, tuples and ordered dicts around tensors come back as what they were."""
    tree: Any = torch.arange(3)
    for level in range(depth):
        around = [{"k": tree, "n": level}, [tree, None], (level, tree), OrderedDict(b=1, a=tree)]
        tree = around[level % 4]
    before = bits(tree)
    state = round_trip({"x": tree}, {"x": None})
    assert bits(state["x"]) == before


@pytest.mark.holds("names-collide")
def test_odd_keys_stay_apart() -> None:
    """Keys that print alike, collide when joined by dots, or would be no file's name."""
    t = torch.arange
    tree = {
        "a": {"b": t(1)},
        "a.b": t(2),
        1: t(3),
        "1": t(4),
        "": t(5),
        "../x": t(6),
        "a/b": t(7),
        "ключ": t(8),
        "a b\n": t(9),
        "k" * 400: t(10),
        (1, 2): t(11),
        None: t(12),
        False: t(13),
        2.5: t(14),
        b"raw": t(15),
        "a.b~2": t(16),
        "__metadata__": t(17),
    }
    before = bits(tree)
    state = round_trip({"x": tree}, {"x": {}})
    assert bits(state["x"]) == before


@pytest.mark.holds("slice-costs-whole")
def test_a_view_costs_its_own_size() -> None:
    """One element of a 4 MB tensor is kept in one page, not in 4 MB; an expanded tensor in its shown size."""
    big = torch.zeros(1 << 20)
    image = make_plan([report(flatten(register({"v": big[:1], "e": torch.ones(1).expand(5)})))]).image(0)
    assert image.size_bytes - len(image.header) == 4 + 20


@pytest.mark.holds("tied-once", "tied-weights")
def test_tied_tensors_are_kept_once_and_tied_again() -> None:
    """Two names of one tensor cost its bytes once; a module stays tied, and a plain tree is tied again."""
    emb, head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False)
    head.weight = emb.weight
    shared = torch.arange(5.0)
    saved = {"model": torch.nn.Sequential(emb, head), "tree": {"a": shared, "b": [shared]}}
    staged = stage(register(saved))
    assert len(staged.plan.items) == 2
    emb2, head2 = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False)
    head2.weight = emb2.weight
    state: dict[str, Any] = {}
    staged.load_into(register({"model": torch.nn.Sequential(emb2, head2), "tree": {}}, state))
    assert bits(emb2.weight) == bits(emb.weight)
    assert head2.weight is emb2.weight
    assert bits(state["tree"]["a"]) == bits(shared)
    assert state["tree"]["b"][0] is state["tree"]["a"]


@pytest.mark.holds("tied-weights")
def test_a_tied_model_loads_into_an_untied_one() -> None:
    """The tie is the model's own business: names that were one tensor fill two that are not."""
    emb, head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False)
    head.weight = emb.weight
    untied = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False))
    round_trip({"model": torch.nn.Sequential(emb, head)}, {"model": untied})
    assert bits(untied[0].weight) == bits(untied[1].weight) == bits(emb.weight)


def test_two_views_of_one_memory_are_two_tensors() -> None:
    """Overlapping views are not taken for a tie."""
    base = torch.arange(6.0)
    state = round_trip({"x": {"a": base[:4], "b": base[2:], "t": base.view(2, 3).t()}}, {"x": {}})
    assert bits(state["x"]) == bits({"a": base[:4], "b": base[2:], "t": base.view(2, 3).t()})


@pytest.mark.holds("rank-without-tensors")
def test_no_tensors_at_all() -> None:
    """A state without a single tensor has an image and comes back."""
    state = round_trip({"a": 1, "b": {}, "e": torch.empty(0, 5)}, {"a": 0, "b": {}, "e": torch.empty(0, 5)})
    assert (state["a"], state["b"]) == (1, {})


def test_plain_values_come_back_by_type() -> None:
    """Values beside tensors, typed: what JSON alone would lose."""
    value = {
        "tuple": (1, [2, (3,)]),
        "set": {1, "a", (2, 3)},
        "bytes": b"\x00\xff",
        "nan": math.nan,
        "minus_zero": -0.0,
        "big": 2**100,
        "complex": 1 - 2j,
        3: {None: True},
        "default": defaultdict(list, {"k": [1]}),
        "deque": deque([1, 2], maxlen=5),
        "counter": Counter("aab"),
        "range": range(0, 10, 3),
        "dtype": torch.bfloat16,
        "size": torch.Size([1, 2]),
    }
    state = round_trip({"x": value, "y": [1, torch.arange(2), value]}, {"x": None, "y": None})
    assert bits(state["x"]) == bits(value)
    assert bits(state["y"]) == bits([1, torch.arange(2), value])
    assert state["x"]["default"].default_factory is list
    assert state["x"]["deque"].maxlen == 5


def test_containers_are_refilled_in_place() -> None:
    """The user's own dict, list and set follow; their order of keys is the saved one."""
    d, lst, s = {"z": 0, "a": 5}, [9, 9, 9], {7}
    state = round_trip({"d": {"a": 1, "b": 2}, "l": [1, 2], "s": {1, 2}}, {"d": d, "l": lst, "s": s})
    assert state["d"] is d
    assert list(d.items()) == [("a", 1), ("b", 2)]
    assert state["l"] is lst
    assert lst == [1, 2]
    assert state["s"] is s
    assert s == {1, 2}


class _Subclass(torch.Tensor):
    pass


class _NoLoad:
    def state_dict(self) -> dict[str, int]:
        return {}


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def _itself() -> list[Any]:
    around: list[Any] = [torch.ones(1)]
    around.append(around)
    return around


_REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse_coo": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "sparse_csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "dense"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta"),
    "quantized": (_quantized, "dense"),
    "subclass": (lambda: torch.ones(2).as_subclass(_Subclass), "_Subclass"),
    "uninitialized": (lambda: torch.nn.LazyLinear(3).weight, "UninitializedParameter"),
    "lambda": (lambda: lambda: 1, "function"),
    "ellipsis_beside_class": (lambda: {"cls": object(), "none": None}, "object"),
    "in_itself": (_itself, "contains itself|nested too deeply"),
    "tensor_in_deque": (lambda: deque([torch.ones(1)]), "Tensor"),
    "no_load": (_NoLoad, "load_state_dict"),
}


@pytest.mark.holds("value-crashes-one-way", "unusual-tensors")
@pytest.mark.parametrize("kind", _REFUSED)
def test_what_cannot_be_kept_is_refused_by_path(kind: str) -> None:
    """At registration, with the path at which it stands and what it is."""
    make, says = _REFUSED[kind]
    value = make()
    tree = value if kind == "no_load" else {"deep": [0, value]}
    paths = {"no_load": ("top:",), "in_itself": ("top",)}.get(kind, ("top.deep.1", "top.deep[1]"))
    with pytest.raises(UnsupportedStateError, match=says) as caught:
        flatten(register({"top": tree}))
    assert str(caught.value).startswith(paths)


@pytest.mark.holds("value-crashes-one-way")
def test_the_same_verdict_with_and_without_tensors_beside() -> None:
    """A value is kept or refused for what it is, wherever it stands."""
    for value in ({"cls": int, "act": torch.nn.GELU}, {"none": None, "ellipsis": ...}, {"fn": print}):
        verdicts = set()
        for tree in (value, {"t": torch.ones(1), **value}, [torch.ones(1), value]):
            try:
                flatten(register({"x": tree}))
                verdicts.add("kept")
            except UnsupportedStateError:
                verdicts.add("refused")
        assert len(verdicts) == 1, value


def test_a_tensor_of_another_shape_is_refused_by_name() -> None:
    """In place loading never broadcasts, casts or resizes."""
    for fresh in (torch.zeros(1), torch.zeros(3, dtype=torch.float64), torch.zeros(1, 3)):
        with pytest.raises(ConfigError, match=r"^x: the checkpoint has torch.float32 \[3\]"):
            round_trip({"x": torch.ones(3)}, {"x": fresh})
