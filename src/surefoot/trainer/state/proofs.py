"""Proves that a registered object's state has the same structure, in the same memory, as when it was last walked.

Walking thousands of tensors costs more than copying them. A proof looks, in bulk, at the facts from which the walk's
result follows: which tensors stand under which names, and where and how each lies in memory. An object that a proof
does not understand (code of the user's own that makes a state, hooks, unusual values) is not proven, and is walked.

Proofs hold objects weakly and tensors' addresses as numbers, so that no memory lives longer because of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from surefoot.core.values import encode
from surefoot.trainer.state.numpy_values import EXTRAS
from surefoot.trainer.state.sharded import local_of

_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer, DTensor)
_SCALARS = (type(None), bool, int, float, str)
_OWN_CODE = ("state_dict", "_save_to_state_dict", "get_extra_state")
_MODULE_CODE = tuple((name, getattr(nn.Module, name)) for name in _OWN_CODE)
_OPTIMIZER_STATE_DICT = Optimizer.state_dict
_Base = torch._C.TensorBase
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")
_FSDP_HOOKS = "torch.distributed.fsdp._fully_shard"
"""FSDP2's hooks put its sharded parameters back into a module; they do nothing if those are in place already."""


class Proof(Protocol):
    """A proof of one registered object's state."""

    def tensors(self) -> list[torch.Tensor] | None:
        """The tensors that a walk would meet, in its order, as they are now; of sharded tensors this rank's own parts.

        None if it is not proven that a walk would find just what the last one found.
        """

    def values(self) -> list[Any] | None:
        """The plain values that a walk would find, encoded, as they are now; None if that is not proven."""


