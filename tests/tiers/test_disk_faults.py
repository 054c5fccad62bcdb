"""A directory when things go wrong: every call fails once, every call is the last one, and odd file systems."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import killed_writer
import pytest
from contract import SEVERAL_CHUNKS, SHARD, aligned, chunked, noise
from disk_place import DiskPlace
from faulty_syscalls import CountedSyscalls, FailingSyscalls, Refusing, ShortWrites

from surefoot.errors import TierDeniedError, TierError, TierFullError
from surefoot.tiers.disk import DiskTier
from surefoot.tiers.syscalls import Syscalls

SCRIPT = Path(killed_writer.__file__)


def write(root: Path, syscalls: Syscalls, data: bytes) -> None:
    async def story() -> None:
        tier = DiskTier(root, syscalls=syscalls)
        try:
            await tier.put_stream(SHARD, chunked(aligned(data)), len(data))
        finally:
            await tier.close()

    asyncio.run(story())


def error_of_write(root: Path, syscalls: Syscalls, data: bytes) -> TierError | None:
    try:
        write(root, syscalls, data)
    except TierError as error:
        return error
    return None


def reopen(root: Path) -> None:
    """What the next process does first: a small write."""

    async def story() -> None:
        tier = DiskTier(root)
        await tier.put("run.json", b"{}")
        await tier.close()

    asyncio.run(story())


@pytest.mark.holds("put-if-absent")
@pytest.mark.parametrize("story", ["overwrite", "claim"])
def test_killed_at_every_call(tmp_path: Path, story: str) -> None:
    """A writer killed before or after any call leaves the older object or the whole new one, and no litter."""
    told = subprocess.run(
        [sys.executable, SCRIPT, str(tmp_path), story], check=True, capture_output=True, text=True, timeout=300
    )
    num_calls = int(told.stdout)
    assert num_calls >= 12
    outcomes = set()
    for root in sorted(tmp_path.iterdir()):
        place = DiskPlace([root])
        reopen(root)
        shard, record = place.read(SHARD), place.read(killed_writer.RECORD)
        assert shard in (killed_writer.OLD, killed_writer.NEW), root.name
        assert record in (None, killed_writer.NEW_RECORD), root.name
        assert set(place.everything()) <= {SHARD, killed_writer.RECORD, "run.json"}, root.name
        outcomes.add((shard == killed_writer.NEW, record is not None))
    # Both sides of the point of no return were seen.
    assert outcomes == ({(False, False), (True, False)} if story == "overwrite" else {(False, False), (False, True)})


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("done", [False, True])
def test_every_call_fails_once(tmp_path: Path, code: int, *, done: bool) -> None:
    """An error at any call is told as ours; the older object stays, or the new one is there whole."""
    old, new = noise(10, seed=1), noise(300_001, seed=2)
    kind = TierFullError if code == errno.ENOSPC else TierError
    for number in range(1_000):
        root = tmp_path / str(number)
        (root / SHARD).parent.mkdir(parents=True)
        (root / SHARD).write_bytes(old)
        syscalls = FailingSyscalls(number, done=done, code=code)
        error = error_of_write(root, syscalls, new)
        if len(syscalls.calls) <= number:
            break
        assert error is None or (type(error), error.errno) == (kind, code), syscalls.calls
        renamed = syscalls.calls.count("rename") == 2  # one of the probe, one of ours
        assert renamed or DiskPlace([root]).read(SHARD) == old, syscalls.calls
        reopen(root)
        assert DiskPlace([root]).read(SHARD) in (old, new), syscalls.calls
        assert DiskPlace([root]).everything() == ["run.json", SHARD], syscalls.calls
    assert number >= 12
    assert error is None
    assert DiskPlace([root]).read(SHARD) == new


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, TierFullError),
        (errno.EDQUOT, TierFullError),
        (errno.EFBIG, TierFullError),
        (errno.EACCES, TierDeniedError),
        (errno.EPERM, TierDeniedError),
        (errno.EROFS, TierDeniedError),
        (errno.EIO, TierError),
        (errno.ESTALE, TierError),
        (errno.ENOENT, TierError),
    ],
)
def test_kinds_of_errors(tmp_path: Path, code: int, kind: type[TierError]) -> None:
    """Full and denied are told apart from other faults; a write is never answered with "missing"."""
    of_the_probe = 7
    syscalls = FailingSyscalls(of_the_probe + 3, done=False, code=code)
    error = error_of_write(tmp_path, syscalls, noise(4096))
    assert type(error) is kind, syscalls.calls
    assert os.strerror(code) in str(error)


def test_order_of_calls(tmp_path: Path) -> None:
    """Data is synced before its name appears, and the name after; so is every new directory's."""
    syscalls = CountedSyscalls()

    async def story() -> list[list[str]]:
        tier = DiskTier(tmp_path / "run", syscalls=syscalls)
        told = []
        for verb in (
            lambda: tier.put("run.json", b"{}"),
            lambda: tier.put_stream("steps/a/x", chunked(aligned(noise(4097))), 4097),
            lambda: tier.put_stream("steps/a/y", chunked(aligned(noise(4097))), 4097),
            lambda: tier.put_if_absent("commits/x.json", b"{}"),
            lambda: tier.put_if_absent("commits/y.json", b"{}"),
        ):
            syscalls.calls.clear()
            await verb()
            told.append([call for call in syscalls.calls if call not in ("allocate", "truncate")])
        await tier.close()
        return told

    probe = ["create", "sync file", "link", "rename", "sync directory", "unlink", "unlink"]
    renamed = ["create", "write", "sync file", "rename", "sync directory"]
    streamed = ["create", "write", "write", "sync file", "rename", "sync directory"]  # a page and a tail
    linked = ["create", "write", "sync file", "link", "sync directory", "unlink"]
    made = ["mkdir", "sync directory"]
    told = asyncio.run(story())
    assert told == [
        [*made, *probe, *renamed],
        [*made, *made, *streamed],
        streamed,
        [*made, *linked],
        linked,
    ]


