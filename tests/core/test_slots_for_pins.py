"""How many slots there must be, so that no upload and no neighbour's copying ever holds up the training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from surefoot.core.slots import NEVER, SlotView, reusable

_LAST_STEP = 6


@dataclass(frozen=True)
class _Rank:
    """One trainer: it finished `step`; that lies in a slot, sealed or being filled, or has none yet."""

    step: int = 0
    slots: tuple[int, ...] = ()
    filling: int = -1
    waiting: bool = False

    @property
    def sealed(self) -> int:
        return self.step if self.filling < 0 and not self.waiting else self.step - 1

    @property
    def held(self) -> set[int]:
        """Steps that it has whole."""
        return {step for number, step in enumerate(self.slots) if step != NEVER and number != self.filling}


@dataclass(frozen=True)
class _World:
    ranks: tuple[_Rank, _Rank]
    pinned: frozenset[int] = frozenset()
    """Steps under an upload, or on their way to another node; neither ever ends here."""


@dataclass(frozen=True)
class _Model:
    num_slots: int
    pins: int
    strict: bool

    def start(self) -> _World:
        rank = _Rank(slots=(0, *[NEVER] * (self.num_slots - 1)))
        return _World((rank, rank))

    def successors(self, world: _World) -> Iterator[_World]:
        for number in (0, 1):
            for rank in self.moves(world, number):
                yield replace(world, ranks=(rank, world.ranks[1]) if number == 0 else (world.ranks[0], rank))
        whole = world.ranks[0].held & world.ranks[1].held
        if whole and len(world.pinned) < self.pins:
            yield replace(world, pinned=world.pinned | {max(whole)})

    def moves(self, world: _World, number: int) -> Iterator[_Rank]:
        rank, other = world.ranks[number], world.ranks[1 - number]
        if rank.waiting:
            yield from self.fillings(world, rank)
        elif rank.filling >= 0:
            yield replace(rank, filling=-1)
        elif rank.step < _LAST_STEP and (other.sealed if self.strict else other.step) >= rank.step:
            # The gradients of a step are of both; the strict fence also waits until both sealed the one before.
            yield replace(rank, step=rank.step + 1, waiting=True)

    def fillings(self, world: _World, rank: _Rank) -> Iterator[_Rank]:
        sealed_on_all = min(one.sealed for one in world.ranks)
        views = [SlotView(step, step in world.pinned) for step in rank.slots]
        for slot in reusable(views, sealed_on_all)[:1]:
            slots = tuple(rank.step if number == slot else step for number, step in enumerate(rank.slots))
            yield replace(rank, slots=slots, filling=slot, waiting=False)


@dataclass(frozen=True)
class _Found:
    waits: bool
    """Somewhere a trainer that finished a step finds no slot for it, whatever it knows."""
    stuck: bool
    """Somewhere, short of the end, nobody can move any more while the pins last."""
    lost: bool
    """Somewhere the two have no step in common."""


def _explore(model: _Model) -> _Found:
    seen = {model.start()}
    pending = [model.start()]
    waits = stuck = lost = False
    while pending:
        world = pending.pop()
        waits |= any(rank.waiting and not list(model.fillings(world, rank)) for rank in world.ranks)
        lost |= not world.ranks[0].held & world.ranks[1].held
        done = all(rank.sealed == _LAST_STEP for rank in world.ranks)
        stuck |= not done and not any(list(model.moves(world, number)) for number in (0, 1))
        for following in model.successors(world):
            if following not in seen:
                seen.add(following)
                pending.append(following)
    assert len(seen) > 30
    return _Found(waits, stuck, lost)


@pytest.mark.holds("slots-needed")
@pytest.mark.parametrize("pins", [0, 1, 2])
def test_the_strict_fence_needs_two_slots_and_one_for_each_pin(pins: int) -> None:
    """With them nobody ever waits for a slot, though uploads never end; with one less the training comes to rest."""
    assert _explore(_Model(2 + pins, pins, strict=True)) == _Found(waits=False, stuck=False, lost=False)
    if pins:
        fewer = _explore(_Model(1 + pins, pins, strict=True))
        assert (fewer.stuck, fewer.lost) == (True, False)


@pytest.mark.holds("slots-needed")
@pytest.mark.parametrize("pins", [0, 1, 2])
def test_the_own_copy_fence_needs_three_slots_and_one_for_each_pin(pins: int) -> None:
    """Three, four and five: with them a rank that runs ahead never waits for its neighbour's copy; with one less it
    does, though no step is ever lost for it."""
    assert _explore(_Model(3 + pins, pins, strict=False)) == _Found(waits=False, stuck=False, lost=False)
    fewer = _explore(_Model(2 + pins, pins, strict=False))
    assert fewer == _Found(waits=True, stuck=False, lost=False)
