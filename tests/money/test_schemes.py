"""Schemes are data: the shipped ones, a user's own, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from money_samples import every

from surefoot.errors import ConfigError
from surefoot.money.request import Request
from surefoot.money.results import timing_for
from surefoot.money.schemes import by_name, emergency_s, load_schemes, parse_schemes, shipped_schemes, timing_of


def test_the_shipped_schemes_cost_what_the_brief_says(brief: Request) -> None:
    """271 s through one pipe, 33.9 s through eight; 0.85 s in the background; a peer holds each step."""
    named = {scheme.name: timing_for(brief, scheme) for scheme in brief.schemes}
    assert named["naive-3h"].stall_s == pytest.approx(840 / 3.1)
    assert named["naive-3h"].interval_s == 3 * 3600
    assert named["sharded-sync"].stall_s == pytest.approx(840 / 24.8)
    assert (named["async-bucket"].stall_s, named["async-bucket"].lag_s) == pytest.approx((0.85, 840 / 3.1))
    shrink = named["two-tier-shrink"]
    assert (shrink.hot_interval_s, shrink.shrink, shrink.standby) == (12.0, True, 0)
    assert shrink.hot_lag_s == pytest.approx(0.85 + 105 / 400)
    assert named["two-tier-standby"].standby == 1


@pytest.mark.holds("no-time-to-save")
def test_a_window_that_is_too_short_makes_notices_useless(brief: Request) -> None:
    """105 GB at 3.1 GB/s and 2 s of notice and commit need 35.9 s: not in 30 s, but in AWS's 120 s."""
    scheme = by_name(brief.schemes, "two-tier")
    assert emergency_s(scheme, brief.job, brief.costs) == pytest.approx(2 + 105 / 3.1)
    assert not timing_for(brief, scheme).hot_announced
    assert timing_for(replace(brief, window_s=120.0), scheme).hot_announced


def test_an_upload_slower_than_the_interval_stretches_it(brief: Request) -> None:
    """At a tenth of the bandwidth an upload takes 2,710 s: the next save starts after it."""
    slow = replace(brief, costs=replace(brief.costs, bucket_bytes_per_s=0.31e9))
    timing = timing_for(slow, by_name(brief.schemes, "async-bucket"))
    assert timing.interval_s == pytest.approx(840 / 0.31, abs=1e-6)


def test_the_byte_budget_of_the_product_holds_here_too(brief: Request) -> None:
    """However tight, it spaces saves out to five minutes, and no further: a large state is not saved less often."""
    scheme = by_name(brief.schemes, "two-tier-shrink")
    free = timing_for(replace(brief, costs=replace(brief.costs, max_bytes_per_hour=float("inf"))), scheme)
    tight = timing_for(replace(brief, costs=replace(brief.costs, max_bytes_per_hour=840e9)), scheme)
    assert free.period_s == tight.period_s == pytest.approx(300.85)


def test_tuned_is_the_best_there_is(brief: Request) -> None:
    """No interval a tenth longer or shorter has a higher goodput."""
    from surefoot.money.closed_form import goodput

    timing = timing_for(brief, by_name(brief.schemes, "naive-tuned"))
    best = goodput(brief.job, timing, brief.hazard)
    for factor in (0.9, 1.1):
        other = replace(timing, interval_s=timing.interval_s * factor)
        assert goodput(brief.job, other, brief.hazard) < best


def test_a_user_adds_and_replaces_schemes(tmp_path: Path, brief: Request) -> None:
    """A file of the same form: measured durations in place of derived ones, an old name taken over."""
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[scheme]]\nname = "mine"\ninterval = "2 min"\nmemory = "peers"\nstall = "20 ms"\nlag = "40 s"\n'
        'restart = "25 s"\non_loss = "shrink"\n[[scheme]]\nname = "naive-3h"\ninterval = "1 h"\nsave = "blocking"\n'
    )
    merged = load_schemes(path)
    assert len(merged) == len(shipped_schemes()) + 1
    assert by_name(merged, "naive-3h").interval_s == 3600
    timing = timing_of(by_name(merged, "mine"), brief.job, brief.costs, every(3600.0), 0.5, 30.0)
    assert (timing.stall_s, timing.lag_s, timing.restart_s, timing.interval_s) == pytest.approx((0.02, 40, 25, 120))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no \\[\\[scheme\\]\\]"),
        ("[[scheme]\n", "f: "),
        ("[[scheme]]\ninterval = '5 min'\n", "without a name"),
        ("[[scheme]]\nname = 'a'\n", "a: no interval"),
        ("[[scheme]]\nname = 'a'\ninterval = 300\n", "300 has no unit"),
        ("[[scheme]]\nname = 'a'\ninterval = '300'\n", "interval: '300' is not a duration"),
        ("[[scheme]]\nname = 'a'\ninterval = 'tuned'\nstal = '1 s'\n", "unknown key 'stal'"),
        ("[[scheme]]\nname = 'a'\ninterval = 'tuned'\nsave = 'now'\n", "save is 'now'"),
        ("[[scheme]]\nname = 'a'\ninterval = 'tuned'\nstandby = -1\n", "standby -1"),
        ("[[scheme]]\nname = 'a'\ninterval = 'tuned'\ngroup = 'two'\n", "'two' is no whole number"),
    ],
)
def test_bad_schemes_get_one_clear_line(text: str, words: str) -> None:
    """File, scheme, key and what is wrong."""
    with pytest.raises(ConfigError, match=words) as caught:
        parse_schemes(text, "f")
    assert "\n" not in str(caught.value)
