"""Cadence: when the next durable save may start, and how often a step is staged."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.cadence import CONTINUOUS_BELOW_S, DEFAULT_INTERVAL_S, Cadence, next_start, stage_every
from surefoot.errors import ConfigError

_times = st.floats(0, 1e6)


@pytest.mark.parametrize(
    ("cadence", "took_s", "size_bytes", "wait_s"),
    [
        (Cadence(), 0.0, 0, 2.0),
        (Cadence(), 2.5, 0, 2.5),
        (Cadence(interval_s=0), 0.1, 0, 0.1),
        (Cadence(), 9.999, 1, 9.999),
        (Cadence(), 10.0, 1, 300.0),
        (Cadence(), 299.0, 1, 300.0),
        (Cadence(), 301.0, 1, 301.0),
        (Cadence(interval_s=0), 20.0, 1, 20.0),
        (Cadence(interval_s=60), 1.0, 1, 60.0),
        (Cadence(interval_s=60), 61.0, 1, 61.0),
        (Cadence(interval_s=inf), 1.0, 1, inf),
        (Cadence(max_bytes_per_hour=3600.0), 1.0, 7, 7.0),
        (Cadence(max_bytes_per_hour=3600.0), 8.0, 7, 8.0),
        (Cadence(interval_s=5, max_bytes_per_hour=3600.0), 1.0, 7, 7.0),
        (Cadence(interval_s=9, max_bytes_per_hour=3600.0), 1.0, 7, 9.0),
        (Cadence(max_bytes_per_hour=inf), 3.0, 10**15, 3.0),
        (Cadence(), 1.0, 64 * 10**9, 300.0),
        (Cadence(), 1.0, 10**9, 56.25),
        (Cadence(interval_s=0), 1.0, 840 * 10**9, 300.0),
    ],
)
def test_the_next_save_starts_when_the_rule_says(
    cadence: Cadence, took_s: float, size_bytes: int, wait_s: float
) -> None:
    """Continuous below ten seconds, at least two apart; else the interval; never before the last one ended."""
    start = 1000.0
    assert next_start(cadence, start, start + took_s, size_bytes) == pytest.approx(start + wait_s)


def test_one_slow_save_does_not_make_saves_rare() -> None:
    """An outage is over when its save is; what is slow twice is slow."""
    slow_s, quick_s = 2 * CONTINUOUS_BELOW_S, CONTINUOUS_BELOW_S / 5
    assert next_start(Cadence(), 100.0, 100.0 + slow_s, 0, quick_s) == 100.0 + slow_s
    assert next_start(Cadence(), 100.0, 100.0 + slow_s, 0, slow_s) == 100.0 + DEFAULT_INTERVAL_S
    assert next_start(Cadence(), 100.0, 100.0 + slow_s, 0) == 100.0 + DEFAULT_INTERVAL_S


@given(_times, st.floats(0, 1e5), st.integers(0, 10**13), st.none() | st.floats(0, 1e5), st.floats(1e3, 1e13))
def test_a_start_breaks_no_bound(
    started: float, took_s: float, size_bytes: int, interval_s: float | None, cap: float
) -> None:
    """For any save: not before its end, not before the interval, and the bytes of an hour stay within the cap."""
    cadence = Cadence(interval_s=interval_s, max_bytes_per_hour=cap)
    ended = started + took_s
    due = next_start(cadence, started, ended, size_bytes)
    assert due >= ended
    assert due >= started + (interval_s or 0)
    # The difference of two large times is rounded.
    if due - started < DEFAULT_INTERVAL_S - 1e-3:
        assert size_bytes <= (due - started) / 3600.0 * cap * (1 + 1e-9) + cap * 1e-9
    if interval_s is None and ended - started >= CONTINUOUS_BELOW_S:
        assert due >= started + DEFAULT_INTERVAL_S


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval_s": -1},
        {"interval_s": nan},
        {"max_bytes_per_s": 0},
        {"max_bytes_per_s": -5},
        {"max_bytes_per_s": nan},
        {"max_bytes_per_hour": 0},
        {"max_bytes_per_hour": nan},
    ],
)
def test_a_bound_that_cannot_work_is_refused(wrong: dict[str, float]) -> None:
    """Negative, zero where it would stop everything, and NaN are refused with the option's name."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Cadence(**wrong)  # type: ignore[arg-type]


@pytest.mark.holds("slow-copies-fewer-steps")
@pytest.mark.parametrize(
    ("copy_s", "step_s", "expected"),
    [(0.0, 1.0, 1), (1.0, 0.0, 1), (-1.0, 1.0, 1), (0.1, 1.0, 1), (1.0, 1.0, 1), (1.001, 1.0, 2), (7.5, 2.5, 3)],
)
def test_a_copy_longer_than_a_step_is_made_less_often(copy_s: float, step_s: float, expected: int) -> None:
    """Every ceil(copy ÷ step)-th step, at least every one; without a measurement every one."""
    assert stage_every(copy_s, step_s) == expected


@pytest.mark.holds("slow-copies-fewer-steps")
@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3))
def test_copies_take_at_most_as_long_as_the_steps_between_them(copy_s: float, step_s: float) -> None:
    """The cadence is the smallest whose steps take at least as long as one copy."""
    every = stage_every(copy_s, step_s)
    assert every * step_s >= copy_s * (1 - 1e-9)
    assert every == 1 or (every - 1) * step_s < copy_s * (1 + 1e-9)
