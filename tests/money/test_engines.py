"""Closed form, simulation and the literal walk check one another."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
from money_samples import Case, brief_job, every
from walk import draws, walk

from surefoot.money.closed_form import Outcome, expected
from surefoot.money.hazards import Renewal, from_trace
from surefoot.money.phases import PHASES, Phase, total
from surefoot.money.request import Request
from surefoot.money.results import timing_for
from surefoot.money.simulate import Runs, simulate
from surefoot.money.traces import SHIPPED, load_trace

SETS = 200
RUNS = 240


def _error(mean: float, values: np.ndarray) -> float:
    """Difference in standard errors; a spread of nothing is compared to rounding."""
    spread = float(values.std(ddof=1)) / sqrt(len(values))
    return (float(values.mean()) - mean) / max(spread, 1e-7 * abs(mean), 1e-9)


def _z(case: Case, seed: int) -> list[float]:
    closed = expected(case.job, case.timing, case.hazard, case.announced)
    runs = simulate(case.job, case.timing, case.hazard, runs=RUNS, seed=seed, announced=case.announced)
    assert runs.finished.all()
    return [_error(closed.wall_s, runs.wall_s), _error(closed.billed_node_s, runs.billed_node_s)]


def test_200_parameter_sets_agree_within_monte_carlo_error() -> None:
    """Wall and billed time of 200 random sets: no difference beyond chance, and as much chance as there should be."""
    errors = np.array([_z(Case(seed), seed) for seed in range(SETS)])
    assert np.abs(errors).max() < 4.5
    # The squares of standard normal errors average 1; with 200 of them the average has a deviation of 0.1.
    assert (errors**2).mean(axis=0).min() > 0.7
    assert (errors**2).mean(axis=0).max() < 1.4
    assert np.abs(errors.mean(axis=0)).max() < 0.3


def test_20_parameter_sets_agree_within_half_a_point(brief: Request) -> None:
    """The shipped schemes, at the brief's rate and at a harder one with double losses: goodput to 0.005."""
    compared = 0
    for hazard in (brief.hazard, Renewal(mean_gap_s=2 * 3600, sizes={1: 0.8, 2: 0.2})):
        request = replace(brief, hazard=hazard, announced=0.6)
        for scheme in request.schemes[:10]:
            timing = timing_for(request, scheme)
            closed = expected(request.job, timing, hazard, request.announced)
            runs = simulate(request.job, timing, hazard, runs=600, seed=compared, announced=request.announced)
            assert runs.mean().goodput == pytest.approx(closed.goodput, abs=0.005), scheme.name
            compared += 1
    assert compared == 20


def test_every_phase_agrees() -> None:
    """Not only the sums: each phase's node-seconds, the lost work, the events and the loads."""
    case = Case(7)
    case.timing = replace(case.timing, shrink=True, hot_interval_s=case.job.step_s, hot_announced=True, load_s=300.0)
    announced = 0.5
    closed = expected(case.job, case.timing, case.hazard, announced)
    runs = simulate(case.job, case.timing, case.hazard, runs=4000, seed=5, announced=announced)
    for phase in PHASES:
        assert abs(_error(closed.node_s.get(phase, 0.0), runs.node_s[phase])) < 5, phase
    assert abs(_error(closed.lost_work_s, runs.lost_work_s)) < 5
    assert abs(_error(closed.events, runs.events.astype(float))) < 5
    assert abs(_error(closed.loads, runs.loads.astype(float))) < 5


def test_phases_add_up_to_billed_time() -> None:
    """Exactly one phase for each billed node-second: their sum is what was counted as paid, beside them."""
    for seed in range(12):
        case = Case(seed)
        timing = replace(case.timing, standby=seed % 2)
        runs = simulate(case.job, timing, case.hazard, runs=50, seed=seed, announced=case.announced)
        np.testing.assert_allclose(runs.billed_node_s, runs.paid_node_s, rtol=1e-9)
        assert (runs.paid_node_s <= runs.wall_s * (case.job.nodes + timing.standby) * (1 + 1e-9)).all()
        for phase, node_s in runs.node_s.items():
            assert (node_s >= -1e-6 * runs.paid_node_s).all(), phase


