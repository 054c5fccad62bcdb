"""The segment: what a dead or hostile writer leaves is adopted whole or refused, never half believed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from segment_actor import IMAGE_DATA_BYTES, RUN, fill, make, plan_of, put, record_of
from surefoot.core.documents import digest
from surefoot.core.image import PAGE_BYTES
from surefoot.core.layout import BoundaryId
from surefoot.errors import CorruptError, ResourceError, UsageError
from surefoot.ipc.segment import Geometry, Segment, open_segment, open_segment_file

_ACTOR = str(Path(__file__).with_name("segment_actor.py"))
_HEADER = struct.Struct("<8s10Q64s32s")


@contextmanager
def _actor(*arguments: str, prefix: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*prefix, sys.executable, _ACTOR, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the actor died without an answer"
    answer = json.loads(line)
    assert isinstance(answer, dict)
    return answer


def _tensor_bytes(segment: Segment, slot: int) -> bytes:
    ((_box, start),) = segment.plan().image(0).places
    return bytes(segment.image(slot)[start:])


@pytest.mark.holds("plan-in-memory")
def test_a_segment_is_adopted_as_it_was_made(tmp_path: Path) -> None:
    """Geometry, run, rank, plan, headers of the images and what is sealed: all is read back from the file alone."""
    made = make(tmp_path, num_slots=3)
    put(made, 2, 7)
    made.close()
    assert made.path is not None
    found = open_segment_file(made.path)
    assert (found.geometry, found.rank, found.run, found.plan_hash) == (made.geometry, 0, RUN, plan_of().hash)
    assert found.plan() == plan_of()
    image = plan_of().image(0)
    for slot in range(3):
        assert bytes(found.image(slot)[: len(image.header)]) == image.header
        assert len(found.image(slot)) == image.size_bytes
    (sealed,) = found.all_sealed()
    assert (sealed.slot, sealed.seq, sealed.at, sealed.durable) == (2, 2, BoundaryId(7, 1), False)
    assert (sealed.staged_ns, sealed.image_hash) == (7000, None)
    assert found.record(sealed) == record_of(7)
    assert _tensor_bytes(found, 2) == bytes([7]) * IMAGE_DATA_BYTES


@pytest.mark.holds("memory-reserved")
def test_a_segment_lies_in_a_private_file_that_is_wholly_reserved(tmp_path: Path) -> None:
    """Mode 0600, one link, and every block allocated: no page fault can run out of memory later."""
    made = make(tmp_path)
    assert made.path is not None
    info = made.path.stat()
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_nlink == 1
    assert info.st_size == made.geometry.size_bytes
    assert info.st_blocks * 512 >= info.st_size


def test_images_and_records_lie_on_pages_of_their_own(tmp_path: Path) -> None:
    """Records and images start at pages, do not overlap, and fill the file to its end."""
    geometry = make(tmp_path, num_slots=5).geometry
    edges = [2 * PAGE_BYTES]
    for slot in range(5):
        for start, size in (
            (geometry.record_offset(slot), geometry.record_capacity),
            (geometry.image_offset(slot), geometry.image_bytes),
        ):
            assert start % PAGE_BYTES == 0
            assert start >= edges[-1]
            edges.append(start + size)
    assert edges[-1] <= geometry.size_bytes < edges[-1] + PAGE_BYTES


def test_a_name_that_is_taken_is_not_touched(tmp_path: Path) -> None:
    """A file or a link that lies at the name is neither followed nor overwritten."""
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "link.seg").symlink_to(tmp_path / "victim")
    (tmp_path / "file.seg").write_bytes(b"precious")
    for name in ("link.seg", "file.seg"):
        with pytest.raises(FileExistsError):
            make(tmp_path, name)
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert (tmp_path / "file.seg").read_bytes() == b"precious"


def test_a_segment_that_cannot_be_described_leaves_nothing(tmp_path: Path) -> None:
    """When creation fails after the memory was taken, file and descriptor are given back."""
    before = sorted(os.listdir("/proc/self/fd"))
    plan = plan_of(10)
    from surefoot.ipc.segment import create_segment

    with pytest.raises(UnicodeEncodeError):
        create_segment(
            tmp_path, "x.seg", run="é" * 8, rank=0, plan=plan, image=plan.image(0), num_slots=2, record_capacity=10
        )
    assert list(tmp_path.iterdir()) == []
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_too_many_slots_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    """The slot table has one page; more is refused, with the number that fits."""
    assert make(tmp_path, "fits.seg", num_slots=32, size_bytes=10).num_slots == 32
    with pytest.raises(ResourceError, match="33 slots: at most 32"):
        make(tmp_path, "x.seg", num_slots=33, size_bytes=10)
    assert [path.name for path in tmp_path.iterdir()] == ["fits.seg"]


# --------------------------------------------------------------------------- untrusted headers


def _header_of(path: Path) -> list[Any]:
    return list(_HEADER.unpack(path.read_bytes()[: _HEADER.size]))


def _write_header(path: Path, fields: list[Any], *, honest_hash: bool) -> None:
    packed = _HEADER.pack(*fields)
    old = path.read_bytes()[_HEADER.size : _HEADER.size + 16]
    with path.open("r+b") as file:
        file.write(packed + (bytes.fromhex(digest(packed)) if honest_hash else old))


def test_every_changed_byte_of_the_header_is_noticed(tmp_path: Path) -> None:
    """Each bit of the header and its hash, turned, makes the segment corrupt."""
    path = make(tmp_path, size_bytes=10).path
    assert path is not None
    whole = path.read_bytes()[: _HEADER.size + 16]
    for place in range(len(whole)):
        for bit in range(8):
            with path.open("r+b") as file:
                file.seek(place)
                file.write(bytes([whole[place] ^ 1 << bit]))
            with pytest.raises(CorruptError):
                open_segment_file(path)
            with path.open("r+b") as file:
                file.write(whole)
    open_segment_file(path)


@pytest.mark.holds("adopted-memory-is-checked")
@pytest.mark.parametrize("value", [0, 1, 3, 4095, 4097, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("field", range(1, 8))
def test_sizes_that_do_not_fit_the_file_are_refused_though_the_hash_fits(
    tmp_path: Path, field: int, value: int
) -> None:
    """Version, counts, sizes, rank: any other value, even under a matching hash, is refused or harmless."""
    path = make(tmp_path, size_bytes=10).path
    assert path is not None
    fields = _header_of(path)
    changed = fields[field] != value
    fields[field] = value
    _write_header(path, fields, honest_hash=True)
    try:
        found = open_segment_file(path)
    except CorruptError:
        return
    assert not changed or field in (4, 5, 6, 7), "only sizes within one page, and the rank, may be something else"
    assert found.geometry.size_bytes == path.stat().st_size
    for slot in range(found.num_slots):
        assert len(found.image(slot)) == found.geometry.image_bytes
    if changed:
        with pytest.raises(CorruptError):
            found.plan()


@pytest.mark.parametrize(
    ("field", "value"), [(0, b"SUREFEET"), (11, b"\xff" * 64), (12, b"\xff" * 32), (12, b"0" * 32)]
)
def test_texts_that_are_none_are_refused_though_the_hash_fits(tmp_path: Path, field: int, value: bytes) -> None:
    """A foreign magic, a run or a plan hash that is no text, a plan hash of another plan: `CorruptError`."""
    path = make(tmp_path, size_bytes=10).path
    assert path is not None
    fields = _header_of(path)
    fields[field] = value
    _write_header(path, fields, honest_hash=True)
    with pytest.raises(CorruptError):
        open_segment_file(path).plan()


@given(st.lists(st.integers(0, 2**64 - 1), min_size=4, max_size=4), st.integers(0, 40))
@settings(max_examples=200, deadline=None, database=None, derandomize=True)
def test_any_geometry_computes(fields: list[int], slot: int) -> None:
    """Sizes of any 64-bit value are computed exactly, without overflow, so that a comparison with the file decides."""
    geometry = Geometry(*fields)
    assert geometry.size_bytes >= geometry.slots_offset >= 2 * PAGE_BYTES
    assert geometry.image_offset(slot) - geometry.record_offset(slot) == geometry.record_capacity
    assert geometry.record_offset(geometry.num_slots) == geometry.size_bytes


@pytest.mark.parametrize("change", [-1, 1, -PAGE_BYTES, PAGE_BYTES])
def test_a_file_of_another_length_is_refused(tmp_path: Path, change: int) -> None:
    """Cut off or grown, by a byte or a page: the header's sizes do not fit any more."""
    path = make(tmp_path, size_bytes=10).path
    assert path is not None
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(CorruptError, match="the file has"):
        open_segment_file(path)


