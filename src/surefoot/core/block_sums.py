"""Block sums: a hash of each block of a shard, so that a part of it can be verified without the rest."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from surefoot.core.documents import Fields
from surefoot.errors import CorruptError

SUM_BLOCK_BYTES = 1024 * 1024
"""Bytes that one sum covers. Smaller blocks make documents longer; larger ones make readers read more than needed."""

_SUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class BlockSums:
    """xxh3-64 of each block of a shard's bytes, in order; the last block may be shorter."""

    block_bytes: int
    sums: tuple[int, ...]

    @classmethod
    def of(cls, block_bytes: int, sums: Iterable[int]) -> BlockSums:
        return cls(block_bytes, tuple(sums))

    def to_json(self) -> dict[str, Any]:
        packed = b"".join(value.to_bytes(_SUM_BYTES, "big") for value in self.sums)
        return {"bytes": self.block_bytes, "xxh3_64": base64.b64encode(packed).decode("ascii")}

    @classmethod
    def from_json(cls, data: Any, size_bytes: int, what: str) -> BlockSums:
        """Read the sums of a shard of `size_bytes`.

        Raises:
            CorruptError: there is not one sum per block.
        """
        fields = Fields(data, f"{what}: blocks")
        block_bytes = fields.integer("bytes", 1)
        try:
            packed = base64.b64decode(fields.text("xxh3_64"), validate=True)
        except (binascii.Error, ValueError) as error:
            raise CorruptError(f"{what}: the sums of blocks are not base64") from error
        if len(packed) != _SUM_BYTES * -(-size_bytes // block_bytes):
            raise CorruptError(
                f"{what}: {len(packed)} bytes of sums do not fit {size_bytes} bytes in blocks of {block_bytes}"
            )
        starts = range(0, len(packed), _SUM_BYTES)
        return cls(block_bytes, tuple(int.from_bytes(packed[start : start + _SUM_BYTES], "big") for start in starts))
