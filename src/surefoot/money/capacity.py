"""The run on on-demand nodes, on reserved ones, and on the best mix."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np

from surefoot.money import mix
from surefoot.money.closed_form import expected
from surefoot.money.deadlines import POLICIES, Availability, Market, Trial, coarser, run_policy
from surefoot.money.hazards import Renewal
from surefoot.money.job import Job, Timing
from surefoot.money.request import Request
from surefoot.money.results import CapacityResult, SchemeResult, Spread
from surefoot.money.simulate import simulate
from surefoot.money.units import HOUR_S

GPU_MTBF_S = 16384 * 54 * 24 * HOUR_S / 419
"""Hardware: 419 unexpected interruptions in 54 days on 16,384 H100 ("The Llama 3 Herd of Models", Meta, 2024)."""
HARDWARE = "419 unexpected interruptions in 54 days on 16,384 H100 (The Llama 3 Herd of Models, Meta, 2024)"
TICK_S = 60.0
POLICY_TICK_S = 300.0
PERIODS = 12
SCENARIOS = 12
MARGINS = (1.0, 1.02, 1.06)
"""Work is taken to be this much more until the plan is on time often enough on other windows, too."""
CHECKED = 400
"""Other windows on which the mix that was found is tried."""


@dataclass(frozen=True, slots=True)
class MixResult:
    """The plan, its own bound, and what it does on windows that it was not made for."""

    request: mix.MixRequest
    mix: mix.Mix
    offer: Availability
    cost: Spread
    finish_s: Spread
    on_time_share: float


def hardware_hazard(gpus: int) -> Renewal:
    return Renewal(mean_gap_s=GPU_MTBF_S / gpus, label="hardware failures", source=HARDWARE)


def on_demand_goodput(request: Request, timing: Timing) -> float:
    """As given, else with hardware failures and the given scheme, which waits for the replaced node."""
    if request.on_demand_goodput is not None:
        return request.on_demand_goodput
    return expected(request.job, timing, hardware_hazard(request.job.gpus)).goodput


def on_demand_usd(request: Request, timing: Timing) -> float:
    """The counterfactual: the whole job on on-demand nodes."""
    wall_h = request.job.work_s / on_demand_goodput(request, timing) / HOUR_S
    return wall_h * request.job.nodes * request.prices.on_demand_usd_per_node_h


def stable_row(request: Request, timing: Timing, name: str, usd_per_node_h: float, detail: str) -> CapacityResult:
    """On-demand or reserved nodes for the whole run."""
    if request.on_demand_goodput is not None:
        walls = np.full(1, request.job.work_s / request.on_demand_goodput)
    else:
        hazard = hardware_hazard(request.job.gpus)
        walls = simulate(request.job, timing, hazard, runs=request.runs, seed=request.seed).wall_s
    cost = walls / HOUR_S * request.job.nodes * usd_per_node_h
    return CapacityResult(name, detail, Spread.of(cost), Spread.of(walls), _on_time(walls, request))


def spot_row(request: Request, result: SchemeResult) -> CapacityResult:
    share = result.on_time_share(request.limits.deadline_s)
    return CapacityResult("spot", result.scheme.name, result.cost, result.wall_s, share)


def best_mix(request: Request, result: SchemeResult, stable: Timing) -> MixResult:
    """The mix for the recommended scheme. `InfeasibleMixError` when the limits cannot be kept together."""
    offer = availability(request)
    asked = _mix_request(request, result, on_demand_goodput(request, stable))
    for margin in MARGINS:
        harder = replace(asked, work_node_h=asked.work_node_h * margin)
        found = _try_mix(request, asked, harder, offer, result.moving_usd)
        if found.on_time_share >= 1.0 - asked.miss_share:
            break
    return found


def _try_mix(
    request: Request, asked: mix.MixRequest, harder: mix.MixRequest, offer: Availability, moving_usd: float
) -> MixResult:
    """Solve the harder problem, then play its plan on windows that it was not made for."""
    horizon_h, nodes = asked.period_h * PERIODS, request.job.nodes
    tick_s = min(offer.tick_s, asked.period_h * HOUR_S)
    made_for = mix.windows(offer.nodes, tick_s, asked.period_h, PERIODS, SCENARIOS, request.seed)
    yielded = mix.yields(made_for, PERIODS, nodes)
    found = mix.polish(mix.solve(harder, yielded), harder, yielded)
    others = mix.windows(offer.nodes, tick_s, asked.period_h, PERIODS, CHECKED, request.seed + 1)
    cost, finish_h = mix.replay(found, asked, mix.yields(others, PERIODS, nodes))
    cost = cost + moving_usd
    finish_s = np.where(np.isfinite(finish_h), finish_h, horizon_h) * HOUR_S
    share = float(np.isfinite(finish_h).mean())
    return MixResult(harder, found, offer, Spread.of(cost), Spread.of(finish_s), share)


def mix_row(result: MixResult) -> CapacityResult:
    return CapacityResult("best mix", describe_mix(result.mix), result.cost, result.finish_s, result.on_time_share)


def describe_mix(found: mix.Mix) -> str:
    spot, bought = found.spot, found.on_demand
    return f"{found.reserved} reserved, {_span(bought)} on-demand, up to {_span(spot)} spot nodes"


def availability(request: Request) -> Availability:
    """What spot offers: the given trace, else a long series made from the hazard."""
    if request.offer is not None:
        return request.offer
    ticks = 50_000
    nodes = mix.from_hazard(request.hazard, request.job.nodes, request.costs.replacement_s, TICK_S, ticks, request.seed)
    return Availability(f"made from: {request.hazard.label}", TICK_S, nodes)


def policy_trials(request: Request, offer: Availability, restart_s: float) -> list[Trial]:
    """The deadline policies on the offered availability. Empty without a deadline."""
    deadline_s = request.limits.deadline_s
    if deadline_s is None or deadline_s <= request.job.work_s:
        return []
    offer = coarser(offer, POLICY_TICK_S)
    market = Market(
        spot_usd_per_node_h=request.prices.spot_usd_per_node_h,
        on_demand_usd_per_node_h=request.prices.on_demand_usd_per_node_h,
    )
    return [
        run_policy(name, request.job, market, offer, deadline_s=deadline_s, restart_s=restart_s, seed=request.seed)
        for name in POLICIES
    ]


def _mix_request(request: Request, result: SchemeResult, stable_goodput: float) -> mix.MixRequest:
    job, limits = request.job, request.limits
    goodput = result.expected.goodput
    horizon_s = limits.deadline_s or ceil(job.work_s / min(goodput, stable_goodput) * 1.5 / HOUR_S) * HOUR_S
    return mix.MixRequest(
        work_node_h=job.work_s * job.nodes / HOUR_S,
        nodes=job.nodes,
        period_h=horizon_s / HOUR_S / PERIODS,
        on_demand_usd=request.prices.on_demand_usd_per_node_h,
        spot_usd=request.prices.spot_usd_per_node_h,
        reserved_usd=request.prices.reserved_usd_per_node_h,
        # Availability takes away the missing nodes: what is left is the useful share of those that are there.
        spot_goodput=result.paid_goodput,
        stable_goodput=stable_goodput,
        world_sizes=_allowed(job),
        core_nodes=limits.core_nodes,
        miss_share=limits.miss_share,
        budget_usd=limits.budget_usd,
        tail_weight=request.tail_weight,
        delay_usd_per_h=request.delay_usd_per_h,
    )


def _allowed(job: Job) -> tuple[int, ...]:
    """World sizes for the mix, a pause among them; empty when every number will do."""
    sizes = (0, *sorted({job.usable(n) for n in range(1, job.nodes + 1)} - {0}))
    return () if len(sizes) == job.nodes + 1 else sizes


def _on_time(walls: np.ndarray[tuple[int, ...], np.dtype[np.float64]], request: Request) -> float:
    deadline_s = request.limits.deadline_s or inf
    return float((walls <= deadline_s).mean())


def _span(values: tuple[int, ...]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