def _walks(case: Case, count: int, seed: int) -> list[Outcome]:
    rng = random.Random(seed)
    sizes, weights = list(case.hazard.sizes), list(case.hazard.sizes.values())

    def one() -> Outcome:
        evictions = draws(lambda: rng.expovariate(1 / case.gap_s), lambda: rng.choices(sizes, weights)[0], rng.random)
        return walk(case.job, case.timing, evictions, case.announced)[0]

    return [one() for _ in range(count)]


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 5])
def test_the_literal_walk_agrees(seed: int) -> None:
    """Event by event with the product's own cadence and recovery rules, the same means come out."""
    case = Case(seed)
    walked = _walks(case, 150, seed)
    closed = expected(case.job, case.timing, case.hazard, case.announced)
    figures: tuple[Callable[[Outcome], float], ...] = (
        lambda o: o.wall_s,
        lambda o: o.billed_node_s,
        lambda o: o.events,
    )
    for figure in figures:
        values = np.array([figure(outcome) for outcome in walked])
        # A save that falls due in a shrunken world counts the wall here and the clock there: 0.1 % apart at most.
        assert abs(values.mean() - figure(closed)) < 4.5 * values.std() / sqrt(len(values)) + 1e-3 * figure(closed)


def test_the_walk_tells_what_happened() -> None:
    """One eviction after 1,000 s of training: the timeline names the loss, how far back, and where the image was."""
    case = Case(0)
    case.timing = replace(case.timing, interval_s=400.0, stall_s=0.0, lag_s=50.0, hot_interval_s=0.0, shrink=False)
    gaps = iter([1000.0, 1e12])
    outcome, timeline = walk(case.job, case.timing, draws(lambda: next(gaps), lambda: 1, lambda: 0.5))
    assert outcome.events == 1
    assert outcome.lost_work_s == pytest.approx(200.0)
    assert [line.what for line in timeline] == ["lost 1 node(s); back by 200.0 s to the image in object"]
    assert total(outcome.node_s) == pytest.approx(outcome.billed_node_s)


def test_same_seed_same_runs() -> None:
    """A seed names a set of runs, bit for bit; another seed names another."""
    case = Case(11)

    def walls(seed: int) -> Runs:
        return simulate(case.job, case.timing, case.hazard, runs=64, seed=seed, announced=case.announced)

    assert walls(3).wall_s.tobytes() == walls(3).wall_s.tobytes()
    assert walls(3).wall_s.tobytes() != walls(4).wall_s.tobytes()


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_trace_runs_through(name: str, brief: Request) -> None:
    """A short job on each trace, every run finished, no phase negative, nodes lost together included."""
    hazard = from_trace(load_trace(name), 8)
    request = replace(brief, hazard=hazard, announced=0.0, job=replace(brief_job(), work_s=6 * 3600.0))
    for scheme in (request.schemes[3], request.schemes[8]):
        runs = simulate(request.job, timing_for(request, scheme), hazard, runs=40, seed=1)
        assert runs.finished.all()
        assert min(float(node_s.min()) for node_s in runs.node_s.values()) >= -1e-6
        assert runs.events.sum() > 0


def test_a_run_that_cannot_end_is_cut_and_says_so() -> None:
    """A save each 3 h where a node lives minutes: unfinished at the horizon, not looped for ever."""
    runs = simulate(
        brief_job(),
        replace(Case(0).timing, interval_s=3 * 3600.0, hot_interval_s=0.0),
        every(300.0),
        runs=8,
        seed=1,
        horizon_s=100 * 3600.0,
    )
    assert not runs.finished.any()


def test_too_few_nodes_wait() -> None:
    """With four of eight nodes needed and five lost at once all wait; with three lost, after a second loss only."""
    job = replace(brief_job(), min_nodes=4)
    timing = replace(Case(0).timing, shrink=True, hot_interval_s=12.0, hot_announced=True, replacement_s=600.0)
    idle, walls = {}, {}
    for lost in (3, 5):
        hazard = Renewal(mean_gap_s=4 * 3600.0, sizes={lost: 1.0})
        runs = simulate(job, timing, hazard, runs=200, seed=2, announced=1.0)
        idle[lost] = runs.node_s[Phase.INFRASTRUCTURE_RECOVERY].sum()
        walls[lost] = runs.wall_s.mean()
    assert idle[5] > 10 * idle[3]
    assert walls[5] > walls[3]
