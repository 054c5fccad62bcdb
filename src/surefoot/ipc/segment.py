"""The segment: one rank's slots in shared memory, self-describing, so that a restarted agent can adopt it.

    static header   magic, sizes, run, plan hash, hash of all that                              page 0
    slot table      one entry of 16 words per slot                                              page 1
    plan            JSON                                                                        from page 2
    slot 0 … n-1    record (JSON, up to record_capacity) │ image (the bytes of the file)        page-aligned

Slot states are not a word but follow from three single-writer words: the trainer's `seq` (odd: filling; even and not
0: sealed), the agent's `hashed_seq` (the `seq` whose bytes its hash describes) and its `voided_seq` (a `seq` that it
gave up). A slot is *hashed* if `hashed_seq` equals `seq`, and holds nothing if `voided_seq` does. Two writers of one
state word could overwrite each other; words with one writer each cannot.

Every field is untrusted when a segment is adopted: bounds are checked against the real size.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from surefoot.core.documents import FORMAT_VERSION, compact, digest, parse_json
from surefoot.core.image import PAGE_BYTES, Image, round_up
from surefoot.core.layout import BoundaryId
from surefoot.core.plan import Plan
from surefoot.core.replicas import areas, areas_bytes
from surefoot.errors import CorruptError, ResourceError, UsageError
from surefoot.ipc.barrier import full_barrier

_MAGIC = b"SUREFOOT"
_STATIC = struct.Struct("<8s10Q64s32s")
_ENTRY_WORDS = 16
_MAX_SLOTS = PAGE_BYTES // (8 * _ENTRY_WORDS)

# Words of a slot's entry. The trainer writes the first group and the third, the agent the second.
_SEQ, _BOUNDARY, _GENERATION, _FLAGS, _RECORD_BYTES, _RECORD_HASH_0, _RECORD_HASH_1, _STAGED_NS = range(8)
_HASHED_SEQ, _HASH_0, _HASH_1, _VOIDED_SEQ = range(8, 12)
_STEP, _EPOCH = range(12, 14)
"""Labels + 1; 0 for none."""

_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)

DURABLE = 1
"""Flag: this image is to be shipped; the slot is pinned until the agent lets go."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a segment, all in bytes."""

    num_slots: int
    record_capacity: int
    image_bytes: int
    plan_bytes: int
    replicas_bytes: int = 0
    """Size of the other ranks' images that stand in each slot too, each rounded up to pages."""

    @property
    def slots_offset(self) -> int:
        return 2 * PAGE_BYTES + round_up(self.plan_bytes)

    @property
    def slot_stride(self) -> int:
        return self.record_capacity + round_up(self.image_bytes) + self.replicas_bytes

    @property
    def size_bytes(self) -> int:
        return self.slots_offset + self.num_slots * self.slot_stride

    def record_offset(self, slot: int) -> int:
        return self.slots_offset + slot * self.slot_stride

    def image_offset(self, slot: int) -> int:
        return self.record_offset(slot) + self.record_capacity

    def replicas_offset(self, slot: int) -> int:
        return self.image_offset(slot) + round_up(self.image_bytes)


@dataclass(frozen=True, slots=True)
class Sealed:
    """A sealed slot as its entry describes it."""

    slot: int
    seq: int
    at: BoundaryId
    durable: bool
    staged_ns: int
    record_bytes: int
    record_hash: str
    image_hash: str | None
    """xxh3-128 as 32 hex digits once the agent has hashed the slot."""


