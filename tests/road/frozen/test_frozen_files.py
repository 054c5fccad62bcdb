"""Frozen files on real tiers: what is deleted and what is not, a lost index, a file that must not be believed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from surefoot.agent.books import Books
from surefoot.agent.frozen_files import FrozenFiles, index_of
from surefoot.agent.journal import Journal
from surefoot.core.frozen import FrozenFile, FrozenIndex
from surefoot.core.layout import ShardId, StepId, frozen_index_key, frozen_key
from surefoot.core.manifest import Manifest, Shard
from surefoot.core.plan import Leaf, Plan, Report, make_plan
from surefoot.tensor_hash import FileHash
from surefoot.tiers.disk import DiskTier
from surefoot.tiers.open import open_disks

PLAN = make_plan(
    [Report((Leaf("w", "float32", (3000,), "local", frozen=True), Leaf("b", "int8", (5,), "local", frozen=True)), "{}")]
)


def _made(seed: int, plan: Plan = PLAN) -> tuple[bytes, FrozenIndex]:
    """A frozen file of the plan, and its index."""
    image = plan.frozen_image(0)
    assert image is not None
    generator = torch.Generator().manual_seed(seed)
    size = image.size_bytes - len(image.header)
    data = image.header + bytes(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).numpy())
    hashing = FileHash(image)
    hashing.update(memoryview(data))
    whole, digests = hashing.finish()
    return data, index_of(FrozenFile(whole, image.size_bytes), image, digests)


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
        return FrozenFiles(Books(self.tier), self.disks, journal)

    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self._log / "e").read_text().splitlines()]

    async def put(self, seed: int) -> FrozenIndex:
        data, index = _made(seed)
        await self.tier.put(index.file.key, data)
        await self.disks.put(index.file.key, data)
        await self.tier.put(index.key, index.to_bytes())
        return index


def _manifest(file: FrozenFile, step: int) -> Manifest:
    at = StepId(step, 1)
    shard = Shard(ShardId(at, 0, "abcd"), PLAN.hash, 1, "0" * 32, {"frozen": file.to_json()})
    return Manifest(at, PLAN.hash, 1, "periodic", None, {}, "l", None, 1.0, (shard,))


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


def _of(index: FrozenIndex) -> set[str]:
    name = index.file.xxh3_128
    return {f"run/{name}.safetensors", f"run/{name}.json", f"disk/{name}.safetensors"}


def test_only_what_nobody_names_is_deleted(place: Play) -> None:
    """A file of a checkpoint, of one given up, and of a trainer stay; the other goes, from every tier."""

    async def scene(one: _Place) -> None:
        named, given_up, held, other = [await one.put(seed) for seed in range(4)]
        files = one.files()
        files.hold(held.file)
        manifests = [_manifest(named.file, 1), _manifest(given_up.file, 2).retire(5.0)]
        freed = await files.sweep(manifests, 0.0)
        assert freed == other.file.size_bytes + len(other.to_bytes())
        assert _there(one) == _of(named) | _of(given_up) | _of(held)

    place(scene)


def test_what_is_unnamed_goes_only_after_the_delay(place: Play) -> None:
    """A file that is not named yet stays for the delay; one that is named meanwhile begins anew."""

    async def scene(one: _Place) -> None:
        index = await one.put(1)
        files = one.files()
        assert await files.sweep([], 3600.0) == 0
        assert await files.sweep([_manifest(index.file, 1)], 0.0) == 0
        assert _there(one) == _of(index)
        assert await files.sweep([], 0.0) > 0
        assert _there(one) == set()

    place(scene)


@pytest.mark.parametrize("damage", ["lost", "flipped", "of another file"])
def test_a_lost_index_is_read_from_the_file(place: Play, damage: str) -> None:
    """Without a good index the file itself tells what is in it, and the index is written again."""

    async def scene(one: _Place) -> None:
        index = await one.put(1)
        path = one.run / index.key
        if damage == "lost":
            path.unlink()
        elif damage == "flipped":
            path.write_bytes(path.read_bytes().replace(b'"w"', b'"v"'))
        else:
            path.write_bytes(_made(2)[1].to_bytes())
        assert await one.files().index(index.file, PLAN, 0) == index
        assert path.read_bytes() == index.to_bytes()

    place(scene)


def test_a_lost_index_is_not_read_from_a_damaged_file(place: Play) -> None:
    """A file whose bytes do not match its name is told apart, also on a drive, and nothing is made up of it."""

    async def scene(one: _Place) -> None:
        index = await one.put(1)
        (one.run / index.key).unlink()
        for root in (one.run, one.disk):
            path = root / index.file.key
            path.write_bytes(path.read_bytes()[:-1] + b"\0")
        assert await one.files().index(index.file, PLAN, 0) is None
        assert not (one.disk / index.file.key).exists()
        assert [event["object"] for event in one.events()] == [index.file.key] * 2
        assert not await one.files().is_durable(index.file)

    place(scene)


def test_a_quarantined_file_is_not_durable_until_it_is_written_again(place: Play) -> None:
    """What was refused once is not believed by any later agent; a new good copy ends that."""

    async def scene(one: _Place) -> None:
        index = await one.put(1)
        files = one.files()
        assert await files.is_durable(index.file)
        await files.refuse(one.tier, index.file, "its bytes do not match their hash")
        assert not await files.is_durable(index.file)
        assert not await one.files().is_durable(index.file)
        await files.saved(one.tier, index.file)
        assert await one.files().is_durable(index.file)

    place(scene)


def test_a_file_of_another_size_is_not_the_file(place: Play) -> None:
    """Cut short, or named with another size: not durable, on any question."""

    async def scene(one: _Place) -> None:
        index = await one.put(1)
        assert not await one.files().is_durable(replace(index.file, size_bytes=index.file.size_bytes + 1))
        path = one.run / frozen_key(index.file.xxh3_128)
        path.write_bytes(path.read_bytes()[:-1])
        assert not await one.files().is_durable(index.file)
        assert (one.run / frozen_index_key(index.file.xxh3_128)).exists()

    place(scene)
