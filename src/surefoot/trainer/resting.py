"""Resting: the parameters that nothing registered changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from surefoot.trainer.sharded import local_of


class Resting:
    """Asked at every boundary; walks only when something may have changed."""

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
    """Addresses of parameters that nothing registered changes.

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
        # BatchNorm's statistics and their like.
        moving.update(_storage(buffer) for buffer in module.buffers())
    for optimizer in optimizers:
        moving.update(_storage(tensor) for group in optimizer.param_groups for tensor in group["params"])
    return frozenset(local_of(p).data_ptr() for p in resting.values() if _storage(p) not in moving)


def _storage(tensor: torch.Tensor) -> int:
    return local_of(tensor).untyped_storage().data_ptr()
