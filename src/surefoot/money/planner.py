"""One request, one plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from surefoot.errors import ConfigError
from surefoot.money import advice as advising
from surefoot.money import cautions as warning
from surefoot.money import ownership, tornado
from surefoot.money.break_even import break_even_gap_s
from surefoot.money.capacity import (
    MixResult,
    availability,
    best_mix,
    describe_mix,
    mix_row,
    on_demand_goodput,
    on_demand_usd,
    policy_trials,
    spot_row,
    stable_row,
)
from surefoot.money.deadlines import Trial
from surefoot.money.job import Timing
from surefoot.money.mix import InfeasibleMixError
from surefoot.money.request import Request
from surefoot.money.results import CapacityResult, SchemeResult, run_scheme, timing_for
from surefoot.money.schemes import Scheme, by_name
from surefoot.money.units import HOUR_S


@dataclass(frozen=True, slots=True)
class Point:
    """One option in the picture of cost against time."""

    name: str
    kind: str
    cost_usd: float
    wall_s: float
    on_front: bool


@dataclass(frozen=True, slots=True)
class Months:
    """The comparison over months."""

    need: ownership.Need
    ways: tuple[ownership.Way, ...]
    paybacks: tuple[tuple[str, str, float], ...]
    """(way, alternative, months)."""
    break_even_utilisation: float | None
    """Of the reserved price against spot with the recommended scheme."""
    adoption_months: float
    monthly_scheme_saving_usd: float


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The hazard at which spot stops paying."""

    best_gap_s: float
    """Mean time between evictions below which the recommended scheme on spot costs more than on-demand."""
    baseline_gap_s: float
    """The same for the baseline scheme."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer."""

    request: Request
    schemes: tuple[SchemeResult, ...]
    capacity: tuple[CapacityResult, ...]
    on_demand_goodput: float
    on_demand_usd: float
    advice: advising.Advice
    cautions: tuple[warning.Caution, ...]
    window: advising.Window
    traps: tuple[warning.Trap, ...]
    bars: tuple[tornado.Bar, ...]
    points: tuple[Point, ...]
    mix: MixResult | None
    mix_note: str
    trials: tuple[Trial, ...]
    slow_trials: tuple[Trial, ...]
    """The deadline policies with a restart of ten minutes."""
    months: Months
    break_even: BreakEven

    @property
    def best(self) -> SchemeResult:
        return result_named(self.schemes, self.advice.scheme)


