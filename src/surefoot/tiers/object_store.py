"""Makes a bucket a tier: S3 and its kin, Google Cloud Storage, Azure Blob.

One object per key. Larger ones go as a multipart upload, of which nothing is visible until its completion. A process
that dies in the middle leaves invisible parts behind, which only a rule on the bucket removes (S3:
AbortIncompleteMultipartUpload); an error or a cancellation aborts the upload.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

from surefoot.core.layout import is_safe_key
from surefoot.errors import ObjectMissingError, TierError
from surefoot.tiers.base import Entry
from surefoot.tiers.store_errors import is_conflict, translated
from surefoot.tiers.store_open import open_store
from surefoot.tiers.upload import Upload, part_bytes

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

DEFAULT_STALL_S = 60.0
"""A request, or an upload's next part, that is not through after so long is given up."""

_NUM_REQUESTS = 8
_READ_PIECE_BYTES = 8 << 20
_NEVER_WRITTEN = "+nothing"
_CONFLICT_TRIES = 6
_CONFLICT_PAUSE_S = 0.1


class ObjectTier:
    """Objects under a prefix of one bucket."""

    def __init__(self, store: ObjectStore, uri: str, prefix: str, stall_s: float) -> None:
        self._store = store
        self._uri = uri
        self._prefix = f"{prefix}/" if prefix else ""
        self._stall_s = stall_s
        self._closed = False

    @classmethod
    def open(cls, scheme: str, bucket: str, prefix: str = "", *, stall_s: float = DEFAULT_STALL_S) -> ObjectTier:
        """See `surefoot.tiers.store_open.open_store`. `prefix` has no slash at either end."""
        uri = f"{scheme}://{bucket}/{prefix}".rstrip("/")
        return cls(open_store(scheme, bucket, stall_s), uri, prefix, stall_s)

    @property
    def name(self) -> str:
        return "object"

    @property
    def uri(self) -> str:
        return self._uri

    async def put_stream(self, key: str, chunks: AsyncIterator[memoryview], size_bytes: int) -> None:
        """See `Tier.put_stream`. Up to `_NUM_REQUESTS` parts are copied and under way at once."""
        path = self._path(key)
        if size_bytes <= part_bytes(size_bytes):
            await self._call("write", key, self._put(path, await self._joined(key, chunks, size_bytes)))
            return
        upload = Upload(self._store, path, f"{self._uri}/{key}", size_bytes, _NUM_REQUESTS, self._stall_s)
        await upload.run(chunks)

    async def put(self, key: str, data: bytes) -> None:
        await self._call("write", key, self._put(self._path(key), data))

    async def put_if_absent(self, key: str, data: bytes) -> None:
        """See `Tier.put_if_absent`: a conditional PUT, which the store decides."""
        path = self._path(key)
        for left in reversed(range(_CONFLICT_TRIES)):
            try:
                await obstore.put_async(self._store, path, data, mode="create")
                return
            except Exception as error:  # noqa: BLE001  translated: the caller gets errors of every kind
                if not (left and is_conflict(error)):
                    failure = translated(error, "create", f"{self._uri}/{key}")
                    break
            # Two racers met in the store and neither has won yet: it is for us to ask again.
            await asyncio.sleep(_CONFLICT_PAUSE_S * (_CONFLICT_TRIES - left))
        raise failure

    async def get(self, key: str) -> bytes:
        return await self._call("read", key, self._get(self._path(key)))

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """See `Tier.read_into`. In pieces, several at once."""
        if not len(buffer):
            await self.size(key)
            return
        turn = asyncio.Semaphore(_NUM_REQUESTS)
        pieces = [
            self._read_piece(turn, key, offset + start, buffer[start : start + _READ_PIECE_BYTES])
            for start in range(0, len(buffer), _READ_PIECE_BYTES)
        ]
        await _all_or_first_error(pieces)

    async def size(self, key: str) -> int:
        """See `Tier.size`. The answer to HEAD has no body that names the fault: then GET is asked."""
        return await self._call("look at", key, self._size(self._path(key)))

    async def delete(self, keys: Sequence[str]) -> None:
        paths = [self._path(key) for key in keys]
        if paths:
            try:
                await self._call("delete", keys[0], self._delete(paths))
            except ObjectMissingError:
                # Some stores report the first absent one and leave the rest to us.
                await self._delete_each(keys)

    async def free_bytes(self) -> int | None:
        """None: a bucket reports no such bound."""
        return None

    async def close(self) -> None:
        self._closed = True

    def _path(self, key: str) -> str:
        if self._closed:
            raise TierError(f"{self._uri} is closed")
        if not is_safe_key(key):
            raise TierError(f"object store {self._uri}: unsafe key {key!r}")
        return f"{self._prefix}{key}"

    async def _call(self, verb: str, key: str, request: Coroutine[Any, Any, T]) -> T:
        """The request's result; foreign errors become ours.

        The original is left behind on purpose: its text, and with it any traceback that shows it, may hold secrets.
        """
        try:
            return await request
        except Exception as error:  # noqa: BLE001  translated: the caller gets errors of every kind
            failure = translated(error, verb, f"{self._uri}/{key}")
        raise failure

    async def _put(self, path: str, data: bytes) -> None:
        await obstore.put_async(self._store, path, data, use_multipart=False)

    async def _joined(self, key: str, chunks: AsyncIterator[memoryview], size_bytes: int) -> bytes:
        """The whole of a small stream, copied: its memory is the caller's again, also when we are cancelled."""
        parts = bytearray()
        async for chunk in chunks:
            parts += chunk
            if len(parts) > size_bytes:
                break
        if len(parts) != size_bytes:
            raise TierError(f"{self._uri}/{key} was announced with {size_bytes} bytes, but {len(parts)} came")
        return bytes(parts)

    async def _get(self, path: str) -> bytes:
        answer = await obstore.get_async(self._store, path)
        return bytes(await answer.bytes_async())

    async def _get_range(self, path: str, start: int, length: int) -> obstore.Bytes:
        return await obstore.get_range_async(self._store, path, start=start, length=length)

    async def _size(self, path: str) -> int:
        with suppress(FileNotFoundError, PermissionDeniedError, UnauthenticatedError):
            return (await obstore.head_async(self._store, path))["size"]
        return await self._size_by_get(path)

    async def _size_by_get(self, path: str) -> int:
        return (await obstore.get_async(self._store, path)).meta["size"]

    async def _read_piece(self, turn: asyncio.Semaphore, key: str, start: int, buffer: memoryview) -> None:
        async with turn:
            length = len(buffer)
            data = await self._call("read", key, self._get_range(self._path(key), start, length))
        if len(data) != length:
            raise TierError(f"{self._uri}/{key} ends at byte {start + len(data)}, before {start + length}")
        buffer[:] = memoryview(data)

    async def _delete(self, paths: Sequence[str]) -> None:
        await obstore.delete_async(self._store, paths)

    async def _delete_each(self, keys: Sequence[str]) -> None:
        for key in keys:
            try:
                await self._call("delete", key, self._delete([self._path(key)]))
            except ObjectMissingError:
                continue

    async def _listed(self, prefix: str) -> builtins.list[Entry]:
        found = []
        async for batch in obstore.list(self._store, prefix=f"{self._prefix}{prefix}" or None):
            for item in batch:
                key = item["path"].removeprefix(self._prefix)
                # Foreign objects (markers of "directories", odd names) are none of ours and are not shown.
                if key.startswith(prefix) and is_safe_key(key):
                    found.append(Entry(key, item["size"]))
        if not found:
            await self._confirm_empty(prefix)
        return sorted(found, key=lambda entry: entry.key)

    async def _confirm_empty(self, prefix: str) -> None:
        """The library takes any well-formed answer, such as a portal's page, for a listing without entries.

        So an empty one is believed only of a server that can also report, in a store's words, a missing object.
        """
        try:
            await self._call("list", prefix, self._size_by_get(f"{self._prefix}{prefix}{_NEVER_WRITTEN}"))
        except ObjectMissingError:
            return
        raise TierError(
            f"object store: cannot list {self._uri}/{prefix}: the server there has every object that one asks "
            "for, and lists none; check the endpoint"
        )

    # Last in the class: below it, `list` no longer names the built-in type.
    async def list(self, prefix: str) -> builtins.list[Entry]:
        """See `Tier.list`. An error in the middle of a long listing is an error, not its end."""
        if prefix and not (prefix.endswith("/") and is_safe_key(prefix[:-1])):
            raise TierError(f"object store {self._uri}: unsafe prefix {prefix!r}")
        return await self._call("list", prefix, self._listed(prefix))


async def _all_or_first_error(pieces: Sequence[Coroutine[Any, Any, None]]) -> None:
    """All at once. On the first error the others are cancelled and waited for: they fill the caller's memory."""
    try:
        async with asyncio.TaskGroup() as group:
            for piece in pieces:
                group.create_task(piece)
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from None
