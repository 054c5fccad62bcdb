"""Retention: nothing that a restart could need is ever given up."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import pytest
from core_samples import generation, history, manifest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.layout import BoundaryId
from surefoot.core.lineage import counts, cuts
from surefoot.core.manifest import Generation, Manifest
from surefoot.core.retention import SWEEP_DELAY_S, abandoned_steps, to_retire, to_sweep


def _at(step: int, number: int = 1) -> BoundaryId:
    return BoundaryId(step, number)


def _retire(
    manifests: Collection[Manifest], generations: Mapping[int, Generation], verified: Collection[BoundaryId]
) -> list[BoundaryId]:
    return to_retire(list(manifests), cuts(generations), generations, verified)


_ONE = history(generation(1))


def test_all_but_the_newest_two_verified_go() -> None:
    """In a plain run of one generation, what lies below the newest two verified checkpoints is given up."""
    ats = [_at(step) for step in (10, 20, 30, 40, 50)]
    made = [manifest(at) for at in ats]
    assert _retire(made, _ONE, ats) == ats[:3]
    assert _retire(made, _ONE, ats[:4]) == ats[:2]
    assert _retire(made, _ONE, [_at(10), _at(50)]) == []
    assert _retire(made, _ONE, [_at(20), _at(50)]) == [_at(10)]


@pytest.mark.parametrize("verified", [[], [_at(50)], [_at(50), _at(50)], [_at(999), _at(50)], [_at(50), _at(50, 2)]])
def test_with_fewer_than_two_verified_nothing_goes(verified: list[BoundaryId]) -> None:
    """None or one verified checkpoint, named twice, absent, or of another generation: everything stays."""
    assert _retire([manifest(_at(step)) for step in (10, 20, 30, 40, 50)], _ONE, verified) == []


def test_a_checkpoint_that_is_listed_twice_is_one() -> None:
    """A manifest seen on two tiers does not stand for two checkpoints."""
    made = [manifest(_at(10)), manifest(_at(20)), manifest(_at(20))]
    assert _retire(made, _ONE, [_at(10), _at(20)]) == []


def test_given_up_ones_do_not_count_and_are_not_given_up_again() -> None:
    """A retired checkpoint is no checkpoint: it does not make up the two, and it is not named again."""
    made = [manifest(_at(10)), manifest(_at(20)), manifest(_at(30), retired=1.0), manifest(_at(40))]
    assert _retire(made, _ONE, [_at(step) for step in (10, 20, 30, 40)]) == [_at(10)]


def test_tagged_ones_stay_wherever_they_are() -> None:
    """A tag keeps a checkpoint, old, off the lineage, or with an empty name."""
    generations = history(generation(1), generation(2, (1, 5)))
    made = [manifest(_at(4), tag="a"), manifest(_at(9), tag="b"), manifest(_at(5), tag=""), manifest(_at(3))]
    newer = [manifest(_at(step, 2)) for step in (20, 30)]
    assert _retire([*made, *newer], generations, [_at(20, 2), _at(30, 2), _at(4)]) == [_at(3)]


def test_off_the_lineage_counts_for_nothing_and_goes_once_it_is_passed() -> None:
    """After a rollback the dead ones neither make up the two, nor are they touched until the new line passes them."""
    generations = history(generation(1), generation(2, (1, 10)))
    dead = [manifest(_at(step)) for step in (20, 30)]
    base = [manifest(_at(5)), manifest(_at(10))]
    verified = [_at(step) for step in (5, 10, 20, 30)]
    assert _retire([*dead, *base], generations, verified) == []
    assert _retire([*dead, *base, manifest(_at(15, 2))], generations, [*verified, _at(15, 2)]) == [_at(5)]
    beyond = [manifest(_at(40, 2)), manifest(_at(50, 2))]
    assert _retire([*dead, *base, *beyond], generations, [*verified, _at(40, 2), _at(50, 2)]) == [
        _at(5),
        _at(10),
        _at(20),
        _at(30),
    ]


def test_one_step_in_two_generations_is_two_checkpoints() -> None:
    """Equal steps of two generations on the lineage are the newest two; the older generation's is not given up."""
    generations = history(generation(1), generation(2, (1, 10)))
    made = [manifest(_at(10)), manifest(_at(10, 2)), manifest(_at(9))]
    assert _retire(made, generations, [_at(9), _at(10), _at(10, 2)]) == [_at(9)]


