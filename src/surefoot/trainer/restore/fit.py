"""Decides which part of which saved tensor each live tensor takes, and so which parts of a checkpoint are needed and
where they are loaded."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from surefoot.core.plan import Item, Plan, structure_leaves
from surefoot.core.ranges import Region, whole_of
from surefoot.errors import ConfigError
from surefoot.trainer.state.flatten import unflatten
from surefoot.trainer.state.sharded import local_of, place_of
from surefoot.trainer.state.wrapped import Wrapped, is_wrapped

if TYPE_CHECKING:
    # torch's planning is imported where it is first needed: most starts never do, and need not wait for it.
    from surefoot.trainer.restore.reshard import Read

_NAMED = 5


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint, by the items that hold it."""

    leaf: str
    dtype: str
    whole: tuple[int, ...]
    items: tuple[Item, ...]
    """Together they make up the whole, each element once."""
    numbers: tuple[int, ...]
    """Numbers of the items in their plan."""
    sharded: bool
    same_ranks: bool
    """True if there are as many ranks now as when it was saved."""
    apart: bool = False
    """It was sharded, but replicas differed: this is the saved rank's own part, and its place was not kept."""
    common: SavedTensor | None = None
    """If each rank kept its own: the tensor that all live ranks take if each needs a part of one sharded tensor."""

    def as_part_of(self, whole: Sequence[int] | None) -> SavedTensor:
        """The same, as a part of a sharded tensor of that shape if it was such a part but was not saved as a block."""
        return self if whole is None or self.sharded else replace(self, whole=tuple(whole), apart=True)


@dataclass(frozen=True, slots=True)
class Like:
    """A parameter's state: every part of it that is not born yet and has the parameter's shape is sharded like it."""

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
        """Its name: one leaf may be wanted in several parts."""
        return f"{self.saved.leaf} at {list(self.offset)} of shape {list(self.shape)}"

    @property
    def is_empty(self) -> bool:
        return not all(self.shape)

    @property
    def number(self) -> int | None:
        """The saved item that is just this part; None if it must be put together."""
        items = self.saved.items
        found = (n for n, item in enumerate(items) if (item.box.offset, item.box.shape) == (self.offset, self.shape))
        return 0 if self.saved.apart else next(found, None)

    @property
    def is_as_saved(self) -> bool:
        """True if it was saved in this same layout: nothing must be put together, cut, or wrapped differently."""
        if (self.model is not None) != (self.saved.sharded or self.saved.apart):
            return False
        return self.number is not None or self.is_empty


@dataclass(frozen=True)
class Fit:
    """A checkpoint, compared with the state that one rank has now."""

    plan: Plan
    of_rank: int
    outlines: Mapping[str, Any]
    saved: Mapping[str, SavedTensor]
    targets: Mapping[str, Target]
    """The wanted parts, by key."""
    repeated: frozenset[str]
    """Keys of the parts that are wanted in several places: such a part must stay one tensor."""
    shared_out: Sequence[str]
    """Leaves that each rank had for itself, of which one rank's is now shared out to all."""

    @property
    def as_saved(self) -> bool:
        """True if every tensor was saved in the layout that it has now."""
        return all(target.is_as_saved for target in self.targets.values())

    @property
    def warning(self) -> str | None:
        """A warning for the user, if there is one."""
        if not self.shared_out:
            return None
        others = " and others" if len(self.shared_out) > _NAMED else ""
        return (
            f"{', '.join(self.shared_out[:_NAMED])}{others}: each rank had saved its own; now it is sharded, and made "
            "from the first rank's"
        )

    @cached_property
    def reads(self) -> Mapping[str, Sequence[Read]]:
        """By key: the reads that make up each target that no single item holds.

        Raises:
            CorruptError: the checkpoint does not have all of a tensor; the message names it.
        """
        parted = [target for target in self.targets.values() if target.number is None and not target.is_empty]
        if not parted:
            return {}
        from surefoot.trainer.restore.reshard import planned

        return planned(parted)

    def regions(self) -> Iterator[tuple[int, Region]]:
        """The needed regions of the plan's items that are read from images, each with its item's number.

        Raises:
            CorruptError: the checkpoint does not have all of a tensor; the message names it.
        """
        for key, target in self.targets.items():
            saved, number = target.saved, target.number
            if number is None:
                yield from ((saved.numbers[read.number], read.source) for read in self.reads.get(key, ()))
            elif not saved.items[number].frozen and not target.is_empty:
                yield saved.numbers[number], whole_of(saved.items[number].box)

    def trees(self, values: Sequence[Any]) -> dict[str, Any]:
        """The saved state, by name, with a `SavedTensor` in each tensor's place."""
        return unflatten(self.plan.structure(self.of_rank), self._saved_as, values)

    def _saved_as(self, leaf: str, whole: Sequence[int] | None) -> SavedTensor:
        return self.saved[leaf].as_part_of(whole)


class Maker(Protocol):
    """Makes the objects to load, given a path, the saved value there, and the live value there."""

    def tensor(self, path: str, saved: SavedTensor, live: Any) -> Any: ...

    def wrapped(self, path: str, saved: Wrapped, live: Any) -> Any:
        """The inner tensors of `saved` are made already."""


