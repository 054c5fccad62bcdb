"""Fences: hooks by which the optimizers announce that they are about to change the state.

A step pre-hook fires in the training thread right before an optimizer touches its parameters. Only an optimizer whose
hook fired in the step just finished is trusted to fire before the next change: a step that is replayed from a captured
graph, or skipped by a gradient scaler, fires no hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from surefoot.trainer.state.sharded import local_of


class Fences:
    """Hooks on every registered optimizer."""

    def __init__(self, on_fence: Callable[[], None]) -> None:
        self._on_fence = on_fence
        self._hooked: dict[int, tuple[Optimizer, RemovableHandle]] = {}
        self._fired: set[int] = set()

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Hook the optimizers that are not hooked yet, and unhook those that are gone."""
        now = {id(optimizer): optimizer for optimizer in optimizers}
        for gone in set(self._hooked) - set(now):
            self._hooked.pop(gone)[1].remove()
            self._fired.discard(gone)
        for number, optimizer in now.items():
            stepping = _stepping(optimizer) if number not in self._hooked else None
            if stepping is not None:
                self._hooked[number] = (optimizer, stepping.register_step_pre_hook(self._hook(number)))

    def take_fired(self) -> tuple[Optimizer, ...]:
        """The optimizers whose hook fired since this was last asked."""
        fired, self._fired = self._fired, set()
        return tuple(optimizer for number, (optimizer, _handle) in self._hooked.items() if number in fired)

    def close(self) -> None:
        for _optimizer, handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()

    def _hook(self, number: int) -> Callable[[Optimizer, Any, Any], None]:
        def hook(_stepping: Optimizer, _args: Any, _kwargs: Any) -> None:
            self._fired.add(number)
            self._on_fence()

        # In a compiled step the fence would be traced and compiled too, with its copies.
        return torch.compiler.disable(hook)  # type: ignore[no-any-return, no-untyped-call]


def _stepping(optimizer: Optimizer) -> Optimizer | None:
    """The optimizer whose step changes the tensors of `optimizer`: itself; or, if it is an optimizer by name only, as
    libraries' wrappers are (they never call `Optimizer.__init__`), the one that it holds. None if no hook would fire.
    """
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        held = {id(value): value for value in vars(optimizer).values() if isinstance(value, Optimizer)}
        if len(held) != 1:
            return None
        (optimizer,) = held.values()
    return optimizer


def owned_addresses(optimizers: Iterable[Optimizer]) -> set[int]:
    """Addresses of the tensors that only these optimizers' steps change: their parameters and their state."""
    owned: set[int] = set()
    for optimizer in optimizers:
        tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        owned |= {local_of(tensor).data_ptr() for tensor in tensors}
    owned.discard(0)
    return owned
