"""Restore: images that the agent has verified, into the live objects."""

from __future__ import annotations

import gc
import mmap
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from surefoot.core.image import PAGE_BYTES
from surefoot.core.plan import Item, Plan, structure_leaves
from surefoot.core.ranges import Range, Region, first_hole, region_ranges, whole_of
from surefoot.errors import ConfigError, CorruptError
from surefoot.trainer.flatten import dtype_name, unflatten
from surefoot.trainer.objects import Kept, KeptModule
from surefoot.trainer.sharded import Blocks
from surefoot.trainer.survey import Survey
from surefoot.trainer.tensors import box_view, memory_view, torch_dtype

_OWN_REFERENCES = 2
"""To a mapping that nobody views: the `MappedImage`'s and that of the question itself."""


@dataclass(frozen=True, slots=True)
class MappedImage:
    """One rank's image, mapped read-only: a load that kept a view of it could not change it."""

    rank: int
    mapping: mmap.mmap
    offset: int
    ranges: tuple[Range, ...] | None = None
    """What of the image is there; None for all."""


def map_image(
    rank: int, fd: int, offset: int, size_bytes: int, ranges: Sequence[Sequence[int]] | None = None
) -> MappedImage:
    """Map what a descriptor holds; takes over the descriptor."""
    there = None if ranges is None else tuple((int(start), int(stop)) for start, stop in ranges)
    try:
        return MappedImage(rank, mmap.mmap(fd, offset + size_bytes, prot=mmap.PROT_READ), offset, there)
    finally:
        os.close(fd)


def load(
    kept: Mapping[str, Kept],
    plan: Plan,
    of_rank: int,
    images: Mapping[int, MappedImage],
    values: list[Any],
    live: Mapping[str, torch.Tensor] | None = None,
    survey: Survey | None = None,
) -> tuple[list[str], list[str]]:
    """Put a checkpoint into the registered objects.

    Args:
        kept: the objects, by name.
        plan: the checkpoint's plan.
        of_rank: the saved rank whose structure, local leaves and values are taken.
        images: by saved rank.
        values: the record's encoded plain values.
        live: the script's own tensors by leaf. Those that the plan has frozen hold what was saved already.
        survey: what of the checkpoint goes where; None if nothing is sharded, then or now.

    Returns:
        Names registered now but not in the checkpoint, and names in the checkpoint but not registered.

    Raises:
        CorruptError: the checkpoint does not fit its own plan.
        ConfigError: an object does not fit what was saved of it.
    """
    views = _Views(plan, images, live or {})
    if survey is None or survey.as_saved:
        trees = _trees(plan, of_rank, views, values)
    else:
        trees = survey.resharded(kept, values, views.view, views.part)
    del views
    fresh, unknown = sorted(set(kept) - set(trees)), sorted(set(trees) - set(kept))
    for name in unknown:
        del trees[name]
    for name in sorted(trees, key=lambda name: kept[name].order):
        kept[name].load(trees.pop(name))
    if any(_is_viewed(image) for image in images.values()):
        # Views may hang in a cycle of references that nobody has collected yet.
        gc.collect()
        _refuse_views(kept, images)
    return fresh, unknown


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
        """What an item holds, read-only.

        Raises:
            CorruptError: its rank's image is not there.
            ConfigError: it is frozen, and the live tensor of its name is of another kind.
        """
        if item.frozen:
            return self._frozen(item)
        return self.part(item, whole_of(item.box))

    def part(self, item: Item, region: Region) -> torch.Tensor:
        """A region of what an item holds, read-only.

        Raises:
            CorruptError: that part of its rank's image is not there.
        """
        if not all(region.lengths):
            # Of an image that holds nothing else nobody may have asked for anything.
            return torch.empty(region.lengths, dtype=torch_dtype(item.box.dtype))
        if item.rank not in self._images:
            raise CorruptError(f"the image of rank {item.rank}, which holds {item.leaf}, did not arrive")
        image = self._images[item.rank]
        if item.rank not in self._memory:
            self._memory[item.rank] = memory_view(image.mapping)
            self._offsets[item.rank] = {box.name: offset for box, offset in self._plan.image(item.rank).places}
        start = self._offsets[item.rank][item.box.name]
        if image.ranges is not None:
            # What is not there reads as zeros. No block of sums is shorter than a page, see `region_ranges`.
            hole = first_hole(image.ranges, region_ranges(item.box, start, region, PAGE_BYTES))
            if hole is not None:
                raise CorruptError(f"{item.leaf}: bytes {hole[0]} to {hole[1]} of rank {item.rank} did not arrive")
        whole = box_view(self._memory[item.rank], item.box, image.offset + start)
        for axis, (offset, length) in enumerate(zip(region.offset, region.lengths, strict=True)):
            whole = whole.narrow(axis, offset, length)
        return whole

    def _frozen(self, item: Item) -> torch.Tensor:
        """The live tensor itself: it was compared with what was saved, or loaded, before this start was decided."""
        live = self._live.get(item.leaf)
        if live is None:
            # Of an object that the script no longer registers: nobody looks at it.
            return torch.empty(item.box.shape, dtype=torch_dtype(item.box.dtype), device="meta")
        if (dtype_name(live.dtype), tuple(live.shape)) != (item.box.dtype, item.box.shape):
            raise ConfigError(
                f"{item.leaf}: the checkpoint has {item.box.dtype} {list(item.box.shape)}, here it is {live.dtype} "
                f"{list(live.shape)}; use the model that the run was started with"
            )
        return live


def _trees(plan: Plan, of_rank: int, views: _Views, values: list[Any]) -> dict[str, Any]:
    structure = plan.structure(of_rank)
    return unflatten(structure, dict(_tensors(plan, of_rank, views, structure)), values)


def _tensors(plan: Plan, of_rank: int, views: _Views, structure: str) -> Iterator[tuple[str, torch.Tensor | Blocks]]:
    sources = plan.sources(of_rank)
    for leaf in structure_leaves(structure):
        blocks = plan.blocks.get(leaf)
        if blocks is not None:
            yield leaf, Blocks(blocks[0].box.global_shape, blocks, views.view)
        else:
            yield leaf, views.view(sources[leaf])