def fit(outlines: Mapping[str, Any], plan: Plan, of_rank: int, world_size: int) -> Fit:
    """Compare a checkpoint with the registered state as it is now. Reads and changes no tensor.

    Args:
        outlines: the registered objects' state as it is now, by name.
        plan: the checkpoint's plan.
        of_rank: the saved rank whose structure and own tensors are taken.
        world_size: ranks now.

    Raises:
        ConfigError: a live object needs a part that the checkpoint does not have; the message names its path.
    """
    wanted = _Wanted()
    bare = Fit(plan, of_rank, outlines, _saved_tensors(plan, of_rank, world_size), {}, frozenset(), ())
    no_values: Any = defaultdict(lambda: None)
    for name, tree in bare.trees(no_values).items():
        if name in outlines:
            fitted(name, tree, outlines[name], wanted)
    repeated = frozenset(key for key, count in wanted.uses.items() if count > 1)
    found = replace(bare, targets=wanted.targets, repeated=repeated, shared_out=sorted(wanted.shared_out))
    if wanted.apart and not found.as_saved:
        # Its shape proves little about its place, unless every sharded tensor is laid out as it was.
        raise _apart_error(wanted.apart[0])
    return found


class _Wanted:
    """Collects the wanted parts."""

    def __init__(self) -> None:
        self.targets: dict[str, Target] = {}
        self.uses: Counter[str] = Counter()
        self.shared_out: set[str] = set()
        self.apart: list[str] = []
        """Paths of parts that a saved rank kept for itself alone."""

    def tensor(self, path: str, saved: SavedTensor, live: Any) -> None:
        target = target_of(path, saved, live)
        self.targets[target.key] = target
        self.uses[target.key] += 1
        if target.saved.apart:
            self.apart.append(path)
        if target.saved is not saved:
            self.shared_out.add(saved.leaf)

    def wrapped(self, path: str, saved: Wrapped, live: Any) -> None:
        """Nothing: only its inner tensors are wanted."""


def fitted(path: str, saved: Any, live: Any, maker: Maker) -> Any:
    """`saved`, with the same nesting, where `maker` has replaced each tensor."""
    if isinstance(saved, SavedTensor):
        return maker.tensor(path, saved, live)
    if isinstance(saved, Wrapped):
        model = live.tensor if isinstance(live, Like) else live
        inner = {
            name: fitted(f"{path}.{name}", item, getattr(model, name, None), maker)
            for name, item in saved.inner.items()
        }
        return maker.wrapped(path, replace(saved, inner=inner), live)
    if type(saved) in (dict, OrderedDict):
        pairs = ((key, fitted(f"{path}.{key}", item, _part(live, key), maker)) for key, item in saved.items())
        return type(saved)(pairs)
    if type(saved) in (list, tuple):
        return type(saved)(fitted(f"{path}.{n}", item, _part(live, n), maker) for n, item in enumerate(saved))
    return saved


def _part(live: Any, key: Any) -> Any:
    if isinstance(live, Like):
        return live.born.get(key, live)
    if isinstance(live, Mapping):
        return live.get(key)
    return live[key] if isinstance(live, list | tuple) and type(key) is int and key < len(live) else None


def target_of(path: str, saved: SavedTensor, live: Any) -> Target:
    """Which part of a saved tensor is wanted where `live` is.

    Raises:
        ConfigError: the checkpoint does not have it; the message names the path.
    """
    target = _target(path, saved, live)
    if saved.items[0].frozen and not target.is_as_saved:
        raise ConfigError(
            f"{path}: it never changed, so it was saved apart, in another layout than it has here: resume with "
            "the number of ranks and the sharding that it was saved with"
        )
    return target


def _target(path: str, saved: SavedTensor, live: Any) -> Target:
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
            f"{path}: the checkpoint has a sharded tensor of shape {list(saved.whole)} there, but the script has none "
            "to load it into; shard the model before surefoot.Run is entered"
        )
    if saved.apart:
        raise _apart_error(path)
    if isinstance(live, torch.Tensor) and is_wrapped(live):
        raise ConfigError(f"{path}: the checkpoint has a plain tensor, here it is a {type(live).__qualname__}")
    return Target(saved, (0,) * len(saved.whole), saved.whole, None)


def _block(path: str, saved: SavedTensor, model: DTensor) -> Target:
    local = tuple(local_of(model).shape)
    if saved.apart:
        if saved.items[0].box.shape != local or not saved.same_ranks:
            raise _apart_error(path)
        return Target(saved, (0,) * len(local), local, model)
    return Target(saved.common or saved, place_of(model, path).offset, local, model)


def _apart_error(path: str) -> ConfigError:
    """The error for a part that is wanted in another layout, though its place in the whole was not saved."""
    return ConfigError(
        f"{path}: when it was saved, ranks that should have had the same part of it had different ones, so each saved "
        "its own: resume with the number of ranks and the device mesh that it was saved with"
    )


def _saved_tensors(plan: Plan, of_rank: int, world_size: int) -> dict[str, SavedTensor]:
    """Every tensor that a saved rank's structure refers to, by leaf."""
    same_ranks = plan.world_size == world_size
    numbered: dict[str, list[tuple[int, Item]]] = {}
    for number, item in enumerate(plan.items):
        numbered.setdefault(item.leaf, []).append((number, item))
    leaves = structure_leaves(plan.structure(of_rank))
    return {leaf: _saved_tensor(leaf, numbered[leaf], of_rank, same_ranks) for leaf in leaves}


def _saved_tensor(leaf: str, found: Sequence[tuple[int, Item]], of_rank: int, same_ranks: bool) -> SavedTensor:
    if found[0][1].spread != "local":
        return _of_items(leaf, found, same_ranks)
    own = _of_items(leaf, [one for one in found if one[1].rank == of_rank], same_ranks)
    first = min(found, key=lambda one: one[1].rank)
    return own if len(found) == 1 else replace(own, common=_of_items(leaf, [first], same_ranks))


def _of_items(leaf: str, found: Sequence[tuple[int, Item]], same_ranks: bool) -> SavedTensor:
    box, sharded = found[0][1].box, found[0][1].spread == "sharded"
    numbers, items = zip(*found, strict=True)
    return SavedTensor(leaf, box.dtype, box.global_shape, tuple(items), tuple(numbers), sharded, same_ranks)
