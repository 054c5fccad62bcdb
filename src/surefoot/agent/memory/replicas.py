"""Replicas: keeps second copies of other machines' images, and rebuilds an image whose machine is lost.

The tensors that a rank shares with others stand in this node's slots anyway (`surefoot.core.replicas`). The bytes that
only this rank has, its record and some small tensors, are its *private part*: its agent sends that once the image is
hashed, together with the hash. Private parts lie as small files beside the segments, so that an agent which replaces
this one has them too.
"""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from surefoot.agent.memory.memory import Held, Memory
from surefoot.agent.nodes.membership import Membership
from surefoot.core import documents
from surefoot.core.documents import Fields
from surefoot.core.image import round_up
from surefoot.core.layout import BoundaryId
from surefoot.core.plan import Plan
from surefoot.core.ranges import Range
from surefoot.core.recovery import Copy
from surefoot.core.replicas import MAX_OWN_BYTES, own_ranges
from surefoot.errors import CorruptError, ObjectMissingError, ResourceError
from surefoot.ipc.home import Home
from surefoot.ipc.segment import Sealed, Segment, create_segment
from surefoot.ipc.wire import Body

_KEPT = 4
"""Number of a rank's newest private parts to keep: as many as a rank has slots, since a replica needs its slot."""
_SUFFIX, _DRAFT, _REBUILT = ".private_part", ".draft", ".rebuilt"
_Key = tuple[BoundaryId, str, int]
"""Step, plan and rank."""


@dataclass(frozen=True, slots=True)
class PrivatePart:
    """The bytes that only one rank had at one step, and the hash of its whole image."""

    at: BoundaryId
    plan: str
    rank: int
    image_hash: str
    record: bytes
    own: bytes
    """The bytes of the image that no other rank has, in its order."""

    @property
    def key(self) -> _Key:
        return self.at, self.plan, self.rank

    def to_json(self) -> Body:
        return {
            **self.at.to_json(),
            "plan": self.plan,
            "rank": self.rank,
            "xxh3_128": self.image_hash,
            "record": base64.b64encode(self.record).decode("ascii"),
            "own": base64.b64encode(self.own).decode("ascii"),
        }

    @classmethod
    def from_json(cls, body: Body, what: str) -> PrivatePart:
        fields = Fields(body, what)
        at, plan, rank = BoundaryId.of(fields), fields.text("plan"), fields.integer("rank")
        return cls(at, plan, rank, fields.text("xxh3_128"), fields.binary("record"), fields.binary("own"))


