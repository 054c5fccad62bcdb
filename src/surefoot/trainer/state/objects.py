"""Gets the state out of the user's objects and back in, under names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from surefoot.errors import ConfigError, UnsupportedStateError
from surefoot.trainer.restore.fit import Like
from surefoot.trainer.state import rng
from surefoot.trainer.state.proofs import ModuleProof, OptimizerProof, Proof, ProofOfAll, TensorProof
from surefoot.trainer.state.sharded import local_of
from surefoot.trainer.state.tensors import copy_all


class Kept(Protocol):
    """One registered object."""

    order: int
    """Restored in this order: modules, others, schedulers, optimizers. A scheduler's load may overwrite what the
    optimizer knows better (its groups' learning rates), so optimizers come last."""
    turn: int
    """Walked in this order: modules, optimizers, tensors, others. Modules first, because FSDP2 puts its sharded
    parameters back in place when a module's state is asked for; objects without a proof come last."""

    def tree(self) -> Any:
        """Its state as nested containers of tensors and plain values; tensors alias the live ones."""

    def load(self, tree: Any) -> None:
        """Put such a state back. Tensors in `tree` are read-only views, which are copied and never kept, or the live
        tensors, which already hold the saved values."""

    def proof(self) -> Proof | None:
        """A proof of its state as it is now; None where it must be walked each time."""

    def outline(self) -> Any:
        """Its state as it is now, to see what would be loaded where; `Like` stands for a state that is not born
        yet."""


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel and torch.compile, in any order of the two."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def canonical(module: nn.Module, key: str) -> str:
    """A key of a module's state dict without the marks that wrappers of inner modules leave in it."""
    if "module" not in key and "_orig_mod" not in key:
        return key
    parts: list[str] = []
    inner: object = module
    for part in key.split("."):
        if not (part == "_orig_mod" and hasattr(inner, part)) and not (
            part == "module" and isinstance(inner, DistributedDataParallel)
        ):
            parts.append(part)
        inner = getattr(inner, part, None)
    return ".".join(parts)


class KeptModule:
    order = 0
    turn = 0

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self.module = unwrap(module)

    def tree(self) -> dict[str, Any]:
        # The parameters themselves: a detached parameter of a class of the user's would look like a plain tensor.
        state = self.module.state_dict(keep_vars=True)
        return {canonical(self.module, key): value for key, value in state.items()}

    def load(self, tree: dict[str, Any]) -> None:
        live = self.module.state_dict(keep_vars=True)
        keys = {canonical(self.module, key): key for key in live}
        _same_keys(self._name, set(tree), set(keys))
        for key, value in tree.items():
            _same_type(f"{self._name}.{key}", value, live[keys[key]])
        # The user's own code gets an extra state, and may well keep it.
        given = {keys[k]: value if isinstance(value, torch.Tensor) else _cloned(value) for k, value in tree.items()}
        given |= {key: _cloned(value) for key, value in given.items() if key.endswith("_extra_state")}
        self._load(
            given, {key for key, value in given.items() if isinstance(value, torch.Tensor) and value is live[key]}
        )
        self._own(tree, [value for value in live.values() if isinstance(value, torch.Tensor)])

    def proof(self) -> Proof | None:
        return ModuleProof(self.module)

    def outline(self) -> Any:
        return self.tree()

    def parameter_names(self) -> Iterator[tuple[nn.Parameter, str]]:
        """Each parameter once, with its name in the run."""
        for key, parameter in self.module.named_parameters():
            yield parameter, f"{self._name}.{canonical(self.module, key)}"

    def _load(self, given: dict[str, Any], loaded: set[str]) -> None:
        """Everything except tensors that are loaded already: tensor classes of the user's may not copy from one
        another."""
        rest = {key: value for key, value in given.items() if key not in loaded}
        result = self.module.load_state_dict(rest, strict=not loaded)
        if wrong := sorted({*result.missing_keys, *result.unexpected_keys} - loaded):
            raise ConfigError(f"{self._name}: its load_state_dict() did not take {wrong[:5]} (first five)")

    def _own(self, tree: dict[str, Any], before: list[torch.Tensor]) -> None:
        # A module that keeps the tensors it is given (own hooks, assign=True) would hold views of read-only memory. Its
        # earlier tensors are its own: a frozen tensor is given back to it as it stands.
        whole = [value for value in tree.values() if isinstance(value, torch.Tensor) and local_of(value) is value]
        given = {value.data_ptr() for value in whole if value.numel()}
        given -= {local_of(value).data_ptr() for value in before}
        for tensor in self.module.state_dict(keep_vars=True).values():
            if isinstance(tensor, torch.Tensor) and local_of(tensor) is tensor and tensor.data_ptr() in given:
                tensor.data = tensor.detach().clone()


class KeptOptimizer:
    order = 3
    turn = 1

    def __init__(self, name: str, optimizer: Optimizer, names: Callable[[], Mapping[int, str]]) -> None:
        self._name = name
        self._optimizer = optimizer
        self._names = names

    def tree(self) -> dict[str, Any]:
        """The optimizer's own state dict, its parameters by name instead of by number.

        `state_dict()` of an optimizer only reads. Helpers that first run a step to make the state exist are not used.
        """
        names = self._parameter_names()
        raw = self._optimizer.state_dict()
        groups = [{**group, "params": [names[index] for index in group["params"]]} for group in raw["param_groups"]]
        state = {names[key] if isinstance(key, int) else key: value for key, value in raw["state"].items()}
        return {**raw, "state": state, "param_groups": groups}

    def load(self, tree: dict[str, Any]) -> None:
        names = self._parameter_names()
        numbers = {name: number for number, name in enumerate(names)}
        saved = {name for group in tree["param_groups"] for name in group["params"]}
        _same_keys(self._name, saved, set(numbers))
        groups = [
            {**group, "params": sorted(numbers[name] for name in group["params"])} for group in tree["param_groups"]
        ]
        if [group["params"] for group in groups] != self._live_groups():
            raise ConfigError(f"{self._name}: its parameter groups are not those of the checkpoint")
        state = {numbers.get(key, key): _cloned(value) for key, value in tree["state"].items()}
        self._optimizer.load_state_dict({**tree, "state": state, "param_groups": _cloned(groups)})
        self._undo_casts(state)

    def proof(self) -> Proof:
        names = iter(self._parameter_names())
        groups = [[next(names) for _ in group["params"]] for group in self._optimizer.param_groups]
        return OptimizerProof(self._optimizer, groups, self._name)

    def outline(self) -> Any:
        tree = self.tree()
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        state = tree["state"]
        named = zip(self._parameter_names(), parameters, strict=True)
        return {**tree, "state": {**state, **{name: Like(one, state.get(name, {})) for name, one in named}}}

    def _undo_casts(self, saved: Mapping[Any, Any]) -> None:
        """torch's own load casts floating-point state to its parameter's type, which loses bits where they differ."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        for number, values in saved.items():
            if isinstance(number, int):
                self._optimizer.state[parameters[number]] = _as_saved(self._optimizer.state[parameters[number]], values)

    def _live_groups(self) -> list[list[int]]:
        numbers = iter(range(sum(len(group["params"]) for group in self._optimizer.param_groups)))
        return [[next(numbers) for _ in group["params"]] for group in self._optimizer.param_groups]

    def _parameter_names(self) -> list[str]:
        """Names in the optimizer's own numbering."""
        known = self._names()
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return [known.get(id(parameter), f"param{number}") for number, parameter in enumerate(parameters)]


class _Unproven:
    turn = 3

    def tree(self) -> Any:
        raise NotImplementedError

    def proof(self) -> Proof | None:
        return None

    def outline(self) -> Any:
        return self.tree()


class KeptOptimizers:
    """Several optimizers in one list, tuple or dict: for instance one per parameter, each stepped in backward."""

    order = 3
    turn = 1

    def __init__(self, name: str, optimizers: Any, names: Callable[[], Mapping[int, str]]) -> None:
        self._name = name
        self._optimizers = optimizers
        self._names = names

    def tree(self) -> dict[str, Any]:
        return {key: one.tree() for key, one in self._parts().items()}

    def load(self, tree: Any) -> None:
        parts = self._parts()
        _same_keys(self._name, set(tree), set(parts))
        for key, one in parts.items():
            one.load(tree[key])

    def proof(self) -> Proof | None:
        parts, known = self._parts(), list(map(id, optimizers_in(self._optimizers)))
        keys = list(parts)

        def still() -> bool:
            now = optimizers_in(self._optimizers)
            return list(map(id, now)) == known and (type(self._optimizers) is not dict or list(self._parts()) == keys)

        return ProofOfAll([one.proof() for one in parts.values()], still)

    def outline(self) -> Any:
        return {key: one.outline() for key, one in self._parts().items()}

    def _parts(self) -> dict[str, KeptOptimizer]:
        """By position, by key, or by the name of the parameter that is the key."""
        several = self._optimizers
        keys = [self._key(key) for key in several] if type(several) is dict else [str(n) for n in range(len(several))]
        if len(set(keys)) < len(keys):
            raise UnsupportedStateError(f"{self._name}: two of its keys have the same name")
        optimizers = optimizers_in(several)
        if len(optimizers) < len(keys):
            raise UnsupportedStateError(f"{self._name}: not everything in it is an optimizer any more")
        return {
            key: KeptOptimizer(f"{self._name}.{key}", optimizer, self._names)
            for key, optimizer in zip(keys, optimizers, strict=True)
        }

    def _key(self, key: Any) -> str:
        if not isinstance(key, torch.Tensor):
            return str(key)
        if (name := self._names().get(id(key))) is None:
            raise UnsupportedStateError(f"{self._name}: a key is a tensor, but not a registered module's parameter")
        return name


class KeptStateful(_Unproven):
    """Anything with `state_dict` and `load_state_dict`."""

    def __init__(self, name: str, owner: Any) -> None:
        self._name = name
        self._owner = owner
        self.order = 2 if isinstance(owner, LRScheduler) else 1

    def tree(self) -> Any:
        return self._owner.state_dict()

    def load(self, tree: Any) -> None:
        self._owner.load_state_dict(_cloned(tree))


class KeptTensor:
    order = 1
    turn = 2

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name = name
        self._tensor = tensor

    def tree(self) -> torch.Tensor:
        return self._tensor.detach()

    def load(self, tree: Any) -> None:
        if tree is self._tensor:
            return
        if tree.shape != self._tensor.shape or tree.dtype != self._tensor.dtype:
            raise ConfigError(
                f"{self._name}: the checkpoint has {tree.dtype} {list(tree.shape)}, "
                f"here it is {self._tensor.dtype} {list(self._tensor.shape)}"
            )
        copy_all([(local_of(self._tensor).detach(), local_of(tree))])

    def proof(self) -> Proof | None:
        return TensorProof(self._tensor)

    def outline(self) -> Any:
        return self._tensor


class KeptGenerator(_Unproven):
    order = 1

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def tree(self) -> torch.Tensor:
        return self._generator.get_state()

    def load(self, tree: torch.Tensor) -> None:
        self._generator.set_state(tree.clone())


class KeptValue(_Unproven):
    """A plain value. It stands in `run.state`; a list, dict, set or NumPy generator is also changed in place, so that
    the user's own variable follows."""

    order = 1

    def __init__(self, name: str, state: dict[str, Any]) -> None:
        self._name = name
        self._state = state

    def tree(self) -> Any:
        return _entry(self._state, self._name)

    def load(self, tree: Any) -> None:
        old = self._state[self._name]
        self._state[self._name] = _refill(old, _cloned(tree))


class KeptEntry(_Unproven):
    """The object that stands in `run.state` under a name, also after the user put another one there."""

    def __init__(self, name: str, state: dict[str, Any], names: Callable[[], Mapping[int, str]]) -> None:
        self._name = name
        self._state = state
        self._names = names
        self.order = keep(name, state[name], state, names).order

    def tree(self) -> Any:
        return self._now().tree()

    def load(self, tree: Any) -> None:
        self._now().load(tree)

    def outline(self) -> Any:
        return self._now().outline()

    def _now(self) -> Kept:
        return keep(self._name, _entry(self._state, self._name), self._state, self._names)


def keep(name: str, value: Any, state: dict[str, Any], names: Callable[[], Mapping[int, str]]) -> Kept:
    """The `Kept` for one registered object."""
    if isinstance(value, nn.Module):
        return KeptModule(name, value)
    if isinstance(value, Optimizer):
        return KeptOptimizer(name, value, names)
    if optimizers_in(value):
        return KeptOptimizers(name, value, names)
    if isinstance(value, torch.Tensor):
        return KeptTensor(name, value)
    if isinstance(value, torch.Generator):
        return KeptGenerator(value)
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        if not callable(getattr(value, "load_state_dict", None)):
            raise UnsupportedStateError(f"{name}: {type(value).__name__} has state_dict(), but no load_state_dict()")
        return KeptStateful(name, value)
    state[name] = value
    return KeptValue(name, state)


def optimizers_in(value: Any) -> list[Optimizer]:
    """The optimizers that one registered value is, alone or in a list, tuple or dict."""
    parts = value.values() if type(value) is dict else value if type(value) in (list, tuple) else [value]
    return [part for part in parts if isinstance(part, Optimizer)]


def _entry(state: dict[str, Any], name: str) -> Any:
    if name not in state:
        raise ConfigError(f"run.state[{name!r}] was removed: leave it there while the run is open")
    return state[name]


def _refill(old: Any, new: Any) -> Any:
    if type(old) is type(new) and isinstance(old, dict | set):
        old.clear()
        old.update(new)
        return old
    if type(old) is type(new) and isinstance(old, list):
        old[:] = new
        return old
    if type(old) is type(new) and isinstance(old, np.random.Generator | np.random.RandomState):
        rng.continue_as(old, new)
        return old
    return new


def _cloned(tree: Any, copies: dict[int, torch.Tensor] | None = None) -> Any:
    """The same containers with tensors of their own: loaded objects must never alias shared memory.

    One tensor in several places stays one tensor.
    """
    copies = {} if copies is None else copies
    if isinstance(tree, torch.Tensor):
        if id(tree) not in copies:
            copies[id(tree)] = tree.clone()
        return copies[id(tree)]
    if type(tree) in (list, tuple):
        return type(tree)(_cloned(item, copies) for item in tree)
    if type(tree) in (dict, OrderedDict):
        return type(tree)((key, _cloned(value, copies)) for key, value in tree.items())
    return tree


def _as_saved(loaded: Any, saved: Any) -> Any:
    """The loaded tree, with every tensor of another type than saved replaced by the saved one."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        same = loaded.dtype == saved.dtype and type(loaded) is type(saved)
        return loaded if same else saved.to(loaded.device)
    if type(loaded) is dict and isinstance(saved, dict) and loaded.keys() == saved.keys():
        return {key: _as_saved(loaded[key], saved[key]) for key in loaded}
    if type(loaded) in (list, tuple) and type(saved) is type(loaded) and len(saved) == len(loaded):
        return type(loaded)(_as_saved(mine, its) for mine, its in zip(loaded, saved, strict=True))
    return loaded


def _same_type(name: str, saved: Any, live: Any) -> None:
    # A module's own load would cast, and so lose bits silently.
    if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor) and saved.dtype != live.dtype:
        raise ConfigError(
            f"{name}: the checkpoint has {saved.dtype}, here it is {live.dtype}; use the model that the run was "
            "started with, and convert it after surefoot.Run is entered"
        )


def _same_keys(name: str, saved: set[str], live: set[str]) -> None:
    if saved != live:
        missing, unexpected = sorted(live - saved)[:5], sorted(saved - live)[:5]
        raise ConfigError(
            f"{name}: the checkpoint does not fit: not in the checkpoint: {missing}; only in the checkpoint: "
            f"{unexpected} (first five of each); use the model and optimizer that the run was started with"
        )
