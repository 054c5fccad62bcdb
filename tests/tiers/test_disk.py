"""What only a directory can get wrong: odd things in the tree, other people's temporary files, blocking calls."""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from contract import SHARD, aligned, chunked, on
from disk_place import DiskPlace

from surefoot.errors import ObjectMissingError, TierError
from surefoot.tiers import disk_write
from surefoot.tiers.disk import DiskTier
from surefoot.tiers.disk_tree import Tree
from surefoot.tiers.syscalls import Syscalls


@pytest.fixture
def place(tmp_path: Path) -> DiskPlace:
    return DiskPlace([tmp_path / "run"])


def refused(place: DiskPlace, *keys: str) -> None:
    """Every way to read or write the keys is a fault that is not called absence."""
    for key in keys:
        for verb in (
            lambda tier, key=key: tier.put(key, b"new"),
            lambda tier, key=key: tier.put_if_absent(key, b"new"),
            lambda tier, key=key: tier.put_stream(key, chunked(aligned(b"new")), 3),
            lambda tier, key=key: tier.get(key),
            lambda tier, key=key: tier.size(key),
        ):
            with pytest.raises(TierError) as caught:
                on(place, verb)
            assert not isinstance(caught.value, ObjectMissingError)


def test_a_linked_directory_leads_nowhere(place: DiskPlace, tmp_path: Path) -> None:
    """A symbolic link in place of a directory is followed by no verb: nothing outside is read, listed or changed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.json").write_bytes(b"secret")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "commits").symlink_to(outside)
    refused(place, "commits/x.json", "commits/y.json")
    assert on(place, lambda tier: tier.list("")) == []
    with pytest.raises(TierError):
        on(place, lambda tier: tier.list("commits/"))
    with pytest.raises(TierError):
        on(place, lambda tier: tier.delete(["commits/x.json"]))
    assert [path.read_bytes() for path in outside.iterdir()] == [b"secret"]


def test_a_linked_file_leads_nowhere(place: DiskPlace, tmp_path: Path) -> None:
    """A symbolic link in place of an object is not read; a write replaces the link, never what it points to."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    link = tmp_path / "run" / "commits" / "x.json"
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    for verb in (lambda tier: tier.get("commits/x.json"), lambda tier: tier.size("commits/x.json")):
        with pytest.raises(TierError) as caught:
            on(place, verb)
        assert not isinstance(caught.value, ObjectMissingError)
    on(place, lambda tier: tier.put("commits/x.json", b"new"))
    assert (outside.read_bytes(), link.read_bytes(), link.is_symlink()) == (b"precious", b"new", False)


def test_odd_files(place: DiskPlace, tmp_path: Path) -> None:
    """A file where a directory belongs, or the reverse, is a fault; a FIFO hangs nobody and is not listed."""
    (tmp_path / "run" / "steps" / "a").mkdir(parents=True)
    (tmp_path / "run" / "commits").write_bytes(b"")
    os.mkfifo(tmp_path / "run" / "fifo")
    refused(place, "commits/x.json", "steps/a")
    with pytest.raises(TierError, match="not a regular file"):
        on(place, lambda tier: tier.get("fifo"))
    with pytest.raises(TierError):
        on(place, lambda tier: tier.list("commits/"))
    assert [entry.key for entry in on(place, lambda tier: tier.list(""))] == ["commits"]


UNREADABLE_STORY = """
import asyncio, os, sys
from pathlib import Path
from surefoot.errors import TierDeniedError
from surefoot.tiers.disk import DiskTier
from surefoot.tiers.disk_tree import Tree

if os.geteuid() == 0:
    os.setgroups([])
    os.setegid(65534)
    os.seteuid(65534)

async def main():
    tier = DiskTier(Path(sys.argv[1]))
    for verb in (lambda: tier.list(""), lambda: tier.list("commits/"), lambda: tier.get("commits/x.json"),
                 lambda: tier.size("commits/x.json"), lambda: tier.put("commits/y.json", b"")):
        try:
            print(await verb())
        except TierDeniedError as error:
            print("denied", error)
    await tier.close()

asyncio.run(main())
"""


@pytest.fixture
def forbidden() -> Iterator[Path]:
    """A run that everybody can reach and whose commits nobody but root can read."""
    with tempfile.TemporaryDirectory() as base:
        Path(base).chmod(0o755)
        commits = Path(base, "commits")
        commits.mkdir()
        (commits / "x.json").write_bytes(b"{}")
        commits.chmod(0)
        yield Path(base)
        commits.chmod(0o700)


