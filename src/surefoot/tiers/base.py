"""What a tier is: the one small interface between the pipeline and a place that keeps bytes.

A tier knows keys and bytes. It knows nothing of steps, ranks, commits or lineage. Keys are those of
`surefoot.core.layout`. Every tier passes the same contract suite (`tests/tiers/contract.py`).

Errors: everything that a tier raises on purpose is a `TierError`; foreign exceptions are translated where they
arise and never leak. "Absent" is `ObjectMissingError` and nothing else: a time-out, a refused credential or a
broken answer is never taken for absence.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
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

        On return the object is durable and whole (disk: data, rename and directory entry are on the device; object
        store: the upload is complete). On any error or cancellation nothing new is visible under `key`, and what was
        written on the way is removed. A chunk's memory is only read until the next chunk is asked for, except the
        last, until return. All chunks but the last have the same length, a multiple of 4096, and the first starts at
        a page boundary of a mapping that is readable up to the next multiple of 4096 past the end.
        """

    async def put(self, key: str, data: bytes) -> None:
        """Write one small object, replacing an older one. Durable on return, whole or not at all."""

    async def put_if_absent(self, key: str, data: bytes) -> None:
        """Write one small object if the key is free; of any number of racers exactly one wins.

        Raises:
            ObjectExistsError: the key is taken, also by an earlier, unacknowledged try of this very call that in
                truth went through: a caller that may have tried before compares contents.
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

    async def list(self, prefix: str) -> list[Entry]:
        """Every object whose key starts with `prefix` (which ends with ``/``), sorted by key. Complete, or an error."""

    async def delete(self, keys: list[str]) -> None:
        """Delete objects; one that is already gone is no error."""

    async def free_bytes(self) -> int | None:
        """Space left, or None where the tier cannot tell or has no such bound."""

    async def close(self) -> None:
        """Release what the tier holds. Idempotent."""
