"""Are the bands honest? The forecast of one set of seeds against the outcomes of another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from surefoot.money.hazards import Hazard, Renewal, from_trace
from surefoot.money.money import costs_usd
from surefoot.money.request import Request
from surefoot.money.results import moves_for, timing_for
from surefoot.money.schemes import by_name
from surefoot.money.simulate import Runs, simulate
from surefoot.money.traces import load_trace

SEEDS = range(1000, 1200)


def _hazards() -> dict[str, Hazard]:
    return {
        "exponential": Renewal(mean_gap_s=4.5 * 3600),
        "weibull": Renewal(mean_gap_s=4.5 * 3600, kind="weibull", shape=0.6),
        "trace": from_trace(load_trace("bamboo-a100"), 8),
    }


@pytest.mark.parametrize("hazard", ["exponential", "weibull", "trace"])
@pytest.mark.parametrize("scheme", ["naive-30min", "two-tier-replica"])
def test_bands_contain_what_they_promise(brief: Request, hazard: str, scheme: str) -> None:
    """Over 200 seeds p5 to p95 contains the outcome 90 ± 4 %, p25 to p75 50 ± 7 %: cost and finishing time."""
    request = replace(
        brief,
        hazard=_hazards()[hazard],
        announced=0.8,
        job=replace(brief.job, work_s=18 * 3600.0),
    )
    timing = timing_for(request, by_name(request.schemes, scheme))
    moves = moves_for(request, by_name(request.schemes, scheme), timing)

    def run(runs: int, seed: int) -> Runs:
        return simulate(request.job, timing, request.hazard, runs=runs, seed=seed, announced=request.announced)

    forecast = run(3000, 1)
    # Twenty outcomes a seed: with one, chance alone would move the share by 2 points.
    outcomes = [run(20, seed) for seed in SEEDS]
    walls = (forecast.wall_s, np.concatenate([outcome.wall_s for outcome in outcomes]))
    spent = [costs_usd(outcome, request.prices.spot, moves) for outcome in outcomes]
    costs = (costs_usd(forecast, request.prices.spot, moves), np.concatenate(spent))
    for predicted, happened in (walls, costs):
        low, lower, upper, high = np.percentile(predicted, (5, 25, 75, 95))
        assert ((happened >= low) & (happened <= high)).mean() == pytest.approx(0.90, abs=0.04)
        assert ((happened >= lower) & (happened <= upper)).mean() == pytest.approx(0.50, abs=0.07)
