"""Liveness: the observer's own clock decides, and an observer that stood still accuses nobody."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.liveness import Bounds, View, begin, hear, look, without
from surefoot.errors import ConfigError

_BOUNDS = Bounds(beat_s=0.5, lost_after_s=3.0, first_within_s=10.0, stood_still_s=1.5)


def _looks(view: View, *at_s: float) -> tuple[View, list[tuple[float, str]]]:
    """Look at these times; who was lost when."""
    lost = []
    for now_s in at_s:
        looked = look(view, _BOUNDS, now_s)
        view = looked.view
        lost += [(now_s, node) for node in looked.lost]
    return view, lost


def _steady(start_s: float, end_s: float) -> list[float]:
    return [start_s + 0.5 * i for i in range(1, int((end_s - start_s) / 0.5) + 1)]


def test_a_member_whose_counter_stands_still_is_lost_after_the_window() -> None:
    """Heard at 1 s and never again: lost at the first look after 4 s, once."""
    view, back = hear(begin(["a", "b"], 0.0), "a", "x", 1, 1.0)
    assert not back
    view, lost = _looks(view, *_steady(0.0, 9.0))
    assert lost == [(4.5, "a")]
    assert (view.names("lost"), view.names("awaited"), view.names("alive")) == (["a"], ["b"], [])


def test_a_member_that_was_never_heard_has_the_longer_window() -> None:
    """Nobody heard since the beginning: lost after `first_within_s`."""
    _, lost = _looks(begin(["a"], 0.0), *_steady(0.0, 12.0))
    assert lost == [(10.5, "a")]


@pytest.mark.holds("liveness-by-counters")
@pytest.mark.parametrize(
    ("life", "counter", "counts"),
    [("x", 8, True), ("x", 7, False), ("x", 0, False), ("y", 0, True), ("y", 7, True)],
)
def test_only_a_counter_that_changed_counts(life: str, counter: int, counts: bool) -> None:
    """After counter 7 of process x: a higher one of it, or any of another process."""
    before, _ = hear(begin(["a"], 0.0), "a", "x", 7, 1.0)
    after, back = hear(before, "a", life, counter, 2.0)
    assert (after != before, back) == (counts, False)
    assert after.pulses["a"].since_s == (2.0 if counts else 1.0)


def test_a_lost_member_is_back_by_a_changed_counter_only() -> None:
    """Repeating the last counter proves nothing; the next one brings it back, once."""
    view, _ = hear(begin(["a"], 0.0), "a", "x", 1, 0.0)
    view, lost = _looks(view, *_steady(0.0, 4.0))
    assert [node for _, node in lost] == ["a"]
    view, back = hear(view, "a", "x", 1, 4.1)
    assert not back
    assert view.names("lost") == ["a"]
    view, back = hear(view, "a", "x", 2, 4.2)
    assert back
    view, back = hear(view, "a", "x", 3, 4.3)
    assert not back


def test_strangers_are_not_counted() -> None:
    """A node that is no member, or no longer one, changes nothing."""
    view = begin(["a"], 0.0)
    assert hear(view, "b", "x", 1, 1.0) == (view, False)
    assert without(view, "a") == begin([], 0.0)
    assert hear(without(view, "a"), "a", "x", 1, 1.0)[0].pulses == {}


@pytest.mark.holds("liveness-by-counters")
def test_an_observer_that_stood_still_gives_a_fresh_window() -> None:
    """Stopped for a minute in mid-window: nobody is lost on waking, and whoever is silent is lost a window later."""
    view, _ = hear(begin(["a", "b"], 0.0), "a", "x", 1, 0.0)
    view, _ = hear(view, "b", "x", 1, 0.0)
    view, lost = _looks(view, *_steady(0.0, 2.5))
    assert lost == []
    woken = look(view, _BOUNDS, 62.5)
    assert (woken.lost, woken.stood_still_s) == ((), 60.0)
    view, _ = hear(woken.view, "b", "x", 2, 64.0)
    view, lost = _looks(view, *_steady(62.5, 66.5))
    assert lost == [(66.0, "a")]


def test_standing_still_brings_nobody_back() -> None:
    """Who was lost before the observer stood still is lost after it."""
    view, _ = hear(begin(["a"], 0.0), "a", "x", 1, 0.0)
    view, _ = _looks(view, *_steady(0.0, 4.0))
    assert look(view, _BOUNDS, 100.0).view.names("lost") == ["a"]


def test_bounds_that_could_not_work_are_refused() -> None:
    """A beat rarer than the bound, a window shorter than a pause: refused with the numbers."""
    for wrong in (
        {"beat_s": 0.0},
        {"beat_s": 1.5},
        {"stood_still_s": 3.5},
        {"lost_after_s": 61.0},
    ):
        with pytest.raises(ConfigError, match="must rise"):
            Bounds(**wrong)


_steps = st.lists(
    st.tuples(
        # Looks mostly come in time, at times much too late.
        st.one_of(st.floats(0.05, 1.4), st.floats(1.6, 50.0)),
        st.sets(st.sampled_from(["a", "b"])),
    ),
    max_size=60,
)


@given(_steps)
def test_lost_means_watched_for_a_whole_window_without_a_change(steps: list[tuple[float, set[str]]]) -> None:
    """Against a rule told over the whole history: no loss without a full watched window, no full one without a loss."""
    now_s = 0.0
    view = begin(["a", "b"], now_s)
    window_from_s = {"a": 0.0, "b": 0.0}
    heard: set[str] = set()
    lost: set[str] = set()
    for counter, (gap_s, beats) in enumerate(steps):
        # Beats come right after the last look: the silence until the next one counts.
        for node in sorted(beats):
            view, back = hear(view, node, "x", counter, now_s)
            assert back == (node in lost)
            lost.discard(node)
            heard.add(node)
            window_from_s[node] = now_s
        now_s += gap_s
        looked = look(view, _BOUNDS, now_s)
        view = looked.view
        if gap_s > _BOUNDS.stood_still_s:
            assert looked.lost == ()
            window_from_s.update({node: now_s for node in window_from_s if node not in lost})
        for node, since_s in window_from_s.items():
            bound_s = _BOUNDS.lost_after_s if node in heard else _BOUNDS.first_within_s
            assert (node in looked.lost) == (node not in lost and now_s - since_s > bound_s)
        lost |= set(looked.lost)
        assert view.names("lost") == sorted(lost)
