"""Loads images that the agent has verified into the live objects."""

from __future__ import annotations

import gc
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from surefoot.core.image import PAGE_BYTES
from surefoot.core.plan import Item, Plan
from surefoot.core.presence import spans
from surefoot.core.ranges import Range, Region, first_hole, region_ranges, whole_of
from surefoot.errors import ConfigError, CorruptError
from surefoot.trainer.restore.fit import Fit, SavedTensor, Target, fitted, target_of
from surefoot.trainer.state.flatten import dtype_name
from surefoot.trainer.state.objects import Kept, KeptModule
from surefoot.trainer.state.tensors import box_view, copy_all, memory_view, narrowed, torch_dtype
from surefoot.trainer.state.wrapped import Wrapped

_NAMED = 5
_OWN_REFERENCES = 2
"""References to a mapping that has no view: the `MappedImage`'s, and that of the `getrefcount` call itself."""


@dataclass(frozen=True, slots=True)
class MappedImage:
    """One rank's image, mapped read-only: a load that kept a view of it could not change it."""

    rank: int
    mapping: mmap.mmap
    offset: int
    ranges: tuple[Range, ...] | None = None
    """The parts of the image that are there; None for all."""


def map_image(
    rank: int, fd: int, offset: int, size_bytes: int, ranges: Sequence[Sequence[int]] | None = None
) -> MappedImage:
    """Map the memory behind a descriptor; takes over the descriptor."""
    there = None if ranges is None else tuple((int(start), int(stop)) for start, stop in ranges)
    try:
        return MappedImage(rank, mmap.mmap(fd, offset + size_bytes, prot=mmap.PROT_READ), offset, there)
    finally:
        os.close(fd)


def load(
    kept: Mapping[str, Kept],
    found: Fit,
    images: Mapping[int, MappedImage],
    values: list[Any],
    frozen: Mapping[str, torch.Tensor] | None = None,
) -> tuple[list[str], list[str]]:
    """Put a checkpoint into the registered objects, one after the other.

    Args:
        kept: the objects, by name.
        found: which parts of the checkpoint go where.
        images: by saved rank.
        values: the record's encoded plain values.
        frozen: the script's own tensors by leaf. Those that the plan has frozen already hold the saved values.

    Returns:
        Names registered now but not in the checkpoint, and names in the checkpoint but not registered.

    Raises:
        CorruptError: the checkpoint does not fit its own plan.
        ConfigError: an object does not fit its saved state.
    """
    trees = found.trees(values)
    loading = _Loading(found, _Views(found.plan, images, frozen or {}))
    for name in sorted(set(trees) & set(kept), key=lambda name: kept[name].order):
        kept[name].load(fitted(name, trees[name], found.outlines[name], loading))
    del loading
    if any(_is_viewed(image) for image in images.values()):
        # Views may hang in a cycle of references that was not collected yet.
        gc.collect()
        _refuse_views(kept, images)
    return sorted(set(kept) - set(trees)), sorted(set(trees) - set(kept))


def _is_viewed(image: MappedImage) -> bool:
    """True if a tensor over the image is still alive: each holds one reference to the mapping."""
    return sys.getrefcount(image.mapping) > _OWN_REFERENCES


def _refuse_views(kept: Mapping[str, Kept], images: Mapping[int, MappedImage]) -> None:
    # A view that is left would change when its memory is filled with a later step, and crash when it is written.
    if any(_is_viewed(image) for image in images.values()):
        modules = sorted(name for name, one in kept.items() if isinstance(one, KeptModule))
        raise ConfigError(
            f"{', '.join(modules)}: a module keeps the very tensors that its load_state_dict() is given, outside of "
            "its parameters and buffers: make it keep a copy (tensor.clone())"
        )


