"""Relay and emergency: minima and maxima over nodes, with words that are lost, doubled, late and out of order."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from core_samples import generation, history
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.emergency import Count, commit_order, late_target
from surefoot.core.lineage import superseding
from surefoot.core.manifest import Generation
from surefoot.core.relay import LEFT, Progress, merge, minimum
from surefoot.core.slots import NEVER

_words = st.lists(st.builds(Progress, st.integers(1, 3), st.integers(NEVER, 9), st.integers(NEVER, 9)), min_size=1)


@given(_words, st.integers(0, 1 << 30))
def test_what_is_known_does_not_depend_on_order_or_repetition(words: list[Progress], seed: int) -> None:
    """Words merged in any order, some twice, come to the greatest of the newest generation."""
    again = [*words, *random.Random(seed).choices(words, k=len(words))]
    random.Random(seed).shuffle(again)
    known: Progress | None = None
    for word in again:
        known = merge(known, word)
    newest = max(word.generation for word in words)
    of_newest = [word for word in words if word.generation == newest]
    assert known == Progress(newest, max(w.sealed for w in of_newest), max(w.passed for w in of_newest))


@pytest.mark.holds("known-late-never-early")
def test_the_minimum_is_never_early() -> None:
    """A member that is silent, or known only from an older generation, holds everybody at nothing."""
    known = {"a": Progress(2, 5, 6), "b": Progress(2, 4, 7)}
    assert minimum(known, ["a", "b"], 2) == Progress(2, 4, 6)
    assert minimum(known, ["a", "b", "c"], 2) == Progress(2)
    assert minimum({**known, "c": Progress(1, 9, 9)}, ["a", "b", "c"], 2) == Progress(2)
    assert minimum(known, ["a", "b"], 3) == Progress(3)
    assert minimum(known, [], 2) == Progress(2)


@pytest.mark.holds("known-late-never-early")
def test_nobody_waits_for_who_left() -> None:
    """A node whose ranks are leaving counts as infinitely far."""
    assert minimum({"a": Progress(1, 3, 3), "b": Progress(1, LEFT, LEFT)}, "ab", 1) == Progress(1, 3, 3)


@pytest.mark.parametrize(
    ("counted", "target"),
    [
        ({"a": [Count(4, 4)], "b": [Count(4, 5)]}, 5),
        ({"a": [Count(5, 4), Count(4, 4)], "b": [Count(4, 4)]}, 5),
        ({"a": [Count(4, NEVER)], "b": [Count(4, NEVER)]}, 4),
        ({"a": [Count(9, 9)]}, None),
        ({"a": [Count(9, 9)], "b": []}, None),
        ({}, None),
    ],
)
def test_the_late_target_is_the_foremost_of_all_and_unknown_until_all_are_counted(
    counted: dict[str, list[Count]], target: int | None
) -> None:
    """The greatest of finished and entered; None as long as one member has not answered."""
    assert late_target(counted, ["a", "b"]) == target


def test_those_that_stay_commit_first() -> None:
    """Leaving nodes come last, each group in its own order; nobody is left out."""
    assert commit_order(["a", "b", "c", "d"], {"c", "a"}) == ["b", "d", "a", "c"]
    assert commit_order(["a", "b"], {"a", "b"}) == ["a", "b"]


def _of(launches: str) -> dict[int, Generation]:
    return history(
        *(
            Generation(number, launch, None, 1, "n", 0.0) if number == 1 else
            Generation(number, launch, generation(number, (number - 1, 5)).parent, 1, "n", 0.0)
            for number, launch in enumerate(launches, 1)
        )
    )  # fmt: skip


@pytest.mark.holds("one-launch-trains")
@pytest.mark.parametrize(
    ("launches", "of_a"), [("", None), ("a", None), ("b", None), ("ab", 2), ("aba", None), ("abb", 3), ("ba", None)]
)
def test_a_launch_is_superseded_by_a_later_generation_of_another(launches: str, of_a: int | None) -> None:
    """Only once it has made one of its own: else it is the newer launch itself."""
    found = superseding(_of(launches), ["a"])
    assert (found and found.number) == of_a


def test_a_job_of_several_machines_is_known_by_any_of_them() -> None:
    """Machines are lost and added, and rank 0 is now here, now there: it is one job as long as a generation has a
    machine of the one before, and another one takes it over only if it has none."""

    def made(*of: tuple[str, ...]) -> dict[int, Generation]:
        found = _of("x" * len(of))
        return {
            number: replace(one, launch=launches[0], launches=launches)
            for (number, one), launches in zip(found.items(), of, strict=True)
        }

    assert superseding(made(("b", "c"), ("a", "b")), ["c", "b"]) is None
    assert superseding(made(("b", "c"), ("a", "b")), ["b", "d"]) is None
    assert superseding(made(("b", "c"), ("x", "y")), ["e", "f"]) is None
    newest = superseding(made(("b", "c"), ("x", "y")), ["c", "d"])
    assert newest is not None
    assert newest.number == 2
    assert superseding(made(("b", "c"), ("x", "y")), ["x", "z"]) is None
