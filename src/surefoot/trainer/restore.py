"""Restore: images that the agent has verified, into the live objects."""

from __future__ import annotations

import gc
import mmap
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from surefoot.core.plan import Plan, structure_leaves
from surefoot.errors import ConfigError, CorruptError
from surefoot.trainer.flatten import unflatten
from surefoot.trainer.objects import Kept, KeptModule
from surefoot.trainer.tensors import box_view, memory_view

_OWN_REFERENCES = 2
"""To a mapping that nobody views: the `MappedImage`'s and that of the question itself."""


@dataclass(frozen=True, slots=True)
class MappedImage:
    """One rank's image, mapped read-only: a load that kept a view of it could not change it."""

    rank: int
    mapping: mmap.mmap
    offset: int


def map_image(rank: int, fd: int, offset: int, size_bytes: int) -> MappedImage:
    """Map what a descriptor holds; takes over the descriptor."""
    try:
        return MappedImage(rank, mmap.mmap(fd, offset + size_bytes, prot=mmap.PROT_READ), offset)
    finally:
        os.close(fd)


def load(
    kept: Mapping[str, Kept], plan: Plan, of_rank: int, images: Mapping[int, MappedImage], values: list[Any]
) -> tuple[list[str], list[str]]:
    """Put a checkpoint into the registered objects.

    Args:
        kept: the objects, by name.
        plan: the checkpoint's plan.
        of_rank: the saved rank whose structure, local leaves and values are taken.
        images: by saved rank.
        values: the record's encoded plain values.

    Returns:
        Names registered now but not in the checkpoint, and names in the checkpoint but not registered.

    Raises:
        CorruptError: the checkpoint does not fit its own plan.
        ConfigError: an object does not fit what was saved of it.
    """
    structure = plan.structure(of_rank)
    trees = unflatten(structure, dict(_tensors(plan, of_rank, images, structure)), values)
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


def _tensors(
    plan: Plan, of_rank: int, images: Mapping[int, MappedImage], structure: str
) -> Iterator[tuple[str, torch.Tensor]]:
    sources = plan.sources(of_rank)
    needed = structure_leaves(structure)
    offsets = {
        (rank, box.name): offset
        for rank in {sources[leaf].rank for leaf in needed}
        for box, offset in plan.image(rank).places
    }
    memory = {rank: memory_view(image.mapping) for rank, image in images.items()}
    for leaf in needed:
        item = sources[leaf]
        if item.rank not in images:
            raise CorruptError(f"the image of rank {item.rank}, which holds {leaf}, did not arrive")
        start = images[item.rank].offset
        yield leaf, box_view(memory[item.rank], item.box, start + offsets[item.rank, item.box.name])