class _Views:
    """Tensors over the images of a checkpoint."""

    def __init__(self, plan: Plan, images: Mapping[int, MappedImage], live: Mapping[str, torch.Tensor]) -> None:
        self._plan = plan
        self._images = images
        self._live = live
        self._memory: dict[int, torch.Tensor] = {}
        self._offsets: dict[int, dict[str, int]] = {}

    def view(self, item: Item) -> torch.Tensor:
        """An item's tensor, read-only.

        Raises:
            CorruptError: its rank's image is not there.
            ConfigError: it is frozen, and the live tensor of its name is of another kind.
        """
        if item.frozen:
            return self._frozen(item)
        return self.part(item, whole_of(item.box))

    def part(self, item: Item, region: Region) -> torch.Tensor:
        """A region of an item's tensor, read-only.

        Raises:
            CorruptError: that part of its rank's image is not there.
        """
        if not all(region.lengths):
            # The agent may have sent no part of an image from which nothing else is needed.
            return torch.empty(region.lengths, dtype=torch_dtype(item.box.dtype))
        if item.rank not in self._images:
            raise CorruptError(f"the image of rank {item.rank}, which holds {item.leaf}, did not arrive")
        image = self._images[item.rank]
        if item.rank not in self._memory:
            self._memory[item.rank] = memory_view(image.mapping)
            self._offsets[item.rank] = {box.name: offset for box, offset in self._plan.image(item.rank).places}
        start = self._offsets[item.rank][item.box.name]
        if image.ranges is not None:
            # Parts that are not there read as zeros. No block of sums is shorter than a page, see `region_ranges`.
            hole = first_hole(image.ranges, region_ranges(item.box, start, region, PAGE_BYTES))
            if hole is not None:
                raise CorruptError(f"{item.leaf}: bytes {hole[0]} to {hole[1]} of rank {item.rank} did not arrive")
        return narrowed(box_view(self._memory[item.rank], item.box, image.offset + start), region)

    def _frozen(self, item: Item) -> torch.Tensor:
        """The live tensor itself: it was compared with the saved bytes, or loaded, before this start was decided."""
        live = self._live.get(item.leaf)
        if live is None:
            # The script no longer registers its object, so nothing looks at the tensor.
            return torch.empty(item.box.shape, dtype=torch_dtype(item.box.dtype), device="meta")
        if (dtype_name(live.dtype), tuple(live.shape)) != (item.box.dtype, item.box.shape):
            raise ConfigError(
                f"{item.leaf}: the checkpoint has {item.box.dtype} {list(item.box.shape)}, here it is {live.dtype} "
                f"{list(live.shape)}; use the model that the run was started with"
            )
        return live


class _Loading:
    """Makes the tensors to load: views of the images where a tensor was saved as it is now."""

    def __init__(self, found: Fit, views: _Views) -> None:
        self._found = found
        self._views = views
        self._made: dict[str, torch.Tensor] = {}

    def tensor(self, path: str, saved: SavedTensor, live: Any) -> torch.Tensor:
        target = target_of(path, saved, live)
        made = self._made.get(target.key)
        if made is None:
            made = self._make(path, target, live)
            if target.key in self._found.repeated:
                self._made[target.key] = made
        return made

    def wrapped(self, path: str, saved: Wrapped, live: Any) -> torch.Tensor:
        """The live wrapped tensor, with the inner tensors copied into it; a new one where there is none."""
        if not isinstance(live, torch.Tensor):
            return saved.build(path, {name: item.clone() for name, item in saved.inner.items()})
        saved.check(live, path)
        pairs = [(name, getattr(live, name), item) for name, item in saved.inner.items()]
        for name, inner, item in pairs:
            if (item.dtype, item.shape) != (inner.dtype, inner.shape):
                raise ConfigError(
                    f"{path}.{name}: the checkpoint has {item.dtype} {list(item.shape)}, here it is {inner.dtype} "
                    f"{list(inner.shape)}"
                )
        copy_all((inner.detach(), item) for _name, inner, item in pairs if item is not inner)
        return live

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
        items, number = target.saved.items, target.number
        if number is not None and not target.is_empty:
            return self._views.view(items[number])
        local = torch.empty(target.shape, dtype=torch_dtype(target.saved.dtype))
        reads = self._found.reads.get(target.key, ())
        copy_all((narrowed(local, one.into), self._views.part(items[one.number], one.source)) for one in reads)
        return local


def unclaimed(plan: Plan, world_size: int) -> str | None:
    """A warning of tensors that each rank saved for itself, and that no rank takes now because there are fewer ranks.

    A rank's own tensors go to the rank of the same number, whether they are equal on all ranks or not, whole or a part
    of something that only the script knows. A script whose ranks each hold a part would go on without the lost parts.
    """
    gone = range(world_size, plan.world_size)
    names = sorted({name for rank in gone for name in plan.own(rank)})
    if not names:
        return None
    more = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
    return (
        f"{', '.join(names[:_NAMED])}{more}: each of {plan.world_size} ranks saved its own, and no rank takes those of "
        f"rank(s) {spans(gone)}"
    )
