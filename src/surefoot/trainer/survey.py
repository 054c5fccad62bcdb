"""The survey: what of a checkpoint goes into which live tensor; from it follow what is needed, and what is loaded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from surefoot.core.plan import Item, Plan
from surefoot.core.ranges import Region
from surefoot.errors import ConfigError
from surefoot.trainer.fitting import Target, apart_error, fit, target_of
from surefoot.trainer.flatten import unflatten
from surefoot.trainer.objects import Kept
from surefoot.trainer.saved import SavedTensor, saved_tensors
from surefoot.trainer.tensors import torch_dtype

if TYPE_CHECKING:
    # torch's planning is imported where it is first needed: most starts never do, and need not wait for it.
    from surefoot.trainer.reshard import Planner

View = Callable[[Item], torch.Tensor]
Part = Callable[[Item, Region], torch.Tensor]


@dataclass(frozen=True)
class Survey:
    """Of one rank."""

    structure: str
    saved: Mapping[str, SavedTensor]
    targets: dict[str, Target] = field(default_factory=dict)
    """What is wanted, by key."""
    uses: Counter[str] = field(default_factory=Counter)
    """How often, by key: a tensor in several places must stay one."""
    taken: set[str] = field(default_factory=set)
    """Leaves that each rank had for itself, of which one rank's is taken by all."""

    apart: list[str] = field(default_factory=list)
    """Paths of parts that a saved rank kept for itself alone."""

    @property
    def as_saved(self) -> bool:
        """True if every tensor was saved in the layout that it has now."""
        return all(target.is_as_saved for target in self.targets.values())

    @property
    def notes(self) -> list[str]:
        """What the user should hear."""
        if not self.taken:
            return []
        names = ", ".join(sorted(self.taken)[:5])
        return [
            f"{names}{' and others' if len(self.taken) > 5 else ''}: each rank had kept its own; now it is sharded, "
            "and made of the first rank's"
        ]

    def regions(self) -> list[dict[str, Any]]:
        """What is needed of the plan's items.

        Raises:
            CorruptError: the checkpoint does not have all of a tensor; the message names it.
        """
        from surefoot.trainer.reshard import region_of, saved_item

        found: dict[tuple[int, Region], None] = {}
        for key, reads in self.planner.reads().items():
            target = self.targets[key]
            for read in reads:
                number = target.saved.numbers[target.saved.items.index(saved_item(target, read))]
                found[number, region_of(read)] = None
        return [
            {"item": number, "offset": list(region.offset), "lengths": list(region.lengths)} for number, region in found
        ]

    def resharded(self, kept: Mapping[str, Kept], values: list[Any], view: View, part: Part) -> dict[str, Any]:
        """The checkpoint's trees, each tensor as it is here: plain and whole, or as this rank's part.

        Args:
            kept: the objects, by name.
            values: the record's encoded plain values.
            view: what an item holds, read-only.
            part: a region of it.
        """
        loading = _Loading(self, view, part)
        trees = unflatten(self.structure, self.saved, values)
        # What is not registered any more is said, and not looked at.
        return {
            name: fit(name, tree, kept[name].outline(), loading.make) if name in kept else None
            for name, tree in trees.items()
        }

    def check_apart(self) -> None:
        """Refuse a part whose place was not kept, unless all that is sharded is as it was: its shape proves little.

        Raises:
            ConfigError: something else is sharded otherwise; the message names the part's path.
        """
        if self.apart and not self.as_saved:
            raise apart_error(self.apart[0])

    def note(self, path: str, saved: SavedTensor, live: Any) -> None:
        """Take in one tensor."""
        target = target_of(path, saved, live)
        if target.saved.apart:
            self.apart.append(path)
        if saved.items[0].frozen and not target.is_as_saved:
            raise ConfigError(
                f"{path}: it never changed, so it was saved by itself, in another layout than it has here: resume with "
                "the number of ranks and the sharding that it was saved with"
            )
        if saved.common is not None and target.saved is saved.common:
            self.taken.add(saved.leaf)
        self.targets[target.key] = target
        self.uses[target.key] += 1

    @cached_property
    def planner(self) -> Planner:
        """Of what is read from images."""
        from surefoot.trainer.reshard import Planner

        return Planner(target for target in self.targets.values() if not target.saved.items[0].frozen)


def survey(kept: Mapping[str, Kept], plan: Plan, of_rank: int, world_size: int) -> Survey:
    """Look at everything that is registered and in the checkpoint. Reads and changes no tensor.

    Args:
        kept: the objects, by name.
        plan: the checkpoint's plan.
        of_rank: the saved rank whose structure and own tensors are taken.
        world_size: ranks now.

    Raises:
        ConfigError: something needs what the checkpoint does not have; the message names its path.
    """
    structure = plan.structure(of_rank)
    found = Survey(structure, saved_tensors(plan, of_rank, world_size))
    # No value is looked at.
    nothing: Any = defaultdict(lambda: None)
    for name, tree in unflatten(structure, found.saved, nothing).items():
        if name in kept:
            fit(name, tree, kept[name].outline(), found.note)
    found.check_apart()
    return found


class _Loading:
    """Makes what is loaded."""

    def __init__(self, found: Survey, view: View, part: Part) -> None:
        from surefoot.trainer.reshard import Filling

        self._survey = found
        self._view = view
        self._filling = Filling(found.planner, found.targets, part)
        self._made: dict[str, torch.Tensor] = {}

    def make(self, path: str, saved: SavedTensor, live: Any) -> torch.Tensor:
        target = target_of(path, saved, live)
        made = self._made.get(target.key)
        if made is None:
            made = self._make(path, target, live)
            if self._survey.uses[target.key] > 1:
                self._made[target.key] = made
        return made

    def _make(self, path: str, target: Target, live: Any) -> torch.Tensor:
        local, model = self._local(target), target.model
        if model is None:
            return local
        if isinstance(live, DTensor) and local.dtype != live.dtype:
            raise ConfigError(f"{path}: the checkpoint has {local.dtype}, here it is {live.dtype}")
        return DTensor.from_local(
            local.to(model.device),
            model.device_mesh,
            model.placements,
            run_check=False,
            shape=model.shape,
            stride=model.stride(),
        )

    def _local(self, target: Target) -> torch.Tensor:
        number = target.number
        if number is not None and all(target.shape):
            return self._view(target.saved.items[number])
        local = torch.empty(target.shape, dtype=torch_dtype(target.saved.dtype))
        self._filling.fill(target, local)
        return local
