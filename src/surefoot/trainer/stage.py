"""Stage: the live state into a slot of shared memory.

Every leaf is copied at the boundary, in the training thread, so an image is one moment by construction. The seam for
copies that hide behind the next step is `Stager.fill`: what it leaves undone would be done behind the training
thread, fenced by the optimizer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from surefoot.core.layout import StepId
from surefoot.core.plan import Plan
from surefoot.core.slots import NEVER, SlotView, reusable
from surefoot.segment import Segment
from surefoot.trainer.flatten import NamedTensor
from surefoot.trainer.tensors import box_view, copy_all, memory_view
from surefoot.wire import Body


class Stager:
    """One rank's slots under one plan. The lock is for pins: the watcher thread grants them."""

    def __init__(self, segment: Segment, plan: Plan, rank: int, pinned: Sequence[int]) -> None:
        self.segment = segment
        self.plan = plan
        self._views = _slot_views(segment, plan, rank)
        self._steps = [self._restored_step(slot) for slot in range(segment.num_slots)]
        self._pinned: dict[int, Body | None] = dict.fromkeys(pinned)
        """Pinned slots, each with what the agent was told of it; None where the agent pinned it itself."""
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
            self._steps[free[0]] = NEVER
            self.segment.begin(free[0])
            return free[0]

    def fill(self, slot: int, tensors: Sequence[NamedTensor]) -> None:
        """Copy this rank's share of the state into an open slot. On return the sources may change."""
        live: dict[str, torch.Tensor] = {named.name: named.tensor for named in tensors}
        views = self._views[slot]
        copy_all((view, live[leaf]) for leaf, view in views)

    def seal(self, slot: int, at: StepId, record: bytes, *, staged_ns: int, message: Body) -> Body:
        """Close a filled slot; returns the message for the agent. With a trigger in it, the slot is pinned: it stays
        until the agent lets go."""
        with self._lock:
            pin = message["trigger"] is not None
            self._steps[slot] = at.step
            seq = self.segment.seal(slot, at, record, durable=pin, staged_ns=staged_ns)
            told = {**message, "plan": self.plan.hash, "slot": slot, "seq": seq}
            if pin:
                self._pinned[slot] = told
            return told

    def pin(self, slot: int, seq: int) -> bool:
        """Keep a slot for the agent. False if it moved on."""
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
        """For an agent that replaces another: what waits to be shipped. Pins that the old one took for itself end."""
        with self._lock:
            self._pinned = {slot: told for slot, told in self._pinned.items() if told is not None}
            return [told for told in self._pinned.values() if told is not None]

    def _slots(self) -> list[SlotView]:
        return [SlotView(step, slot in self._pinned) for slot, step in enumerate(self._steps)]

    def _restored_step(self, slot: int) -> int:
        # What the agent left in an adopted segment is what this generation started from: the newest image there is
        # until a newer one is sealed on all ranks.
        sealed = self.segment.sealed(slot)
        return sealed.at.step if sealed is not None else NEVER


def _slot_views(segment: Segment, plan: Plan, rank: int) -> list[list[tuple[str, torch.Tensor]]]:
    """For each slot, every leaf that this rank keeps with its place there."""
    leaf_of = {item.box.name: item.leaf for item in plan.items if item.rank == rank}
    places = [(leaf_of[box.name], box, offset) for box, offset in plan.image(rank).places]
    memory = memory_view(segment.memory)
    starts = [segment.geometry.image_offset(slot) for slot in range(segment.num_slots)]
    return [[(leaf, box_view(memory, box, start + offset)) for leaf, box, offset in places] for start in starts]
