"""The registry: what the user named, as one tree of state out and one back in, and where its loaders stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from surefoot.core.plan import Plan
from surefoot.trainer import rng
from surefoot.trainer.data import Position, shield
from surefoot.trainer.flatten import Flat, Flattener, uncollected
from surefoot.trainer.objects import Kept, KeptEntry, KeptModule, keep
from surefoot.trainer.restore import MappedImage, load


class Registry:
    """Everything that is kept of one trainer."""

    def __init__(self, objects: Mapping[str, Any], state: dict[str, Any], warn: Callable[[str], None]) -> None:
        self._objects = objects
        self._state = state
        self._warn = warn
        self._kept: dict[str, Kept] = {}
        self._loaders: dict[str, Any] = {}
        self._positions: dict[str, Position] = {}
        self._resumed_positions: dict[str, Any] = {}
        self._state_names: set[str] = set()
        self._habits_checked = False

    def register(self) -> None:
        """Take in what the user named.

        Raises:
            UnsupportedStateError: something in it cannot be kept; refused now, by path, and not hours later.
        """
        for name, value in self._objects.items():
            shield(value)
            if isinstance(value, DataLoader) and not hasattr(value, "load_state_dict"):
                self._loaders[name] = value
            else:
                self._kept[name] = keep(name, value, self._state, self._parameter_names)
        for name in self._state:
            if name not in self._kept:
                self._kept[name] = KeptEntry(name, self._state, self._parameter_names)
        self._state_names = set(self._state)
        self.flatten()

    def flatten(self) -> Flat:
        """All state as of now; its tensors alias the live ones."""
        ddp = [value for value in self._objects.values() if isinstance(value, DistributedDataParallel)]
        replicated = frozenset(parameter.data_ptr() for module in ddp for parameter in module.parameters())
        ids = {id(parameter) for module in ddp for parameter in module.parameters()}
        optimizers = [
            name
            for name, value in self._objects.items()
            if isinstance(value, Optimizer)
            and ids
            and all(id(p) in ids for group in value.param_groups for p in group["params"])
        ]
        with uncollected():
            trees = {name: kept.tree() for name, kept in self._kept.items()}
            return Flattener(replicated).flatten(trees, optimizers)

    def optimizers(self) -> list[Optimizer]:
        """Every optimizer that the user named, alone or in a list or dict."""
        found: list[Optimizer] = []
        for value in [*self._objects.values(), *self._state.values()]:
            parts = value.values() if type(value) is dict else value if type(value) in (list, tuple) else [value]
            found += [part for part in parts if isinstance(part, Optimizer)]
        return list({id(optimizer): optimizer for optimizer in found}.values())

    def load(
        self, plan: Plan, record: Mapping[str, Any], of_rank: int, images: Mapping[int, MappedImage], rank: int
    ) -> None:
        """Put a checkpoint back: objects, then positions, and the random states last."""
        fresh, unknown = load(self._kept, plan, of_rank, images, record["values"])
        for name in [name for name in fresh if name not in self._loaders]:
            self._warn(f"{name} is not in the checkpoint: it starts fresh")
        if unknown:
            self._warn(f"the checkpoint holds {unknown}, which this script does not register")
        self._resumed_positions = dict(record.get("positions", {}))
        for name, position in self._positions.items():
            self._resume_position(name, position)
        rng.restore(record["rng"])
        if of_rank != rank:
            rng.diverge(rank)

    def position_of(self, loader: Any) -> Position:
        """The position of a loader, registered or not."""
        for name, known in self._loaders.items():
            if known is loader:
                return self._positions.get(name) or self._new_position(name, loader)
        name = f"batches{len(self._positions) or ''}"
        self._loaders[name] = loader
        return self._new_position(name, loader)

    def positions(self) -> dict[str, Any]:
        """Where the loaders stand, encoded; of those not asked for yet, where they stood in the checkpoint."""
        return self._resumed_positions | {name: position.state() for name, position in self._positions.items()}

    def check_habits(self) -> None:
        """Say once, at the first step, what looks kept and is not."""
        if self._habits_checked:
            return
        self._habits_checked = True
        for name in self._loaders:
            if name not in self._positions:
                self._warn(
                    f"{name} is registered, but this step's batch did not come from run.batches({name}, …): "
                    "its position is not kept while it is iterated otherwise"
                )
        for name in set(self._state) - self._state_names:
            self._warn(f"run.state[{name!r}] was added after the run was opened: it is not kept")

    def _new_position(self, name: str, loader: Any) -> Position:
        position = Position(name, loader, self._warn)
        self._positions[name] = position
        self._resume_position(name, position)
        return position

    def _resume_position(self, name: str, position: Position) -> None:
        state = self._resumed_positions.pop(name, None)
        if state is not None:
            position.load(state)

    def _parameter_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for kept in self._kept.values():
            if isinstance(kept, KeptModule):
                for parameter, name in kept.parameter_names():
                    names.setdefault(id(parameter), name)
        return names