@pytest.mark.holds("parent-stays")
def test_the_parent_stays_until_the_new_generation_stands_by_itself() -> None:
    """What a generation started from stays although it is no longer among the newest two that anybody verified."""
    generations = history(generation(1), generation(2, (1, 20)))
    made = [manifest(_at(step)) for step in (10, 20)] + [manifest(_at(step, 2)) for step in (30, 40)]
    assert _at(20) not in _retire(made, generations, [_at(10), _at(20)])
    assert _retire(made, generations, [_at(10), _at(20), _at(30, 2)]) == [_at(10)]
    assert _retire(made, generations, [_at(10), _at(20), _at(30, 2), _at(40, 2)]) == [_at(10), _at(20)]


def test_an_unverified_parent_stays_too() -> None:
    """The parent is kept because somebody stands on it, not because this process has verified it."""
    generations = history(generation(1), generation(2, (1, 15)))
    made = [manifest(_at(step)) for step in (10, 15, 14, 13)]
    assert _retire(made, generations, [_at(13), _at(14)]) == [_at(10)]


def test_an_empty_run_has_nothing_to_give_up() -> None:
    """No manifests and no generations: nothing, and no error."""
    assert _retire([], {}, []) == []
    assert _retire([manifest(_at(1))], {}, [_at(1)]) == []


@dataclass(frozen=True)
class _Run:
    generations: dict[int, Generation]
    manifests: list[Manifest]
    verified: set[BoundaryId]

    @property
    def chain(self) -> dict[int, float]:
        return cuts(self.generations)

    def kept(self) -> list[Manifest]:
        given_up = set(_retire(self.manifests, self.generations, self.verified))
        return [made for made in self.manifests if made.retired is None and made.at not in given_up]

    def good(self, made: Collection[Manifest]) -> list[BoundaryId]:
        """Verified, not retired, on the lineage; newest first."""
        return sorted(
            {m.at for m in made if m.retired is None and m.at in self.verified and counts(m.at, self.chain)},
            reverse=True,
        )


def _random_run(rng: random.Random) -> _Run:
    number = rng.randint(1, 4)
    generations = {1: generation(1)}
    for each in range(2, number + 1):
        parent = None if rng.random() < 0.15 else (rng.randint(1, each - 1), rng.randint(0, 12))
        generations[each] = generation(each, parent, committed=rng.random() < 0.5)
    ats = {BoundaryId(rng.randint(0, 12), rng.randint(1, number)) for _ in range(rng.randint(0, 10))}
    made = [
        manifest(at, tag="best" if rng.random() < 0.2 else None, retired=1.0 if rng.random() < 0.2 else None)
        for at in sorted(ats)
    ]
    share = rng.random()
    return _Run(generations, made, {at for at in ats if rng.random() < share})


_seeds = st.integers(0, 2**64)


@pytest.mark.holds("pointer-moves-first")
@given(_seeds)
@settings(max_examples=500)
def test_the_newest_two_verified_on_the_lineage_always_stay(seed: int) -> None:
    """Before and after giving up, the newest two that a restart would take are the same."""
    run = _random_run(random.Random(seed))
    assert run.good(run.kept())[:2] == run.good(run.manifests)[:2]


@given(_seeds)
@settings(max_examples=500)
def test_what_is_given_up_is_old_untagged_and_live(seed: int) -> None:
    """Everything given up is live, untagged and strictly older than two verified checkpoints on the lineage."""
    run = _random_run(random.Random(seed))
    live = {made.at: made for made in run.manifests if made.retired is None}
    given_up = _retire(run.manifests, run.generations, run.verified)
    assert given_up == sorted(set(given_up))
    for at in given_up:
        assert live[at].tag is None
        assert sum(better > at for better in run.good(run.manifests)) >= 2


