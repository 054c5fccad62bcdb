"""Makes tensors over shared memory: views of an image's bytes, and copies into them."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterable

import torch
import xxhash

from surefoot.core.image import Box
from surefoot.core.ranges import Region
from surefoot.trainer.state.flatten import dtype_name

_COPIED_AS = {
    "complex32": torch.int32,
    "float4_e2m1fn_x2": torch.uint8,
    "float8_e8m0fnu": torch.uint8,
    "float8_e4m3fnuz": torch.uint8,
    "float8_e5m2fnuz": torch.uint8,
}
"""Element types for which not every kernel exists: they are moved as integers of their size."""


def memory_view(memory: memoryview | mmap.mmap) -> torch.Tensor:
    """All of `memory` as bytes, aliasing it."""
    with warnings.catch_warnings():
        # Read-only memory is meant: restore sources are never written.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def box_view(memory: torch.Tensor, box: Box, offset: int) -> torch.Tensor:
    """A box's tensor, aliasing `memory` (bytes) from byte `offset` on."""
    dtype = torch_dtype(box.dtype)
    size_bytes = box.size_bytes
    if size_bytes == 0:
        return torch.empty(box.shape, dtype=dtype)
    return memory[offset : offset + size_bytes].view(dtype).view(box.shape)


def narrowed(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """A region of a tensor, aliasing it."""
    for axis, (offset, length) in enumerate(zip(region.offset, region.lengths, strict=True)):
        tensor = tensor.narrow(axis, offset, length)
    return tensor


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def is_plainly_copied(tensor: torch.Tensor) -> bool:
    """True if a copy into a destination of the same type needs no detour."""
    return dtype_name(tensor.dtype) not in _COPIED_AS


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each source into its destination; both have the same type and shape."""
    with torch.no_grad():
        for destination, source in pairs:
            other = _COPIED_AS.get(dtype_name(source.dtype))
            if other is None:
                destination.copy_(source)
            else:
                # A view of the same element size exists for any strides, so the bytes go to the right places.
                destination.view(other).copy_(source.resolve_conj().view(other))


def digest(tensor: torch.Tensor) -> str:
    """Hash of a tensor's bytes, to compare it between ranks."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    data = plain.contiguous().reshape(-1).view(torch.uint8).cpu()
    return xxhash.xxh3_128_hexdigest(data.numpy().data)