SLOW_RESTART_S = 600.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every scheme by both engines, and what follows from that alone."""

    request: Request
    schemes: tuple[SchemeResult, ...]
    on_demand_goodput: float
    on_demand_usd: float
    stable: Timing
    """The scheme of nodes that only fail."""
    advice: advising.Advice
    cautions: tuple[warning.Caution, ...]

    @property
    def best(self) -> SchemeResult:
        return result_named(self.schemes, self.advice.scheme)


def compare(request: Request) -> Comparison:
    """The schemes side by side, the recommendation and the warnings."""
    baseline = by_name(request.schemes, request.baseline)
    stable = _stable_timing(request, baseline)
    counterfactual = on_demand_usd(request, stable)
    baseline_usd = run_scheme(request, baseline, counterfactual, 0.0).cost_usd
    results = tuple(run_scheme(request, scheme, counterfactual, baseline_usd) for scheme in request.schemes)
    goodput = on_demand_goodput(request, stable)
    advised = advising.recommend(request, results, goodput)
    cautions = tuple(warning.cautions(request, results, advised))
    return Comparison(request, results, goodput, counterfactual, stable, advised, cautions)


def make_plan(request: Request) -> Plan:
    """The comparison, every kind of capacity, and what the answer hangs on."""
    compared = compare(request)
    best, stable = compared.best, compared.stable
    mixed, note = _mix(request, best, stable)
    capacity = _capacity(request, best, stable, mixed)
    offer = availability(request)
    baseline = result_named(compared.schemes, request.baseline)
    return Plan(
        request=request,
        schemes=compared.schemes,
        capacity=capacity,
        on_demand_goodput=compared.on_demand_goodput,
        on_demand_usd=compared.on_demand_usd,
        advice=compared.advice,
        cautions=compared.cautions,
        window=advising.window(request, best.scheme),
        traps=tuple(warning.traps(request, best)),
        bars=tuple(tornado.bars(request, best.scheme)),
        points=_points(compared.schemes, capacity),
        mix=mixed,
        mix_note=note,
        trials=tuple(policy_trials(request, offer, best.timing.restart_s)),
        slow_trials=tuple(policy_trials(request, offer, SLOW_RESTART_S)),
        months=_months(request, best, compared.on_demand_goodput, baseline.paid_goodput),
        break_even=BreakEven(
            break_even_gap_s(request, best.scheme, compared.on_demand_usd),
            break_even_gap_s(request, baseline.scheme, compared.on_demand_usd),
        ),
    )


def result_named(results: Sequence[SchemeResult], name: str) -> SchemeResult:
    return next(result for result in results if result.scheme.name == name)


def _stable_timing(request: Request, baseline: Scheme) -> Timing:
    """On nodes that only fail: the best scheme there is for them, which waits for the repaired node."""
    tuned = [scheme for scheme in request.schemes if scheme.memory == "peers" and not scheme.standby]
    return replace(timing_for(request, tuned[0] if tuned else baseline), shrink=False, standby=0)


def _mix(request: Request, best: SchemeResult, stable: Timing) -> tuple[MixResult | None, str]:
    try:
        found = best_mix(request, best, stable)
    except (InfeasibleMixError, ConfigError) as error:
        return None, str(error)
    return found, describe_mix(found.mix)


def _capacity(
    request: Request, best: SchemeResult, stable: Timing, mixed: MixResult | None
) -> tuple[CapacityResult, ...]:
    prices = request.prices
    rows = [stable_row(request, stable, "on-demand", prices.on_demand_usd_per_node_h, "every node, whole run")]
    if prices.reserved_usd_per_node_h is not None:
        detail = "hours of this run only; the rest of the term must be used too"
        rows.append(stable_row(request, stable, "reserved", prices.reserved_usd_per_node_h, detail))
    rows.append(spot_row(request, best))
    if mixed is not None:
        rows.append(mix_row(mixed))
    return tuple(rows)


def _points(results: Sequence[SchemeResult], capacity: Sequence[CapacityResult]) -> tuple[Point, ...]:
    found = [(r.scheme.name, "scheme", r.cost_usd, r.expected.wall_s) for r in results if r.finishes]
    found += [(row.name, "capacity", row.cost.mean, row.wall_s.mean) for row in capacity if row.name != "spot"]
    return tuple(
        Point(name, kind, cost, wall, not any(_dominates(other, (cost, wall)) for other in found))
        for name, kind, cost, wall in found
    )


def _dominates(other: tuple[str, str, float, float], mine: tuple[float, float]) -> bool:
    cost, wall = other[2], other[3]
    return cost <= mine[0] and wall <= mine[1] and (cost, wall) != mine


def _months(request: Request, best: SchemeResult, stable_goodput: float, base_goodput: float) -> Months:
    asked, job, prices = request.ownership, request.job, request.prices
    wall_h = best.expected.wall_s / HOUR_S
    storage = [line.cost_usd for line in best.lines if line.name in ("storage", "requests")]
    egress = [line.cost_usd for line in best.lines if line.name.startswith("transfer")]
    busy_h = request.month_h * asked.utilisation
    need = ownership.Need(
        gpus=job.gpus,
        utilisation=asked.utilisation,
        month_h=request.month_h,
        months=asked.months,
        storage_usd_per_month=sum(storage) / wall_h * busy_h,
        egress_usd_per_month=sum(egress) / wall_h * busy_h,
    )
    adoption_usd = asked.engineer_h * asked.usd_per_engineer_h
    ways = _ways(request, need, best, stable_goodput, base_goodput, adoption_usd)
    surefoot, plain = ways[-1], ways[-2]
    saved_usd = plain.monthly_usd - surefoot.monthly_usd
    spot_usd = prices.spot_usd_per_node_h / job.gpus_per_node
    reserved_usd = prices.reserved_usd_per_node_h
    paid_goodput = best.paid_goodput
    return Months(
        need=need,
        ways=ways,
        paybacks=tuple(
            (way.name, other.name, ownership.payback_months(way, other))
            for way in ways
            for other in (ways[0], surefoot)
            if way.upfront_usd > 0 and way is not other
        ),
        break_even_utilisation=None
        if reserved_usd is None
        else ownership.break_even_utilisation(reserved_usd / job.gpus_per_node, spot_usd, paid_goodput),
        adoption_months=ownership.adoption_payback_months(asked.engineer_h, asked.usd_per_engineer_h, saved_usd),
        monthly_scheme_saving_usd=saved_usd,
    )


def _ways(
    request: Request,
    need: ownership.Need,
    best: SchemeResult,
    stable_goodput: float,
    base_goodput: float,
    adoption_usd: float,
) -> tuple[ownership.Way, ...]:
    asked, job, prices = request.ownership, request.job, request.prices
    per_gpu = 1.0 / job.gpus_per_node
    on_demand, spot = prices.on_demand_usd_per_node_h * per_gpu, prices.spot_usd_per_node_h * per_gpu
    ways = [ownership.rented(need, "on-demand", on_demand, stable_goodput)]
    for name, (term, upfront, discount) in asked.discounts.items():
        ways.append(ownership.reserved(need, name, on_demand, discount, upfront, term))
    if asked.usd_per_gpu is not None:
        owned = (asked.usd_per_gpu, asked.opex_usd_per_gpu_month, asked.residual_usd_per_gpu)
        ways.append(ownership.owned(need, "owned", *owned))
    ways.append(ownership.rented(need, f"spot, {request.baseline}", spot, base_goodput))
    ways.append(ownership.rented(need, "spot with Surefoot", spot, best.paid_goodput, upfront_usd=adoption_usd))
    return tuple(ways)