def test_short_writes(tmp_path: Path) -> None:
    """Calls that write less than asked are repeated until all is written."""
    data = noise(SEVERAL_CHUNKS)
    write(tmp_path, ShortWrites(), data)
    assert DiskPlace([tmp_path]).read(SHARD) == data


class RefusesDirect(Syscalls):
    """A device that wants another alignment than ours: every direct write is refused."""

    refused = 0

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if _is_direct(fd):
            self.refused += 1
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().write(fd, data, offset)


def _is_direct(fd: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii").split("flags:")[1].split()[0]
    return bool(int(flags, 8) & os.O_DIRECT)


def test_direct_writes_refused(tmp_path: Path) -> None:
    """Where direct writes are refused the bytes arrive the plain way."""
    data = noise(SEVERAL_CHUNKS)
    syscalls = RefusesDirect()
    write(tmp_path, syscalls, data)
    assert DiskPlace([tmp_path]).read(SHARD) == data
    assert syscalls.refused == 1


def test_direct_writes_are_direct(tmp_path: Path) -> None:
    """Aligned chunks bypass the page cache wherever the file system lets a plain program do so."""

    class Watching(Syscalls):
        def __init__(self) -> None:
            self.direct: list[bool] = []

        def write(self, fd: int, data: memoryview, offset: int) -> int:
            self.direct.append(_is_direct(fd))
            return super().write(fd, data, offset)

    try:
        fd = os.open(tmp_path / "plain", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
        os.pwrite(fd, aligned(bytes(4096)), 0)
        os.close(fd)
        supported = True
    except OSError:
        supported = False
    watching = Watching()
    write(tmp_path, watching, noise(SEVERAL_CHUNKS))
    assert watching.direct == [supported] * (7 if supported else 6)  # six chunks, and the page of the tail


@pytest.mark.parametrize(
    ("call", "code", "said"),
    [
        ("link", errno.EPERM, "hard links"),
        ("link", errno.EOPNOTSUPP, "hard links"),
        ("rename", errno.ENOSYS, "rename"),
        ("sync directory", errno.EINVAL, "fsync of directories"),
    ],
)
def test_file_systems_that_cannot_keep_promises(tmp_path: Path, call: str, code: int, said: str) -> None:
    """A file system that lacks a needed call is refused at the first write, which says what is missing."""
    with pytest.raises(TierError, match=said):
        write(tmp_path, Refusing(call, code), b"data")
    assert DiskPlace([tmp_path]).everything() == []


def test_no_reservation(tmp_path: Path) -> None:
    """A file system that cannot reserve space is fine."""
    write(tmp_path, Refusing("allocate", errno.EOPNOTSUPP), b"data")
    assert DiskPlace([tmp_path]).read(SHARD) == b"data"


FULL_STORY = """
import asyncio, resource, sys
from contract import SHARD, aligned, chunked
from pathlib import Path
from surefoot.errors import TierFullError
from surefoot.tiers.disk import DiskTier

async def main():
    tier = DiskTier(Path(sys.argv[1]))
    await tier.put(SHARD, b"older")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    for verb in (lambda: tier.put_stream(SHARD, chunked(aligned(bytes(5 << 20))), 5 << 20),
                 lambda: tier.put("run.json", bytes(2 << 20)),
                 lambda: tier.put_if_absent("run.json", bytes(2 << 20))):
        try:
            await verb()
        except TierFullError as error:
            print(error)
    await tier.close()

asyncio.run(main())
"""


def test_full(tmp_path: Path) -> None:
    """Where no more bytes fit every write says so, removes its part and leaves the older object."""
    told = subprocess.run(
        [sys.executable, "-c", FULL_STORY, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parent)},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.stdout.count("free some space") == 3, told
    assert DiskPlace([tmp_path]).read(SHARD) == b"older"
    assert DiskPlace([tmp_path]).everything() == [SHARD]
