"""Places of blocks: what is computed equals what torch puts into each rank's local tensor, element by element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from surefoot.core.cover import cover_flaw
from surefoot.core.image import Box
from surefoot.errors import UnsupportedStateError
from surefoot.trainer.state.sharded import Place, place_of


@contextmanager
def _rank(rank: int, world_size: int) -> Iterator[None]:
    """One of many ranks, alone: nothing is sent in these tests."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _of_rank(rank: int, mesh: tuple[int, ...], placements: Sequence[Any], whole: tuple[int, ...]) -> DTensor:
    """A tensor whose elements are their own numbers, as this rank has it."""
    numbers = torch.arange(prod(whole)).view(whole)
    ranks = torch.arange(prod(mesh)).view(mesh)
    return distribute_tensor(numbers, DeviceMesh("cpu", ranks), placements, src_data_rank=None)


def _placed(
    mesh: tuple[int, ...], placements: Sequence[Any], whole: tuple[int, ...]
) -> list[tuple[Place, torch.Tensor]]:
    found = []
    for rank in range(prod(mesh)):
        with _rank(rank, prod(mesh)):
            tensor = _of_rank(rank, mesh, placements, whole)
            found.append((place_of(tensor, "x"), tensor._local_tensor))
    return found


_MESHES: list[tuple[tuple[int, ...], list[Any]]] = [
    ((2,), [Shard(0)]),
    ((3,), [Shard(1)]),
    ((4,), [Replicate()]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 3), [Shard(0), Replicate()]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 3), [Shard(0), Shard(0)]),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 2, 2), [Replicate(), Shard(1), Shard(0)]),
]


@pytest.mark.holds("uneven-lengths")
@pytest.mark.parametrize(("mesh", "placements"), _MESHES)
@pytest.mark.parametrize("whole", [(8, 12), (7, 5), (1, 4), (12, 1), (3, 2)])
def test_a_block_is_where_its_elements_say(
    mesh: tuple[int, ...], placements: list[Any], whole: tuple[int, ...]
) -> None:
    """Even, uneven and empty: the numbers in each local tensor are those of its block, or it is refused; the distinct
    blocks cover the whole, and those on several ranks are said to be shared."""
    strided = any(isinstance(placement, _StridedShard) for placement in placements)
    try:
        found = _placed(mesh, placements, whole)
    except UnsupportedStateError:
        # Evenly nested, as FSDP2 over tensor parallelism is, it must be taken.
        assert strided
        assert whole[0] % prod(mesh)
        return
    numbers = torch.arange(prod(whole)).view(whole)
    blocks: dict[Any, int] = {}
    for place, local in found:
        assert place.whole == whole
        block = numbers
        for axis, (start, length) in enumerate(zip(place.offset, local.shape, strict=True)):
            block = block.narrow(axis, start, length)
        assert torch.equal(block, local)
        if local.numel():
            blocks[place.offset, tuple(local.shape)] = blocks.get((place.offset, tuple(local.shape)), 0) + 1
            assert place.shared == any(isinstance(one, Replicate) for one in placements)
    boxes = [Box("x", "int64", shape, offset, whole) for offset, shape in blocks]
    assert cover_flaw(boxes) is None
    copies = prod(n for n, one in zip(mesh, placements, strict=True) if isinstance(one, Replicate))
    assert set(blocks.values()) == {copies}


@pytest.mark.holds("wrong-strides-refused")
def test_a_part_that_is_no_block_is_refused() -> None:
    """Every other row: strided as no even nesting is."""
    with _rank(0, 2):
        tensor = _of_rank(0, (2,), [_StridedShard(0, split_factor=2)], (8, 3))
        assert tensor._local_tensor[:, 0].tolist() == [0, 3, 12, 15]
        with pytest.raises(UnsupportedStateError, match=r"^m\.w: sharded as .* not one block"):
            place_of(tensor, "m.w")


def test_a_rank_outside_of_the_mesh_has_nothing() -> None:
    """A tensor of other ranks: an empty block, in whatever shape."""
    with _rank(3, 4):
        mesh = DeviceMesh("cpu", torch.arange(2))
        tensor = DTensor.from_local(torch.empty(0), mesh, [Shard(0)], run_check=False, shape=(4, 2), stride=(2, 1))
        place = place_of(tensor, "x")
        assert (place.offset, place.whole, place.shared) == ((0, 0), (4, 2), False)
        assert tensor._local_tensor.numel() == 0
