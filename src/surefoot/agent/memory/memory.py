"""The node's memory tier: owns the segments of its ranks, hashes their images, and finds whole steps among them."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from surefoot.core.documents import Fields, parse_json
from surefoot.core.image import round_up
from surefoot.core.layout import BoundaryId
from surefoot.core.plan import Plan
from surefoot.core.replicas import areas_bytes
from surefoot.errors import CorruptError, ResourceError
from surefoot.events import human_bytes
from surefoot.host.memory import available_bytes
from surefoot.host.priority import give_way
from surefoot.ipc.home import Home
from surefoot.ipc.segment import Geometry, Sealed, Segment, create_segment, open_segment, open_segment_file
from surefoot.launch.config import MIN_SLOTS

HASH_THREADS = 2
_SUFFIX = ".seg"
_SPARE_BYTES = 256 * 1024 * 1024
"""Left to all other programs when a segment's size is judged."""


@dataclass(frozen=True, slots=True)
class Held:
    """One rank's hashed image in shared memory."""

    segment: Segment
    sealed: Sealed

    @property
    def image_hash(self) -> str:
        assert self.sealed.image_hash is not None
        return self.sealed.image_hash

    def unchanged(self) -> bool:
        return self.segment.seq(self.sealed.slot) == self.sealed.seq

    def record(self) -> dict[str, Any]:
        """The rank's record.

        Raises:
            CorruptError: its bytes do not match their hash, or it belongs to another image than the slot's entry names:
                the entry has no hash of its own, and images of two steps must never be taken for one.
        """
        what = f"slot {self.sealed.slot} of rank {self.segment.rank}"
        fields = Fields(parse_json(self.segment.record(self.sealed), what), what)
        at, said = BoundaryId.of(fields), self.sealed.at
        if (at, at.step, at.epoch, fields.integer("rank")) != (said, said.step, said.epoch, self.segment.rank):
            raise CorruptError(f"{what}: its entry names {said}, {said.label}, its record {at}, {at.label}")
        return fields.body


@dataclass(frozen=True, slots=True)
class ImageSet:
    """Images of one step, of one plan: this node's, or those of all ranks."""

    at: BoundaryId
    plan: str
    parts: tuple[Held, ...]
    """The images in rank order."""

    @property
    def size_bytes(self) -> int:
        return sum(part.segment.geometry.image_bytes for part in self.parts)