class Segment:
    """A mapped segment. The trainer calls `begin` and `seal`, the agent `set_hash` and `void`; both read."""

    def __init__(
        self, fd: int, mapping: mmap.mmap, geometry: Geometry, rank: int, run: str, plan_hash: str, path: Path | None
    ) -> None:
        self.fd = fd
        self.geometry = geometry
        self.rank = rank
        self.run = run
        self.plan_hash = plan_hash
        self.path = path
        """None for a memfd."""
        self._plan: Plan | None = None
        self.memory = memoryview(mapping)
        self._table = self.memory[PAGE_BYTES : 2 * PAGE_BYTES].cast("Q")

    @property
    def num_slots(self) -> int:
        return self.geometry.num_slots

    def plan(self) -> Plan:
        """The plan that stands in the segment; read and checked once.

        Raises:
            CorruptError: its bytes do not match the hash in the header, or are not of this rank and size.
        """
        if self._plan is None:
            self._plan = self._read_plan()
        return self._plan

    def _read_plan(self) -> Plan:
        what = f"segment of rank {self.rank}"
        text = bytes(self.memory[2 * PAGE_BYTES : 2 * PAGE_BYTES + self.geometry.plan_bytes])
        if digest(text) != self.plan_hash:
            raise CorruptError(f"{what}: the plan's bytes do not match its hash")
        plan = Plan.from_body(parse_json(text, what), what)
        if self.rank >= plan.world_size or plan.image(self.rank).size_bytes != self.geometry.image_bytes:
            raise CorruptError(f"{what}: its plan is for {plan.world_size} ranks, or for another size")
        if self.geometry.replicas_bytes not in (0, areas_bytes(plan, self.rank)):
            raise CorruptError(f"{what}: it has {self.geometry.replicas_bytes} bytes for replicas, its plan has others")
        return plan

    def image(self, slot: int) -> memoryview:
        """The image's bytes, exactly as the file's."""
        start = self.geometry.image_offset(slot)
        return self.memory[start : start + self.geometry.image_bytes]

    def padded_image(self, slot: int) -> memoryview:
        """The image and the rest of its last page."""
        start = self.geometry.image_offset(slot)
        return self.memory[start : start + round_up(self.geometry.image_bytes)]

    def replica(self, slot: int, rank: int) -> memoryview:
        """Another rank's image, as far as this rank has the same bytes: that rank's private part is missing."""
        start = self.geometry.replicas_offset(slot) + areas(self.plan(), self.rank)[rank]
        return self.memory[start : start + self.plan().image(rank).size_bytes]

    def record(self, sealed: Sealed) -> bytes:
        """The record's bytes.

        Raises:
            CorruptError: they do not match the hash in the entry.
        """
        start = self.geometry.record_offset(sealed.slot)
        data = bytes(self.memory[start : start + sealed.record_bytes])
        if digest(data) != sealed.record_hash:
            raise CorruptError(f"slot {sealed.slot} of rank {self.rank}: the record's bytes do not match its hash")
        return data

    def begin(self, slot: int) -> None:
        """Open a slot for filling. From here on until `seal` it holds nothing.

        Invariant: `seq` turns odd BEFORE the first byte changes.
        """
        self._set(slot, _SEQ, self._get(slot, _SEQ) | 1)
        full_barrier()

    def seal(self, slot: int, at: BoundaryId, record: bytes, *, durable: bool, staged_ns: int) -> int:
        """Close a filled slot and return its new `seq`.

        Invariant: data and description are there BEFORE `seq` turns even.

        Raises:
            ResourceError: the record has outgrown its place; nothing was written.
            UsageError: the slot was not opened by `begin`.
        """
        if len(record) > self.geometry.record_capacity:
            raise ResourceError(
                f"slot {slot} of rank {self.rank}: the record has {len(record)} bytes, and there is room for "
                f"{self.geometry.record_capacity}; register fewer or smaller plain values, or start the run again"
            )
        if not self._get(slot, _SEQ) & 1:
            raise UsageError(f"slot {slot} of rank {self.rank} is sealed without being filled: call begin first")
        start = self.geometry.record_offset(slot)
        self.memory[start : start + len(record)] = record
        record_hash = bytes.fromhex(digest(record))
        self._set(slot, _BOUNDARY, at.boundary)
        self._set(slot, _GENERATION, at.generation)
        self._set(slot, _FLAGS, DURABLE if durable else 0)
        self._set(slot, _RECORD_BYTES, len(record))
        self._set(slot, _RECORD_HASH_0, int.from_bytes(record_hash[:8], "big"))
        self._set(slot, _RECORD_HASH_1, int.from_bytes(record_hash[8:], "big"))
        self._set(slot, _STAGED_NS, staged_ns)
        self._set(slot, _STEP, _word_of(at.step))
        self._set(slot, _EPOCH, _word_of(at.epoch))
        full_barrier()
        seq = self._get(slot, _SEQ) + 1
        self._set(slot, _SEQ, seq)
        return seq

    def void(self, slot: int, seq: int | None = None) -> None:
        """Give up what a slot holds (a bad image, or history). The agent calls this, also while the trainer fills.

        Args:
            slot: the slot.
            seq: the `seq` that was found bad; no effect if the slot moved on. None: the image that it holds now.
        """
        self._set(slot, _VOIDED_SEQ, self._get(slot, _SEQ) if seq is None else seq)

    def set_hash(self, sealed: Sealed, image_hash: str) -> None:
        """Write the image's hash; dropped if the slot moved on since `sealed` was read.

        If it moves on just now, readers drop it: `hashed_seq` names the `seq` that it describes.
        """
        if self._get(sealed.slot, _SEQ) != sealed.seq:
            return
        value = bytes.fromhex(image_hash)
        self._set(sealed.slot, _HASHED_SEQ, 0)
        full_barrier()
        self._set(sealed.slot, _HASH_0, int.from_bytes(value[:8], "big"))
        self._set(sealed.slot, _HASH_1, int.from_bytes(value[8:], "big"))
        full_barrier()
        self._set(sealed.slot, _HASHED_SEQ, sealed.seq)

    def seq(self, slot: int) -> int:
        return self._get(slot, _SEQ)

    def sealed(self, slot: int) -> Sealed | None:
        """Description of a sealed slot; None if it is free, is being filled, or changed while it was read."""
        seq = self._get(slot, _SEQ)
        if seq == 0 or seq & 1:
            return None
        entry = self._table[slot * _ENTRY_WORDS : (slot + 1) * _ENTRY_WORDS].tolist()
        if self._get(slot, _SEQ) != seq or entry[_RECORD_BYTES] > self.geometry.record_capacity:
            return None
        if entry[_VOIDED_SEQ] == seq:
            return None
        hashed = entry[_HASHED_SEQ] == seq
        return Sealed(
            slot,
            seq,
            BoundaryId(entry[_BOUNDARY], entry[_GENERATION], _label_of(entry[_STEP]), _label_of(entry[_EPOCH])),
            bool(entry[_FLAGS] & DURABLE),
            entry[_STAGED_NS],
            entry[_RECORD_BYTES],
            f"{entry[_RECORD_HASH_0]:016x}{entry[_RECORD_HASH_1]:016x}",
            f"{entry[_HASH_0]:016x}{entry[_HASH_1]:016x}" if hashed else None,
        )

    def all_sealed(self) -> list[Sealed]:
        return [sealed for slot in range(self.num_slots) if (sealed := self.sealed(slot)) is not None]

    def remove(self) -> None:
        """Give the memory back to the machine, once no process has it mapped any more."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close the descriptor; the mapping goes when its last view does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _get(self, slot: int, word: int) -> int:
        return self._table[slot * _ENTRY_WORDS + word]

    def _set(self, slot: int, word: int, value: int) -> None:
        self._table[slot * _ENTRY_WORDS + word] = value


def _word_of(label: int | None) -> int:
    return 0 if label is None else label + 1


def _label_of(word: int) -> int | None:
    return word - 1 if word else None


def create_segment(
    directory: Path,
    name: str,
    *,
    run: str,
    rank: int,
    plan: Plan,
    image: Image,
    num_slots: int,
    record_capacity: int,
    replicas: bool = True,
) -> Segment:
    """Reserve and describe a segment: a file in `directory`, or a sealed memfd where that mount is too small.

    Every page is reserved here, so that shortage is an error now and not a SIGBUS in the training loop. With `replicas`
    there is room for those that the plan gives this rank to keep.

    Raises:
        ResourceError: neither has room.
    """
    plan_text = compact(plan.body)
    replicas_bytes = areas_bytes(plan, rank) if replicas else 0
    geometry = Geometry(num_slots, round_up(record_capacity), image.size_bytes, len(plan_text), replicas_bytes)
    if num_slots > _MAX_SLOTS:
        raise ResourceError(f"{num_slots} slots: at most {_MAX_SLOTS}")
    fd, path = _reserve(directory / name, geometry.size_bytes)
    try:
        mapping = mmap.mmap(fd, geometry.size_bytes)
        memory = memoryview(mapping)
        if replicas_bytes:
            _describe_replicas(memory, geometry, plan, rank)
        _describe(memory, geometry, image, plan_text, _static_header(geometry, rank, run, plan.hash))
    except BaseException:
        os.close(fd)
        if path is not None:
            path.unlink()
        raise
    return Segment(fd, mapping, geometry, rank, run, plan.hash, path)


def _describe(memory: memoryview, geometry: Geometry, image: Image, plan_text: bytes, header: bytes) -> None:
    memory[2 * PAGE_BYTES : 2 * PAGE_BYTES + len(plan_text)] = plan_text
    for slot in range(geometry.num_slots):
        start = geometry.image_offset(slot)
        memory[start : start + len(image.header)] = image.header
    # Last: a segment without this header belongs to no run.
    full_barrier()
    memory[: len(header)] = header


def _describe_replicas(memory: memoryview, geometry: Geometry, plan: Plan, holder: int) -> None:
    for rank, offset in areas(plan, holder).items():
        header = plan.image(rank).header
        for slot in range(geometry.num_slots):
            start = geometry.replicas_offset(slot) + offset
            memory[start : start + len(header)] = header


def open_segment(fd: int, path: Path | None, *, populate: bool = False) -> Segment:
    """Map a segment that lies there, checking every bound. Takes over `fd`.

    Raises:
        CorruptError: it is not a whole segment of this user.
    """
    try:
        info = os.fstat(fd)
        what = str(path or "memfd")
        private = info.st_uid == os.geteuid() and stat.S_ISREG(info.st_mode) and info.st_nlink <= 1
        # A memfd has no name by which others could open it, so its mode does not matter.
        if not private or (path is not None and info.st_mode & 0o077):
            raise CorruptError(f"{what}: not a segment of this user")
        if info.st_size < 2 * PAGE_BYTES:
            raise CorruptError(f"{what}: too short for a segment")
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        mapping = mmap.mmap(fd, info.st_size, flags=flags)
        return _described(fd, mapping, info.st_size, path, what)
    except BaseException:
        os.close(fd)
        raise


def open_segment_file(path: Path, *, populate: bool = False) -> Segment:
    """Map a segment by its name.

    Raises:
        CorruptError: it is not a whole segment of this user.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise CorruptError(f"{path}: not a file ({error.strerror})") from error
        raise
    return open_segment(fd, path, populate=populate)


