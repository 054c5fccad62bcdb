"""Forms of NumPy and torch values: equal by type and bits, refused by path, safe on hostile documents."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from surefoot.core.values import decode, encode
from surefoot.errors import CorruptError, UnsupportedStateError
from surefoot.trainer.state.numpy_values import EXTRAS, NUMPY_EXTRAS, TORCH_EXTRAS

QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def through(value: object) -> Any:
    """The value after a trip through bytes."""
    return decode(json.loads(json.dumps(encode(value, "x", extras=EXTRAS))), extras=EXTRAS)


def bits(value: Any) -> Any:
    """Type, dtype, shape, order and raw bytes of an array or scalar."""
    order = (value.flags.c_contiguous, value.flags.f_contiguous) if type(value) is np.ndarray else None
    return type(value), value.dtype.str, value.shape, order, value.tobytes("A")


ARRAYS: dict[str, Any] = {
    "int64": np.arange(6).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "big_endian": np.arange(4, dtype=">f4"),
    "bool": np.array([True, False]),
    "half": np.array([1.5, np.nan, -0.0], dtype=np.float16),
    "nan_payload": np.array([0x7FF8DEAD0000BEEF, 0x7FF0000000000001], dtype=np.uint64).view(np.float64),
    "complex": np.array([1 + 2j, np.inf], dtype=np.complex64),
    "bytes": np.array([b"a\0b", b""]),
    "text": np.array(["é", "abc"]),
    "datetime": np.array(["2024-01-01", "NaT"], dtype="M8[25us]"),
    "timedelta": np.array([1, 2], dtype="m8"),
    "zero_dimensions": np.array(3.5),
    "empty": np.empty((0, 3), dtype=np.uint16),
    "long_long": np.arange(3, dtype=np.longlong),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_come_back_bit_for_bit(name: str) -> None:
    """Dtype with byte order, shape, memory order and bytes survive; the new array is writable and its own."""
    back = through({"a": [ARRAYS[name]]})["a"][0]
    assert bits(back) == bits(ARRAYS[name])
    assert back.flags.writeable
    assert back.flags.owndata


def test_strided_arrays_come_back_contiguous() -> None:
    """A view keeps its values, not its strides."""
    back = through(np.arange(12).reshape(3, 4)[:, ::-2])
    assert bits(back) == bits(np.array([[3, 1], [7, 5], [11, 9]]))


@QUICK
@given(
    hnp.arrays(
        hnp.scalar_dtypes().filter(lambda d: d.itemsize > 0 and d.name not in ("float128", "complex256")),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )
)
def test_any_plain_array_comes_back(array: Any) -> None:
    """Arrays of any plain dtype and shape survive bit for bit."""
    assert bits(through(array)) == bits(array)


SCALARS = [
    np.float64(-0.0),
    np.array([0x7FF8DEAD0000BEEF], dtype=np.uint64).view(np.float64)[0],
    np.float32(0.1),
    np.float16(np.inf),
    np.int8(-1),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex128(1 - 2j),
    np.datetime64("2024-01-01T00:00:00.000000001"),
    np.datetime64("NaT"),
    np.timedelta64(3, "h"),
    np.str_("é"),
    np.str_(""),
    np.bytes_(b"a\0"),
    np.bytes_(b""),
]


@pytest.mark.parametrize("value", SCALARS, ids=repr)
def test_scalars_come_back_by_type_and_bits(value: Any) -> None:
    """A NumPy scalar stays one, whether or not it is a subclass of a Python number."""
    assert bits(through(value)) == bits(value)
    assert type(through({value: [value]}).popitem()[0]) is type(value)


def test_dtypes_come_back() -> None:
    """NumPy dtypes survive with their byte order."""
    for text in ["<i4", ">f8", "|b1", "<M8[ns]", "<U7"]:
        back = through(np.dtype(text))
        assert isinstance(back, np.dtype)
        assert back.str == text


def test_legacy_global_state_goes_on() -> None:
    """np.random.get_state() comes back, and the stream goes on from it."""
    source = np.random.RandomState(5)
    source.normal()
    state = source.get_state()
    back = through(state)
    assert [type(part) for part in back] == [type(part) for part in state]
    assert bits(back[1]) == bits(state[1])
    assert back[0:1] + back[2:] == state[0:1] + state[2:]
    other = np.random.RandomState(6)
    other.set_state(back)
    assert other.normal(size=700).tobytes() == source.normal(size=700).tobytes()


def test_random_state_objects_go_on() -> None:
    """A RandomState in the middle of a Gaussian pair comes back at the same point."""
    source = np.random.RandomState(5)
    source.normal()
    back = through([source])[0]
    assert type(back) is np.random.RandomState
    assert back.normal(size=7).tobytes() == source.normal(size=7).tobytes()


@pytest.mark.parametrize("name", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_generators_go_on_and_spawn_alike(name: str) -> None:
    """Each kind of generator goes on from the same point, with half-used words, and spawns the same children."""
    source = np.random.Generator(getattr(np.random, name)(np.random.SeedSequence([1, 2**90], spawn_key=(3,))))
    source.spawn(1)
    source.integers(0, 2**31, dtype=np.uint32)
    back = through({"rng": source})["rng"]
    assert type(back) is np.random.Generator
    assert type(back.bit_generator) is type(source.bit_generator)
    assert (
        back.integers(0, 2**31, size=5, dtype=np.uint32).tolist()
        == source.integers(0, 2**31, size=5, dtype=np.uint32).tolist()
    )
    assert back.normal(size=1000).tobytes() == source.normal(size=1000).tobytes()
    assert back.spawn(1)[0].random() == source.spawn(1)[0].random()


def test_bit_generator_states_and_bare_ones_come_back() -> None:
    """The state dictionary is a plain value with big ints; a bare bit generator and a seed sequence are kept too."""
    source = np.random.PCG64(9)
    assert through(source.state) == source.state
    assert through(source).random_raw(3).tolist() == source.random_raw(3).tolist()
    seed = np.random.SeedSequence(7, n_children_spawned=2)
    assert through(seed).spawn(1)[0].generate_state(4).tolist() == seed.spawn(1)[0].generate_state(4).tolist()


def test_torch_values_come_back() -> None:
    """dtype, device and Size come back as what they are."""
    for value in [torch.float32, torch.bfloat16, torch.int64, torch.device("cuda:1"), torch.device("cpu")]:
        assert through([value]) == [value]
    assert str(through(torch.device("cuda"))) == "cuda"
    back = through(torch.Size([2, 0, 3]))
    assert type(back) is torch.Size
    assert back == torch.Size([2, 0, 3])


def test_torch_generator_goes_on() -> None:
    """A torch generator comes back at the same point of its stream."""
    source = torch.Generator().manual_seed(3)
    torch.randn(5, generator=source)
    back = through(source)
    assert type(back) is torch.Generator
    assert torch.randn(700, generator=back).numpy().tobytes() == torch.randn(700, generator=source).numpy().tobytes()


def test_a_schedulers_state() -> None:
    """What a scheduler hands out survives."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    weight.grad = torch.ones(2)
    optimizer.step()
    scheduler.step()
    assert through(scheduler.state_dict()) == scheduler.state_dict()


