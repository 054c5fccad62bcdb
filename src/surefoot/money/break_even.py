"""The interruption rate at which a scheme on spot costs what on-demand does."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from surefoot.money.money import costs_usd
from surefoot.money.request import Request
from surefoot.money.results import moves_for, timing_for
from surefoot.money.schemes import Scheme
from surefoot.money.simulate import simulate
from surefoot.money.tornado import with_gap
from surefoot.money.units import HOUR_S

LEAST_GAP_S = 180.0
RUNS = 16
PIECE_S = 8 * HOUR_S
"""Of the job: enough to see the rate, quick enough to try a dozen of them."""


def break_even_gap_s(request: Request, scheme: Scheme, on_demand_usd: float) -> float:
    """Mean time between evictions below which on-demand is cheaper; bisection to 5 %.

    Simulated: at such rates losses overlap, which the closed form does not see. 0 when spot is cheaper even with an
    eviction each three minutes, infinite when it never is.
    """
    low, high = LEAST_GAP_S, max(request.hazard.mean_gap_s, 10.0 * HOUR_S) * 100.0
    if not _pays(request, scheme, on_demand_usd, high):
        return inf
    if _pays(request, scheme, on_demand_usd, low):
        return 0.0
    while high / low > 1.05:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _pays(request, scheme, on_demand_usd, middle) else (middle, high)
    return high


def _pays(request: Request, scheme: Scheme, on_demand_usd: float, gap_s: float) -> bool:
    piece_s = min(request.job.work_s, PIECE_S)
    asked = with_gap(replace(request, job=replace(request.job, work_s=piece_s)), gap_s)
    timing = timing_for(asked, scheme)
    bound_usd = on_demand_usd * piece_s / request.job.work_s
    # Twice as long as money would last with every node there: what is not done by then does not pay.
    horizon_s = 2.0 * bound_usd / (request.prices.spot_usd_per_node_h * request.job.nodes) * HOUR_S
    runs = simulate(
        asked.job,
        timing,
        asked.hazard,
        runs=RUNS,
        seed=request.seed,
        announced=request.announced,
        horizon_s=horizon_s,
    )
    cost = costs_usd(runs, request.prices.spot, moves_for(asked, scheme, timing)).mean()
    return bool(runs.finished.all() and cost < bound_usd)
