"""Frozen files on real tiers: what is deleted and what is not, and a file that must not be believed."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from surefoot.agent.frozen.files import FrozenFiles
from surefoot.agent.journal import Journal
from surefoot.core.frozen import FrozenFile
from surefoot.core.layout import BoundaryId, ShardId, frozen_key
from surefoot.core.manifest import Manifest, Shard
from surefoot.records.records import Records
from surefoot.tiers.disk import DiskTier
from surefoot.tiers.open import open_disks

_SIZE_BYTES = 5000


class _Place:
    """A run in a directory, with copies in another."""

    def __init__(self, root: Path) -> None:
        self.run, self.disk = root / "run", root / "disk"
        self.tier = DiskTier(self.run, direct=False)
        disks = open_disks([str(self.disk)])
        assert disks is not None
        self.disks = disks
        (root / "log").mkdir()
        self._log = root / "log"

    def files(self) -> FrozenFiles:
        """As an agent that has just started has them."""
        journal = Journal("r" * 8, "l", "n", self.tier, (self._log / "e").open("a", buffering=1), self._log / "e")
        return FrozenFiles(Records(self.tier), self.disks, journal)

    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self._log / "e").read_text().splitlines()]

    async def put(self, seed: int) -> FrozenFile:
        data = random.Random(seed).randbytes(_SIZE_BYTES)
        file = FrozenFile(xxhash.xxh3_128_hexdigest(data), _SIZE_BYTES)
        await self.tier.put(file.key, data)
        await self.disks.put(file.key, data)
        return file


def _manifest(file: FrozenFile, step: int) -> Manifest:
    at = BoundaryId(step, 1)
    shard = Shard(ShardId(at, 0, "abcd"), "0" * 32, 1, "0" * 32, {"frozen": file.to_json()})
    return Manifest(at, "0" * 32, 1, "periodic", None, {}, "l", None, 1.0, (shard,))


@pytest.fixture
def place(tmp_path: Path) -> Callable[[Callable[[_Place], Awaitable[None]]], None]:
    def run(scene: Callable[[_Place], Awaitable[None]]) -> None:
        async def all_of_it() -> None:
            one = _Place(tmp_path)
            try:
                await scene(one)
            finally:
                await one.tier.close()
                await one.disks.close()

        asyncio.run(all_of_it())

    return run


Play = Callable[[Callable[[_Place], Awaitable[None]]], None]


def _there(place: _Place) -> set[str]:
    return {f"{root.name}/{path.name}" for root in (place.run, place.disk) for path in root.glob("frozen/*")}


def _of(file: FrozenFile) -> set[str]:
    return {f"run/{file.xxh3_128}.safetensors", f"disk/{file.xxh3_128}.safetensors"}


def test_only_what_nobody_names_is_deleted(place: Play) -> None:
    """A file of a checkpoint, of one given up, and of a trainer stay; the other goes, from every tier."""

    async def scene(one: _Place) -> None:
        named, given_up, held, other = [await one.put(seed) for seed in range(4)]
        files = one.files()
        files.hold(held)
        manifests = [_manifest(named, 1), _manifest(given_up, 2).retire(5.0)]
        freed = await files.sweep(manifests, 0.0)
        assert freed == other.size_bytes
        assert _there(one) == _of(named) | _of(given_up) | _of(held)

    place(scene)


def test_what_is_unnamed_goes_only_after_the_delay(place: Play) -> None:
    """A file that is not named yet stays for the delay; one that is named meanwhile begins anew."""

    async def scene(one: _Place) -> None:
        file = await one.put(1)
        files = one.files()
        assert await files.sweep([], 3600.0) == 0
        assert await files.sweep([_manifest(file, 1)], 0.0) == 0
        assert _there(one) == _of(file)
        assert await files.sweep([], 0.0) > 0
        assert _there(one) == set()

    place(scene)


def test_a_quarantined_file_is_not_durable_until_it_is_written_again(place: Play) -> None:
    """What was refused once is not believed by any later agent; a new good copy ends that."""

    async def scene(one: _Place) -> None:
        file = await one.put(1)
        files = one.files()
        assert await files.is_durable(file)
        await files.refuse(one.tier, file, "its bytes do not match their hash")
        assert not await files.is_durable(file)
        assert not await one.files().is_durable(file)
        await files.saved(one.tier, file)
        assert await one.files().is_durable(file)

    place(scene)


def test_a_file_of_another_size_is_not_the_file(place: Play) -> None:
    """Cut short, or named with another size: not durable, on any question."""

    async def scene(one: _Place) -> None:
        file = await one.put(1)
        assert not await one.files().is_durable(replace(file, size_bytes=file.size_bytes + 1))
        path = one.run / frozen_key(file.xxh3_128)
        path.write_bytes(path.read_bytes()[:-1])
        assert not await one.files().is_durable(file)

    place(scene)
