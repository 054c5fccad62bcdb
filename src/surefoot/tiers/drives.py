"""Makes several drives one disk tier: whole files, spread by rank.

A shard lies on drive `rank % number of drives`, everything else on the first. Reads look there first and then on
the others, so that a changed order or number of drives still finds what is there.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from surefoot.core.layout import parse_shard
from surefoot.errors import ObjectExistsError, ObjectMissingError, TierError
from surefoot.tiers.base import Entry
from surefoot.tiers.disk import DiskTier

T = TypeVar("T")


class DrivesTier:
    """At least one `DiskTier`, best of the same size and speed."""

    def __init__(self, drives: Sequence[DiskTier]) -> None:
        self._drives = tuple(drives)

    @property
    def name(self) -> str:
        return "disk"

    @property
    def uri(self) -> str:
        return " + ".join(drive.uri for drive in self._drives)

    async def put_stream(self, key: str, chunks: AsyncIterator[memoryview], size_bytes: int) -> None:
        await self._home(key).put_stream(key, chunks, size_bytes)

    async def put(self, key: str, data: bytes) -> None:
        await self._home(key).put(key, data)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        """See `Tier.put_if_absent`. Racers meet on the key's own drive; the others only hold older layouts."""
        home, *others = self._from_home(key)
        for drive in others:
            if await _has(drive, key):
                raise ObjectExistsError(f"disk {drive.uri}: {key} exists already")
        await home.put_if_absent(key, data)

    async def get(self, key: str) -> bytes:
        return await self._first(key, lambda drive: drive.get(key))

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        await self._first(key, lambda drive: drive.read_into(key, offset, buffer))

    async def size(self, key: str) -> int:
        return await self._first(key, lambda drive: drive.size(key))

    async def delete(self, keys: Sequence[str]) -> None:
        """From every drive. One that cannot delete does not keep the others from it."""
        answers = await asyncio.gather(*(drive.delete(keys) for drive in self._drives), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def free_bytes(self) -> int | None:
        """What the fullest drive can still take: a shard must fit on its own drive."""
        return min([free async for free in self._free()], default=None)

    async def close(self) -> None:
        for drive in self._drives:
            await drive.close()

    def _home(self, key: str) -> DiskTier:
        shard = parse_shard(key)
        return self._drives[shard.rank % len(self._drives) if shard else 0]

    def _from_home(self, key: str) -> Iterator[DiskTier]:
        home = self._home(key)
        yield home
        yield from (drive for drive in self._drives if drive is not home)

    async def _first(self, key: str, read: Callable[[DiskTier], Awaitable[T]]) -> T:
        """The answer of the first drive that has the object. Missing only if every drive reports it missing."""
        missing: ObjectMissingError | None = None
        fault: TierError | None = None
        for drive in self._from_home(key):
            try:
                return await read(drive)
            except ObjectMissingError as error:
                missing = missing or error
            except TierError as error:
                fault = fault or error
        raise fault or missing or ObjectMissingError(f"disk {self.uri}: no such object: {key}")

    async def _free(self) -> AsyncIterator[int]:
        for drive in self._drives:
            free = await drive.free_bytes()
            if free is not None:
                yield free

    # Last in the class: below it, `list` no longer names the built-in type.
    async def list(self, prefix: str) -> builtins.list[Entry]:
        """The union; of a key that lies on several drives the one that a read would find."""
        found: dict[str, Entry] = {}
        for drive in self._drives:
            for entry in await drive.list(prefix):
                if entry.key not in found or self._home(entry.key) is drive:
                    found[entry.key] = entry
        return [found[key] for key in sorted(found)]


async def _has(drive: DiskTier, key: str) -> bool:
    try:
        await drive.size(key)
    except ObjectMissingError:
        return False
    return True
