"""Defines a tier: the one small interface between the pipeline and a place that keeps bytes.

A tier knows keys and bytes. It knows nothing of steps, ranks, commits or lineage. Keys are those of
`surefoot.core.layout`. Every tier passes the same contract suite (`tests/tiers/contract.py`).

Errors: everything that a tier raises on purpose is a `TierError`; foreign exceptions are translated where
they arise and never leak. "Absent" is `ObjectMissingError` and nothing else: a time-out, a refused credential
or a broken answer is never taken for absence.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """One listed object."""

    key: str
    size_bytes: int


class Tier(Protocol):
    """A place that keeps objects by key."""

    @property
    def name(self) -> str:
        """`"disk"` or `"object"`: what manifests, events and people call it."""

    @property
    def uri(self) -> str:
        """Where it is, for messages. Holds no secret."""

    async def put_stream(self, key: str, chunks: AsyncIterator[memoryview], size_bytes: int) -> None:
        """Write one object of exactly `size_bytes` from `chunks`, replacing an older one.

        On return the object is durable and whole (disk: data, rename and directory entry are on the device;
        object store: the upload is complete). On an error or cancellation what was written on the way is
        removed and an older object stays what it was. The one exception lies in the nature of things: when
        the very last step (rename, completion of the upload) was already under way, the whole new object may
        be there, never a part of it.

        A chunk's memory is only read until the next chunk is asked for, the last one's until return, also on
        cancellation. Every chunk but the last has a length that is a multiple of 4096; chunks that start at a
        page boundary go to a disk without a copy, others are allowed.

        Raises:
            TierFullError, TierDeniedError, TierError; also when not exactly `size_bytes` came.
        """

    async def put(self, key: str, data: bytes) -> None:
        """Write one small object, replacing an older one. Durable on return, whole or not at all."""

    async def put_if_absent(self, key: str, data: bytes) -> None:
        """Write one small object if the key is free; of any number of racers exactly one wins.

        Raises:
            ObjectExistsError: the key is taken, also by an earlier, unacknowledged try of this very call that
                in truth went through: a caller that may have tried before compares contents.
        """

    async def get(self, key: str) -> bytes:
        """The whole of a small object.

        Raises:
            ObjectMissingError: there is none.
        """

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the object's bytes from `offset` on.

        Raises:
            ObjectMissingError: there is no such object.
            TierError: the object ends before the buffer is full.
        """

    async def size(self, key: str) -> int:
        """Size of an object in bytes.

        Raises:
            ObjectMissingError: there is none.
        """

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is already gone is not an error."""

    async def free_bytes(self) -> int | None:
        """Space left, or None where the tier does not know it or has no such bound."""

    async def close(self) -> None:
        """Release what the tier holds. Idempotent."""

    # Last in the class: below it, `list` no longer names the built-in type.
    async def list(self, prefix: str) -> list[Entry]:
        """Every object whose key starts with `prefix` (``""`` or ending with ``/``), sorted by key.

        Complete, or an error. A prefix under which nothing is, is empty.
        """
