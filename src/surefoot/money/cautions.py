"""What to beware of: everything that can make the forecast wrong, or the bill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from surefoot.money.advice import Advice, window
from surefoot.money.hazards import mean_survival
from surefoot.money.request import Request
from surefoot.money.results import SchemeResult, moves_for
from surefoot.money.schemes import ship_s
from surefoot.money.survival import group_survival
from surefoot.money.transfer import Keeping, Route, routes
from surefoot.money.units import show_duration, show_share, show_usd

RISKY_SHARE = 0.02
"""Events that outlive no replica: above this share a warning is due."""


@dataclass(frozen=True, slots=True)
class Caution:
    """Something that can make the forecast wrong, or the bill."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Trap:
    """A way to the store that was not chosen, and what it would cost."""

    route: str
    title: str
    run_usd: float
    month_usd: float
    share_of_compute: float


def traps(request: Request, result: SchemeResult) -> list[Trap]:
    """Every way to the store for this scheme; the chosen one too."""
    compute_usd = result.cost_usd - result.moving_usd
    return [_trap(request, result, route, compute_usd) for route in routes().values()]


def cautions(request: Request, results: Sequence[SchemeResult], advice: Advice) -> list[Caution]:
    """Everything worth saying, most expensive first."""
    best = next(result for result in results if result.scheme.name == advice.scheme)
    found: list[Caution] = []
    found += _price_warnings(request)
    found += _transfer_warnings(request, best)
    found += _window_warnings(request, results)
    found += _upload_warnings(request, results)
    found += _survival_warnings(request, best)
    found += _run_warnings(request, results, advice)
    return found


def _trap(request: Request, result: SchemeResult, route: Route, compute_usd: float) -> Trap:
    keeping = Keeping(store=request.keeping.store, route=route, keep=request.keeping.keep)
    moves = moves_for(replace(request, keeping=keeping), result.scheme, result.timing)
    run = result.expected
    usd = run.saves * moves.route_usd_per_save + run.loads * moves.back_usd_per_load
    month_usd = usd / run.wall_s * request.month_h * 3600.0
    return Trap(route.name, route.title, usd, month_usd, usd / compute_usd)


def _price_warnings(request: Request) -> list[Caution]:
    spot, base = request.prices.spot_usd_per_node_h, request.prices.on_demand_usd_per_node_h
    if spot < base:
        return []
    text = f"spot costs {spot:.2f} USD a node-hour, on-demand {base:.2f}: spot saves nothing here; take another zone"
    return [Caution("spot_not_below_on_demand", text)]


def _transfer_warnings(request: Request, best: SchemeResult) -> list[Caution]:
    found = []
    compute_usd = best.cost_usd - best.moving_usd
    if best.moving_usd > compute_usd:
        text = (
            f"storage and transfer cost {show_usd(best.moving_usd)} USD, the GPUs {show_usd(compute_usd)}: "
            f"the way is '{request.keeping.route.title}'"
        )
        found.append(Caution("transfer_above_compute", text))
    chosen = request.keeping.route.name
    dear = [trap for trap in traps(request, best) if trap.share_of_compute > 1 and trap.route != chosen]
    if dear:
        listed = ", ".join(f"{trap.route} {show_share(trap.share_of_compute, 0)}" for trap in dear)
        text = f"other ways to the bucket would cost more than the GPUs: {listed} of them"
        found.append(Caution("transfer_traps", text))
    return found


def _window_warnings(request: Request, results: Sequence[SchemeResult]) -> list[Caution]:
    if request.announced <= 0:
        return []
    found = []
    for result in results:
        need = window(request, result.scheme)
        if need.needed_s < inf and not need.fits:
            text = (
                f"{result.scheme.name}: an emergency needs {show_duration(need.needed_s)} of a window of "
                f"{show_duration(need.window_s)}: notices do not help it, it falls back to the bucket"
            )
            found.append(Caution("window_too_short", text))
    return found


def _upload_warnings(request: Request, results: Sequence[SchemeResult]) -> list[Caution]:
    found = []
    for result in results:
        asked = result.asked_interval_s
        if asked is None or result.scheme.save == "blocking":
            continue
        lag, takes = result.timing.lag_s, f"{result.scheme.name}: an upload takes {show_duration(result.timing.lag_s)}"
        if result.stretched:
            text = f"{takes}: the interval becomes {show_duration(result.timing.interval_s)}"
            found.append(Caution("upload_slower_than_interval", text))
        elif lag > 0.8 * asked:
            text = f"{takes}, {show_share(lag / asked, 0)} of the interval: any slowdown delays the next save"
            found.append(Caution("upload_nearly_fills_interval", text))
    slow, step = ship_s(request.job, request.costs, 2), request.job.step_s
    if slow > step:
        text = f"a replica takes {show_duration(slow)}, a step {show_duration(step)}: not each step can be shipped"
        found.append(Caution("replica_slower_than_step", text))
    return found


def _survival_warnings(request: Request, best: SchemeResult) -> list[Caution]:
    scheme, sizes = best.scheme, request.hazard.sizes
    if scheme.memory != "peers":
        return []
    lost = {group: 1.0 - mean_survival(sizes, _survivals(request, group)) for group in (scheme.group, 4)}
    if lost[scheme.group] <= RISKY_SHARE:
        return []
    text = (
        f"{show_share(lost[scheme.group])} of the losses that hit the job take a whole group of {scheme.group} "
        f"(with groups of 4: {show_share(lost[4])}): without a notice they fall back to the bucket"
    )
    return [Caution("correlated_losses", text)]


def _survivals(request: Request, group: int) -> dict[int, float]:
    nodes = request.job.nodes
    return {k: group_survival(nodes, group, k) for k in request.hazard.sizes}


def _run_warnings(request: Request, results: Sequence[SchemeResult], advice: Advice) -> list[Caution]:
    facts = advice.standby_facts
    found = [
        Caution("never_finishes", f"{result.scheme.name}: takes more than eight times its work, or for ever: refused")
        for result in results
        if not result.finishes
    ]
    if request.hazard.memoryless:
        text = "evictions are assumed exponential (Poisson); real ones cluster: use a trace or your own event log"
        found.append(Caution("poisson_assumed", text))
    if any(result.scheme.standby for result in results) and not facts.pays:
        text = f"a warm standby pays only below {show_duration(facts.break_even_gap_s)} between evictions"
        found.append(Caution("standby_does_not_pay", text))
    if not advice.meets_limits:
        found.append(Caution("limits_not_met", "no scheme on spot keeps deadline and budget; see the mix"))
    if not advice.use_spot:
        found.append(Caution("spot_not_worth_it", "on-demand costs no more than the best scheme on spot"))
    return found