@pytest.mark.parametrize("content", [b"", b"x", b"SUREFOOT", b"\0" * 8191, b"\0" * 8192, b"\xff" * 65536])
def test_a_file_that_is_no_segment_is_refused_and_its_descriptor_closed(tmp_path: Path, content: bytes) -> None:
    """Empty, short, zeroed (its creator died early) and foreign files are `CorruptError`; nothing stays open."""
    path = tmp_path / "x.seg"
    path.write_bytes(content)
    path.chmod(0o600)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(CorruptError):
        open_segment_file(path)
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.holds("adopted-memory-is-checked")
def test_links_and_other_things_than_files_are_refused(tmp_path: Path) -> None:
    """A symbolic link, a second hard link, a directory, a FIFO: none is a segment, whatever it leads to."""
    path = make(tmp_path, size_bytes=10).path
    assert path is not None
    (tmp_path / "soft").symlink_to(path)
    (tmp_path / "directory").mkdir(mode=0o700)
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("soft", "directory", "fifo"):
        with pytest.raises(CorruptError):
            open_segment_file(tmp_path / name)
    open_segment_file(path)
    os.link(path, tmp_path / "hard")
    for each in (path, tmp_path / "hard"):
        with pytest.raises(CorruptError, match="not a segment of this user"):
            open_segment_file(each)
    with pytest.raises(FileNotFoundError):
        open_segment_file(tmp_path / "absent")


