"""Slots: which one may be filled next.

Invariant: a slot is reusable only if it is not pinned and a newer boundary is known to be sealed on ALL ranks; never
because it is "not my newest". Otherwise two ranks can throw away the only one that they have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NEVER = -1


@dataclass(frozen=True, slots=True)
class SlotView:
    """What a trainer knows of one of its slots."""

    boundary: int
    """Boundary sealed in it, or `NEVER`."""
    pinned: bool


def reusable(slots: Sequence[SlotView], sealed_on_all: int) -> list[int]:
    """Slots that may be filled now, oldest content first.

    Args:
        slots: this rank's slots.
        sealed_on_all: newest boundary known to be sealed on every rank, `NEVER` if none is.
    """
    free = [
        i
        for i, slot in enumerate(slots)
        if not slot.pinned and (slot.boundary == NEVER or slot.boundary < sealed_on_all)
    ]
    return sorted(free, key=lambda i: slots[i].boundary)