class Replicas:
    """The private parts of other nodes' ranks on this node, and the images that are rebuilt from them."""

    def __init__(self, home: Home, membership: Membership, memory: Memory, say: Callable[[str], None]) -> None:
        self._home = home
        self._membership = membership
        self._memory = memory
        self._say = say
        self._kept: dict[int, OrderedDict[_Key, tuple[PrivatePart, Path]]] = {}
        """By rank, oldest first, each with its file."""
        self._rebuilt: dict[_Key, Held] = {}
        self._turn = asyncio.Lock()
        self._own: dict[tuple[str, int], list[Range]] = {}
        """By plan and rank, the ranges of an image that only its rank has: found once, needed at every step."""
        self._too_large: set[int] = set()
        """Ranks whose private part was reported as too large."""
        self._unwritten = False
        """True once it was reported that a private part could not be written to a file."""
        membership.hear("private_part", self._receive)

    def adopt(self) -> None:
        """Take over the private parts that an earlier agent left, and remove its drafts and rebuilt images."""
        for left in (*self._home.directory.glob(f"*{_REBUILT}"), *self._home.directory.glob(f"*{_DRAFT}")):
            left.unlink(missing_ok=True)
        for path in sorted(self._home.directory.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns):
            try:
                private_part = PrivatePart.from_json(documents.unseal(path.read_bytes(), path.name), path.name)
            except (CorruptError, OSError) as error:
                self._say(f"{path.name} is of no use: {error}")
                path.unlink(missing_ok=True)
                continue
            self._keep(private_part, path)

    # ------------------------------------------------------------------ telling

    def hashed(self, held: Held) -> None:
        """Send the private part of an image of this node, which was just hashed, to the node that holds its replica."""
        plan, rank = held.segment.plan(), held.segment.rank
        node = self._membership.node_of(plan.holders[rank]) if rank in plan.holders else None
        if node is None or node == self._membership.me:
            return
        try:
            private_part = self._private_part_of(held, plan)
        except CorruptError as error:
            if held.unchanged():
                self._say(f"{held.sealed.at.label} of rank {rank} has no second copy: {error}")
            return
        if not held.unchanged():
            # The bytes just read may belong to two steps.
            return
        if len(private_part.record) > MAX_OWN_BYTES:
            if rank not in self._too_large:
                self._too_large.add(rank)
                self._say(
                    f"plain values of rank {rank} take {len(private_part.record)} bytes, too many to send to another "
                    "machine at every step: if its machine is lost, its newest steps are, too"
                )
            return
        self._membership.tell(node, {"op": "private_part", **private_part.to_json()})

    def _private_part_of(self, held: Held, plan: Plan) -> PrivatePart:
        rank, image = held.segment.rank, held.segment.image(held.sealed.slot)
        if (plan.hash, rank) not in self._own:
            self._own[plan.hash, rank] = own_ranges(plan, rank)
        own = b"".join(image[start:stop] for start, stop in self._own[plan.hash, rank])
        record = held.segment.record(held.sealed)
        return PrivatePart(held.sealed.at, plan.hash, rank, held.image_hash, record, own)

    def _receive(self, _node: str, body: Body) -> None:
        private_part = PrivatePart.from_json(body, "private_part")
        if len(private_part.own) > MAX_OWN_BYTES or len(private_part.record) > MAX_OWN_BYTES:
            raise CorruptError(f"a private part of {len(private_part.own)} and {len(private_part.record)} bytes")
        path = self._home.directory / f"rank-{private_part.rank:05d}-{secrets.token_hex(4)}{_SUFFIX}"
        try:
            _write(path, documents.seal(private_part.to_json()))
        except OSError as error:
            if not self._unwritten:
                self._unwritten = True
                self._say(f"second copies of other machines' images end with this agent: {path.name}: {error}")
        self._keep(private_part, path)

    def _keep(self, private_part: PrivatePart, path: Path) -> None:
        of_rank = self._kept.setdefault(private_part.rank, OrderedDict())
        if (same := of_rank.pop(private_part.key, None)) is not None:
            same[1].unlink(missing_ok=True)
        of_rank[private_part.key] = (private_part, path)
        while len(of_rank) > _KEPT:
            _key, (_old, its_path) = of_rank.popitem(last=False)
            its_path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ using

    def copies(self) -> list[Copy]:
        """The images that could be rebuilt here. Whether one has the right bytes is known once it is rebuilt."""
        return [
            Copy(
                private_part.at,
                private_part.plan,
                source.plan().world_size,
                private_part.rank,
                private_part.image_hash,
                source.plan().image(private_part.rank).size_bytes,
                self._membership.me,
            )
            for of_rank in self._kept.values()
            for private_part, _path in of_rank.values()
            if (source := self._source(private_part)) is not None
        ]

    async def find(self, at: BoundaryId, plan_hash: str, rank: int) -> Held:
        """A lost rank's image, rebuilt.

        Raises:
            ObjectMissingError: it cannot be rebuilt here.
            CorruptError: the rebuilt bytes are not that image.
        """
        key = (at, plan_hash, rank)
        async with self._turn:
            if key not in self._rebuilt:
                self._rebuilt[key] = await self._rebuild(key)
            return self._rebuilt[key]

    def forget(self) -> None:
        """Drop the images that were rebuilt for a start: the trainers train again."""
        for held in self._rebuilt.values():
            held.segment.remove()
        self._rebuilt.clear()

    def _source(self, private_part: PrivatePart) -> Segment | None:
        """The segment whose slots have the rest of an image."""
        segments = [segment for segment in self._memory.segments if segment.plan_hash == private_part.plan]
        for segment in reversed(segments):
            try:
                keeps = (
                    private_part.rank in segment.plan().replicas_kept_by(segment.rank)
                    and segment.geometry.replicas_bytes
                )
            except CorruptError:
                continue
            if keeps and _slot_of(segment, private_part.at) is not None:
                return segment
        return None

    async def _rebuild(self, key: _Key) -> Held:
        at, _plan_hash, rank = key
        kept = self._kept[rank].get(key) if rank in self._kept else None
        private_part = kept[0] if kept is not None else None
        source = self._source(private_part) if private_part is not None else None
        sealed = _slot_of(source, at) if source is not None else None
        if private_part is None or source is None or sealed is None:
            raise ObjectMissingError(f"the image of rank {rank} at {at.label} is not here")
        try:
            made = self._empty(source.plan(), rank, len(private_part.record))
        except ResourceError as error:
            raise ObjectMissingError(
                f"the image of rank {rank} at {at.label} cannot be put together: {error}"
            ) from error
        try:
            await asyncio.to_thread(_put_together, made, source, sealed, private_part)
            made.seal(0, private_part.at, private_part.record, durable=False, staged_ns=sealed.staged_ns)
            held = await self._memory.hash_slot(made, 0)
            if held is None or held.image_hash != private_part.image_hash or source.seq(sealed.slot) != sealed.seq:
                self._drop(key)
                raise CorruptError(
                    f"the image of rank {rank} at {at.label}, put together on node {self._membership.me} from both "
                    "machines' parts, does not match its hash"
                )
        except BaseException:
            made.remove()
            raise
        self._say(f"{at.label} of rank {rank}, whose machine is lost, is whole again from a second copy")
        return held

    def _drop(self, key: _Key) -> None:
        _private_part, path = self._kept[key[2]].pop(key)
        path.unlink(missing_ok=True)

    def _empty(self, plan: Plan, rank: int, record_bytes: int) -> Segment:
        segment = create_segment(
            self._home.directory,
            f"rank-{rank:05d}-{secrets.token_hex(4)}{_REBUILT}",
            run=self._home.run,
            rank=rank,
            plan=plan,
            image=plan.image(rank),
            num_slots=1,
            record_capacity=round_up(record_bytes),
            replicas=False,
        )
        segment.begin(0)
        return segment


def _put_together(made: Segment, source: Segment, sealed: Sealed, private_part: PrivatePart) -> None:
    image = made.image(0)
    image[:] = source.replica(sealed.slot, private_part.rank)
    start_own = 0
    for start, stop in own_ranges(made.plan(), private_part.rank):
        part = private_part.own[start_own : start_own + stop - start]
        if len(part) != stop - start:
            raise CorruptError(f"a private part of rank {private_part.rank} is {stop - start - len(part)} bytes short")
        image[start:stop] = part
        start_own += stop - start


def _slot_of(segment: Segment, at: BoundaryId) -> Sealed | None:
    return next((sealed for sealed in segment.all_sealed() if sealed.at == at), None)


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, for an agent that replaces this one; it need not outlive the machine."""
    draft = path.with_suffix(_DRAFT)
    with suppress(FileNotFoundError):
        draft.unlink()
    fd = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
    draft.rename(path)