@pytest.mark.holds("adopted-memory-is-checked")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o601])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    """Any permission for group or others: somebody else may have written it."""
    path = make(tmp_path, size_bytes=10).path
    assert path is not None
    path.chmod(mode)
    with pytest.raises(CorruptError, match="not a segment of this user"):
        open_segment_file(path)


@pytest.mark.holds("adopted-memory-is-checked")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_refused(tmp_path: Path) -> None:
    """A whole segment that belongs to somebody else is not adopted."""
    path = make(tmp_path, size_bytes=10).path
    assert path is not None
    os.chown(path, 65534, 65534)
    with pytest.raises(CorruptError, match="not a segment of this user"):
        open_segment_file(path)


@pytest.mark.holds("plan-in-memory")
def test_a_changed_plan_is_noticed(tmp_path: Path) -> None:
    """Each byte of the plan's text, changed, is `CorruptError` when the plan is asked for."""
    made = make(tmp_path, size_bytes=10)
    start = 2 * PAGE_BYTES
    for place in range(made.geometry.plan_bytes):
        made.memory[start + place] ^= 0x20
        with pytest.raises(CorruptError, match="the plan's bytes do not match"):
            made.plan()
        made.memory[start + place] ^= 0x20
    assert made.plan() == plan_of(10)


# --------------------------------------------------------------------------- states of a slot


def _hash(segment: Segment, slot: int) -> str:
    return xxhash.xxh3_128(segment.image(slot)).hexdigest()


@pytest.mark.holds("sealed-is-not-verified")
def test_a_slot_goes_from_free_to_hashed_and_round_again(tmp_path: Path) -> None:
    """Free, filling, sealed, hashed, filling again: what a reader sees at each point."""
    segment = make(tmp_path, size_bytes=10)
    assert segment.all_sealed() == []
    segment.begin(0)
    assert segment.sealed(0) is None
    fill(segment, 0, 3)
    assert segment.sealed(0) is None
    seq = segment.seal(0, BoundaryId(3, 2), record_of(3), durable=True, staged_ns=9)
    sealed = segment.sealed(0)
    assert sealed is not None
    assert (sealed.seq, sealed.at, sealed.durable, sealed.image_hash) == (seq, BoundaryId(3, 2), True, None)
    segment.set_hash(sealed, _hash(segment, 0))
    hashed = segment.sealed(0)
    assert hashed is not None
    assert hashed.image_hash == _hash(segment, 0)
    segment.begin(0)
    assert segment.sealed(0) is None
    assert put(segment, 0, 4) == seq + 2
    again = segment.sealed(0)
    assert again is not None
    assert again.image_hash is None
    assert segment.sealed(1) is None


