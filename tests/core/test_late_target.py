"""Late staging: hold first, count after. Every interleaving of ranks and agents, explored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from surefoot.core.emergency import Count, late_target

_LAST_STEP = 4


@dataclass(frozen=True)
class _Rank:
    """One trainer between its boundaries: `entered` goes up before it looks whether it is held."""

    finished: int = 0
    entered: int = 0
    phase: str = "training"
    """training, entering (said so, has not looked yet), staying (was held when it looked), passing."""
    held: bool = False


@dataclass(frozen=True)
class _World:
    ranks: tuple[_Rank, _Rank] = (_Rank(), _Rank())
    counted: tuple[Count | None, Count | None] = (None, None)

    @property
    def target(self) -> int | None:
        if None in self.counted:
            return None
        return late_target({str(n): [c] for n, c in enumerate(self.counted) if c is not None}, ["0", "1"])


def _next_of_rank(world: _World, number: int) -> Iterator[_Rank]:
    rank, other = world.ranks[number], world.ranks[1 - number]
    if rank.phase == "training":
        # The optimizer of the next step needs every rank's gradients: the other must have finished this step.
        if rank.finished < _LAST_STEP and other.finished >= rank.finished:
            yield replace(rank, entered=rank.finished + 1, phase="entering")
    elif rank.phase == "entering":
        yield replace(rank, phase="staying" if rank.held else "passing")
    elif rank.phase == "staying":
        # It goes up to the target, and not beyond.
        if world.target is not None and world.target > rank.finished:
            yield replace(rank, phase="passing")
    else:
        yield replace(rank, finished=rank.finished + 1, phase="training")


def _next(world: _World, hold_first: bool) -> Iterator[_World]:
    for number in (0, 1):
        for after in _next_of_rank(world, number):
            ranks = (after, world.ranks[1]) if number == 0 else (world.ranks[0], after)
            yield replace(world, ranks=ranks)
        rank = world.ranks[number]
        if not rank.held and (hold_first or None not in world.counted):
            held = replace(rank, held=True)
            yield replace(world, ranks=(held, world.ranks[1]) if number == 0 else (world.ranks[0], held))
        if world.counted[number] is None and (not hold_first or all(r.held for r in world.ranks)):
            count = Count(rank.finished, rank.entered)
            counted = (count, world.counted[1]) if number == 0 else (world.counted[0], count)
            yield replace(world, counted=counted)


def _ends(hold_first: bool) -> Iterator[_World]:
    """Every reachable state in which nothing can happen any more."""
    seen, pending = {_World()}, [_World()]
    while pending:
        world = pending.pop()
        after = list(_next(world, hold_first))
        if not after:
            yield world
        for one in after:
            if one not in seen:
                seen.add(one)
                pending.append(one)


def _is_good(world: _World) -> bool:
    return world.target is not None and all(rank.finished == world.target for rank in world.ranks)


@pytest.mark.holds("late-staging")
def test_all_ranks_come_to_rest_at_the_target() -> None:
    """However orders, counts and steps interleave: both ranks end exactly where late staging wants them."""
    ends = list(_ends(hold_first=True))
    assert len({world.target for world in ends}) > 1
    assert all(_is_good(world) for world in ends)


@pytest.mark.holds("late-staging")
def test_counting_before_holding_leaves_ranks_beyond_the_target() -> None:
    """The other order has an interleaving in which a rank is past the step that was named."""
    assert any(max(rank.finished for rank in world.ranks) > (world.target or 0) for world in _ends(hold_first=False))


@pytest.mark.holds("late-staging")
def test_finished_steps_alone_do_not_say_where_a_rank_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the word that goes up before a rank looks whether it is held, some rank ends beyond the target."""

    def of_finished(counted: dict[str, list[Count]], _members: object) -> int:
        return max(count.finished for counts in counted.values() for count in counts)

    monkeypatch.setitem(globals(), "late_target", of_finished)
    assert any(max(rank.finished for rank in world.ranks) > (world.target or 0) for world in _ends(hold_first=True))
