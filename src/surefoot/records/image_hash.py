"""Computes the hash of an image and the sums of its blocks, in one pass over its bytes."""

from __future__ import annotations

from array import array

import xxhash

from surefoot.core.block_sums import SUM_BLOCK_BYTES, BlockSums


class BlockHash:
    """xxh3-64 of each block of some bytes."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.blocks = array("Q")
        """The hash of each whole block so far."""
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


class ImageHash:
    """Takes an image's bytes in order. Each block is hashed twice while it is in the processor's cache."""

    def __init__(self, block_bytes: int = SUM_BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._whole = xxhash.xxh3_128()
        self._blocks = BlockHash(block_bytes)

    def update(self, data: memoryview) -> None:
        """The next bytes, any number of them. Lets other threads run."""
        for start in range(0, len(data), self._block_bytes):
            part = data[start : start + self._block_bytes]
            self._whole.update(part)
            self._blocks.update(part)

    def hexdigest(self) -> str:
        """xxh3-128 of all bytes so far."""
        return self._whole.hexdigest()

    def sums(self) -> BlockSums:
        """The sums of the blocks, once all bytes have passed."""
        return BlockSums.of(self._block_bytes, self._blocks.finish())