@pytest.mark.holds("sealed-is-not-verified")
def test_a_hash_of_what_a_slot_held_before_is_dropped(tmp_path: Path) -> None:
    """A result that comes after the slot moved on describes nothing, and does not displace the newer hash."""
    segment = make(tmp_path, size_bytes=10)
    put(segment, 0, 1)
    old = segment.sealed(0)
    assert old is not None
    segment.begin(0)
    segment.set_hash(old, "1" * 32)
    assert segment.sealed(0) is None
    put(segment, 0, 2)
    segment.set_hash(old, "1" * 32)
    new = segment.sealed(0)
    assert new is not None
    assert new.image_hash is None
    segment.set_hash(new, "2" * 32)
    segment.set_hash(old, "1" * 32)
    found = segment.sealed(0)
    assert found is not None
    assert found.image_hash == "2" * 32


@pytest.mark.holds("lock-of-the-dead")
def test_a_slot_whose_filling_was_given_up_never_reuses_a_number(tmp_path: Path) -> None:
    """A trainer that died while it filled, and the next one in the same slot: an old hash still fits nothing."""
    segment = make(tmp_path, size_bytes=10)
    put(segment, 0, 1)
    old = segment.sealed(0)
    assert old is not None
    segment.begin(0)
    assert put(segment, 0, 2) > old.seq
    segment.set_hash(old, "1" * 32)
    found = segment.sealed(0)
    assert found is not None
    assert found.image_hash is None


def test_a_voided_slot_holds_nothing_until_it_is_filled_again(tmp_path: Path) -> None:
    """`void` takes a sealed image away, is repeatable, and on a free slot does no harm."""
    segment = make(tmp_path, size_bytes=10)
    put(segment, 0, 1)
    for _ in range(2):
        segment.void(0)
        assert segment.sealed(0) is None
    segment.void(1)
    assert segment.all_sealed() == []
    assert put(segment, 0, 2) == 4
    assert put(segment, 1, 2) == 2
    assert len(segment.all_sealed()) == 2


def test_giving_up_a_slot_never_touches_what_was_filled_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that fills and seals anew while the agent gives the old image up loses neither image nor number."""
    segment = make(tmp_path, size_bytes=10)
    put(segment, 0, 1)
    old = segment.sealed(0)
    assert old is not None
    read = segment._get
    restage = [lambda: put(segment, 0, 2)]

    def interrupted(slot: int, word: int) -> int:
        value = read(slot, word)
        if restage:
            restage.pop()()
        return value

    monkeypatch.setattr(segment, "_get", interrupted)
    segment.void(0)
    monkeypatch.undo()
    segment.void(0, old.seq)
    new = segment.sealed(0)
    assert new is not None
    assert (new.seq, new.at.boundary) == (4, 2)
    assert put(segment, 0, 3) == 6
    segment.begin(0)
    segment.void(0)
    assert segment.seal(0, BoundaryId(4, 1), record_of(4), durable=False, staged_ns=0) == 8
    assert [sealed.at.boundary for sealed in segment.all_sealed()] == [4]


def test_sealing_what_was_not_opened_is_an_error(tmp_path: Path) -> None:
    """A slot that is free or sealed already cannot be sealed: its number would say "filling" for ever."""
    segment = make(tmp_path, size_bytes=10)
    with pytest.raises(UsageError, match="slot 0 of rank 0 is sealed without being filled"):
        segment.seal(0, BoundaryId(1, 1), b"{}", durable=False, staged_ns=0)
    put(segment, 0, 1)
    with pytest.raises(UsageError, match="call begin first"):
        segment.seal(0, BoundaryId(2, 1), b"{}", durable=False, staged_ns=0)
    assert [sealed.at for sealed in segment.all_sealed()] == [BoundaryId(1, 1)]


def test_a_record_that_has_outgrown_its_place_is_refused_with_the_sizes(tmp_path: Path) -> None:
    """A record longer than its capacity is an error before a byte of the image is overwritten."""
    segment = make(tmp_path, size_bytes=10)
    put(segment, 0, 1)
    capacity = segment.geometry.record_capacity
    for length in (capacity + 1, capacity + segment.geometry.image_bytes + 1, segment.geometry.size_bytes):
        segment.begin(0)
        fill(segment, 0, 2)
        before = bytes(segment.image(0))
        with pytest.raises(ResourceError, match=f"the record has {length} bytes, and there is room for {capacity}"):
            segment.seal(0, BoundaryId(2, 1), b"x" * length, durable=False, staged_ns=0)
        assert bytes(segment.image(0)) == before
        assert segment.sealed(0) is None
    segment.seal(0, BoundaryId(2, 1), b"x" * capacity, durable=False, staged_ns=0)
    sealed = segment.sealed(0)
    assert sealed is not None
    assert segment.record(sealed) == b"x" * capacity
    assert bytes(segment.image(0)) == before


def test_a_changed_record_is_noticed(tmp_path: Path) -> None:
    """Each byte of a record, changed, is `CorruptError`; so is a record length that the entry makes up."""
    segment = make(tmp_path, size_bytes=10)
    put(segment, 0, 1)
    sealed = segment.sealed(0)
    assert sealed is not None
    start = segment.geometry.record_offset(0)
    for place in range(sealed.record_bytes):
        segment.memory[start + place] ^= 1
        with pytest.raises(CorruptError, match="slot 0 of rank 0: the record's bytes"):
            segment.record(sealed)
        segment.memory[start + place] ^= 1
    table = segment.memory[PAGE_BYTES : 2 * PAGE_BYTES].cast("Q")
    for length in (segment.geometry.record_capacity + 1, 2**64 - 1):
        table[4] = length
        assert segment.sealed(0) is None


def test_a_description_that_changed_while_it_was_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is filled and sealed anew between two reads of one reader: no mixed description."""
    segment = make(tmp_path, size_bytes=10)
    put(segment, 0, 1)
    read = segment._get
    restage = [lambda: put(segment, 0, 2)]

    def interrupted(slot: int, word: int) -> int:
        value = read(slot, word)
        if restage:
            restage.pop()()
        return value

    monkeypatch.setattr(segment, "_get", interrupted)
    assert segment.sealed(0) is None
    found = segment.sealed(0)
    assert found is not None
    assert (found.seq, found.at.boundary) == (4, 2)


