"""Saved tensors: what a checkpoint has of a tensor, before it is known which part of it is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from surefoot.core.plan import Item, Plan, structure_leaves


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint, by the items that hold it."""

    leaf: str
    dtype: str
    whole: tuple[int, ...]
    items: tuple[Item, ...]
    """They make up the whole, each element once."""
    numbers: tuple[int, ...]
    """Of the items in their plan."""
    sharded: bool
    same_ranks: bool
    """There are as many ranks now as when it was saved."""
    apart: bool = False
    """It was sharded, but replicas differed: this is the saved rank's own part, and its place was not kept."""
    common: SavedTensor | None = None
    """Of what each rank kept for itself: the one that all take of whom each needs a part."""

    def kept_apart(self, whole: Sequence[int]) -> SavedTensor:
        """The same as a part of a sharded tensor of that shape, if it was no block."""
        return self if self.sharded else replace(self, whole=tuple(whole), apart=True)


def saved_tensors(plan: Plan, of_rank: int, world_size: int) -> dict[str, SavedTensor]:
    """Every tensor that a saved rank's structure refers to, by leaf."""
    same_ranks = plan.world_size == world_size
    numbered: dict[str, list[tuple[int, Item]]] = {}
    for number, item in enumerate(plan.items):
        numbered.setdefault(item.leaf, []).append((number, item))
    leaves = structure_leaves(plan.structure(of_rank))
    return {leaf: _saved(leaf, numbered[leaf], of_rank, same_ranks) for leaf in leaves}


def _saved(leaf: str, found: Sequence[tuple[int, Item]], of_rank: int, same_ranks: bool) -> SavedTensor:
    if found[0][1].spread != "local":
        return _of(leaf, found, same_ranks)
    own = _of(leaf, [one for one in found if one[1].rank == of_rank], same_ranks)
    first = min(found, key=lambda one: one[1].rank)
    return own if len(found) == 1 else replace(own, common=_of(leaf, [first], same_ranks))


def _of(leaf: str, found: Sequence[tuple[int, Item]], same_ranks: bool) -> SavedTensor:
    box, sharded = found[0][1].box, found[0][1].spread == "sharded"
    numbers, items = zip(*found, strict=True)
    return SavedTensor(leaf, box.dtype, box.global_shape, tuple(items), tuple(numbers), sharded, same_ranks)
