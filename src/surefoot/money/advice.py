"""What to do, and what to beware of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from surefoot.money.ownership import standby_break_even_delay_usd_per_h, standby_break_even_gap_s
from surefoot.money.request import Request
from surefoot.money.results import SchemeResult, expected_cost_usd, timing_for
from surefoot.money.schemes import Scheme, emergency_s
from surefoot.money.units import show_share, show_usd

COLD_AT_LEAST = 0.05
"""For the interval one loss in twenty is taken to fall back to the bucket, however safe the replicas look."""
RISKY_SHARE = 0.02
"""Events that outlive no replica: above this share a warning is due."""
_INTERVALS_S = (60.0, 120.0, 180.0, 300.0, 450.0, 600.0, 900.0, 1200.0, 1800.0)


@dataclass(frozen=True, slots=True)
class Window:
    """What an emergency needs of the eviction window."""

    scheme: str
    window_s: float
    needed_s: float
    """Infinite for schemes that save nothing in an emergency."""

    @property
    def share(self) -> float:
        return self.needed_s / self.window_s if self.window_s > 0 else inf

    @property
    def fits(self) -> bool:
        return self.needed_s <= self.window_s


@dataclass(frozen=True, slots=True)
class Standby:
    """When a warm node pays."""

    pays: bool
    break_even_gap_s: float
    break_even_delay_usd_per_h: float


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommendation."""

    scheme: str
    reason: str
    next_best: str
    interval_s: float
    tiers: tuple[str, ...]
    replicas: int
    standby: int
    standby_facts: Standby
    meets_limits: bool
    use_spot: bool
    least_goodput: float
    """Spot is worth it when its goodput is above this."""


def recommend(request: Request, results: Sequence[SchemeResult], on_demand_goodput: float) -> Advice:
    """The cheapest scheme that keeps the limits, delay included; else the one most often on time."""
    keeping = [result for result in results if _keeps_limits(request, result)]
    ranked = sorted(keeping or results, key=lambda result: _order(request, result, bool(keeping)))
    best = ranked[0]
    scheme, prices = best.scheme, request.prices
    least = on_demand_goodput * prices.spot_usd_per_node_h / prices.on_demand_usd_per_node_h
    return Advice(
        scheme=scheme.name,
        reason=_reason(request, best, bool(keeping)),
        next_best=ranked[1].scheme.name if len(ranked) > 1 else "",
        interval_s=best_interval_s(request, scheme),
        tiers=_tiers(scheme),
        replicas=scheme.group - 1 if scheme.memory == "peers" else 0,
        standby=scheme.standby,
        standby_facts=standby_facts(request),
        meets_limits=bool(keeping),
        use_spot=best.cost_usd < best.saving.on_demand_usd,
        least_goodput=least,
    )


def best_interval_s(request: Request, scheme: Scheme) -> float:
    """Durable interval of least expected cost, up to 30 minutes. A tuned or blocking scheme keeps its own."""
    if scheme.save == "blocking":
        return timing_for(request, scheme).interval_s
    careful = replace(request, announced=min(request.announced, 1.0 - COLD_AT_LEAST))
    least = replace(scheme, group=1, memory="own") if scheme.memory == "peers" else scheme

    def cost(interval_s: float) -> float:
        return expected_cost_usd(careful, replace(least, interval_s=interval_s))

    chosen = min(_INTERVALS_S, key=cost)
    return timing_for(request, replace(scheme, interval_s=chosen)).interval_s


def standby_facts(request: Request) -> Standby:
    """Against waiting for a replacement with all other nodes idle."""
    rates, costs, nodes = request.prices.spot, request.costs, request.job.nodes
    gap_s = standby_break_even_gap_s(nodes, costs.replacement_s, rates.node_usd_per_h, rates.standby_usd_per_h)
    delay = standby_break_even_delay_usd_per_h(
        nodes, costs.replacement_s, request.hazard.mean_gap_s, rates.node_usd_per_h, rates.standby_usd_per_h
    )
    pays = request.hazard.mean_gap_s < gap_s or (delay > 0 and request.delay_usd_per_h >= delay)
    return Standby(pays, gap_s, delay)


def window(request: Request, scheme: Scheme) -> Window:
    return Window(scheme.name, request.window_s, emergency_s(scheme, request.job, request.costs))


def _order(request: Request, result: SchemeResult, keeps: bool) -> tuple[bool, float, float]:
    """Best first: by cost with delay; where no scheme keeps the limits, first those that end, most often on time."""
    delay_usd = request.delay_usd_per_h * result.expected.wall_s / 3600.0
    on_time = 0.0 if keeps else result.on_time_share(request.limits.deadline_s)
    return not result.finishes, -on_time, result.cost_usd + delay_usd


def _keeps_limits(request: Request, result: SchemeResult) -> bool:
    limits = request.limits
    on_time = result.on_time_share(limits.deadline_s) >= 1.0 - limits.miss_share
    return result.finishes and on_time and (limits.budget_usd is None or result.cost.p95 <= limits.budget_usd)


def _tiers(scheme: Scheme) -> tuple[str, ...]:
    memory = {"none": (), "own": ("local_ram",), "peers": ("local_ram", "peer_ram")}[scheme.memory]
    return (*memory, "object")


def _reason(request: Request, best: SchemeResult, keeps: bool) -> str:
    if not keeps:
        return "no scheme keeps every limit; this one is on time most often"
    deadline_s = request.limits.deadline_s
    on_time = "" if deadline_s is None else f", on time in {show_share(best.on_time_share(deadline_s))}"
    return f"least expected cost, {show_usd(best.cost_usd)} USD at goodput {best.expected.goodput:.3f}{on_time}"