def test_images_of_two_slots_and_their_records_do_not_touch(tmp_path: Path) -> None:
    """Filling one slot to its last byte leaves every other byte of the segment as it was."""
    segment = make(tmp_path, num_slots=3, size_bytes=5000)
    for slot in range(3):
        put(segment, slot, slot)
    others = [(bytes(segment.padded_image(slot)), segment.sealed(slot)) for slot in (0, 2)]
    put(segment, 1, 77)
    assert [(bytes(segment.padded_image(slot)), segment.sealed(slot)) for slot in (0, 2)] == others
    assert _tensor_bytes(segment, 1) == bytes([77]) * 5000


# --------------------------------------------------------------------------- processes


@pytest.mark.holds("memory-outlives-trainers", "lock-of-the-dead")
@pytest.mark.parametrize(("where", "held"), [("begin", [1]), ("fill", [1]), ("seal", [1, 2])])
def test_the_death_of_the_writer_leaves_it_adoptable(tmp_path: Path, where: str, held: list[int]) -> None:
    """SIGKILL after begin, after filling, after sealing: the step before is whole, the last one if it was sealed."""
    with _actor("die", str(tmp_path), where) as process:
        path = Path(_answer(process)["path"])
        process.kill()
        process.wait()
        found = open_segment_file(path)
        assert sorted(sealed.at.boundary for sealed in found.all_sealed()) == held
        for sealed in found.all_sealed():
            assert found.record(sealed) == record_of(sealed.at.boundary)
            assert _tensor_bytes(found, sealed.slot) == bytes([sealed.at.boundary]) * IMAGE_DATA_BYTES
        assert put(found, 1, 3) > 0
        assert 3 in [sealed.at.boundary for sealed in found.all_sealed()]


class _Torn(Exception):  # noqa: N818 - what the check below looks for
    """A reader saw a stable number around bytes that do not belong together."""


def _read_once(segment: Segment, slot: int) -> bool:
    """One reading of a slot. True if it was stable, that is, if what was seen must be whole.

    Raises:
        _Torn: it was stable, and not whole.
    """
    sealed = segment.sealed(slot)
    if sealed is None:
        return False
    try:
        record: bytes | None = segment.record(sealed)
    except CorruptError:
        record = None
    image = _tensor_bytes(segment, slot)
    image_hash = _hash(segment, slot)
    if segment.seq(slot) != sealed.seq:
        return False
    step = sealed.at.boundary
    if record != record_of(step) or image != bytes([step % 251]) * len(image):
        raise _Torn(f"step {step}: record {record!r}, image bytes {set(image)}")
    if sealed.image_hash not in (None, image_hash):
        raise _Torn(f"step {step}: hash {sealed.image_hash} of another image")
    segment.set_hash(sealed, image_hash)
    return True


