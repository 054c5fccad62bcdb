"""Agreement of trainers: one small vector per rank, merged by MAX at each boundary and read at the next.

All ranks read the result of the same boundary's vector, so all stop, save, skip and re-plan at one step. The result
is waited for, never polled: a rank that went on without it would act on another step than its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FIELDS = 6
_SLOTS = (1 << 8) - 1
"""A word has room for this many free slots; a rank that has more has enough."""
_EVERY = (1 << 20) - 1
"""A word has room for a cadence of this many steps; a slower one counts as none."""
_NUMBERS = 1 << 20
_GENERATIONS = 1 << 12
LARGEST_PACKED = (1 << 32) - 1
"""A packed vector is at most this; the rest of its word is its tag."""


@dataclass(frozen=True, slots=True)
class Vector:
    """One rank's contribution, or the result on which all ranks agreed."""

    notice: bool = False
    """An eviction was announced: stop at the next boundary."""
    replan: bool = False
    """The structure drifted: plan again at the next boundary."""
    leaving: bool = False
    """A rank ends its loop: no rank waits for it any more."""
    durable: bool = False
    """A durable save is due: make the next boundary's image one."""
    free_slots: int = 0
    """Fewest slots that any rank could fill now (MIN, sent negated)."""
    stage_every: int = 1
    """Largest cadence that any rank asks for."""

    def encode(self) -> list[int]:
        return [
            int(self.notice),
            int(self.replan),
            int(self.leaving),
            int(self.durable),
            -self.free_slots,
            self.stage_every,
        ]

    @classmethod
    def decode(cls, data: Sequence[int]) -> Vector:
        notice, replan, leaving, durable, negated_free, every = data
        return cls(bool(notice), bool(replan), bool(leaving), bool(durable), -negated_free, max(1, every))


def merge(vectors: Iterable[Vector]) -> Vector:
    """The merged vector: the largest of each field, as an all-reduce with MAX makes it."""
    return Vector.decode([max(fields) for fields in zip(*(vector.encode() for vector in vectors), strict=True)])


def tag(generation: int, number: int) -> int:
    """A word's own mark: its launch, and the boundary at which it was written. `number` counts from 0."""
    return (generation % _GENERATIONS << 20 | (number + 1) % _NUMBERS) << 32


def pack(vector: Vector) -> int:
    """A vector in the lower half of a word of 64 bits; the upper one is its `tag`."""
    return (
        min(vector.stage_every, _EVERY) << 12
        | min(vector.free_slots, _SLOTS) << 4
        | vector.notice << 3
        | vector.replan << 2
        | vector.leaving << 1
        | vector.durable
    )


def unpack(word: int) -> Vector:
    """The vector of a word, with or without its tag."""
    return Vector(
        bool(word & 8), bool(word & 4), bool(word & 2), bool(word & 1), word >> 4 & _SLOTS, word >> 12 & _EVERY
    )


@dataclass(frozen=True, slots=True)
class BoundaryPlan:
    """What every rank does at this boundary."""

    stage: bool
    replan: bool
    durable: bool
    stop: bool
    skipped: bool
    """A staging was due, but some rank had no slot."""


def at_boundary(agreed: Vector, boundary: int, *, planned: bool, wanted: bool, last: bool) -> BoundaryPlan:
    """Decide from the agreed vector alone (and from what all ranks know alike), so that every rank decides the same.

    Args:
        agreed: the result of the vector posted at the previous boundary.
        boundary: its number.
        planned: there is a plan already.
        wanted: this step's own caller asked for a save, which by contract every rank does.
        last: this is the run's last step.
    """
    stop = agreed.notice
    must = stop or wanted or last
    due = must or agreed.durable or boundary % agreed.stage_every == 0
    # A wanted or an emergency save waits for a slot; a periodic staging is skipped, by all.
    skipped = planned and due and not must and agreed.free_slots < 1
    return BoundaryPlan(
        stage=due and not skipped,
        replan=agreed.replan or not planned,
        durable=agreed.durable and not skipped,
        stop=stop,
        skipped=skipped,
    )