@pytest.mark.holds("step-0-needs-answers")
def test_unreadable_is_not_absent(forbidden: Path) -> None:
    """A directory that we may not read is a refusal in every verb, never an empty listing or a missing object."""
    told = subprocess.run(
        [sys.executable, "-c", UNREADABLE_STORY, str(forbidden)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert [line.split()[0] for line in told.stdout.splitlines()] == ["denied"] * 5, told


@pytest.mark.parametrize(("umask", "modes"), [(0o022, (0o755, 0o644)), (0o027, (0o750, 0o640))])
def test_the_umask_decides_who_may_read(place: DiskPlace, umask: int, modes: tuple[int, int]) -> None:
    """A team's directory stays as readable as the user's umask says."""
    before = os.umask(umask)
    try:
        on(place, lambda tier: tier.put_if_absent("commits/x.json", b""))
        on(place, lambda tier: tier.put_stream(SHARD, chunked(aligned(b"")), 0))
    finally:
        os.umask(before)
    for key in ("commits/x.json", SHARD):
        path = place.roots[0] / key
        assert (stat.S_IMODE(path.parent.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == modes


def test_deleting_leaves_no_empty_directories(place: DiskPlace) -> None:
    """Directories go with their last object: a long run does not pile up empty ones."""
    place.seed(["steps/a/b/1", "steps/a/2", "steps/c/3"])
    on(place, lambda tier: tier.delete(["steps/a/b/1", "steps/c/3"]))
    assert sorted(path.name for path in place.roots[0].rglob("*")) == ["2", "a", "steps"]


def temporary(root: Path, boot: str, number: int) -> Path:
    path = root / "steps" / f"+{boot}-{number:016x}.tmp"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"part")
    return path


@pytest.mark.holds("put-if-absent")
def test_only_abandoned_temporary_files_are_swept(place: DiskPlace) -> None:
    """The first write removes what dead writers left, here or long ago elsewhere, and nobody else's."""
    root = place.roots[0]
    here, elsewhere = disk_write._boot(), "00000000"
    dead, living, foreign, stale = (
        temporary(root, boot, number) for number, boot in enumerate([here, here, elsewhere, elsewhere])
    )
    lookalike = root / "steps" / "+notes.tmp"
    lookalike.write_bytes(b"somebody's")
    os.utime(stale, (0, 0))
    with living.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert on(place, lambda tier: tier.list("")) == []
        on(place, lambda tier: tier.put("run.json", b"{}"))
    assert [path.exists() for path in (dead, living, foreign, stale)] == [False, True, True, False]
    assert lookalike.read_bytes() == b"somebody's"
    assert on(place, lambda tier: tier.sweep()) == 1
    assert not living.exists()


class Swept(Syscalls):
    """Another process sweeps right after a temporary file was made, before anybody holds its lock."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.names: list[str] = []

    def create(self, name: str, dir_fd: int) -> int:
        fd = super().create(name, dir_fd)
        self.names.append(name)
        if len(self.names) % 2:
            assert disk_write.sweep(Tree(self._root, Syscalls()), Syscalls()) == 1
        return fd


def test_a_sweeper_that_comes_before_the_lock(tmp_path: Path) -> None:
    """Each first temporary file is swept away under its maker, the file system's probe included: made again."""
    swept = Swept(tmp_path)

    async def story() -> None:
        tier = DiskTier(tmp_path, syscalls=swept)
        await tier.put_if_absent("run.json", b"{}")
        await tier.close()

    asyncio.run(story())
    assert (tmp_path / "run.json").read_bytes() == b"{}"
    assert len(swept.names) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


class Gated(Syscalls):
    """A device that does not answer until the test lets it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()
        self.seen: list[bytes] = []

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self.entered.set()
        assert self.go.wait(60)
        self.seen.append(bytes(data))
        return super().write(fd, data, offset)


async def _until(event: threading.Event) -> None:
    while not event.is_set():  # noqa: ASYNC110  set by a thread
        await asyncio.sleep(0)


def test_a_slow_device_does_not_block_the_loop(tmp_path: Path) -> None:
    """While a write hangs in the device the event loop runs on: here it is what frees the write."""
    device = Gated()

    async def story() -> None:
        tier = DiskTier(tmp_path, syscalls=device)
        putting = asyncio.create_task(tier.put("run.json", b"data"))
        await _until(device.entered)
        device.go.set()
        await putting
        await tier.close()

    asyncio.run(story())
    assert (tmp_path / "run.json").read_bytes() == b"data"


def test_memory_is_not_given_back_while_a_thread_reads_it(tmp_path: Path) -> None:
    """A cancelled, and again cancelled, write ends only when the call in progress has left the caller's memory."""
    device = Gated()
    memory = aligned(b"before")

    async def story() -> None:
        tier = DiskTier(tmp_path, syscalls=device)

        async def source() -> AsyncIterator[memoryview]:
            yield memory

        putting = asyncio.create_task(tier.put_stream(SHARD, source(), 6))
        await _until(device.entered)
        for _ in range(2):
            putting.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
            assert not putting.done()
        device.go.set()
        with pytest.raises(asyncio.CancelledError):
            await putting
        memory[:] = b"after!"
        await tier.close()

    asyncio.run(story())
    assert [data[:6] for data in device.seen] == [b"before"]
    assert DiskPlace([tmp_path]).everything() == []
