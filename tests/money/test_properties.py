"""What must hold for every job, scheme and price."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from money_samples import H, brief_request

from surefoot.money.closed_form import expected, goodput
from surefoot.money.hazards import Renewal
from surefoot.money.job import Job, Timing
from surefoot.money.money import Saving, cost_lines, cost_usd
from surefoot.money.request import Request
from surefoot.money.results import moves_for, run_scheme, timing_for

BRIEF = brief_request()
_schemes = st.sampled_from(BRIEF.schemes)
_gaps = st.floats(0.3, 200.0).map(lambda hours: hours * H)
_sizes = st.sampled_from([{1: 1.0}, {1: 0.7, 2: 0.3}, {1: 0.5, 2: 0.2, 4: 0.3}])


def _with(gap_s: float, sizes: dict[int, float], announced: float) -> Request:
    return replace(BRIEF, hazard=Renewal(mean_gap_s=gap_s, sizes=sizes), announced=announced)


def _cost(request: Request, timing: Timing, scheme_index: int) -> float:
    scheme = request.schemes[scheme_index]
    outcome = expected(request.job, timing, request.hazard, request.announced)
    return cost_usd(outcome, request.prices.spot, moves_for(request, scheme, timing))


@settings(max_examples=60, deadline=None)
@given(index=st.integers(0, len(BRIEF.schemes) - 1), gap_s=_gaps, factor=st.floats(1.05, 20), sizes=_sizes)
def test_more_evictions_never_cost_less(index: int, gap_s: float, factor: float, sizes: dict[int, float]) -> None:
    """The same scheme and interval, all else equal: with a longer gap it costs no more and takes no longer."""
    often, seldom = _with(gap_s, sizes, 0.6), _with(gap_s * factor, sizes, 0.6)
    timing = timing_for(often, often.schemes[index])
    assert _cost(seldom, timing, index) <= _cost(often, timing, index) * (1 + 1e-9)
    walls = [expected(r.job, timing, r.hazard, 0.6).wall_s for r in (seldom, often)]
    assert walls[0] <= walls[1] * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(scheme=_schemes, gap_s=_gaps, sizes=_sizes, announced=st.floats(0, 1), scale=st.floats(1.01, 5))
def test_cost_grows_with_the_price(
    scheme: object, gap_s: float, sizes: dict[int, float], announced: float, scale: float
) -> None:
    """A higher price of spot never makes a run cheaper."""
    request = _with(gap_s, sizes, announced)
    index = BRIEF.schemes.index(scheme)  # type: ignore[arg-type]
    timing = timing_for(request, request.schemes[index])
    spot_usd = request.prices.spot_usd_per_node_h
    dearer = replace(request, prices=replace(request.prices, spot_usd_per_node_h=spot_usd * scale))
    assert _cost(dearer, timing, index) >= _cost(request, timing, index)


@settings(max_examples=60, deadline=None)
@given(scheme=_schemes, gap_s=_gaps, sizes=_sizes, announced=st.floats(0, 1))
def test_parts_add_up_to_the_total(scheme: object, gap_s: float, sizes: dict[int, float], announced: float) -> None:
    """The lines of a cost add up to it; the phases to the billed time; no part is negative."""
    request = _with(gap_s, sizes, announced)
    index = BRIEF.schemes.index(scheme)  # type: ignore[arg-type]
    timing = timing_for(request, request.schemes[index])
    outcome = expected(request.job, timing, request.hazard, announced)
    moves = moves_for(request, request.schemes[index], timing)
    lines = cost_lines(outcome, request.prices.spot, moves)
    assert sum(line.cost_usd for line in lines) == pytest.approx(cost_usd(outcome, request.prices.spot, moves))
    assert all(line.cost_usd == pytest.approx(line.quantity * line.usd_per_unit) for line in lines)
    assert min(line.cost_usd for line in lines) >= -1e-6
    assert sum(outcome.node_s.values()) == pytest.approx(outcome.billed_node_s)
    assert outcome.goodput <= 1.0


@given(on_demand=st.floats(1, 1e7), baseline=st.floats(0, 1e7), cost=st.floats(0, 1e7))
def test_savings_are_never_above_the_counterfactual(on_demand: float, baseline: float, cost: float) -> None:
    """At most all of it is saved; price and scheme add up."""
    saving = Saving(on_demand, baseline, cost)
    assert saving.net <= 1.0
    assert saving.price + saving.scheme == pytest.approx(saving.net, abs=1e-9 * max(1.0, abs(saving.price)))


@settings(max_examples=40, deadline=None)
@given(gap_s=_gaps, stall_s=st.floats(0, 300), restart_s=st.floats(0, 300), announced=st.floats(0, 1))
def test_goodput_between_its_limits(gap_s: float, stall_s: float, restart_s: float, announced: float) -> None:
    """1 less the stalls without evictions, 0 with nothing but evictions, between them else."""
    job = Job(work_s=72 * H, state_bytes=1e9, step_s=10, nodes=8)
    timing = Timing(interval_s=600, stall_s=stall_s, lag_s=60, load_s=30, restart_s=restart_s, replacement_s=360)
    best = 600 / (600 + stall_s)
    value = goodput(job, timing, Renewal(mean_gap_s=gap_s), announced)
    assert 0.0 <= value <= best
    assert goodput(job, timing, Renewal(mean_gap_s=1e15), announced) == pytest.approx(best)
    assert goodput(job, timing, Renewal(mean_gap_s=1.0), announced) == pytest.approx(0.0, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    gap_s=st.floats(1.0, 100.0).map(lambda h: h * H), wait_s=st.floats(120, 1200), nodes=st.sampled_from([2, 4, 8, 32])
)
def test_going_on_with_fewer_nodes_beats_waiting(gap_s: float, wait_s: float, nodes: int) -> None:
    """Where both stops of a resize are shorter than the wait."""
    job = Job(work_s=72 * H, state_bytes=1e9, step_s=10, nodes=nodes)
    waits = Timing(interval_s=300, stall_s=1, hot_interval_s=10, hot_announced=True, restart_s=18, replacement_s=wait_s)
    shrinks = replace(waits, shrink=True, rejoin_s=18)
    hazard = Renewal(mean_gap_s=gap_s)
    assert goodput(job, shrinks, hazard, 1.0) >= goodput(job, waits, hazard, 1.0)


def test_worse_measurements_never_help() -> None:
    """A longer stall, lag, load, restart, rejoin or wait: no scheme gets cheaper."""
    for index in range(len(BRIEF.schemes)):
        timing = timing_for(BRIEF, BRIEF.schemes[index])
        base = _cost(BRIEF, timing, index)
        for name in ("stall_s", "lag_s", "load_s", "restart_s", "rejoin_s"):
            worse = replace(timing, **{name: getattr(timing, name) * 2 + 10})
            assert _cost(BRIEF, worse, index) >= base - 1e-6, (BRIEF.schemes[index].name, name)


def test_simulated_savings_keep_the_same_rules() -> None:
    """In the simulation too: net is price plus scheme, and at most what on-demand costs."""
    request = replace(BRIEF, runs=200)
    for scheme in (request.schemes[2], request.schemes[8]):
        result = run_scheme(request, scheme, 45_158.4, 17_909.8)
        assert result.saving.net == pytest.approx(result.saving.price + result.saving.scheme)
        assert (result.costs_usd > 0).all()
        assert result.costs_usd.mean() == pytest.approx(result.cost_usd, rel=0.02)
