"""What a plan is asked for: the job, its surroundings, and the limits it must keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from surefoot.errors import ConfigError
from surefoot.money.deadlines import Availability
from surefoot.money.hazards import Hazard
from surefoot.money.job import Job
from surefoot.money.money import NodeRates
from surefoot.money.schemes import Costs, Scheme
from surefoot.money.transfer import Keeping
from surefoot.money.units import MONTH_H


@dataclass(frozen=True, slots=True)
class Assumption:
    """One input of a forecast, with where it comes from."""

    name: str
    value: float | str
    unit: str
    source: str
    as_of: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Dollars for an hour of one node. None: not to be had."""

    on_demand_usd_per_node_h: float
    spot_usd_per_node_h: float
    reserved_usd_per_node_h: float | None = None
    standby_usd_per_node_h: float | None = None
    """None: a standby is a spot node."""

    def __post_init__(self) -> None:
        for name in ("on_demand_usd_per_node_h", "spot_usd_per_node_h"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: give a positive price")

    @property
    def spot(self) -> NodeRates:
        standby = self.standby_usd_per_node_h
        return NodeRates(self.spot_usd_per_node_h, self.spot_usd_per_node_h if standby is None else standby)

    @property
    def on_demand(self) -> NodeRates:
        return NodeRates(self.on_demand_usd_per_node_h, self.on_demand_usd_per_node_h)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the plan must keep."""

    deadline_s: float | None = None
    budget_usd: float | None = None
    """At most this, also in a bad run (p95)."""
    miss_share: float = 0.05
    """α: the deadline may be missed with this probability."""
    core_nodes: int = 0
    """Nodes that must not be spot."""
    data_regions: tuple[str, ...] = ()
    """Patterns of regions where the data may lie; empty: anywhere."""

    def check_region(self, region: str, what: str) -> None:
        """`ConfigError` when ``what`` would lie outside the allowed regions."""
        if self.data_regions and not any(fnmatchcase(region, pattern) for pattern in self.data_regions):
            allowed, place = ", ".join(self.data_regions), region or "an unknown region"
            raise ConfigError(f"{what} would lie in {place}; the data may lie in {allowed} only")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ownership:
    """Inputs of the comparison over months."""

    months: int = 36
    utilisation: float = 1.0
    usd_per_gpu: float | None = None
    """Price of a bought GPU with its share of the server; None: buying is not compared."""
    opex_usd_per_gpu_month: float = 0.0
    residual_usd_per_gpu: float = 0.0
    discounts: Mapping[str, tuple[int, float, float]] = field(default_factory=dict)
    """Reservations: name → (term in months, upfront share, discount)."""
    engineer_h: float = 0.0
    usd_per_engineer_h: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Everything that a plan depends on."""

    name: str
    job: Job
    costs: Costs
    hazard: Hazard
    announced: float
    """Share of evictions that a notice comes before."""
    window_s: float
    """From the notice to the end."""
    prices: Prices
    keeping: Keeping
    schemes: tuple[Scheme, ...]
    baseline: str = "naive-tuned"
    """The scheme that a spot user has without Surefoot."""
    on_demand_goodput: float | None = None
    """None: from hardware failures (`surefoot.money.capacity`)."""
    limits: Limits = field(default_factory=Limits)
    ownership: Ownership = field(default_factory=Ownership)
    offer: Availability | None = None
    """Spot availability for the mix and the deadline policies; None: made from the hazard."""
    delay_usd_per_h: float = 0.0
    tail_weight: float = 0.0
    assumptions: tuple[Assumption, ...] = ()
    runs: int = 2000
    seed: int = 1
    month_h: float = MONTH_H
