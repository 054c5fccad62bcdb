"""The hash of an image and the sums of its blocks, in one pass over its bytes."""

from __future__ import annotations

import xxhash

from surefoot.core.block_sums import SUM_BLOCK_BYTES, BlockSums
from surefoot.tensor_hash import BlockHash


class ImageHash:
    """Sees an image's bytes in order. Each block is hashed twice while it is in the processor's cache."""

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
        """Once all bytes have passed."""
        return BlockSums.of(self._block_bytes, self._blocks.finish())
