"""Plans resharding: which regions of which saved blocks make up a part of a tensor, by PyTorch's own planning.

Each rank plans by itself: no collective runs, and nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from surefoot.core.ranges import Region
from surefoot.errors import CorruptError
from surefoot.trainer.restore.fit import Target
from surefoot.trainer.state.tensors import torch_dtype


@dataclass(frozen=True, slots=True)
class Read:
    """A region of a saved item, and where in the target it goes."""

    number: int
    """Number of the item among those of the saved tensor."""
    source: Region
    into: Region


def planned(targets: Iterable[Target]) -> dict[str, list[Read]]:
    """The reads for each target, by its key.

    Raises:
        CorruptError: the checkpoint does not have all of it; the message names the leaf.
    """
    return {target.key: _reads(target) for target in targets}


def _reads(target: Target) -> list[Read]:
    saved = target.saved
    chunks = [_chunk(item.box.offset, item.box.shape) for item in saved.items]
    tensor = TensorStorageMetadata(TensorProperties(torch_dtype(saved.dtype)), torch.Size(saved.whole), chunks)
    reads = []
    for one in create_read_items_for_chunk_list(target.key, tensor, [_chunk(target.offset, target.shape)]):
        number, lengths = one.storage_index.index, tuple(one.lengths)
        assert number is not None
        reads.append(
            Read(number, Region(tuple(one.storage_offsets), lengths), Region(tuple(one.dest_offsets), lengths))
        )
    # The plan was checked: saved blocks do not overlap, so the elements can be counted.
    found = sum(read.source.elements for read in reads)
    if found != prod(target.shape):
        raise CorruptError(f"{target.key}: the checkpoint has {found} of {prod(target.shape)} elements")
    return reads


def _chunk(offset: tuple[int, ...], shape: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
