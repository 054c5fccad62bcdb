"""Resharding: a checkpoint's tensors in another layout, by PyTorch's own load planning.

The plan is told to `torch.distributed.checkpoint` as metadata, in memory; its planner says which region of which saved
block comes where in the tensor that a rank has now; `ImageReader` reads those regions from mapped images. All of it
happens on each rank by itself: no collective runs, and nothing is pickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from surefoot.core.plan import Item
from surefoot.core.ranges import Region
from surefoot.errors import CorruptError
from surefoot.trainer.fitting import Target
from surefoot.trainer.tensors import copy_all, torch_dtype


class _Part:
    """A target, as torch's planning sees it (the protocol of `_Checkpointable`)."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def size(self) -> torch.Size:
        return torch.Size(self._target.saved.whole)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        target = self._target
        return [ChunkStorageMetadata(torch.Size(target.offset), torch.Size(target.shape))]


class Planner(DefaultLoadPlanner):
    """Plans reads for targets, which need have no memory yet."""

    def __init__(self, targets: Iterable[Target]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._targets = {target.key: target for target in targets}
        self._filling: dict[str, torch.Tensor] = {}
        self.state_dict = {key: _Part(target) for key, target in self._targets.items()}
        self.metadata = metadata_of(self._targets)

    def reads(self) -> dict[str, list[ReadItem]]:
        """By target, what is read for it.

        Raises:
            CorruptError: the checkpoint does not have all of it; the message names the leaf.
        """
        reads: dict[str, list[ReadItem]] = {key: [] for key in self._targets}
        for item in self.create_local_plan().items:
            reads[item.dest_index.fqn].append(item)
        for key, target in self._targets.items():
            # Saved blocks do not overlap, which the plan was checked for: so elements can be counted.
            found = sum(prod(item.lengths) for item in reads[key])
            if found != prod(target.shape):
                raise CorruptError(f"{key}: the checkpoint has {found} of {prod(target.shape)} elements")
        return reads

    def give(self, target: Target, tensor: torch.Tensor) -> None:
        """Give a target its memory."""
        self._filling[target.key] = tensor

    def take_back(self, target: Target) -> None:
        """It is filled."""
        del self._filling[target.key]

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """torch's hook: where a read goes."""
        return self._filling[index.fqn]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """torch's hook: a read is done."""
        del tensor


class ImageReader(StorageReader):
    """Reads blocks from images that were verified and mapped."""

    def __init__(self, targets: Mapping[str, Target], view: Callable[[Item, Region], torch.Tensor]) -> None:
        self._targets = targets
        self._view = view

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See `StorageReader.read_data`. Done on return."""
        for item in plan.items:
            source = self._view(saved_item(self._targets[item.dest_index.fqn], item), region_of(item))
            into = planner.resolve_tensor(item)
            copy_all([(into, source)])
            planner.commit_tensor(item, into)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See `StorageReader.read_metadata`."""
        return metadata_of(self._targets)

    # What follows is for storages that have something to set up, or that plan together.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See `StorageReader.reset`."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See `StorageReader.set_up_storage_reader`."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See `StorageReader.prepare_local_plan`."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See `StorageReader.prepare_global_plan`."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See `StorageReader.validate_checkpoint_id`."""
        return False


class Filling:
    """Fills targets, one after the other, so that none is held longer than its taker holds it."""

    def __init__(
        self, planner: Planner, targets: Mapping[str, Target], view: Callable[[Item, Region], torch.Tensor]
    ) -> None:
        self._planner = planner
        self._reader = ImageReader(targets, view)
        self._reads = planner.reads()

    def fill(self, target: Target, tensor: torch.Tensor) -> None:
        """Read all of a target into a tensor of its shape."""
        self._planner.give(target, tensor)
        self._reader.read_data(LoadPlan(self._reads[target.key]), self._planner).wait()
        self._planner.take_back(target)


def metadata_of(targets: Mapping[str, Target]) -> Metadata:
    """What a plan says of the tensors of some targets, in torch's words."""
    return Metadata({key: _storage(target) for key, target in targets.items()})


def _storage(target: Target) -> TensorStorageMetadata:
    saved = target.saved
    chunks = [ChunkStorageMetadata(torch.Size(i.box.offset), torch.Size(i.box.shape)) for i in saved.items]
    return TensorStorageMetadata(TensorProperties(torch_dtype(saved.dtype)), torch.Size(saved.whole), chunks)


def saved_item(target: Target, read: ReadItem) -> Item:
    """The item of our plan that a read of torch's is from."""
    index = read.storage_index
    items, offset = target.saved.items, tuple(index.offset or ())
    # The number is a hint, as torch has it.
    if index.index is not None and items[index.index].box.offset == offset:
        return items[index.index]
    return next(item for item in items if item.box.offset == offset and all(item.box.shape))


def region_of(read: ReadItem) -> Region:
    return Region(tuple(read.storage_offsets), tuple(read.lengths))