class _Sameness:
    """Checks that objects are the same ones as before, and that the tensors among them lie as before."""

    def __init__(self, things: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        self._ids = [id(thing) for thing in things]
        self._specs = _specs(tensors)
        self._lie = _lie(_locals(tensors)) if _are_usual(tensors) else None
        self._alive = True
        # A new object may be found at the address of one that died.
        self._references = [_weak(thing, self._end) for thing in things]

    def find(self, things: Iterable[Any], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """This rank's parts of the tensors, if all is as before; else None."""
        if not self._alive or self._lie is None or list(map(id, things)) != self._ids:
            return None
        if self._specs and list(map(id, _specs(tensors))) != list(map(id, self._specs)):
            return None
        found = _locals(tensors)
        return found if _lie(found) == self._lie else None

    def _end(self, _reference: Any) -> None:
        self._alive = False


class ModuleProof:
    """The proof of a module whose state is made by torch's own code."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        survey = _survey(module)
        self._names, self._rare = survey.names, survey.rare
        self._same = _Sameness(survey.things, survey.tensors) if survey.is_understood() else None

    def tensors(self) -> list[torch.Tensor] | None:
        survey = _survey(self._module)
        if self._same is None or survey.names != self._names or survey.rare != self._rare:
            return None
        return self._same.find(survey.things, survey.tensors) if survey.is_understood() else None

    def values(self) -> list[Any] | None:
        return []


class OptimizerProof:
    """The proof of an optimizer whose state is made by torch's own code: tensors and numbers by parameter."""

    def __init__(self, optimizer: Optimizer, names: Sequence[Sequence[str]], path: str) -> None:
        self._optimizer = optimizer
        self._path = path
        self._params = [[encode(name, path, extras=EXTRAS) for name in group] for group in names]
        self._keys, things, tensors, _scalars = self._survey()
        self._same = _Sameness(things, tensors)

    def tensors(self) -> list[torch.Tensor] | None:
        if not _is_plain_optimizer(self._optimizer):
            return None
        keys, things, tensors, scalars = self._survey()
        if keys != self._keys or not all(type(value) in _SCALARS for value in scalars):
            return None
        return self._same.find(things, tensors)

    def values(self) -> list[Any] | None:
        optimizer, path = self._optimizer, self._path
        _keys, _things, _tensors, scalars = self._survey()
        groups = []
        for group, params in zip(optimizer.param_groups, self._params, strict=True):
            rest = {key: value for key, value in group.items() if key != "params"}
            if not all(_is_scalar(value) for value in rest.values()) or not all(type(key) is str for key in rest):
                return None
            encoded = encode(rest, path, extras=EXTRAS)
            if "$" in encoded:
                return None
            groups.append({**encoded, "params": params})
        return [*(encode(value, path, extras=EXTRAS) for value in scalars), groups]

    def _survey(self) -> tuple[list[Any], list[Any], list[torch.Tensor], list[Any]]:
        """Names and lengths, objects that must be the same, the state's tensors, and its other values."""
        optimizer = self._optimizer
        keys: list[Any] = []
        things: list[Any] = [type(optimizer)]
        for group in optimizer.param_groups:
            keys.append(len(group["params"]))
            things += group["params"]
        things += optimizer.state
        values: list[Any] = []
        for state in optimizer.state.values():
            if type(state) is not dict:
                keys.append(None)
                continue
            keys.append(len(state))
            keys += state
            values += state.values()
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if len(tensors) == len(values):
            return keys, things + tensors, tensors, []
        # Where the scalars stand among the tensors is part of the structure.
        keys += [isinstance(value, torch.Tensor) for value in values]
        return keys, things + tensors, tensors, [value for value in values if not isinstance(value, torch.Tensor)]


class TensorProof:
    """The proof of one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._same = _Sameness([tensor], [tensor])

    def tensors(self) -> list[torch.Tensor] | None:
        return self._same.find([self._tensor], [self._tensor])

    def values(self) -> list[Any] | None:
        return []


class ProofOfAll:
    """The proof of several objects, one after the other."""

    def __init__(self, proofs: Sequence[Proof], still: Callable[[], bool]) -> None:
        self._proofs = proofs
        self._still = still
        """True as long as they are the same objects, under the same names."""

    def tensors(self) -> list[torch.Tensor] | None:
        if not self._still():
            return None
        parts = [proof.tensors() for proof in self._proofs]
        return [tensor for part in parts for tensor in part or ()] if all(part is not None for part in parts) else None

    def values(self) -> list[Any] | None:
        parts = [proof.values() for proof in self._proofs]
        return [value for part in parts for value in part or ()] if all(part is not None for part in parts) else None


class _Survey:
    """A module and all in it, in the order of its state dict."""

    def __init__(self) -> None:
        self.names: list[Any] = []
        """Names and lengths."""
        self.things: list[Any] = []
        """Objects that must be the same."""
        self.rare: list[Any] = []
        """For each module with buffers, the names of those that its state dict leaves out."""
        self.tensors: list[torch.Tensor] = []
        """The tensors of the state dict."""
        self.classes: set[type] = set()
        self.odd = False
        """True if a module has code of its own for its state."""

    def is_understood(self) -> bool:
        """True if every state dict in it is made by torch's code alone."""
        return not self.odd and all(getattr(cls, name) is code for cls in self.classes for name, code in _MODULE_CODE)


def _survey(root: nn.Module) -> _Survey:
    survey = _Survey()
    names, things, tensors, classes = survey.names, survey.things, survey.tensors, survey.classes
    pending = [root]
    while pending:
        module = pending.pop()
        parameters, buffers, inner = module._parameters, module._buffers, module._modules
        names += (len(parameters), len(buffers), len(inner), *parameters, *buffers, *inner)
        things += (module, type(module), *parameters.values(), *buffers.values())
        classes.add(type(module))
        tensors += [parameter for parameter in parameters.values() if parameter is not None]
        if buffers:
            passing = module._non_persistent_buffers_set
            survey.rare.append(frozenset(passing))
            tensors += [b for name, b in buffers.items() if b is not None and name not in passing]
        if _is_odd(module):
            survey.odd = True
        if inner:
            pending += [child for child in reversed(inner.values()) if child is not None]
    return survey


def _is_odd(module: nn.Module) -> bool:
    own = module.__dict__
    if module._state_dict_hooks or "state_dict" in own or "_save_to_state_dict" in own or "get_extra_state" in own:
        return True
    return bool(module._state_dict_pre_hooks) and not _are_fsdps(module._state_dict_pre_hooks)


def _are_fsdps(hooks: Mapping[int, Any]) -> bool:
    return all(getattr(hook, "__module__", "").startswith(_FSDP_HOOKS) for hook in hooks.values())


def _is_plain_optimizer(optimizer: Optimizer) -> bool:
    if type(optimizer).state_dict is not _OPTIMIZER_STATE_DICT or "state_dict" in optimizer.__dict__:
        return False
    return not optimizer._optimizer_state_dict_pre_hooks and not optimizer._optimizer_state_dict_post_hooks


def _is_scalar(value: Any) -> bool:
    return type(value) in _SCALARS or (type(value) in (tuple, list) and all(type(item) in _SCALARS for item in value))


def _are_usual(tensors: Sequence[torch.Tensor]) -> bool:
    """True if nothing but their layout in memory matters."""
    kinds = all(type(tensor) in _TENSORS and type(local_of(tensor)) in _TENSORS for tensor in tensors)
    return kinds and not any(tensor.is_complex() for tensor in tensors)


def _locals(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor._local_tensor if type(tensor) is DTensor else tensor for tensor in tensors]


def _specs(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """How the sharded ones among them are sharded."""
    return [tensor._spec for tensor in tensors if type(tensor) is DTensor]


def _lie(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """How each tensor lies in memory: a walk finds ties by it."""
    addresses = list(map(_Base.data_ptr, tensors))
    if 0 in addresses:
        # An empty tensor's memory may be there all the same.
        addresses = [tensor.data_ptr() or tensor.untyped_storage().data_ptr() for tensor in tensors]
    shapes, dtypes = map(_shape, tensors), map(_dtype, tensors)
    return [*addresses, *shapes, *map(_Base.stride, tensors), *dtypes, *map(_Base.is_neg, tensors)]


def _weak(thing: Any, end: Callable[[Any], None]) -> Any:
    try:
        return weakref.ref(thing, end)
    except TypeError:
        return thing
