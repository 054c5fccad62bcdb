"""A plan as plain JSON values. Every key carries its unit; shares are 0 … 1; what is infinite is null."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

from surefoot.money.planner import Months, Plan
from surefoot.money.results import CapacityResult, SchemeResult, Spread
from surefoot.money.units import HOUR_S

Json = dict[str, Any]


def plan_json(plan: Plan) -> Json:
    """The whole answer. The keys of each scheme that others rely on: scheme, goodput, net_saving, price_saving,
    scheme_saving, lost_steps, cost_usd, p95_cost_usd."""
    request = plan.request
    document = {
        "version": 1,
        "currency": "USD",
        "name": request.name,
        "assumptions": _assumptions(plan),
        "schemes": [_scheme(result, request.limits.deadline_s) for result in plan.schemes],
        "capacity": [_capacity(row) for row in plan.capacity],
        "mix": _mix(plan),
        "deadline_policies": [_trial(trial, plan.best.timing.restart_s) for trial in plan.trials]
        + [_trial(trial, 600.0) for trial in plan.slow_trials],
        "recommendation": asdict(plan.advice),
        "emergency": {**asdict(plan.window), "share_of_window": plan.window.share},
        "tornado": [asdict(bar) for bar in plan.bars],
        "pareto": [asdict(point) for point in plan.points],
        "warnings": [asdict(caution) for caution in plan.cautions],
        "transfer": [asdict(trap) for trap in plan.traps],
        "break_even": asdict(plan.break_even),
        "months": _months(plan.months),
    }
    return _plain(document)  # type: ignore[no-any-return]


def _assumptions(plan: Plan) -> Json:
    request = plan.request
    noted = {
        note.name: {"value": note.value, "unit": note.unit, "source": note.source, "as_of": note.as_of}
        for note in request.assumptions
    }
    model = {
        "hazard": request.hazard.label,
        "closed_form_exact": request.hazard.memoryless,
        "loss_sizes": {str(k): share for k, share in request.hazard.sizes.items()},
        "baseline": request.baseline,
        "on_demand_goodput": plan.on_demand_goodput,
        "on_demand_usd": plan.on_demand_usd,
        "simulated_runs": request.runs,
        "seed": request.seed,
        "hours_of_a_month": request.month_h,
        "estimate": "forecast, not a bill",
    }
    return {**noted, "model": model}


def _scheme(result: SchemeResult, deadline_s: float | None) -> Json:
    outcome = result.expected
    return {
        "scheme": result.scheme.name,
        "title": result.scheme.title,
        "goodput": outcome.goodput,
        "net_saving": result.saving.net,
        "price_saving": result.saving.price,
        "scheme_saving": result.saving.scheme,
        "lost_steps": outcome.lost_steps,
        "cost_usd": result.cost_usd,
        "p95_cost_usd": result.cost.p95,
        "redone_h": outcome.lost_work_s / HOUR_S,
        "evictions": outcome.events,
        "wall_h": outcome.wall_s / HOUR_S,
        "cost_distribution_usd": _spread(result.cost),
        "wall_distribution_h": _spread(result.wall_s, HOUR_S),
        "on_time_share": result.on_time_share(deadline_s),
        "finishes": result.finishes,
        "goodput_closed_form": result.closed.goodput,
        "goodput_simulated": result.simulated.goodput,
        "interval_s": result.timing.interval_s,
        "stall_s": result.timing.stall_s,
        "durable_lag_s": result.timing.lag_s,
        "load_s": result.timing.load_s,
        "saved_usd": {
            "net": result.saving.on_demand_usd - result.saving.cost_usd,
            "price": result.saving.on_demand_usd - result.saving.baseline_usd,
            "scheme": result.saving.baseline_usd - result.saving.cost_usd,
        },
        "phases_node_h": {phase.value: node_s / HOUR_S for phase, node_s in outcome.node_s.items()},
        "cost_components": [asdict(line) for line in result.lines],
    }


def _capacity(row: CapacityResult) -> Json:
    return {
        "capacity": row.name,
        "detail": row.detail,
        "cost_usd": _spread(row.cost),
        "wall_h": _spread(row.wall_s, HOUR_S),
        "on_time_share": row.on_time_share,
    }


def _mix(plan: Plan) -> Json:
    if plan.mix is None:
        return {"feasible": False, "why": plan.mix_note}
    found, asked = plan.mix.mix, plan.mix.request
    return {
        "feasible": True,
        "reserved_nodes": found.reserved,
        "on_demand_nodes_by_period": found.on_demand,
        "spot_nodes_by_period": found.spot,
        "period_h": asked.period_h,
        "objective_usd": found.objective_usd,
        "bound_usd": found.bound_usd,
        "relative_gap": found.gap,
        "on_time_share": plan.mix.on_time_share,
        "availability": plan.mix.offer.name,
        "spot_usd_per_node_h": asked.spot_usd,
    }


def _trial(trial: Any, restart_s: float) -> Json:
    return {
        "policy": trial.policy,
        "restart_s": restart_s,
        "cost_usd": float(trial.cost_usd.mean()),
        "late_share": trial.late_share,
    }


def _months(months: Months) -> Json:
    horizon = months.need.months
    return {
        "months": horizon,
        "utilisation": months.need.utilisation,
        "ways": [
            {**asdict(way), "total_usd": way.cumulated_usd(horizon)[-1], "cumulated_usd": way.cumulated_usd(horizon)}
            for way in months.ways
        ],
        "payback": [{"way": way, "against": other, "months": value} for way, other, value in months.paybacks],
        "break_even_utilisation_of_reserving": months.break_even_utilisation,
        "adoption_payback_months": months.adoption_months,
        "scheme_saving_usd_per_month": months.monthly_scheme_saving_usd,
    }


def _spread(spread: Spread, divisor: float = 1.0) -> Json:
    return {name: value / divisor for name, value in asdict(spread).items()}


def _plain(value: Any) -> Any:
    """JSON has no infinity: null."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return float(value) if isfinite(value) else None
    return value
