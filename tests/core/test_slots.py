"""Slots: every reachable state of two ranks, explored, under the right rule and under rules that look right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.slots import NEVER, SlotView, reusable

_LAST_STEP = 7
Rule = Callable[[Sequence[SlotView], int], list[int]]


@dataclass(frozen=True)
class _Rank:
    """One trainer. It finished `step`, which is waiting for a slot, being filled into one, or sealed."""

    step: int
    phase: str
    slots: tuple[int, ...]
    filling: int = -1

    @property
    def sealed(self) -> int:
        return self.step if self.phase == "sealed" else self.step - 1

    @property
    def held(self) -> set[int]:
        return {step for step in self.slots if step != NEVER}


@dataclass(frozen=True)
class _Node:
    ranks: tuple[_Rank, _Rank]
    pinned: int | None = None
    """Step that is being uploaded: its slots may not be touched."""

    @property
    def common(self) -> set[int]:
        return self.ranks[0].held & self.ranks[1].held


@dataclass(frozen=True)
class _Model:
    """Two ranks coupled by the gradients of every step, with an uploader that may pin the newest whole step."""

    rule: Rule
    num_slots: int
    strict: bool
    """The fence before the next optimizer step waits until all ranks sealed this one; else for the own copy only."""
    uploads: bool

    def start(self) -> _Node:
        rank = _Rank(0, "sealed", (0, *[NEVER] * (self.num_slots - 1)))
        return _Node((rank, rank))

    def successors(self, node: _Node) -> Iterator[_Node]:
        for index in (0, 1):
            for rank in self._moves(node, index):
                yield replace(node, ranks=(rank, node.ranks[1]) if index == 0 else (node.ranks[0], rank))
        if self.uploads and node.pinned is None and node.common:
            yield replace(node, pinned=max(node.common))
        if node.pinned is not None:
            yield replace(node, pinned=None)

    def _moves(self, node: _Node, index: int) -> Iterator[_Rank]:
        rank, other = node.ranks[index], node.ranks[1 - index]
        if rank.phase == "sealed":
            passed = other.sealed >= rank.step if self.strict else other.step >= rank.step
            if passed and rank.step < _LAST_STEP:
                yield replace(rank, step=rank.step + 1, phase="waiting")
        elif rank.phase == "filling":
            slots = tuple(rank.step if i == rank.filling else step for i, step in enumerate(rank.slots))
            yield replace(rank, phase="sealed", slots=slots, filling=-1)
        else:
            yield from self._fillings(node, rank)

    def _fillings(self, node: _Node, rank: _Rank) -> Iterator[_Rank]:
        sealed_on_all = min(each.sealed for each in node.ranks)
        # What a rank knows of the others may be late by one.
        for known in {sealed_on_all, max(NEVER, sealed_on_all - 1)}:
            views = [SlotView(step, step != NEVER and step == node.pinned) for step in rank.slots]
            for slot in self.rule(views, known)[:1]:
                slots = tuple(NEVER if i == slot else step for i, step in enumerate(rank.slots))
                yield replace(rank, phase="filling", slots=slots, filling=slot)


@dataclass(frozen=True)
class _Outcome:
    behind_all: float
    """Most steps from the newest one finished on all ranks back to the newest whole one."""
    behind_any: float
    stuck: bool
    """A state, short of the end and with nothing pinned, in which nobody can move."""
    torn_uploads: bool
    """A state in which a pinned step is no longer held by every rank."""
    states: int


def _explore(model: _Model) -> _Outcome:
    seen = {model.start()}
    pending = [model.start()]
    behind_all = behind_any = 0.0
    stuck = torn = False
    while pending:
        node = pending.pop()
        newest = max(node.common, default=-inf)
        behind_all = max(behind_all, min(rank.step for rank in node.ranks) - newest)
        behind_any = max(behind_any, max(rank.step for rank in node.ranks) - newest)
        trainers = [move for index in (0, 1) for move in model._moves(node, index)]
        done = all(rank.step == _LAST_STEP and rank.phase == "sealed" for rank in node.ranks)
        stuck = stuck or not (trainers or done or node.pinned is not None)
        torn = torn or (node.pinned is not None and node.pinned not in node.common)
        for following in model.successors(node):
            if following not in seen:
                seen.add(following)
                pending.append(following)
    return _Outcome(behind_all, behind_any, stuck, torn, len(seen))


def _not_my_newest(slots: Sequence[SlotView], sealed_on_all: int) -> list[int]:
    newest = max(slot.boundary for slot in slots)
    free = [i for i, slot in enumerate(slots) if not slot.pinned and (slot.boundary == NEVER or slot.boundary < newest)]
    return sorted(free, key=lambda i: slots[i].boundary)


def _not_newer_than_sealed(slots: Sequence[SlotView], sealed_on_all: int) -> list[int]:
    free = [i for i, s in enumerate(slots) if not s.pinned and (s.boundary == NEVER or s.boundary <= sealed_on_all)]
    return sorted(free, key=lambda i: slots[i].boundary)


def _anything_unpinned(slots: Sequence[SlotView], sealed_on_all: int) -> list[int]:
    return sorted((i for i, slot in enumerate(slots) if not slot.pinned), key=lambda i: slots[i].boundary)


def _newest_first(slots: Sequence[SlotView], sealed_on_all: int) -> list[int]:
    return _anything_unpinned(slots, sealed_on_all)[::-1]


def _pins_ignored(slots: Sequence[SlotView], sealed_on_all: int) -> list[int]:
    return reusable([replace(slot, pinned=False) for slot in slots], sealed_on_all)


@pytest.mark.holds("strict-fence")
@pytest.mark.parametrize(("num_slots", "uploads"), [(2, False), (3, False), (2, True), (3, True), (4, True)])
def test_with_the_strict_fence_there_is_always_a_common_step_at_most_one_behind(num_slots: int, uploads: bool) -> None:
    """Two unpinned slots and the strict fence: in every reachable state a whole step is held, one behind at most."""
    outcome = _explore(_Model(reusable, num_slots, strict=True, uploads=uploads))
    assert (outcome.behind_all, outcome.behind_any) == (1, 1)
    assert not outcome.stuck
    assert not outcome.torn_uploads
    assert outcome.states > 20


@pytest.mark.holds("loose-fence")
@pytest.mark.parametrize(("num_slots", "uploads"), [(2, False), (3, False), (2, True), (3, True), (4, True)])
def test_with_the_own_copy_fence_the_rule_holds_too_one_step_later(num_slots: int, uploads: bool) -> None:
    """Ranks that run ahead wait for a slot rather than take one: two behind what any rank finished, never more."""
    outcome = _explore(_Model(reusable, num_slots, strict=False, uploads=uploads))
    assert (outcome.behind_all, outcome.behind_any) == (1, 2)
    assert not outcome.stuck


@pytest.mark.holds("slot-reuse")
@pytest.mark.parametrize(
    ("rule", "num_slots", "strict", "uploads"),
    [
        (_not_my_newest, 2, False, False),
        (_not_my_newest, 3, False, True),
        (_anything_unpinned, 2, False, False),
        (_anything_unpinned, 2, True, True),
        (_not_newer_than_sealed, 2, False, False),
        (_not_newer_than_sealed, 2, True, True),
        (_newest_first, 2, True, False),
        (_pins_ignored, 2, True, True),
    ],
)
def test_a_rule_that_looks_right_loses_every_whole_step(
    rule: Rule, num_slots: int, strict: bool, uploads: bool
) -> None:
    """Each wrong rule reaches a state in which the two ranks hold no step in common, or an upload loses its slot."""
    outcome = _explore(_Model(rule, num_slots, strict, uploads))
    assert outcome.behind_all == inf or outcome.torn_uploads


@pytest.mark.holds("slot-reuse")
@given(
    st.lists(st.builds(SlotView, st.integers(NEVER, 9), st.booleans()), max_size=6),
    st.integers(NEVER, 10),
)
def test_only_unpinned_and_outlived_slots_are_offered_oldest_first(slots: list[SlotView], sealed_on_all: int) -> None:
    """Exactly the unpinned slots that are empty or older than a step known on all ranks, in order of age."""
    offered = reusable(slots, sealed_on_all)
    wanted = {
        i
        for i, slot in enumerate(slots)
        if not slot.pinned and (slot.boundary == NEVER or slot.boundary < sealed_on_all)
    }
    assert set(offered) == wanted
    assert len(offered) == len(wanted)
    ages = [slots[i].boundary for i in offered]
    assert ages == sorted(ages)
