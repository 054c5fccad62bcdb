"""The rows of a plan: what each scheme and each kind of capacity is expected to cost, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from surefoot.money.closed_form import Outcome, expected
from surefoot.money.hazards import Floats
from surefoot.money.job import Timing
from surefoot.money.money import CostLine, Saving, cost_lines, cost_usd, costs_usd, moving_usd
from surefoot.money.phases import Phase
from surefoot.money.request import Request
from surefoot.money.schemes import Scheme, timing_of
from surefoot.money.simulate import Runs, simulate
from surefoot.money.transfer import MoveRates, move_rates

HORIZON_TIMES = 8.0
MOST_EVENTS = 200_000
LEAST_RUNS = 200
"""A run that takes this many times its work is cut: the scheme does not get there."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution of runs."""

    mean: float
    p05: float
    p25: float
    p50: float
    p75: float
    p95: float

    @classmethod
    def of(cls, values: Floats) -> Spread:
        low, lower, middle, upper, high = (float(q) for q in np.percentile(values, (5, 25, 50, 75, 95)))
        return cls(float(values.mean()), low, lower, middle, upper, high)


@dataclass(frozen=True, slots=True)
class SchemeResult:
    """One scheme on spot nodes."""

    scheme: Scheme
    timing: Timing
    closed: Outcome
    simulated: Outcome
    lines: tuple[CostLine, ...]
    """Of the expected outcome; they add up to ``cost_usd``."""
    cost_usd: float
    cost: Spread
    wall_s: Spread
    costs_usd: Floats
    """One entry a simulated run."""
    walls_s: Floats
    saving: Saving
    memoryless: bool
    finishes: bool
    asked_interval_s: float | None

    @property
    def expected(self) -> Outcome:
        """The closed form where it is exact, else the mean of the simulation."""
        return self.closed if self.memoryless else self.simulated

    @property
    def paid_goodput(self) -> float:
        """Useful share of what is billed: nodes that are away are not."""
        spent = self.expected.node_s
        return spent[Phase.USEFUL] / sum(spent.values())

    @property
    def moving_usd(self) -> float:
        return moving_usd(self.lines)

    def on_time_share(self, deadline_s: float | None) -> float:
        return 1.0 if deadline_s is None else float((self.walls_s <= deadline_s).mean())

    @property
    def stretched(self) -> bool:
        """Uploads do not allow the interval that was asked for."""
        asked = self.asked_interval_s
        return asked is not None and self.timing.interval_s > asked * (1 + 1e-9)


@dataclass(frozen=True, slots=True)
class CapacityResult:
    """One kind of capacity for the whole run."""

    name: str
    detail: str
    cost: Spread
    wall_s: Spread
    on_time_share: float


def run_scheme(request: Request, scheme: Scheme, on_demand_usd: float, baseline_usd: float) -> SchemeResult:
    """Both engines on one scheme. ``baseline_usd``: expected cost of the baseline scheme on spot."""
    job, hazard = request.job, request.hazard
    timing = timing_for(request, scheme)
    moves = moves_for(request, scheme, timing)
    closed = expected(job, timing, hazard, request.announced)
    runs = simulate(
        job,
        timing,
        hazard,
        runs=_affordable(request.runs, closed),
        seed=request.seed,
        announced=request.announced,
        horizon_s=HORIZON_TIMES * job.work_s,
    )
    simulated = runs.mean()
    best = closed if hazard.memoryless else simulated
    costs = costs_usd(runs, request.prices.spot, moves)
    total = cost_usd(best, request.prices.spot, moves)
    return SchemeResult(
        scheme=scheme,
        timing=timing,
        closed=closed,
        simulated=simulated,
        lines=tuple(cost_lines(best, request.prices.spot, moves)) if np.isfinite(total) else (),
        cost_usd=total,
        cost=Spread.of(costs),
        wall_s=Spread.of(runs.wall_s),
        costs_usd=costs,
        walls_s=runs.wall_s,
        saving=Saving(on_demand_usd, baseline_usd, total),
        memoryless=hazard.memoryless,
        finishes=finishes(runs),
        asked_interval_s=scheme.interval_s,
    )


def _affordable(runs: int, outcome: Outcome) -> int:
    """Fewer runs of a scheme that takes thousands of evictions to end: its spread is small beside its mean."""
    events = min(outcome.events, 1e5) if np.isfinite(outcome.events) else 1e5
    return max(min(runs, LEAST_RUNS), min(runs, int(MOST_EVENTS / max(events, 1.0))))


def expected_cost_usd(request: Request, scheme: Scheme) -> float:
    """Closed form only: quick enough to ask it hundreds of times."""
    timing = timing_for(request, scheme)
    moves = moves_for(request, scheme, timing)
    return cost_usd(expected(request.job, timing, request.hazard, request.announced), request.prices.spot, moves)


def timing_for(request: Request, scheme: Scheme) -> Timing:
    return timing_of(scheme, request.job, request.costs, request.hazard, request.announced, request.window_s)


def moves_for(request: Request, scheme: Scheme, timing: Timing) -> MoveRates:
    replicas = scheme.group - 1 if scheme.memory == "peers" else 0
    return move_rates(request.job, timing, request.keeping, replicas, request.month_h)


def finishes(runs: Runs) -> bool:
    """True when at most one run in a hundred was cut."""
    return float(runs.finished.mean()) >= 0.99
