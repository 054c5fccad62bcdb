"""A tensor's bytes, a few at a time: as they stand in a file (row-major), wherever the tensor lies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from surefoot.core.frozen import BLOCK_BYTES

CHUNK_BYTES = 16 * BLOCK_BYTES
"""At a time; nothing larger is ever held beside the tensor itself, but for one row of a tensor that is strided."""


def read(tensor: torch.Tensor, start: int, stop: int) -> memoryview:
    """Bytes `start` to `stop`: the tensor's own memory where that is possible, else a copy of just these."""
    if tensor.is_contiguous():
        return _memory(_bytes(tensor)[start:stop])
    row_bytes = tensor.nbytes // tensor.shape[0]
    first, last = start // row_bytes, -(-stop // row_bytes)
    rows = _bytes(tensor[first:last].contiguous())
    return _memory(rows[start - first * row_bytes : stop - first * row_bytes])


def write(tensor: torch.Tensor, start: int, data: memoryview) -> None:
    """Put bytes in place of those from `start` on."""
    with torch.no_grad():
        fresh = torch.frombuffer(data, dtype=torch.uint8)
        if tensor.is_contiguous():
            _bytes(tensor)[start : start + len(data)].copy_(fresh)
            return
        row_bytes = tensor.nbytes // tensor.shape[0]
        first, last = start // row_bytes, -(-(start + len(data)) // row_bytes)
        rows = tensor[first:last].contiguous()
        _bytes(rows)[start - first * row_bytes :][: len(data)].copy_(fresh)
        tensor[first:last].copy_(rows)


def chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """All bytes in order, `CHUNK_BYTES` at a time."""
    for start in range(0, tensor.nbytes, CHUNK_BYTES):
        yield read(tensor, start, min(start + CHUNK_BYTES, tensor.nbytes))


def beside_the_training(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Reads of an accelerator's memory within it wait for nothing that is being computed, nor delay it."""
    if tensor.device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(tensor.device))  # type: ignore[no-untyped-call]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _memory(data: torch.Tensor) -> memoryview:
    return data.cpu().numpy().data
