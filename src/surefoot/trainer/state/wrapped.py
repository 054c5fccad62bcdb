"""Handles wrapped tensors: those of a custom class that describes how it is made of inner tensors.

`__tensor_flatten__` names a tensor's inner tensors and gives a context, `__tensor_unflatten__` makes it of both (the
protocol is described in `torch.utils._python_dispatch`). The inner tensors are saved like any others, the context as a
typed value. Nothing is unpickled: the class is the live tensor's own, or one found by name among imported modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from surefoot.core.values import decode, encode
from surefoot.core.values.classes import find_class
from surefoot.errors import ConfigError
from surefoot.trainer.state.numpy_values import EXTRAS


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A wrapped tensor of a checkpoint."""

    module: str
    qualname: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    inner: Mapping[str, Any]
    """By attribute: read-only tensors, or the objects that stand for them."""
    context: Any
    """Encoded."""

    def check(self, live: Any, path: str) -> None:
        """Refuse a live tensor that is made in another way.

        Raises:
            ConfigError: its class, shape, parts or context differ.
        """
        cls = type(live)
        if (cls.__module__, cls.__qualname__) != (self.module, self.qualname):
            raise ConfigError(f"{path}: the checkpoint has a {self.qualname}, here it is a {cls.__qualname__}")
        parts, context = live.__tensor_flatten__()
        if tuple(live.shape) != self.shape or list(parts) != list(self.inner):
            raise ConfigError(
                f"{path}: the checkpoint has a {self.qualname} of shape {list(self.shape)} made of {list(self.inner)}, "
                f"here it is one of shape {list(live.shape)} made of {list(parts)}"
            )
        if encode(context, path, extras=EXTRAS) != self.context:
            raise ConfigError(f"{path}: the checkpoint's {self.qualname} was made with other settings than this one")

    def build(self, path: str, inner: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A new tensor of these inner ones.

        Raises:
            ConfigError: its class is not imported.
        """
        cls: Any = find_class(self.module, self.qualname)
        if cls is None or not issubclass(cls, torch.Tensor) or not hasattr(cls, "__tensor_unflatten__"):
            raise ConfigError(
                f"{path}: the checkpoint has a tensor of class {self.module}.{self.qualname} there: import its module "
                "before surefoot.Run is entered"
            )
        made = cls.__tensor_unflatten__(dict(inner), decode(self.context, extras=EXTRAS), self.shape, self.stride)
        if type(made) is not cls:
            raise ConfigError(f"{path}: class {self.qualname} made a {type(made).__qualname__} of its inner tensors")
        assert isinstance(made, torch.Tensor)
        return made


def is_wrapped(tensor: torch.Tensor) -> bool:
    """True if its class describes how it is made of inner tensors."""
    return is_traceable_wrapper_subclass(tensor)


def parts_of(tensor: Any) -> tuple[Sequence[str], Any]:
    """The attributes with its inner tensors, and its context."""
    attributes, context = tensor.__tensor_flatten__()
    return list(attributes), context