@given(_seeds)
@settings(max_examples=500)
def test_what_the_newest_generation_stands_on_stays(seed: int) -> None:
    """Until the newest generation has a verified checkpoint, the newest verified one at or below its parent stays."""
    run = _random_run(random.Random(seed))
    newest = max(run.generations)
    parent = run.generations[newest].parent
    good = run.good(run.manifests)
    if parent is None or any(at.generation == newest for at in good):
        return
    below = [at for at in good if at.boundary <= parent.boundary]
    assert not below or below[0] in {made.at for made in run.kept()}


@given(_seeds)
def test_to_know_less_never_gives_up_more(seed: int) -> None:
    """A process that has verified fewer checkpoints gives up a part of what one that has verified more does."""
    rng = random.Random(seed)
    run = _random_run(rng)
    fewer = {at for at in sorted(run.verified) if rng.random() < 0.7}
    less = _retire(run.manifests, run.generations, fewer)
    assert set(less) <= set(_retire(run.manifests, run.generations, run.verified))


@given(_seeds)
def test_giving_up_twice_gives_up_nothing_more(seed: int) -> None:
    """Applied to its own result, retention is at rest."""
    run = _random_run(random.Random(seed))
    given_up = set(_retire(run.manifests, run.generations, run.verified))
    after = [made.retire(5.0) if made.at in given_up else made for made in run.manifests]
    assert _retire(after, run.generations, run.verified) == []


@pytest.mark.holds("bytes-go-later")
def test_bytes_go_an_hour_after_giving_up_and_not_before() -> None:
    """Only retired checkpoints are swept, from the delay on; a clock that jumped back sweeps nothing."""
    made = [manifest(_at(1)), manifest(_at(2), retired=100.0), manifest(_at(3), retired=200.0)]
    assert to_sweep(made, 100.0 + SWEEP_DELAY_S - 0.5) == []
    assert to_sweep(made, 100.0 + SWEEP_DELAY_S) == [made[1]]
    assert to_sweep(made, 200.0 + SWEEP_DELAY_S) == made[1:]
    assert to_sweep(made, -1e9) == []
    assert to_sweep(made, 150.0, delay_s=0.0) == [made[1]]
    assert SWEEP_DELAY_S == 3600.0


def test_abandoned_are_only_old_unfinished_steps_that_nobody_needs() -> None:
    """Off the lineage, or below the oldest kept one; never of the newest generation, never with its key taken."""
    chain = cuts(history(generation(1), generation(2, (1, 20)), generation(3, (2, 40))))
    steps = [_at(10), _at(20), _at(21), _at(30, 2), _at(40, 2), _at(41, 2), _at(10, 3), _at(99, 4)]
    assert abandoned_steps(steps, [], chain, 3, None) == [_at(21), _at(41, 2)]
    assert abandoned_steps(steps, [_at(21)], chain, 3, None) == [_at(41, 2)]
    assert abandoned_steps(steps, [], chain, 3, _at(30, 2)) == [_at(10), _at(20), _at(21), _at(41, 2)]
    assert abandoned_steps(steps, [], chain, 1, _at(30, 2)) == []


@pytest.mark.holds("tombstones")
@given(_seeds)
@settings(max_examples=500)
def test_a_step_that_could_still_matter_is_never_abandoned(seed: int) -> None:
    """A step that, if it were committed now, would be among the newest two of the lineage is never abandoned."""
    rng = random.Random(seed)
    run = _random_run(rng)
    newest = max(run.generations)
    steps = {BoundaryId(rng.randint(0, 12), rng.randint(1, newest + 1)) for _ in range(8)}
    good = run.good(run.manifests)
    bound = good[1] if len(good) >= 2 else None
    taken = {made.at for made in run.manifests}
    found = abandoned_steps(steps, taken, run.chain, newest, bound)
    assert found == sorted(set(found))
    for at in found:
        assert at in steps
        assert at not in taken
        assert at.generation < newest
        assert not counts(at, run.chain) or at not in sorted({*good, at}, reverse=True)[:2]
