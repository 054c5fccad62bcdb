"""Runs one multipart upload: the caller's chunks on one side, the store library on the other.

The library takes an iterator, sends its parts several at once, and reads a part's memory long after it has asked for
the next. The caller, though, gets a chunk's memory back when we ask it for the next. So every part is copied, and a
bounded number of copies exists at a time.

The library aborts the upload on the server when the iterator fails, and leaves the parts lying there when it is
cancelled. So a cancellation of ours is turned into a failure of the iterator.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import obstore

from surefoot.errors import TierError
from surefoot.tiers.store_errors import translated

if TYPE_CHECKING:
    from obstore.store import ObjectStore

MIN_PART_BYTES = 8 << 20
MAX_PARTS = 9_000
"""S3 allows 10,000 parts of 5 MiB to 5 GiB (Amazon S3 user guide, "multipart upload limits")."""

ABORT_WAIT_S = 5.0

# A request may take one stall_s, and then be repeated for another; only after that is it for us to give up.
_STALLS_PER_PART = 2.5
_STALLS_AT_THE_END = 5.0


class _AbandonedError(Exception):
    """Handed to the library through its iterator, so that it aborts the upload. Never leaves this module."""


def part_bytes(size_bytes: int) -> int:
    """Size of a part, a multiple of 1 MiB, such that the number of parts stays below the limit."""
    needed = -(-size_bytes // MAX_PARTS)
    return max(MIN_PART_BYTES, -(-needed >> 20) << 20) if needed > MIN_PART_BYTES else MIN_PART_BYTES


class Upload:
    """One upload; `run` once."""

    def __init__(
        self, store: ObjectStore, path: str, place: str, size_bytes: int, num_parts_at_once: int, stall_s: float
    ) -> None:
        self._store = store
        self._path = path
        self._place = place
        self._size_bytes = size_bytes
        self._num_parts_at_once = num_parts_at_once
        self._stall_s = stall_s
        self._part_bytes = part_bytes(size_bytes)
        # One part waits here; None ends the upload, an exception aborts it.
        self._queue: asyncio.Queue[bytes | _AbandonedError | None] = asyncio.Queue(1)

    async def run(self, chunks: AsyncIterator[memoryview]) -> None:
        """Upload what `chunks` yields. On an error of theirs, ours or the store's nothing becomes visible."""
        sending = asyncio.ensure_future(self._send())
        try:
            await self._feed(chunks, sending)
            await self._put(None, sending)
            await self._wait_for_end(sending)
        except BaseException:
            await self._abandon(sending)
            raise

    async def _feed(self, chunks: AsyncIterator[memoryview], sending: asyncio.Future[None]) -> None:
        got = 0
        async for chunk in chunks:
            got += len(chunk)
            if got > self._size_bytes:
                raise TierError(f"{self._place} was announced with {self._size_bytes} bytes, but more came")
            for start in range(0, len(chunk), self._part_bytes):
                await self._put(bytes(chunk[start : start + self._part_bytes]), sending)
        if got != self._size_bytes:
            raise TierError(f"{self._place} was announced with {self._size_bytes} bytes, but {got} came")

    async def _put(self, part: bytes | None, sending: asyncio.Future[None]) -> None:
        """Hand one part over. The library takes none while too many are under way: that is the watch on progress."""
        putting = asyncio.ensure_future(self._queue.put(part))
        try:
            await asyncio.wait(
                (putting, sending), timeout=_STALLS_PER_PART * self._stall_s, return_when=asyncio.FIRST_COMPLETED
            )
            if sending.done():
                sending.result()
            if not putting.done():
                raise self._stalled()
        finally:
            putting.cancel()

    async def _wait_for_end(self, sending: asyncio.Future[None]) -> None:
        """Parts under way and the completion: each request has its own limit in the library, this is the last net."""
        done, _ = await asyncio.wait((sending,), timeout=_STALLS_AT_THE_END * self._stall_s)
        if not done:
            raise self._stalled()
        sending.result()

    async def _send(self) -> None:
        try:
            await obstore.put_async(
                self._store,
                self._path,
                self._parts(),
                use_multipart=True,
                chunk_size=self._part_bytes,
                max_concurrency=self._num_parts_at_once,
            )
            return
        except _AbandonedError:
            return  # only `_abandon` waits for us by now, and it raises what led there
        except Exception as error:  # noqa: BLE001  translated: the caller gets errors of every kind
            failure = translated(error, "write", self._place)
        raise failure

    async def _parts(self) -> AsyncIterator[bytes]:
        while True:
            part = await self._queue.get()
            if part is None:
                return
            if isinstance(part, _AbandonedError):
                raise part
            yield part

    async def _abandon(self, sending: asyncio.Future[None]) -> None:
        """Let the library abort the upload, for a bounded time; then drop it, which leaves invisible parts."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(_AbandonedError())
        sending.add_done_callback(_look_at)
        try:
            await asyncio.wait((sending,), timeout=ABORT_WAIT_S)
        finally:
            sending.cancel()
        await asyncio.wait((sending,), timeout=ABORT_WAIT_S)

    def _stalled(self) -> TierError:
        return TierError(
            f"object store: cannot write {self._place}: no progress for {_STALLS_PER_PART * self._stall_s:g} s; "
            "check that the store works, and the network to it"
        )


def _look_at(sending: asyncio.Future[None]) -> None:
    """What led to the end of the upload is what is raised; a later error of the upload itself adds nothing."""
    if not sending.cancelled():
        sending.exception()