def _watch(path: Path, stable: int) -> None:
    """Read while somebody writes, until enough readings were stable and enough were not."""
    segment = open_segment_file(path)
    seen = {True: 0, False: 0}
    give_up = time.monotonic() + 60
    while seen[True] < stable or seen[False] < 20:
        for slot in range(segment.num_slots):
            seen[_read_once(segment, slot)] += 1
        assert time.monotonic() < give_up, f"too few readings: {seen}"


@pytest.mark.holds("start-during-save")
def test_what_is_read_under_one_number_is_whole(tmp_path: Path) -> None:
    """A writer at full speed, a reader that checks record, image and hash: never torn while the number stands still."""
    path = make(tmp_path, num_slots=3, size_bytes=8192).path
    assert path is not None
    with _actor("cycle", str(path), "careful"):
        _watch(path, 300)


def test_the_check_for_torn_reads_can_fail(tmp_path: Path) -> None:
    """The same reader finds out a writer that closes its slots too early."""
    path = make(tmp_path, num_slots=3, size_bytes=8192).path
    assert path is not None
    with _actor("cycle", str(path), "careless"):
        with pytest.raises(_Torn):
            _watch(path, 100_000)


_NAMESPACE = ("unshare", "-m") if os.geteuid() == 0 else ("unshare", "-rm")


@pytest.fixture
def small_mount(tmp_path: Path) -> tuple[str, ...]:
    """Prefix of a command that runs where `tmp_path` is a tmpfs of 256 KiB, seen by that command only."""
    script = 'mount -t tmpfs -o size=256k,mode=700 tmpfs "$1" && shift && exec "$@"'
    prefix = (*_NAMESPACE, "sh", "-c", script, "sh", str(tmp_path))
    tried = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no private mounts here: {tried.stderr.decode().strip()}")
    return prefix


def test_a_mount_that_is_too_small_is_stood_in_for_by_sealed_memory(
    tmp_path: Path, small_mount: tuple[str, ...]
) -> None:
    """On a tmpfs of 256 KiB a larger segment becomes a memfd: sealed against resizing, nothing left in the mount."""
    with _actor("create", str(tmp_path), "r.seg", "1000000", "0", prefix=small_mount) as process:
        answer = _answer(process)
        assert (answer["path"], answer["left"]) == (None, [])
        assert answer["seals"] == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fd = os.open(f"/proc/{process.pid}/fd/{answer['fd']}", os.O_RDWR | os.O_CLOEXEC)
        for length in (0, 10**9):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, length)
        found = open_segment(fd, None)
        process.kill()
        process.wait()
        (sealed,) = found.all_sealed()
        assert found.record(sealed) == record_of(5)
        assert _tensor_bytes(found, 0) == bytes([5]) * 1_000_000


def test_a_mount_that_is_large_enough_is_used(tmp_path: Path, small_mount: tuple[str, ...]) -> None:
    """On the same mount a segment that fits is a file."""
    with _actor("create", str(tmp_path), "r.seg", "10000", "0", prefix=small_mount) as process:
        answer = _answer(process)
        assert answer["path"] == str(tmp_path / "r.seg")
        assert answer["left"] == ["r.seg"]


def test_with_no_room_anywhere_the_error_says_need_and_have(tmp_path: Path) -> None:
    """Neither a file nor a memfd may have the size: `ResourceError` with both sizes, and nothing is left behind."""
    with _actor("create", str(tmp_path), "r.seg", "3000000", "1000000") as process:
        answer = _answer(process)
        assert answer["error"] == "ResourceError"
        need = make(tmp_path, size_bytes=3_000_000).geometry.size_bytes
        said = re.search(r"no room for (\d+) bytes of shared memory: (\S+) has \d+ bytes free", answer["text"])
        assert said is not None
        assert said.groups() == (str(need), str(tmp_path))
        assert os.strerror(errno.EFBIG) in answer["text"]
        assert answer["left"] == []
