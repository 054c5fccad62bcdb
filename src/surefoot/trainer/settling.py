"""Settling: what a checkpoint has of a tensor that is more than one dense block, made to fit the live one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from surefoot.errors import ConfigError
from surefoot.trainer.sharded import Blocks
from surefoot.trainer.tensors import copy_all
from surefoot.trainer.wrapped import Wrapped, is_wrapped


def settle(path: str, saved: Any, live: Any, *models: Any) -> Any:
    """`saved`, nested as it is, with every sharded or wrapped tensor in it as a tensor like the live one there.

    A wrapped tensor is copied into the live one, which is then the result; where there is none, it is made anew. What
    was made a sharded tensor before stays one.

    Args:
        path: names what does not fit.
        saved: from a checkpoint.
        live: the state as it is now; may lack what is to be loaded.
        models: tensors like which a sharded one may be made where there is no live one.

    Raises:
        ConfigError: one is sharded or wrapped and the other is not, or in another way.
    """
    if isinstance(saved, Blocks):
        return saved.like(path, live, *models)
    if isinstance(saved, Wrapped):
        return _wrapped(path, saved, live)
    if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor) and not isinstance(saved, DTensor):
        _same_kind(path, saved, live)
    if type(saved) in (dict, OrderedDict):
        pairs = ((key, settle(f"{path}.{key}", item, _part(live, key), *models)) for key, item in saved.items())
        return type(saved)(pairs)
    if type(saved) in (list, tuple):
        return type(saved)(settle(f"{path}.{i}", item, _part(live, i), *models) for i, item in enumerate(saved))
    return saved


def needs_settling(saved: Any) -> bool:
    """True if there is a sharded or wrapped tensor in it."""
    if type(saved) in (dict, OrderedDict):
        return any(needs_settling(item) for item in saved.values())
    if type(saved) in (list, tuple):
        return any(needs_settling(item) for item in saved)
    return isinstance(saved, Blocks | Wrapped)


def _same_kind(path: str, saved: torch.Tensor, live: torch.Tensor) -> None:
    if isinstance(live, DTensor):
        raise ConfigError(
            f"{path}: the checkpoint has a whole tensor of shape {list(saved.shape)}, here it is sharded: resume with "
            "the number of ranks and the sharding that it was saved with"
        )
    if is_wrapped(live):
        raise ConfigError(f"{path}: the checkpoint has a plain tensor, here it is a {type(live).__qualname__}")


def _wrapped(path: str, saved: Wrapped, live: Any) -> torch.Tensor:
    if not isinstance(live, torch.Tensor):
        inner = {name: settle(f"{path}.{name}", item, None) for name, item in saved.inner.items()}
        return saved.build(path, {name: item.clone() for name, item in inner.items()})
    saved.check(live, path)
    for name, item in saved.inner.items():
        place = getattr(live, name)
        _copy_into(f"{path}.{name}", place, settle(f"{path}.{name}", item, place))
    return live


def _copy_into(path: str, live: torch.Tensor, saved: torch.Tensor) -> None:
    if saved is live:
        return
    if (saved.dtype, saved.shape) != (live.dtype, live.shape):
        raise ConfigError(
            f"{path}: the checkpoint has {saved.dtype} {list(saved.shape)}, here it is {live.dtype} {list(live.shape)}"
        )
    copy_all([(live.detach(), saved)])


def _part(live: Any, key: Any) -> Any:
    if isinstance(live, Mapping):
        return live.get(key)
    return live[key] if isinstance(live, list | tuple) and key < len(live) else None
