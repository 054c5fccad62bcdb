"""Lineage: which steps count, against every history that was really continued."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import pytest
from core_samples import generation, history
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.layout import BoundaryId
from surefoot.core.lineage import counts, cuts
from surefoot.core.manifest import Generation
from surefoot.errors import CorruptError


@pytest.mark.holds("lineage-decides")
def test_the_committer_that_slept_through_a_restart() -> None:
    """Generation 6 commits 1300 late, after 7 went on from 1200: "newest step" would take the dead one."""
    chain = cuts(history(generation(6), generation(7, (6, 1200))))
    assert chain == {7: inf, 6: 1200}
    commits = [BoundaryId(1200, 6), BoundaryId(1250, 7), BoundaryId(1300, 6)]
    assert max(commits) == BoundaryId(1300, 6)
    assert max(at for at in commits if counts(at, chain)) == BoundaryId(1250, 7)


def test_without_a_generation_nothing_counts() -> None:
    """An empty run has no chain and no step."""
    assert cuts({}) == {}
    assert not counts(BoundaryId(0, 1), {})


def test_from_scratch_cuts_off_everything_older() -> None:
    """A generation without parent makes all older steps dead, however high they are."""
    chain = cuts(history(generation(1), generation(2, (1, 50)), generation(3)))
    assert chain == {3: inf}
    assert not counts(BoundaryId(50, 2), chain)


def test_a_rollback_kills_what_lies_above_it_and_a_second_one_more() -> None:
    """Two rollbacks one after the other: the lower cut stands for all that is older."""
    chain = cuts(history(generation(1), generation(2, (1, 100)), generation(3, (2, 150)), generation(4, (1, 40))))
    assert chain == {4: inf, 1: 40}
    chain = cuts(history(generation(1), generation(2, (1, 100)), generation(3, (2, 60))))
    assert chain == {3: inf, 2: 60, 1: 60}


def test_a_step_may_count_in_two_generations() -> None:
    """The step at which a generation starts may be kept again by it: both count."""
    chain = cuts(history(generation(1), generation(2, (1, 100))))
    assert counts(BoundaryId(100, 1), chain)
    assert counts(BoundaryId(100, 2), chain)


def test_the_edges_of_a_cut() -> None:
    """The step branched from counts, the next one does not; the newest generation has no edge."""
    chain = cuts(history(generation(1), generation(2, (1, 100))))
    assert counts(BoundaryId(100, 1), chain)
    assert not counts(BoundaryId(101, 1), chain)
    assert counts(BoundaryId(2**63, 2), chain)
    assert not counts(BoundaryId(0, 3), chain)


@pytest.mark.holds("generation-before-training")
def test_a_missing_record_on_the_chain_is_corrupt() -> None:
    """Without the record of a parent nothing is guessed; a gap beside the chain does no harm."""
    with pytest.raises(CorruptError, match="generation 2 is named as a parent, but its record is missing"):
        cuts(history(generation(1), generation(3, (2, 10))))
    assert cuts(history(generation(1), generation(3, (1, 10)))) == {3: inf, 1: 10}


@dataclass(frozen=True)
class _Kept:
    """An image of the model: where it was made, and the whole life that led to it."""

    at: BoundaryId
    life: tuple[BoundaryId, ...]


class _World:
    """What really happens: lives are lists of finished steps; every step leaves an image that may be taken up again."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.generations: dict[int, Generation] = {}
        self.images: list[_Kept] = []
        self._alive: dict[int, tuple[BoundaryId, ...]] = {}

    def start(self) -> None:
        """A new generation takes up an image that counts for the newest one, or any old image, or none."""
        number = len(self.generations) + 1
        choice = self._rng.random()
        living = [image for image in self.images if self.in_newest_life(image)]
        pool = living if choice < 0.6 else self.images if choice < 0.9 else []
        origin = self._rng.choice(pool) if pool else None
        parent = None if origin is None else (origin.at.generation, origin.at.boundary)
        self.generations[number] = generation(number, parent)
        self._alive[number] = () if origin is None else origin.life

    def train(self) -> None:
        """Some generation, the newest or one that does not know that it is dead, finishes a step and keeps it."""
        number = len(self.generations) if self._rng.random() < 0.7 else self._rng.randint(1, len(self.generations))
        life = self._alive[number]
        at = BoundaryId((life[-1].boundary if life else 0) + 1, number)
        self._alive[number] = (*life, at)
        self.images.append(_Kept(at, self._alive[number]))

    def in_newest_life(self, image: _Kept) -> bool:
        newest = len(self.generations)
        return image.at.generation == newest or image.at in self._life_before(newest)

    def _life_before(self, number: int) -> set[BoundaryId]:
        """Steps that the newest generation had behind it when it started."""
        return {at for at in self._alive[number] if at.generation != number}


def _lived(seed: int, length: int) -> _World:
    rng = random.Random(seed)
    world = _World(rng)
    world.start()
    for _ in range(length):
        if rng.random() < 0.25:
            world.start()
        else:
            world.train()
    return world


@pytest.mark.holds("lineage-decides")
@given(st.integers(0, 2**32), st.integers(1, 60))
@settings(max_examples=300)
def test_the_rule_is_what_was_really_continued(seed: int, length: int) -> None:
    """In random histories of restarts, rollbacks, forks and late writers, what the newest lived counts, no more."""
    world = _lived(seed, length)
    chain = cuts(world.generations)
    for image in world.images:
        assert counts(image.at, chain) == world.in_newest_life(image), image.at


_WRONG_RULES: dict[str, Callable[[dict[int, Generation]], dict[int, float]]] = {
    "the newest step wins": lambda generations: dict.fromkeys(generations, inf),
    "the chain without cuts": lambda generations: dict.fromkeys(cuts(generations), inf),
    "the newest generation alone": lambda generations: {max(generations): inf},
    "a cut one too low": lambda generations: {number: cut - 1 for number, cut in cuts(generations).items()},
    "a cut one too high": lambda generations: {number: cut + 1 for number, cut in cuts(generations).items()},
}


@pytest.mark.holds("lineage-decides")
@pytest.mark.parametrize("rule", _WRONG_RULES)
def test_the_histories_tell_a_wrong_rule_from_the_right_one(rule: str) -> None:
    """The model is hard enough to catch each rule that looks right and is not."""
    for seed in range(100):
        world = _lived(seed, 40)
        chain = _WRONG_RULES[rule](world.generations)
        if any(counts(image.at, chain) != world.in_newest_life(image) for image in world.images):
            return
    pytest.fail(f"no history tells {rule!r} from the right rule")
