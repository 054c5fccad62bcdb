"""Reads and writes a frozen file's bytes where they lie, in live tensors of any strides, a few MiB at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import xxhash

from surefoot.core.frozen import FrozenFile
from surefoot.trainer.frozen.leaves import Stamp, stamp

CHUNK_BYTES = 4 * 1024 * 1024
"""Bytes per chunk; nothing larger is ever held beside the tensor itself, except one row of a strided tensor."""

See = Callable[[memoryview], None]
"""Called with each chunk that is read; an exception from it ends the reading."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of the file."""

    leaf: str
    start: int
    tensor: torch.Tensor

    def digest(self, *also: See) -> str:
        """xxh3-128 of its bytes."""
        own = xxhash.xxh3_128()
        with beside_the_training(self.tensor):
            for start in range(0, self.tensor.nbytes, CHUNK_BYTES):
                chunk = read(self.tensor, start, min(start + CHUNK_BYTES, self.tensor.nbytes))
                for see in (own.update, *also):
                    see(chunk)
        return own.hexdigest()


@dataclass(frozen=True, slots=True)
class Hashed:
    """A file that was read through."""

    file: FrozenFile
    digests: dict[str, str]
    """The digest of each tensor, by leaf."""
    stamps: dict[str, Stamp]
    """The tensors' stamps, by leaf, as they were BEFORE the reading."""


@dataclass(frozen=True, slots=True)
class Contents:
    """One frozen file, as it can be read and written at any moment."""

    header: bytes
    size_bytes: int
    places: tuple[Placed, ...]
    """In the file's order; without gaps if this rank has all tensors of the file."""

    @property
    def is_whole(self) -> bool:
        """False if only other ranks have some of its tensors."""
        return len(self.header) + sum(place.tensor.nbytes for place in self.places) == self.size_bytes

    def hash(self, see: See) -> Hashed:
        """Read it through, once accelerators have done all work that was ordered so far."""
        for device in {place.tensor.device for place in self.places if place.tensor.is_cuda}:
            torch.cuda.default_stream(device).synchronize()
        stamps = {place.leaf: stamp(place.tensor) for place in self.places}
        whole = xxhash.xxh3_128(self.header)
        digests = {place.leaf: place.digest(whole.update, see) for place in self.places}
        return Hashed(FrozenFile(whole.hexdigest(), self.size_bytes), digests, stamps)

    def copy_out(self, start: int, window: memoryview) -> None:
        """Fill `window` with the file's bytes from `start` on."""
        head = self.header[start : start + len(window)]
        window[: len(head)] = head
        for tensor, first, part in self._parts(start, window):
            with beside_the_training(tensor):
                part[:] = read(tensor, first, first + len(part))

    def copy_in(self, start: int, window: memoryview) -> None:
        """Put the file's bytes from `start` on in place of the tensors' own."""
        for tensor, first, part in self._parts(start, window):
            write(tensor, first, part)

    def _parts(self, start: int, window: memoryview) -> Iterator[tuple[torch.Tensor, int, memoryview]]:
        """Each tensor that has bytes in this stretch of the file, the first of its bytes there, and their place in
        the window."""
        for place in self.places:
            first, last = max(start, place.start), min(start + len(window), place.start + place.tensor.nbytes)
            if first < last:
                yield place.tensor, first - place.start, window[first - start : last - start]


def read(tensor: torch.Tensor, start: int, stop: int) -> memoryview:
    """Bytes `start` to `stop`, row-major: the tensor's own memory where that is possible, else a copy of these."""
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


def beside_the_training(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Within it, reads of an accelerator's memory neither wait for its computation nor delay it."""
    if tensor.device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(tensor.device))  # type: ignore[no-untyped-call]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _memory(data: torch.Tensor) -> memoryview:
    return data.cpu().numpy().data
