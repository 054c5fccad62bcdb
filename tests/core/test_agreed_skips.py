"""Skipping a save: agreed by all, or the ranks end up without a step in common."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce

import pytest

from surefoot.core.agreement import Vector, at_boundary
from surefoot.core.slots import NEVER, SlotView, reusable

_RANKS = 4
_STEPS = 400
_SLOTS = 3
_UPLOAD_STEPS = 8


@dataclass
class _Rank:
    slots: list[int] = field(default_factory=lambda: [NEVER] * _SLOTS)
    pinned_until: dict[int, int] = field(default_factory=dict)
    """By slot: the step at which its upload ends."""
    skipped: int = 0

    def free(self, step: int, sealed_on_all: int) -> list[int]:
        pinned = {slot for slot, until in self.pinned_until.items() if until > step}
        return reusable([SlotView(held, slot in pinned) for slot, held in enumerate(self.slots)], sealed_on_all)


def _max(first: list[int], second: list[int]) -> list[int]:
    return [max(pair) for pair in zip(first, second, strict=True)]


def _each_for_itself(ranks: list[_Rank], step: int, sealed_on_all: int, _agreed: Vector) -> set[int]:
    return {number for number, rank in enumerate(ranks) if rank.free(step, sealed_on_all)}


def _together(_ranks: list[_Rank], step: int, _sealed_on_all: int, agreed: Vector) -> set[int]:
    stage = at_boundary(agreed, step, planned=True, wanted=False, last=False).stage
    return set(range(_RANKS)) if stage else set()


def _train(seed: int, who_stages: Callable[[list[_Rank], int, int, Vector], set[int]]) -> tuple[int, int]:
    """Steps in which somebody skipped, and the most steps from the newest back to one that all ranks hold.

    Every rank's uploads begin and end in their own time. Steps take longer than copies: what was taken at one
    boundary is sealed on all at the next.
    """
    drawn = random.Random(seed)
    ranks = [_Rank() for _ in range(_RANKS)]
    sealed_on_all, behind, skips = NEVER, 0, 0
    agreed = Vector(free_slots=1)
    for step in range(_STEPS):
        staging = who_stages(ranks, step, sealed_on_all, agreed)
        skips += len(staging) < _RANKS
        for number in staging:
            rank = ranks[number]
            # What the vector promised is kept: a slot that was free at the last boundary is free now.
            rank.slots[rank.free(step, sealed_on_all)[0]] = step
        # As each rank's word says it: the newest step that it has sealed.
        sealed_on_all = min(max(rank.slots) for rank in ranks)
        common = set.intersection(*(set(rank.slots) for rank in ranks)) - {NEVER}
        behind = max(behind, step - max(common, default=-1))
        for rank in ranks:
            if max(rank.slots) != NEVER and drawn.random() < 0.3:
                rank.pinned_until[rank.slots.index(max(rank.slots))] = step + drawn.randint(1, _UPLOAD_STEPS)
        vectors = [Vector(free_slots=len(rank.free(step + 1, sealed_on_all))).encode() for rank in ranks]
        agreed = Vector.decode(reduce(_max, vectors))
    return skips, behind


@pytest.mark.holds("skips-are-agreed")
@pytest.mark.parametrize("seed", range(4))
def test_skips_that_are_agreed_never_part_the_ranks(seed: int) -> None:
    """Uploads of four ranks take their own time: all skip the same steps, and the newest step taken is on all."""
    skips, behind = _train(seed, _together)
    assert skips > 20
    assert behind <= _UPLOAD_STEPS


@pytest.mark.holds("skips-are-agreed")
@pytest.mark.parametrize("seed", range(4))
def test_skips_of_each_rank_alone_part_them(seed: int) -> None:
    """The same uploads, each rank skipping when it has no slot itself: steps that nobody else holds push out those
    that all held."""
    skips, behind = _train(seed, _each_for_itself)
    assert skips > 20
    assert behind > _STEPS // 2
