"""Encodes the state that a loader, its data set or its sampler keeps of itself, as plain JSON."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from surefoot.core.values import At, Form, decode, encode, refusal
from surefoot.trainer.state.numpy_values import EXTRAS

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}


def has_state(one: Any) -> bool:
    return all(callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict"))


def owner_of(loader: Any) -> Any:
    """The object that knows the loader's position itself: the loader, or its iterable data set; None if neither does.

    A data set's state is of use only in this process: worker processes move copies of it on, ahead of the training.
    """
    if callable(getattr(loader, "load_state_dict", None)):
        return loader
    data = getattr(loader, "dataset", None)
    is_iterable = isinstance(loader, DataLoader) and isinstance(data, IterableDataset)
    return data if is_iterable and has_state(data) and not loader.num_workers else None


def encode_state(owner: Any, path: str) -> Any:
    """Its `state_dict()`, encoded.

    Raises:
        UnsupportedStateError: something in it cannot be checkpointed; the message names its path.
    """
    return encode(owner.state_dict(), path, extras=_EXTRAS)


def decode_state(encoded: Any) -> Any:
    return decode(encoded, extras=_EXTRAS)


def _reduce(tensor: torch.Tensor, at: At) -> object:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES or tensor.layout is not torch.strided or tensor.requires_grad:
        raise refusal(at, tensor, f"a loader's state may hold plain tensors only, this is {tensor.dtype}")
    raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [name, list(tensor.shape), raw]


def _rebuild(parts: Any) -> torch.Tensor:
    name, shape, raw = parts
    if not raw:
        return torch.empty(shape, dtype=_DTYPES[name])
    return torch.frombuffer(bytearray(raw), dtype=_DTYPES[name]).reshape(shape)


_EXTRAS = (*EXTRAS, Form("torch.tensor", lambda value: type(value) is torch.Tensor, _reduce, _rebuild))
"""The forms with one for tensors: data libraries keep a generator's state as a tensor."""
