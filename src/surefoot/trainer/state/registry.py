"""The registry: gets the state of all registered objects out and back in, and knows the positions of the loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from surefoot.core.plan import Plan
from surefoot.ipc.wire import Body
from surefoot.trainer.data.loader_state import owner_of
from surefoot.trainer.data.position import Position, shield
from surefoot.trainer.frozen.frozen import Frozen
from surefoot.trainer.frozen.leaves import Resting
from surefoot.trainer.restore.fit import Fit, fit
from surefoot.trainer.restore.restore import MappedImage, load
from surefoot.trainer.state import rng
from surefoot.trainer.state.flatten import Flat, NamedTensor, uncollected
from surefoot.trainer.state.objects import Kept, KeptEntry, KeptModule, keep, optimizers_in
from surefoot.trainer.state.shortcut import Replicated, Shortcut
from surefoot.trainer.state.tensors import digest


class Registry:
    """All objects of one trainer that are checkpointed."""

    def __init__(
        self,
        objects: Mapping[str, Any],
        state: dict[str, Any],
        warn: Callable[[str], None],
        tell: Callable[[Body], None],
    ) -> None:
        self._objects = objects
        self._state = state
        self._warn = warn
        self._kept: dict[str, Kept] = {}
        self._loaders: dict[str, Any] = {}
        self._positions: dict[str, Position] = {}
        self._resumed_positions: dict[str, Any] = {}
        self._state_names: set[str] = set()
        self._habits_checked = False
        self._shortcut = Shortcut()
        self._names: dict[int, str] | None = None
        """Names of parameters, by identity. None unless a flattening or loading runs; filled when first needed."""
        self.sharded = False
        """True if a registered tensor is a block of a sharded one."""
        self.frozen = Frozen(warn, tell)
        self._resting = Resting()

    def register(self) -> None:
        """Take in the objects that the user named.

        Raises:
            UnsupportedStateError: a value in them cannot be checkpointed; refused now, by path, and not hours later.
        """
        for name, value in self._objects.items():
            shield(value)
            if isinstance(value, DataLoader):
                self._loaders[name] = value
                self._keep_own_position(name, value)
            else:
                self._kept[name] = keep(name, value, self._state, self._parameter_names)
        for name in self._state:
            if name not in self._kept:
                self._kept[name] = KeptEntry(name, self._state, self._parameter_names)
        self._state_names = set(self._state)
        flat = self.flatten()
        self.sharded = any(named.spread == "sharded" for named in flat.tensors)
        self.frozen.open(flat)

    def flatten(self) -> Flat:
        """All state as of now; its tensors alias the live ones."""
        with uncollected(), self._one_naming():
            flat = self._shortcut.flatten(self._kept, self._replicated, self._parameter_names)
            return self.frozen.mark(flat, self._resting_addresses())

    def _replicated(self) -> Replicated:
        ddp = [value for value in self._objects.values() if isinstance(value, DistributedDataParallel)]
        parameters = [parameter for module in ddp for parameter in module.parameters()]
        ids = {id(parameter) for parameter in parameters}
        optimizers = [
            name
            for name, value in self._objects.items()
            if (parts := optimizers_in(value))
            and ids
            and all(id(p) in ids for part in parts for group in part.param_groups for p in group["params"])
        ]
        return Replicated(frozenset(parameter.data_ptr() for parameter in parameters), optimizers)

    def digest(self, named: NamedTensor) -> str:
        """Hash of a tensor, to compare it between ranks."""
        return self.frozen.digest(named) if named.frozen else digest(named.tensor)

    def _resting_addresses(self) -> frozenset[int]:
        modules = {name: kept.module for name, kept in self._kept.items() if isinstance(kept, KeptModule)}
        tensors = [value for value in self._objects.values() if isinstance(value, torch.Tensor)]
        return self._resting.addresses(modules, self._shortcut.walked, self.optimizers(), tensors)

    def optimizers(self) -> list[Optimizer]:
        """Every optimizer that the user named, alone or in a list or dict."""
        found = [part for value in [*self._objects.values(), *self._state.values()] for part in optimizers_in(value)]
        return list({id(optimizer): optimizer for optimizer in found}.values())

    def fit(self, plan: Plan, of_rank: int, world_size: int) -> Fit:
        """Decide which parts of a checkpoint go where.

        Raises:
            ConfigError: an object here needs a part that the checkpoint does not have; the message names its path.
        """
        with self._one_naming():
            return fit({name: kept.outline() for name, kept in self._kept.items()}, plan, of_rank, world_size)

    def load(self, found: Fit, record: Mapping[str, Any], images: Mapping[int, MappedImage], rank: int) -> None:
        """Put a checkpoint back: objects, then positions, and the random states last."""
        fresh, unknown = self.load_state(found, record["values"], images)
        for name in [name for name in fresh if name not in self._loaders]:
            self._warn(f"{name} is not in the checkpoint: it starts fresh")
        if unknown:
            self._warn(f"the checkpoint holds {unknown}, which this script does not register")
        self._resumed_positions = dict(record.get("positions", {}))
        for name, position in self._positions.items():
            self._resume_position(name, position)
        rng.restore(record["rng"])
        if found.of_rank != rank:
            rng.diverge(rank)
        self.frozen.refuse_torn(found.plan, found.of_rank)

    def load_state(
        self, found: Fit, values: list[Any], images: Mapping[int, MappedImage]
    ) -> tuple[list[str], list[str]]:
        """Load the objects; returns names that only the script has, and names that only the checkpoint has."""
        if found.warning is not None:
            self._warn(found.warning)
        with self._one_naming():
            return load(self._kept, found, images, values, self.frozen.found)

    def position_of(self, loader: Any) -> Position:
        """The position of a loader, registered or not."""
        for name, known in self._loaders.items():
            if known is loader:
                return self._positions.get(name) or self._new_position(name, loader)
        name = f"batches{len(self._positions) or ''}"
        self._loaders[name] = loader
        return self._new_position(name, loader)

    def positions(self) -> dict[str, Any]:
        """The loaders' positions, encoded; for loaders not used yet, their positions in the checkpoint."""
        return self._resumed_positions | {name: position.state() for name, position in self._positions.items()}

    def epoch(self) -> int | None:
        """The epoch in which the first loader stands that `batches` was asked for; None without one."""
        epochs = (position.known_epoch for position in self._positions.values())
        return next((epoch for epoch in epochs if epoch is not None), None)

    def check_habits(self) -> None:
        """Warn once, at the first step, of state that seems to be checkpointed and is not."""
        if self._habits_checked:
            return
        self._habits_checked = True
        for name in self._loaders:
            if name not in self._positions:
                self._warn(
                    f"{name} is registered, but this step's batch did not come from run.batches({name}, …): "
                    "its position is not checkpointed while it is iterated otherwise"
                )
        for name in set(self._state) - self._state_names:
            self._warn(f"run.state[{name!r}] was added after the run was opened: it is not checkpointed")

    def _keep_own_position(self, name: str, loader: Any) -> None:
        # The position of a loader that knows it itself is saved even if the script iterates it without run.batches.
        if owner_of(loader) is not None:
            self._new_position(name, loader).iterated_outside()

    def _new_position(self, name: str, loader: Any) -> Position:
        position = Position(name, loader, self._warn)
        self._positions[name] = position
        self._resume_position(name, position)
        return position

    def _resume_position(self, name: str, position: Position) -> None:
        state = self._resumed_positions.pop(name, None)
        if state is not None:
            position.load(state)

    @contextmanager
    def _one_naming(self) -> Iterator[None]:
        """Within it, parameters are named once, when an optimizer first asks: all modules were handled before."""
        self._names = {}
        try:
            yield
        finally:
            self._names = None

    def _parameter_names(self) -> dict[int, str]:
        if self._names:
            return self._names
        names = self._names if self._names is not None else {}
        for kept in self._kept.values():
            if isinstance(kept, KeptModule):
                for parameter, name in kept.parameter_names():
                    names.setdefault(id(parameter), name)
        return names