REFUSED: dict[str, tuple[Any, str]] = {
    "tensor": (torch.ones(1), "torch.Tensor"),
    "parameter": (torch.nn.Parameter(torch.ones(1)), "torch.nn.parameter.Parameter"),
    "object_array": (np.array([{}], dtype=object), "numpy.ndarray"),
    "structured": (np.zeros(1, dtype=[("a", "i4")]), "numpy.ndarray"),
    "void": (np.zeros(1, dtype="V4"), "numpy.ndarray"),
    "void_scalar": (np.zeros(1, dtype="V4")[0], "numpy.void"),
    "masked": (np.ma.array([1]), "numpy.ma.MaskedArray"),
    "record": (np.rec.array([(1,)]), "numpy.rec.recarray"),
    "long_double": (np.longdouble(1), "numpy.longdouble"),
    "long_double_array": (np.zeros(1, dtype=np.longdouble), "numpy.ndarray"),
    "long_long": (np.longlong(1), "numpy.longlong"),
    "object_dtype": (np.dtype(object), "numpy.dtypes.ObjectDType"),
    "seed_pool": (np.random.SeedSequence(1, pool_size=65), "numpy.random.bit_generator.SeedSequence"),
    "ufunc": (np.add, "numpy.ufunc"),
    "scalar_class": (np.float32, "type"),
    "module": (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_path_and_type(name: str) -> None:
    """What has no portable form is refused in encode, with its path and type."""
    value, kind = REFUSED[name]
    with pytest.raises(UnsupportedStateError) as caught:
        encode({"a": [0, value]}, "x", extras=EXTRAS)
    assert str(caught.value).startswith(f"x.a[1]: a value of type {kind} cannot be checkpointed")


def state_of(name: str) -> Any:
    return getattr(np.random, name)(0).state


def changed(state: Any, *way: str, to: Any) -> Any:
    """A copy of a state in which one member is another value."""
    state = copy.deepcopy(state)
    inner = state
    for part in way[:-1]:
        inner = inner[part]
    inner[way[-1]] = to
    return state


def bits_document(name: Any, state: Any, seed: Any = None) -> Any:
    return {"$": "np.bits", "v": encode([name, state, seed], "x", extras=EXTRAS)}


def array_document(*parts: Any) -> Any:
    return {"$": "np.array", "v": encode(list(parts), "x")}


LEGACY = np.random.RandomState(0).get_state(legacy=False)
HOSTILE: dict[str, Any] = {
    "object_dtype": array_document("|O", [1], "C", bytes(8)),
    "structured": array_document("i4,i4", [1], "C", bytes(8)),
    "zero_width": array_document("<U0", [10**15], "C", b""),
    "void": array_document("|V8", [1], "C", bytes(8)),
    "torn": array_document("<f8", [2], "C", bytes(15)),
    "negative": array_document("<f8", [-1, -1], "C", bytes(8)),
    "huge": array_document("<f8", [2**62, 2**62], "C", bytes(8)),
    "huge_empty": array_document("<f8", [2**62, 2**62, 0], "C", b""),
    "many_dimensions": array_document("<f8", [1] * 100, "C", bytes(8)),
    "bool_length": array_document("<f8", [True], "C", bytes(8)),
    "order": array_document("<f8", [1], "X", bytes(8)),
    "text_for_bytes": array_document("|S1", [1], "C", "a"),
    "list_for_bytes": array_document("|u1", [1], "C", [1]),
    "wide_float": array_document("<f16", [1], "C", bytes(16)),
    "scalar": {"$": "np.scalar", "v": ["<f8", {"$": "bytes", "v": "AAAA"}]},
    "dtype": {"$": "np.dtype", "v": "O"},
    "seed_pool": {"$": "np.seed", "v": {"entropy": 1, "spawn_key": [], "pool_size": 10**9, "n_children_spawned": 0}},
    "bits_name": bits_document("default_rng", {}),
    "bits_other_state": bits_document("PCG64", state_of("SFC64")),
    "bits_seed": bits_document("PCG64", state_of("PCG64"), 1),
    "mt_position": bits_document("MT19937", changed(state_of("MT19937"), "state", "pos", to=625)),
    "mt_negative": bits_document("MT19937", changed(state_of("MT19937"), "state", "pos", to=-1)),
    "mt_short": bits_document("MT19937", changed(state_of("MT19937"), "state", "key", to=np.zeros(3, np.uint32))),
    "mt_long": bits_document("MT19937", changed(state_of("MT19937"), "state", "key", to=np.zeros(700, np.uint32))),
    "philox_position": bits_document("Philox", changed(state_of("Philox"), "buffer_pos", to=-5)),
    "philox_buffer": bits_document("Philox", changed(state_of("Philox"), "buffer", to=np.zeros(2, np.uint64))),
    "pcg_text": bits_document("PCG64", changed(state_of("PCG64"), "state", "inc", to="1")),
    "pcg_huge": bits_document("PCG64", changed(state_of("PCG64"), "state", "inc", to=2**200)),
    "generator": {"$": "np.generator", "v": 1},
    "legacy_position": {
        "$": "np.random_state",
        "v": encode(changed(LEGACY, "state", "pos", to=10**6), "x", extras=EXTRAS),
    },
    "legacy_gauss": {"$": "np.random_state", "v": encode(changed(LEGACY, "gauss", to="a"), "x", extras=EXTRAS)},
    "torch_dtype": {"$": "torch.dtype", "v": "load"},
    "torch_submodule": {"$": "torch.dtype", "v": "_dynamo"},
    "torch_device": {"$": "torch.device", "v": "nowhere:0"},
    "torch_size": {"$": "torch.size", "v": [1.5]},
    "torch_generator": {"$": "torch.generator", "v": ["cpu", {"$": "bytes", "v": "AAAA"}]},
    "torch_generator_zeros": {"$": "torch.generator", "v": encode(["cpu", b"\xff" * 5056], "x")},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_documents_are_corrupt(name: str) -> None:
    """Nonsense in a form is CorruptError with its place, and never reaches a generator's memory."""
    with pytest.raises(CorruptError, match=r"^value\[1\]"):
        decode([0, HOSTILE[name]], extras=EXTRAS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without the device")
def test_a_missing_device_is_not_corruption() -> None:
    """A generator of a device that is not here names the device: the copy itself is sound."""
    data = {"$": "torch.generator", "v": encode(["cuda:0", bytes(16)], "x")}
    with pytest.raises(UnsupportedStateError, match="cuda:0"):
        decode(data, extras=EXTRAS)


ORIGINALS = [*ARRAYS.values(), *SCALARS, np.random.default_rng(1), torch.float16, torch.Size([1]), np.dtype("i4")]


@QUICK
@given(st.data())
def test_altered_documents_raise_only_their_own_errors(data: Any) -> None:
    """Fuzz: bytes of real documents, altered in one place, give a value or an error of the tree."""
    raw = bytearray(json.dumps(encode(data.draw(st.sampled_from(ORIGINALS)), "x", extras=EXTRAS)).encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        document = json.loads(bytes(raw))
    except ValueError:
        return  # It is not JSON any more: it is refused before it is decoded.
    with contextlib.suppress(CorruptError, UnsupportedStateError):
        decode(document, extras=EXTRAS)


@QUICK
@given(
    st.sampled_from([extra.tag for extra in EXTRAS]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["<f8", "PCG64", "cpu", "C"]),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["state", "pool_size", "entropy", "gauss"]), inner)
        ),
        max_leaves=8,
    ),
)
def test_any_payload_raises_only_its_own_errors(tag: str, payload: Any) -> None:
    """Fuzz: each form is fed anything; nothing but the tree's errors escapes."""
    with contextlib.suppress(CorruptError, UnsupportedStateError):
        decode({"$": tag, "v": payload}, extras=EXTRAS)


@pytest.mark.holds("unreadable-values")
def test_all_rng_states_together() -> None:
    """The three global generators' states come back equal."""
    state = {
        "python": random.Random(1).getstate(),
        "numpy": np.random.RandomState(2).get_state(),
        "torch": torch.get_rng_state().numpy(),
    }
    back = through(state)
    assert back["python"] == state["python"]
    assert bits(back["numpy"][1]) == bits(state["numpy"][1])
    assert bits(back["torch"]) == bits(state["torch"])


def test_extras_are_the_two_tables_together() -> None:
    """No form is forgotten, and no tag is given twice."""
    assert EXTRAS == NUMPY_EXTRAS + TORCH_EXTRAS
    assert len({extra.tag for extra in EXTRAS}) == len(EXTRAS)
