"""Which input matters most: each one alone low and high, all schemes priced again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from surefoot.money.hazards import Renewal
from surefoot.money.request import Request
from surefoot.money.results import expected_cost_usd
from surefoot.money.schemes import Scheme
from surefoot.money.units import show_duration

Change = Callable[[Request], Request]


@dataclass(frozen=True, slots=True)
class Bar:
    """Expected cost of the recommended scheme with one input low and high; the cheapest scheme there."""

    name: str
    low: str
    high: str
    low_usd: float
    high_usd: float
    low_best: str
    high_best: str

    @property
    def swing_usd(self) -> float:
        return abs(self.high_usd - self.low_usd)


def bars(request: Request, scheme: Scheme) -> list[Bar]:
    """Widest first. Closed form; a hazard that is not memoryless is taken as if it were, with its mean and sizes."""
    made = [_bar(_memoryless(request), scheme, *entry) for entry in _entries(request)]
    return sorted(made, key=lambda bar: -bar.swing_usd)


def _bar(request: Request, scheme: Scheme, name: str, low: str, high: str, down: Change, up: Change) -> Bar:
    lower, higher = down(request), up(request)
    return Bar(
        name,
        low,
        high,
        expected_cost_usd(lower, scheme),
        expected_cost_usd(higher, scheme),
        _cheapest(lower),
        _cheapest(higher),
    )


def _cheapest(request: Request) -> str:
    return min(request.schemes, key=lambda scheme: expected_cost_usd(request, scheme)).name


def _entries(request: Request) -> list[tuple[str, str, str, Change, Change]]:
    gap_s = request.hazard.mean_gap_s
    return [
        ("time between evictions", show_duration(gap_s / 4), show_duration(gap_s * 4), _gap(0.25), _gap(4.0)),
        ("spot price", "−30 %", "+30 %", _spot(0.7), _spot(1.3)),
        ("evictions announced", "none", "all", _announced(0.0), _announced(1.0)),
        ("restart", "÷ 4", "× 10", _cost("restart_s", 0.25), _cost("restart_s", 10.0)),
        ("wait for a node", "÷ 4", "× 4", _cost("replacement_s", 0.25), _cost("replacement_s", 4.0)),
        ("copy to memory", "hidden", "× 4", _cost("copy_s", 0.0), _cost("copy_s", 4.0)),
        ("bandwidth to the bucket", "÷ 4", "× 4", _cost("bucket_bytes_per_s", 0.25), _cost("bucket_bytes_per_s", 4.0)),
        ("bandwidth to peers", "÷ 40", "× 4", _cost("peer_bytes_per_s", 0.025), _cost("peer_bytes_per_s", 4.0)),
        ("state size", "÷ 2", "× 2", _state(0.5), _state(2.0)),
        ("step time", "÷ 2", "× 4", _step(0.5), _step(4.0)),
    ]


def _memoryless(request: Request) -> Request:
    return request if request.hazard.memoryless else with_gap(request, request.hazard.mean_gap_s)


def with_gap(request: Request, gap_s: float) -> Request:
    """The same request with another mean time between evictions, memoryless."""
    hazard = request.hazard
    return replace(request, hazard=Renewal(mean_gap_s=gap_s, sizes=hazard.sizes, source=hazard.source))


def _gap(factor: float) -> Change:
    return lambda request: with_gap(request, request.hazard.mean_gap_s * factor)


def _spot(factor: float) -> Change:
    def change(request: Request) -> Request:
        spot_usd = request.prices.spot_usd_per_node_h * factor
        return replace(request, prices=replace(request.prices, spot_usd_per_node_h=spot_usd))

    return change


def _announced(share: float) -> Change:
    return lambda request: replace(request, announced=share)


def _cost(name: str, factor: float) -> Change:
    def change(request: Request) -> Request:
        value = getattr(request.costs, name) * factor
        return replace(request, costs=replace(request.costs, **{name: value}))

    return change


def _state(factor: float) -> Change:
    return lambda request: replace(request, job=replace(request.job, state_bytes=request.job.state_bytes * factor))


def _step(factor: float) -> Change:
    return lambda request: replace(request, job=replace(request.job, step_s=request.job.step_s * factor))
