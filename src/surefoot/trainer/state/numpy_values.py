"""Encodes NumPy and torch values: their forms for the typed-value codec (`surefoot.core.values`).

The forms cover NumPy arrays and scalars of plain dtypes, dtypes, SeedSequence, bit generators, Generator, RandomState;
torch dtype, device, Size, Generator. Tensors are not handled here: the caller's leaf hook stages them as bytes.

An array comes back with dtype (byte order included), shape and C or Fortran order; writable, and owning its memory.
A generator comes back at the same point of its stream, its seed sequence too, so that `spawn` goes on as well.

Invariant: state from a document is checked before it enters a generator whose C code trusts it: an index out of range
there would read beyond the generator's memory.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import numpy as np
import torch

from surefoot.core.values import At, Form, refusal
from surefoot.errors import UnsupportedStateError

_DTYPE = re.compile(r"[<>|=]?[biufcSUmM][0-9]{1,9}(\[[0-9]{0,9}[A-Za-zμ]{1,7}(/[0-9]{1,9})?\])?")
# Wider floats than these are of another layout on other machines.
_FLOAT_BYTES = {"f": (2, 4, 8), "c": (8, 16)}
_SEED_POOL_WORDS = 64  # mixing costs its square

_BIT_GENERATORS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        np.random.MT19937,
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.Philox,
        np.random.SFC64,
    )
}
# Where each generator's C code indexes by its state: the member, its least and greatest value.
_POSITIONS = {"MT19937": ("pos", 0, 624), "Philox": ("buffer_pos", 0, 4)}


# ------------------------------------------------------------------------------------------------------- arrays


def _is_keepable(dtype: np.dtype[Any]) -> bool:
    sizes = _FLOAT_BYTES.get(dtype.kind, (dtype.itemsize,))
    return dtype.itemsize in sizes and dtype.itemsize > 0 and _DTYPE.fullmatch(dtype.str) is not None


def _dtype(text: Any) -> np.dtype[Any]:
    if type(text) is not str or _DTYPE.fullmatch(text) is None:
        raise ValueError("not a plain dtype")
    dtype = np.dtype(text)
    if not _is_keepable(dtype):
        raise ValueError("not a plain dtype")
    return dtype


def _reduce_dtype(value: np.dtype[Any], at: At) -> object:
    if not _is_keepable(value):
        raise refusal(at, value, f"dtype {str(value)[:60]} is not one of plain numbers, text or times")
    return value.str


def _reduce_array(value: np.ndarray[Any, Any], at: At) -> object:
    if not _is_keepable(value.dtype):
        raise refusal(at, value, f"its dtype {str(value.dtype)[:60]} is not one of plain numbers, text or times")
    order: Literal["C", "F"] = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    return [value.dtype.str, list(value.shape), order, value.tobytes(order)]


def _rebuild_array(parts: Any) -> np.ndarray[Any, Any]:
    text, shape, order, raw = parts
    dtype = _dtype(text)
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError("a shape is a list of lengths")
    if math.prod(shape) * dtype.itemsize != len(raw) or type(raw) is not bytes:
        raise ValueError("shape and bytes do not agree")
    return np.ndarray(shape, dtype, buffer=raw, order=order).copy(order="A")


def _is_scalar(value: object) -> bool:
    return isinstance(value, np.generic) and not isinstance(value, np.void | np.object_)


def _reduce_scalar(value: Any, at: At) -> object:
    if type(value) is np.str_:
        return str(value)  # text and bytes are encoded as such: their dtype would cut trailing zeros
    if type(value) is np.bytes_:
        return bytes(value)
    dtype = value.dtype
    # Two C types of one size (long and long long) share a dtype's text; only one of them comes back.
    if not _is_keepable(dtype) or np.dtype(dtype.str).type is not type(value):
        raise refusal(at, value, f"no portable dtype {dtype.name}: convert it, as by int() or float()")
    return [dtype.str, value.tobytes()]


def _rebuild_scalar(parts: Any) -> Any:
    if type(parts) is str:
        return np.str_(parts)
    if type(parts) is bytes:
        return np.bytes_(parts)
    text, raw = parts
    scalar: Any = _rebuild_array([text, [], "C", raw])[()]
    return scalar


# --------------------------------------------------------------------------------------------------- generators


def _reduce_seed(value: np.random.SeedSequence, at: At) -> object:
    if value.pool_size > _SEED_POOL_WORDS:
        raise refusal(at, value, f"a pool of more than {_SEED_POOL_WORDS} words")
    return {
        "entropy": value.entropy,
        "spawn_key": value.spawn_key,
        "pool_size": value.pool_size,
        "n_children_spawned": value.n_children_spawned,
    }


def _rebuild_seed(parts: Any) -> np.random.SeedSequence:
    if not 0 < parts["pool_size"] <= _SEED_POOL_WORDS:
        raise ValueError("pool size out of range")
    return np.random.SeedSequence(**parts)


def _reduce_bits(value: Any, at: At) -> object:
    seed = value.seed_seq
    # A generator seeded in the legacy way has no SeedSequence, and cannot spawn either.
    return [type(value).__name__, value.state, seed if type(seed) is np.random.SeedSequence else None]


def _rebuild_bits(parts: Any) -> Any:
    name, state, seed = parts
    _check_state(name, state)
    if seed is not None and type(seed) is not np.random.SeedSequence:
        raise TypeError("a SeedSequence expected")
    bits = _BIT_GENERATORS[name](np.random.SeedSequence(0) if seed is None else seed)
    bits.state = state
    return bits


def _check_state(name: Any, state: Any) -> None:
    """Raise unless the state has exactly the shape that this bit generator gives out."""
    like = _BIT_GENERATORS[name](0).state
    if not _is_like(state, like):
        raise ValueError("not the state of such a generator")
    if name in _POSITIONS:
        member, least, greatest = _POSITIONS[name]
        position = state["state"][member] if member in state["state"] else state[member]
        if not least <= position <= greatest:
            raise ValueError("a position out of range")


def _is_like(value: Any, like: Any) -> bool:
    if type(value) is not type(like):
        return False
    if isinstance(like, dict):
        return value.keys() == like.keys() and all(_is_like(value[key], like[key]) for key in like)
    if isinstance(like, np.ndarray):
        return bool(value.dtype == like.dtype and value.shape == like.shape)
    return True


def _reduce_random_state(value: np.random.RandomState, at: At) -> object:
    state: Any = value.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise refusal(at, value, "its bit generator is not MT19937")
    return state


def _rebuild_random_state(state: Any) -> np.random.RandomState:
    rest = {key: state[key] for key in ("has_gauss", "gauss")}
    _check_state("MT19937", {key: state[key] for key in state.keys() - rest.keys()})
    if type(rest["has_gauss"]) is not int or type(rest["gauss"]) is not float:
        raise TypeError("not the state of a RandomState")
    random = np.random.RandomState(np.random.MT19937(0))
    random.set_state(state)
    return random


# ------------------------------------------------------------------------------------------------------- torch


def _torch_dtype(name: Any) -> torch.dtype:
    found = vars(torch).get(name)  # not getattr: torch imports some of its names when they are asked for
    if not isinstance(found, torch.dtype):
        raise TypeError("not a dtype of torch")
    return found


def _reduce_torch_generator(value: torch.Generator, at: At) -> object:
    return [str(value.device), value.get_state().numpy().tobytes()]


def _rebuild_torch_generator(parts: Any) -> torch.Generator:
    device, raw = parts
    kind = torch.device(device)
    if type(raw) is not bytes or not raw:
        raise TypeError("bytes expected")
    try:
        generator = torch.Generator(device=kind)
    except RuntimeError as error:
        # The copy is sound: it must not be taken for a bad one where the device is missing.
        raise UnsupportedStateError(f"a torch.Generator needs device {kind}, which is missing: {error}") from error
    generator.set_state(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    return generator


def _sizes(parts: Any) -> torch.Size:
    if not all(type(length) is int for length in parts):
        raise TypeError("sizes are integers")
    return torch.Size(parts)


# The order matters little: no value is matched by two.
NUMPY_EXTRAS: tuple[Form, ...] = (
    Form("np.array", lambda v: type(v) is np.ndarray, _reduce_array, _rebuild_array),
    Form("np.scalar", _is_scalar, _reduce_scalar, _rebuild_scalar),
    Form("np.dtype", lambda v: isinstance(v, np.dtype), _reduce_dtype, _dtype),
    Form("np.seed", lambda v: type(v) is np.random.SeedSequence, _reduce_seed, _rebuild_seed),
    Form("np.bits", lambda v: type(v) in _BIT_GENERATORS.values(), _reduce_bits, _rebuild_bits),
    Form(
        "np.generator",
        lambda v: type(v) is np.random.Generator,
        lambda v, at: v.bit_generator,
        np.random.Generator,
    ),
    Form(
        "np.random_state",
        lambda v: type(v) is np.random.RandomState,
        _reduce_random_state,
        _rebuild_random_state,
    ),
)
"""Forms of NumPy's values."""

TORCH_EXTRAS: tuple[Form, ...] = (
    Form(
        "torch.dtype",
        lambda v: type(v) is torch.dtype,
        lambda v, at: str(v).removeprefix("torch."),
        _torch_dtype,
    ),
    Form("torch.device", lambda v: type(v) is torch.device, lambda v, at: str(v), torch.device),
    Form("torch.size", lambda v: type(v) is torch.Size, lambda v, at: list(v), _sizes),
    Form(
        "torch.generator",
        lambda v: type(v) is torch.Generator,
        _reduce_torch_generator,
        _rebuild_torch_generator,
    ),
)
"""Forms of torch's values, tensors excepted."""

EXTRAS: tuple[Form, ...] = NUMPY_EXTRAS + TORCH_EXTRAS
"""All of them: what the trainer passes to `encode` and `decode`."""