class Memory:
    """Owns the segments. Runs in the agent's event loop; hashing runs in threads."""

    def __init__(self, home: Home, on_bad: Callable[[str, str], None]) -> None:
        self._home = home
        self._on_bad = on_bad
        self._all: list[Segment] = []
        self._pool = ThreadPoolExecutor(HASH_THREADS, "hash", initializer=give_way)

    @property
    def segments(self) -> list[Segment]:
        return list(self._all)

    def adopt_files(self) -> int:
        """Take over the segments that lie in the run's directory. A file that is not a whole segment is removed and
        reported."""
        for path in sorted(self._home.directory.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns):
            try:
                segment = open_segment_file(path)
                if segment.run != self._home.run:
                    raise CorruptError(f"belongs to run {segment.run}")
                segment.plan()
            except CorruptError as error:
                self._on_bad(path.name, str(error))
                path.unlink(missing_ok=True)
                continue
            except OSError as error:
                # The file itself may be good: it may hold the only copy of a step, and stays.
                self._on_bad(path.name, f"cannot be opened ({error}); left as it is")
                continue
            self._all.append(segment)
        return len(self._all)

    def adopt_descriptor(self, fd: int) -> None:
        """Take over a segment that a trainer still holds (a memfd has no name to be found by).

        A segment that was found by its name too is the same memory: if it were listed twice, `void_all_but` would empty
        it.
        """
        if any(os.path.sameopenfile(fd, segment.fd) for segment in self._all):
            os.close(fd)
            return
        segment = open_segment(fd, None)
        if segment.run != self._home.run:
            raise CorruptError(f"a trainer sent a segment of run {segment.run}")
        self._all.append(segment)

    def find(self, rank: int, plan_hash: str) -> Segment | None:
        """The newest segment of a rank under a plan."""
        for segment in reversed(self._all):
            if segment.rank == rank and segment.plan_hash == plan_hash:
                return segment
        return None

    def usable(self, plan: Plan, rank: int, record_capacity: int) -> Segment | None:
        """A rank's segment under this very plan, if its records have room for `record_capacity` bytes."""
        found = self.find(rank, plan.hash)
        return found if found is not None and found.geometry.record_capacity >= record_capacity else None

    def reserve(self, plan: Plan, ranks: Sequence[int], record_capacity: int, num_slots: int) -> list[Segment]:
        """A segment for each of these ranks of a plan: those that are there, and new ones with as many slots as there
        is memory for, from `num_slots` down to two.

        Raises:
            ResourceError: not even two slots fit; the message names need and have.
        """
        capacity = round_up(record_capacity)
        images = {rank: plan.image(rank) for rank in ranks if self.usable(plan, rank, capacity) is None}
        step_bytes = sum(slot_bytes(plan, rank, capacity) for rank in images)
        slots = _affordable_slots(step_bytes, num_slots)
        made: list[Segment] = []
        try:
            for rank, image in images.items():
                made.append(
                    create_segment(
                        self._home.directory,
                        f"rank-{rank:05d}-{secrets.token_hex(4)}{_SUFFIX}",
                        run=self._home.run,
                        rank=rank,
                        plan=plan,
                        image=image,
                        num_slots=slots,
                        record_capacity=capacity,
                    )
                )
        except ResourceError:
            self._all.extend(made)
            self.drop(made)
            raise
        self._all.extend(made)
        return [self._usable(plan, rank, capacity) for rank in ranks]

    def room_bytes(self) -> int:
        """Bytes that this run could have for its slots: free memory, and the memory that its segments take now."""
        return _free_bytes() + sum(segment.geometry.size_bytes for segment in self._all)

    def _usable(self, plan: Plan, rank: int, record_capacity: int) -> Segment:
        segment = self.usable(plan, rank, record_capacity)
        assert segment is not None
        return segment

    async def hash_slot(self, segment: Segment, slot: int) -> Held | None:
        """Hash one sealed slot, unless it is hashed already. None if it moved on, or holds nothing good."""
        sealed = segment.sealed(slot)
        if sealed is None:
            return None
        if sealed.image_hash is None:
            try:
                segment.record(sealed)
            except CorruptError as error:
                if segment.seq(slot) == sealed.seq:
                    self._give_up(segment, sealed, str(error))
                return None
            image_hash = await self._hash(segment, slot)
            # Hashing does not pin the slot: the result is worth nothing if the slot moved on meanwhile.
            if segment.seq(slot) != sealed.seq:
                return None
            segment.set_hash(sealed, image_hash)
            sealed = replace(sealed, image_hash=image_hash)
        return Held(segment, sealed)

    async def whole_sets(self) -> list[ImageSet]:
        """Every step of which all ranks' images are here and hashed. Answers only after every sealed slot is hashed."""
        return [one for one in await self.sets() if len(one.parts) == one.parts[0].segment.plan().world_size]

    async def sets(self) -> list[ImageSet]:
        """Every step of which any rank's image is here and hashed. Answers only after every sealed slot is hashed."""
        found: dict[tuple[BoundaryId, str], dict[int, Held]] = {}
        for segment in list(self._all):
            for slot in range(segment.num_slots):
                held = await self.hash_slot(segment, slot)
                if held is not None and self._is_good(held):
                    found.setdefault((held.sealed.at, segment.plan_hash), {})[segment.rank] = held
        return [
            ImageSet(at, plan_hash, tuple(parts[rank] for rank in sorted(parts)))
            for (at, plan_hash), parts in found.items()
        ]

    async def parts(self, at: BoundaryId, plan_hash: str) -> dict[int, Held]:
        """The images of one step that are here and hashed, by rank; some ranks may be missing."""
        found = {}
        for segment in [segment for segment in self._all if segment.plan_hash == plan_hash]:
            for sealed in segment.all_sealed():
                held = await self.hash_slot(segment, sealed.slot) if sealed.at == at else None
                if held is not None and self._is_good(held):
                    found[segment.rank] = held
        return found

    def give_up(self, held: Held, why: str) -> None:
        """Give up an image that turned out bad."""
        self._give_up(held.segment, held.sealed, why)

    async def verify(self, images: ImageSet) -> None:
        """Hash a set again, before it is trusted with a restore.

        Raises:
            CorruptError: with the rank whose bytes changed; that slot is given up.
        """
        hashes = await asyncio.gather(*(self._hash(part.segment, part.sealed.slot) for part in images.parts))
        for part, image_hash in zip(images.parts, hashes, strict=True):
            if image_hash != part.image_hash or not part.unchanged():
                why = f"image of rank {part.segment.rank} at {images.at.label}: its bytes do not match its hash"
                self._give_up(part.segment, part.sealed, why)
                raise CorruptError(why)
            part.record()

    async def sift(self, at: BoundaryId, plan_hash: str) -> None:
        """Hash the images of a step here again, and give up those that have changed."""
        for held in (await self.parts(at, plan_hash)).values():
            with suppress(CorruptError):  # it is given up, and that is logged
                await self.verify(ImageSet(at, plan_hash, (held,)))

    def void_all_but(self, kept: Iterable[Held]) -> None:
        """Empty every slot that is not kept: steps that a new generation does not continue are history."""
        keep = {(id(part.segment), part.sealed.slot) for part in kept}
        for segment in self._all:
            for slot in range(segment.num_slots):
                if (id(segment), slot) not in keep and segment.seq(slot):
                    segment.void(slot)

    def drop(self, segments: Iterable[Segment]) -> None:
        """Give segments back to the machine."""
        for segment in list(segments):
            self._all.remove(segment)
            segment.remove()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _hash(self, segment: Segment, slot: int) -> str:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, xxhash.xxh3_128_hexdigest, segment.image(slot))

    def _is_good(self, held: Held) -> bool:
        try:
            held.segment.plan()
            held.record()
        except CorruptError as error:
            self._give_up(held.segment, held.sealed, str(error))
            return False
        return True

    def _give_up(self, segment: Segment, sealed: Sealed, why: str) -> None:
        segment.void(sealed.slot, sealed.seq)
        self._on_bad(f"slot {sealed.slot} of rank {segment.rank}", why)


def slot_bytes(plan: Plan, rank: int, record_capacity: int) -> int:
    """Bytes that one slot of a rank takes."""
    image_bytes = plan.image(rank).size_bytes
    return Geometry(1, round_up(record_capacity), image_bytes, 0, areas_bytes(plan, rank)).slot_stride


def _free_bytes() -> int:
    return max(0, available_bytes() - _SPARE_BYTES)


def _affordable_slots(step_bytes: int, num_slots: int) -> int:
    have_bytes = _free_bytes()
    slots = min(num_slots, have_bytes // step_bytes) if step_bytes else num_slots
    if slots < MIN_SLOTS:
        raise ResourceError(
            f"this node's ranks need {human_bytes(MIN_SLOTS * step_bytes)} of shared memory ({MIN_SLOTS} slots of "
            f"{human_bytes(step_bytes)}), {human_bytes(have_bytes)} are available; use a machine with more memory, "
            "or train fewer parameters"
        )
    return slots
