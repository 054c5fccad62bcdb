"""The contract on one directory and on several drives."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from contract import SHARD, TierContract, aligned, chunked
from disk_place import DiskPlace

from surefoot.errors import ObjectExistsError, ObjectMissingError, TierError


class TestDisk(TierContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> DiskPlace:
        return DiskPlace([tmp_path / "new" / "a run, 100% #1 ü"])


class TestDrives(TierContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> DiskPlace:
        return DiskPlace([tmp_path / f"drive{number}" for number in range(3)])


def test_shards_are_spread_by_rank(tmp_path: Path) -> None:
    """A shard lies on drive rank % n as one whole file, everything else on the first drive."""
    place = DiskPlace([tmp_path / "a", tmp_path / "b"])

    async def story() -> None:
        tier = place.open()
        for rank in range(4):
            key = f"steps/00000001-g0001/rank-{rank:05d}-a3f2.safetensors"
            await tier.put_stream(key, chunked(aligned(b"%d" % rank)), 1)
            await tier.put(key.replace(".safetensors", ".ok.json"), b"{}")
        await tier.close()

    asyncio.run(story())
    on_drive = [{path.name for path in root.rglob("*") if path.is_file()} for root in place.roots]
    acks = {f"rank-{rank:05d}-a3f2.ok.json" for rank in range(4)}
    assert on_drive == [
        acks | {f"rank-{rank:05d}-a3f2.safetensors" for rank in (0, 2)},
        {f"rank-{rank:05d}-a3f2.safetensors" for rank in (1, 3)},
    ]


def test_another_order_of_drives_finds_everything(tmp_path: Path) -> None:
    """Files that lie on another drive than today's rule says are found, listed once and deleted."""
    one = DiskPlace([tmp_path / "a", tmp_path / "b"])
    other = DiskPlace([tmp_path / "b", tmp_path / "a"])

    async def story() -> None:
        before, after = one.open(), other.open()
        await before.put(SHARD, b"shard")
        await before.put("commits/x.json", b"first")
        assert await after.get(SHARD) == b"shard"
        assert [entry.key for entry in await after.list("")] == ["commits/x.json", SHARD]
        with pytest.raises(ObjectExistsError):
            await after.put_if_absent("commits/x.json", b"second")
        await after.delete([SHARD, "commits/x.json"])
        for tier in (before, after):
            with pytest.raises(ObjectMissingError):
                await tier.get(SHARD)
            await tier.close()

    asyncio.run(story())
    assert one.everything() == []


def test_a_broken_drive_is_no_absence(tmp_path: Path) -> None:
    """What the other drives have is read; what they lack may lie on the broken one, and is not called missing."""
    place = DiskPlace([tmp_path / "a", tmp_path / "b"])
    (tmp_path / "a").write_bytes(b"a file where the drive should be")

    async def story() -> None:
        tier = place.open()
        await tier.put(SHARD, b"on drive b")
        assert await tier.get(SHARD) == b"on drive b"
        for verb in (tier.get("run.json"), tier.list("")):
            with pytest.raises(TierError) as caught:
                await verb
            assert not isinstance(caught.value, ObjectMissingError)
        await tier.close()

    asyncio.run(story())
