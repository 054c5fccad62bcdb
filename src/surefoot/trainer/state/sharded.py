"""Finds the block of a sharded tensor that a rank has.

A DTensor is saved as the block that its local tensor is of the whole, so nothing is gathered and nothing is sent.
Loading goes by the blocks that the live tensors have now: it does not matter which rank's image holds such a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset, _get_shard_size_and_offsets
from torch.distributed.tensor.placement_types import _StridedShard

from surefoot.errors import UnsupportedStateError


@dataclass(frozen=True, slots=True)
class Place:
    """A block's place in the whole tensor."""

    offset: tuple[int, ...]
    whole: tuple[int, ...]
    shared: bool
    """True if other ranks have the same block."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own part of a tensor, aliasing it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def place_of(tensor: DTensor, path: str) -> Place:
    """Where the local tensor lies in the whole.

    Raises:
        UnsupportedStateError: the local tensor is not one block of the whole; the message names the path.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    for placement in placements:
        if not isinstance(placement, Shard | _StridedShard | Replicate):
            raise UnsupportedStateError(
                f"{path}: a DTensor placed {placement} is a sum not yet made; redistribute it before it is checkpointed"
            )
    coordinate = mesh.get_coordinate()
    whole = tuple(tensor.shape)
    if coordinate is None:
        return Place((0,) * len(whole), whole, shared=False)
    block = _block(whole, tuple(mesh.shape), tuple(coordinate), tuple(placements))
    local = tuple(tensor._local_tensor.shape)
    if block is None or (block[0] != local and prod(local) + prod(block[0])):
        raise UnsupportedStateError(
            f"{path}: sharded as {list(placements)} over a mesh of {list(mesh.shape)}, this rank's part is not one "
            "block of the whole; shard it evenly"
        )
    return Place(block[1], whole, block[2])


@lru_cache(maxsize=8192)
def _block(
    whole: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], bool] | None:
    """Shape, offset, and whether other ranks have the same block; None if it is not a block."""
    if any(isinstance(one, _StridedShard) for one in placements) and not _is_block(whole, mesh, coordinate, placements):
        return None
    shape, offset = _compute_local_shape_and_global_offset(whole, mesh, list(coordinate), placements)
    shared = any(isinstance(one, Replicate) and size > 1 for one, size in zip(placements, mesh, strict=True))
    # Every empty block gets the same place, so that all of them count as the same block.
    return tuple(shape), tuple(offset) if prod(shape) else (0,) * len(whole), shared


def _is_block(
    whole: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> bool:
    """True if the indices that strided sharding picks along each axis follow one another without a gap."""
    sizes = list(whole)
    indices: dict[int, torch.Tensor | None] = {}
    for size, rank, placement in zip(mesh, coordinate, placements, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            axis = placement.dim
            sizes[axis], indices[axis] = _get_shard_size_and_offsets(
                sizes[axis], size, rank, placement, indices.get(axis), whole[axis], False
            )
    return all(
        found is None or sizes[axis] == 0 or bool((found == found[0] + torch.arange(len(found))).all())
        for axis, found in indices.items()
    )
