"""Fitting: which live tensor each tensor of a checkpoint is loaded into, and so which part of it is wanted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from surefoot.errors import ConfigError
from surefoot.trainer.saved import SavedTensor
from surefoot.trainer.sharded import local_of, place_of
from surefoot.trainer.wrapped import Wrapped


@dataclass(frozen=True, slots=True)
class Like:
    """A parameter's state: whatever of it is not born yet, and has the parameter's shape, is sharded like it."""

    tensor: torch.Tensor
    born: Mapping[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Target:
    """The part of a saved tensor that this rank has now."""

    saved: SavedTensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    model: DTensor | None
    """It becomes the local part of a tensor like this one; None: the whole, as a plain tensor."""

    @property
    def key(self) -> str:
        """Names it in a load plan: one leaf may be wanted in several parts."""
        return f"{self.saved.leaf} at {list(self.offset)} of shape {list(self.shape)}"

    @property
    def number(self) -> int | None:
        """The saved item that is just this part; None if it must be put together."""
        items = self.saved.items
        found = (n for n, item in enumerate(items) if (item.box.offset, item.box.shape) == (self.offset, self.shape))
        return 0 if self.saved.apart else next(found, None)

    @property
    def is_as_saved(self) -> bool:
        """True if it was saved in this very layout: nothing is to be put together, cut or wrapped otherwise."""
        if (self.model is not None) != (self.saved.sharded or self.saved.apart):
            return False
        return self.number is not None or not all(self.shape)


Make = Callable[[str, SavedTensor, Any], Any]
"""Given a path, the saved tensor and what is there now, makes what is loaded."""


def fit(path: str, saved: Any, live: Any, make: Make) -> Any:
    """`saved`, nested as it is, with every saved tensor in it replaced by what `make` makes of it."""
    if isinstance(saved, SavedTensor):
        return make(path, saved, live)
    if isinstance(saved, Wrapped):
        wrapper = live.tensor if isinstance(live, Like) else live
        inner = {
            name: fit(f"{path}.{name}", item, getattr(wrapper, name, None), make) for name, item in saved.inner.items()
        }
        return replace(saved, inner=inner)
    if type(saved) in (dict, OrderedDict):
        return type(saved)((key, fit(f"{path}.{key}", item, _part(live, key), make)) for key, item in saved.items())
    if type(saved) in (list, tuple):
        return type(saved)(fit(f"{path}.{n}", item, _part(live, n), make) for n, item in enumerate(saved))
    return saved


def target_of(path: str, saved: SavedTensor, live: Any) -> Target:
    """Which part of a saved tensor is wanted where `live` is.

    Raises:
        ConfigError: the checkpoint does not have it; the message names the path.
    """
    model = live.tensor if isinstance(live, Like) else live
    if isinstance(model, DTensor) and tuple(model.shape) == saved.whole:
        return _block(path, saved, model)
    if isinstance(live, DTensor):
        raise ConfigError(
            f"{path}: the checkpoint has a tensor of shape {list(saved.whole)}, here it is sharded and of shape "
            f"{list(live.shape)}; use the model that the run was started with"
        )
    if (saved.sharded or saved.apart) and (isinstance(model, DTensor) or not isinstance(model, torch.Tensor)):
        raise ConfigError(
            f"{path}: the checkpoint has a sharded tensor of shape {list(saved.whole)} there, and here is none to load "
            "it into; shard the model before surefoot.Run is entered"
        )
    if saved.apart:
        raise apart_error(path)
    return Target(saved, (0,) * len(saved.whole), saved.whole, None)


def _block(path: str, saved: SavedTensor, model: DTensor) -> Target:
    local = tuple(local_of(model).shape)
    if saved.apart:
        if saved.items[0].box.shape != local or not saved.same_ranks:
            raise apart_error(path)
        return Target(saved, (0,) * len(local), local, model)
    return Target(saved.common or saved, place_of(model, path).offset, local, model)


def apart_error(path: str) -> ConfigError:
    """A part whose place in the whole was not kept is wanted in another layout."""
    return ConfigError(
        f"{path}: when it was saved, ranks that should have had the same part of it had different ones, so each kept "
        "its own: resume with the number of ranks and the device mesh that it was saved with"
    )


def _part(live: Any, key: Any) -> Any:
    if isinstance(live, Like):
        return live.born.get(key, live)
    if isinstance(live, Mapping):
        return live.get(key)
    return live[key] if isinstance(live, list | tuple) and type(key) is int and key < len(live) else None
