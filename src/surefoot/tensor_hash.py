"""Hashes of tensors and of frozen files, computed while their bytes pass by (`surefoot.core.frozen` says of what)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

from surefoot.core.frozen import BLOCK_BYTES
from surefoot.core.image import Image


class BlockHash:
    """xxh3-64 of each block of some bytes."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.blocks = array("Q")
        """Of each whole block so far."""
        self._open = xxhash.xxh3_64()
        self._open_bytes = 0

    def update(self, data: memoryview) -> None:
        """The next bytes, any number of them. Lets other threads run."""
        while len(data):
            room = self._block_bytes - self._open_bytes
            part, data = data[:room], data[room:]
            if len(part) == self._block_bytes:
                self.blocks.append(xxhash.xxh3_64_intdigest(part))
                continue
            self._open.update(part)
            self._open_bytes += len(part)
            if self._open_bytes == self._block_bytes:
                self._close_block()

    def finish(self) -> array[int]:
        """The blocks, once all bytes have passed; the last may be a short one."""
        if self._open_bytes:
            self._close_block()
        return self.blocks

    def _close_block(self) -> None:
        self.blocks.append(self._open.intdigest())
        self._open.reset()
        self._open_bytes = 0


class TensorHash:
    """One tensor's blocks and digest."""

    def __init__(self) -> None:
        self._hash = BlockHash(BLOCK_BYTES)

    @property
    def blocks(self) -> array[int]:
        """xxh3-64 of each whole block so far."""
        return self._hash.blocks

    def update(self, data: memoryview) -> None:
        """The next bytes, any number of them. Lets other threads run."""
        self._hash.update(data)

    def finish(self) -> str:
        """The digest, once all bytes have passed."""
        return xxhash.xxh3_128_hexdigest(b"".join(block.to_bytes(8, "big") for block in self._hash.finish()))


def block_hash(data: memoryview) -> int:
    """What `TensorHash.blocks` has for a block of these bytes."""
    return xxhash.xxh3_64_intdigest(data)


class FileHash:
    """A frozen file's hash and the digests of its tensors, from its bytes in order."""

    def __init__(self, image: Image) -> None:
        self._sizes: Sequence[int] = [box.size_bytes for box, _start in image.places]
        self._whole = xxhash.xxh3_128()
        self._skip_bytes = len(image.header)
        self._number = 0
        self._left_bytes = self._sizes[0] if self._sizes else 0
        self._tensor = TensorHash()
        self._digests: list[str] = []

    def update(self, data: memoryview) -> None:
        """The next bytes of the file. Lets other threads run."""
        self._whole.update(data)
        header, data = data[: self._skip_bytes], data[self._skip_bytes :]
        self._skip_bytes -= len(header)
        while len(data):
            self._end_tensors()
            if self._number == len(self._sizes):
                return
            part, data = data[: self._left_bytes], data[self._left_bytes :]
            self._tensor.update(part)
            self._left_bytes -= len(part)

    def finish(self) -> tuple[str, tuple[str, ...]]:
        """The file's hash, and each tensor's digest in the file's order."""
        while self._number < len(self._sizes):
            self._end_tensor()
        return self._whole.hexdigest(), tuple(self._digests)

    def _end_tensors(self) -> None:
        # Tensors without elements take no bytes.
        while not self._left_bytes and self._number < len(self._sizes):
            self._end_tensor()

    def _end_tensor(self) -> None:
        self._digests.append(self._tensor.finish())
        self._tensor = TensorHash()
        self._number += 1
        self._left_bytes = self._sizes[self._number] if self._number < len(self._sizes) else 0
