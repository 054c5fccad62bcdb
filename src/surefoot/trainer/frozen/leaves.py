"""Finds the frozen leaves: tensors of a trainer that no registered object changes, and that have stood still so far.

A module's parameter is frozen if it has no `requires_grad` and is in no registered optimizer. Nothing proves that the
script leaves it alone, so every boundary looks at its version counter. A leaf that changed is ordinary for good.
Writes that move no counter (through `.data` or NumPy) are found by hashing again (`trainer/frozen/frozen.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from surefoot.core.frozen import MIN_FROZEN_BYTES
from surefoot.trainer.state.flatten import Flat, NamedTensor
from surefoot.trainer.state.sharded import local_of

Stamp = tuple[int, int]
"""Where a tensor's bytes lie, and its version counter: equal as long as no ordinary operation wrote to it."""


def stamp(tensor: torch.Tensor) -> Stamp:
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


class FrozenLeaves:
    """The frozen leaves of one trainer. The training thread calls everything here; `suspect` any thread."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._moving: set[str] = set()
        """Leaves that were seen to change."""
        self._suspects: set[str] = set()
        self._stamps: dict[str, Stamp] = {}
        self.live: dict[str, torch.Tensor] = {}
        """The frozen leaves as of the last boundary."""

    def mark(self, flat: Flat, resting: frozenset[int]) -> Flat:
        """The same state with its frozen leaves marked: those that have stood still since they were first seen."""
        found = self._found(flat, resting) if resting else {}
        stamps = {name: stamp(tensor) for name, tensor in found.items()}
        changed = {name for name, now in stamps.items() if self._stamps.get(name, now) != now}
        changed |= self._suspects & found.keys()
        self._thaw(changed)
        self._stamps = {name: now for name, now in stamps.items() if name not in changed}
        self.live = {name: tensor for name, tensor in found.items() if name not in changed}
        if sum(tensor.nbytes for tensor in self.live.values()) < MIN_FROZEN_BYTES:
            self.live = {}
        if not self.live:
            return flat
        return replace(flat, tensors=[_frozen(one) if one.name in self.live else one for one in flat.tensors])

    def forget(self) -> None:
        """Forget the counters seen so far: a checkpoint was loaded since."""
        self._stamps = {}

    def stand(self, stamps: Mapping[str, Stamp]) -> bool:
        """True if these leaves are frozen, and have these stamps now."""
        return all(name in self.live and stamp(self.live[name]) == then for name, then in stamps.items())

    def suspect(self, name: str) -> None:
        """Give a leaf up at the next boundary: its bytes were found to have changed. Any thread may call this."""
        self._suspects.add(name)

    def _found(self, flat: Flat, resting: frozenset[int]) -> dict[str, torch.Tensor]:
        return {
            named.name: named.tensor
            for named in flat.tensors
            if named.tensor.data_ptr() in resting and named.name not in self._moving
        }

    def _thaw(self, changed: set[str]) -> None:
        self._moving |= changed
        for name in sorted(changed):
            self._warn(
                f"{name} is frozen (requires_grad is off, and no registered optimizer has it), but it was written to: "
                "from here on it is saved with every step"
            )


class Resting:
    """The parameters that no registered object changes. Asked at every boundary; walks only when something may have
    changed."""

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []
        self._seen: tuple[list[bool], list[int]] | None = None
        self._addresses: frozenset[int] = frozenset()

    def addresses(
        self,
        modules: Mapping[str, nn.Module],
        walked: Iterable[str],
        optimizers: Sequence[Optimizer],
        others: Iterable[torch.Tensor],
    ) -> frozenset[int]:
        """See `resting_addresses`.

        Args:
            modules: the registered ones, by name.
            walked: names of objects whose tensors are not proven to be those of the last time.
            optimizers: the registered ones.
            others: tensors that are registered by themselves.
        """
        if self._seen is None or not modules.keys().isdisjoint(walked):
            self._parameters = [parameter for module in modules.values() for parameter in module.parameters()]
            self._seen = None
        trained = [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
        seen = ([parameter.requires_grad for parameter in self._parameters], trained)
        if seen != self._seen:
            self._seen = seen
            still = not all(seen[0])
            self._addresses = resting_addresses(modules.values(), optimizers, others) if still else frozenset()
        return self._addresses


def resting_addresses(
    modules: Iterable[nn.Module], optimizers: Iterable[Optimizer], others: Iterable[torch.Tensor]
) -> frozenset[int]:
    """Addresses of parameters that no registered object changes.

    Args:
        modules: the registered ones.
        optimizers: the registered ones.
        others: tensors that are registered by themselves: the script changes them.
    """
    resting: dict[int, torch.Tensor] = {}
    moving: set[int] = {_storage(tensor) for tensor in others}
    for module in modules:
        for parameter in module.parameters():
            if parameter.requires_grad:
                moving.add(_storage(parameter))
            elif local_of(parameter).numel():
                resting[id(parameter)] = parameter
        # Buffers such as BatchNorm's statistics.
        moving.update(_storage(buffer) for buffer in module.buffers())
    for optimizer in optimizers:
        moving.update(_storage(tensor) for group in optimizer.param_groups for tensor in group["params"])
    return frozenset(local_of(p).data_ptr() for p in resting.values() if _storage(p) not in moving)


def _storage(tensor: torch.Tensor) -> int:
    return local_of(tensor).untyped_storage().data_ptr()


def _frozen(one: NamedTensor) -> NamedTensor:
    return NamedTensor(one.name, one.tensor, one.spread, one.place, frozen=True)