def _described(fd: int, mapping: mmap.mmap, size_bytes: int, path: Path | None, what: str) -> Segment:
    raw = mapping[: _STATIC.size + 16]
    words = _STATIC.unpack(raw[: _STATIC.size])
    magic, version, num_slots, capacity, image_bytes, plan_bytes, rank, total, replicas_bytes, *_, run, plan_hash = (
        words
    )
    if (
        magic != _MAGIC
        or version != FORMAT_VERSION
        or bytes.fromhex(digest(raw[: _STATIC.size])) != raw[_STATIC.size :]
    ):
        raise CorruptError(f"{what}: not a segment of format {FORMAT_VERSION}, or its header is damaged")
    geometry = Geometry(num_slots, capacity, image_bytes, plan_bytes, replicas_bytes)
    if num_slots > _MAX_SLOTS or capacity % PAGE_BYTES or geometry.size_bytes != total or total != size_bytes:
        raise CorruptError(f"{what}: header describes {geometry.size_bytes} bytes, the file has {size_bytes}")
    try:
        run_id, hash_text = run.rstrip(b"\0").decode("ascii"), plan_hash.decode("ascii")
    except UnicodeDecodeError as error:
        raise CorruptError(f"{what}: header names no run or no plan") from error
    return Segment(fd, mapping, geometry, rank, run_id, hash_text, path)


