"""Manages one rank's slots under one plan, and each leaf's place in them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from surefoot.core.image import Box, round_up
from surefoot.core.layout import BoundaryId
from surefoot.core.plan import Plan
from surefoot.core.replicas import areas
from surefoot.core.slots import NEVER, SlotView, reusable
from surefoot.ipc.segment import Segment
from surefoot.ipc.wire import Body
from surefoot.trainer.stage.copying import Pair
from surefoot.trainer.state.flatten import NamedTensor
from surefoot.trainer.state.tensors import box_view, memory_view


class Stager:
    """One rank's slots under one plan. The lock is for pins: the watcher thread grants them."""

    def __init__(
        self, segment: Segment, plan: Plan, rank: int, pinned: Sequence[int], tensors: Sequence[NamedTensor]
    ) -> None:
        self.segment = segment
        self.plan = plan
        places = _slot_places(plan, rank)
        self.names = [place.leaf for place in places]
        """Names of a slot's leaves, in the slot's order."""
        self.memory = memory_view(segment.memory)
        numbers = {named.name: number for number, named in enumerate(tensors)}
        self._numbers = [numbers[name] for name in self.names]
        self._views = _slot_views(self.memory, segment, places)
        self._boundaries = [self._restored_boundary(slot) for slot in range(segment.num_slots)]
        self._pinned: dict[int, Body | None] = dict.fromkeys(pinned)
        """Pinned slots, each with the message that the agent got of it; None where the agent pinned it itself."""
        self._open: set[int] = set()
        """Slots that are being filled."""
        self._lock = threading.Lock()

    def free_slots(self, sealed_on_all: int) -> int:
        """How many slots could be filled once `sealed_on_all` is known to be sealed everywhere."""
        with self._lock:
            return len(reusable(self._slots(), sealed_on_all))

    def take(self, sealed_on_all: int) -> int | None:
        """Open a slot for filling; None if none is free. From here on it holds nothing."""
        with self._lock:
            free = reusable(self._slots(), sealed_on_all)
            if not free:
                return None
            self._boundaries[free[0]] = NEVER
            self._open.add(free[0])
            self.segment.begin(free[0])
            return free[0]

    def pairs(self, slot: int, tensors: Sequence[NamedTensor]) -> list[Pair]:
        """Each leaf of this rank's share: its place in a slot, and its live tensor.

        Args:
            slot: the slot.
            tensors: in the order that they had when this stager was made.
        """
        return [(view, tensors[number].tensor) for number, view in zip(self._numbers, self._views[slot], strict=True)]

    def seal(self, slot: int, at: BoundaryId, record: bytes, *, staged_ns: int, message: Body) -> Body:
        """Close a filled slot; returns the message for the agent. With a trigger in it, the slot is pinned: it stays
        until the agent lets go."""
        with self._lock:
            pin = message["trigger"] is not None
            self._open.discard(slot)
            self._boundaries[slot] = at.boundary
            seq = self.segment.seal(slot, at, record, durable=pin, staged_ns=staged_ns)
            told = {**message, "plan": self.plan.hash, "slot": slot, "seq": seq}
            if pin:
                self._pinned[slot] = told
            return told

    def give_back(self, slot: int) -> None:
        """Give up a slot that was opened and is not going to be sealed: it may be opened again."""
        with self._lock:
            self._open.discard(slot)

    def pin(self, slot: int, seq: int) -> bool:
        """Pin a slot for the agent. False if it moved on."""
        with self._lock:
            if self.segment.seq(slot) != seq:
                return False
            self._pinned.setdefault(slot, None)
            return True

    def unpin(self, slot: int, seq: int) -> None:
        with self._lock:
            if self.segment.seq(slot) == seq:
                self._pinned.pop(slot, None)

    def tell_again(self) -> list[Body]:
        """The messages about slots that wait to be shipped, for an agent that replaces another. Pins that the old
        agent took for itself end."""
        with self._lock:
            self._pinned = {slot: told for slot, told in self._pinned.items() if told is not None}
            return [told for told in self._pinned.values() if told is not None]

    def _slots(self) -> list[SlotView]:
        busy = self._open | self._pinned.keys()
        return [SlotView(boundary, slot in busy) for slot, boundary in enumerate(self._boundaries)]

    def _restored_boundary(self, slot: int) -> int:
        # The image that the agent left in an adopted segment is the one from which this generation started: the newest
        # that there is until a newer one is sealed on all ranks.
        sealed = self.segment.sealed(slot)
        return sealed.at.boundary if sealed is not None else NEVER


@dataclass(frozen=True, slots=True)
class _Place:
    """A leaf's place in a slot, from the beginning of the rank's own image."""

    leaf: str
    box: Box
    offset: int


def _slot_places(plan: Plan, rank: int) -> list[_Place]:
    """The leaves of the rank's image in its order, then those of the replicas that it keeps."""
    places = _image_places(plan, rank, 0, own=True)
    replicas_start = round_up(plan.image(rank).size_bytes)
    for other, start in areas(plan, rank).items():
        places += _image_places(plan, other, replicas_start + start, own=False)
    return places


def _image_places(plan: Plan, rank: int, start: int, *, own: bool) -> list[_Place]:
    item_of = {item.box.name: item for item in plan.kept_by(rank) if not item.frozen}
    found = [(item_of[box.name], box, offset) for box, offset in plan.image(rank).places]
    # The private part of another rank reaches its replica in another way.
    return [_Place(item.leaf, box, start + offset) for item, box, offset in found if own or item.spread != "local"]


def _slot_views(memory: torch.Tensor, segment: Segment, places: Sequence[_Place]) -> list[list[torch.Tensor]]:
    """Each slot's places."""
    starts = [segment.geometry.image_offset(slot) for slot in range(segment.num_slots)]
    return [[box_view(memory, place.box, start + place.offset) for place in places] for start in starts]