def _static_header(geometry: Geometry, rank: int, run: str, plan_hash: str) -> bytes:
    fields = (
        _MAGIC,
        FORMAT_VERSION,
        geometry.num_slots,
        geometry.record_capacity,
        geometry.image_bytes,
        geometry.plan_bytes,
        rank,
        geometry.size_bytes,
        geometry.replicas_bytes,
        0,
        0,
        run.encode("ascii"),
        plan_hash.encode("ascii"),
    )
    packed = _STATIC.pack(*fields)
    return packed + bytes.fromhex(digest(packed))


def _reserve(path: Path, size_bytes: int) -> tuple[int, Path | None]:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        return fd, path
    except OSError as error:
        os.close(fd)
        path.unlink()
        if error.errno not in _NO_ROOM:
            raise
    return _reserve_memfd(path, size_bytes), None


def _reserve_memfd(path: Path, size_bytes: int) -> int:
    # A memfd counts against memory, not against the mount's size: containers often mount /dev/shm with 64 MB.
    fd = os.memfd_create(path.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        room = os.statvfs(path.parent)
        raise ResourceError(
            f"no room for {size_bytes} bytes of shared memory: {path.parent} has {room.f_bavail * room.f_frsize} bytes "
            f"free, and memory without a name is refused too ({error.strerror}); mount a larger /dev/shm or use a "
            "machine with more memory"
        ) from error
    return fd
