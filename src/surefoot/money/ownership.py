"""Months of owning, reserving and renting the same capacity; when a commitment, or adopting Surefoot, pays back."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from surefoot.errors import ConfigError
from surefoot.money.units import HOUR_S, MONTH_H


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What has to be computed each month."""

    gpus: int
    utilisation: float = 1.0
    """Share of the month in which these GPUs would be busy at goodput 1."""
    month_h: float = MONTH_H
    months: int = 36
    storage_usd_per_month: float = 0.0
    egress_usd_per_month: float = 0.0

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.months < 1 or not 0.0 < self.utilisation <= 1.0:
            raise ConfigError(f"{self.gpus} GPUs, {self.months} months, utilisation {self.utilisation}: not possible")

    @property
    def useful_gpu_h(self) -> float:
        return self.gpus * self.month_h * self.utilisation

    @property
    def moving_usd(self) -> float:
        return self.storage_usd_per_month + self.egress_usd_per_month


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to have the capacity: money at the start, and money each month."""

    name: str
    upfront_usd: float
    monthly_usd: float
    term_months: int | None = None
    """The upfront part is due again after so many months; None: never."""
    note: str = ""

    def cumulated_usd(self, months: int) -> list[float]:
        """After 0, 1, … ``months`` months."""
        return [self._upfront_by(month) + self.monthly_usd * month for month in range(months + 1)]

    def _upfront_by(self, month: int) -> float:
        """A term that begins at the horizon's end is not begun."""
        terms = 1 if self.term_months is None else max(1, -(-month // self.term_months))
        return self.upfront_usd * terms


def rented(need: Need, name: str, usd_per_gpu_h: float, goodput: float, upfront_usd: float = 0.0) -> Way:
    """Paid by the hour, only for what is used; work lost to a goodput below 1 is paid again."""
    monthly = need.useful_gpu_h / goodput * usd_per_gpu_h + need.moving_usd
    return Way(name=name, upfront_usd=upfront_usd, monthly_usd=monthly)


def reserved(
    need: Need, name: str, on_demand_usd_per_gpu_h: float, discount: float, upfront_share: float, term_months: int
) -> Way:
    """Paid for the whole term, used or not; the upfront part once."""
    term_usd = need.gpus * need.month_h * term_months * on_demand_usd_per_gpu_h * (1.0 - discount)
    monthly = term_usd * (1.0 - upfront_share) / term_months + need.moving_usd
    return Way(
        name=name,
        upfront_usd=term_usd * upfront_share,
        monthly_usd=monthly,
        term_months=term_months,
        note=f"{term_months} months, {discount:.0%} off on-demand, used or not",
    )


def owned(need: Need, name: str, usd_per_gpu: float, opex_usd_per_gpu_month: float, residual_usd_per_gpu: float) -> Way:
    """Bought; power, hosting and people each month; what the GPUs are worth at the end is taken off the start."""
    upfront = need.gpus * (usd_per_gpu - residual_usd_per_gpu)
    return Way(name=name, upfront_usd=upfront, monthly_usd=need.gpus * opex_usd_per_gpu_month + need.moving_usd)


def payback_months(way: Way, alternative: Way) -> float:
    """Months until ``way`` has cost less than ``alternative``; infinite when never within its term."""
    more_upfront = way.upfront_usd - alternative.upfront_usd
    saved = alternative.monthly_usd - way.monthly_usd
    if more_upfront <= 0:
        return 0.0 if saved >= 0 else inf
    months = more_upfront / saved if saved > 0 else inf
    return months if way.term_months is None or months <= way.term_months else inf


def break_even_utilisation(committed_usd_per_gpu_h: float, rented_usd_per_gpu_h: float, rented_goodput: float) -> float:
    """Share of the month above which a commitment, paid used or not, costs less than renting; above 1: never."""
    return committed_usd_per_gpu_h / (rented_usd_per_gpu_h / rented_goodput)


def adoption_payback_months(engineer_h: float, usd_per_engineer_h: float, saved_usd_per_month: float) -> float:
    """Months until the engineers' time to adopt is earned back; infinite when nothing is saved."""
    return engineer_h * usd_per_engineer_h / saved_usd_per_month if saved_usd_per_month > 0 else inf


def standby_break_even_gap_s(
    nodes: int, replacement_s: float, idle_usd_per_h: float, standby_usd_per_h: float
) -> float:
    """Mean time between losses below which one standby node is cheaper than the others' waiting.

    A wait idles ``nodes`` − 1 nodes for ``replacement_s``; the standby is paid all the time.
    """
    return (nodes - 1) * replacement_s * idle_usd_per_h / standby_usd_per_h


def standby_break_even_delay_usd_per_h(
    nodes: int, replacement_s: float, gap_s: float, idle_usd_per_h: float, standby_usd_per_h: float
) -> float:
    """Value of an hour's delay above which a standby node pays although it is dearer than the waiting."""
    idle_usd_per_hour = (nodes - 1) * replacement_s / HOUR_S * idle_usd_per_h / (gap_s / HOUR_S)
    delay_h_per_hour = replacement_s / gap_s
    return max(0.0, standby_usd_per_h - idle_usd_per_hour) / delay_h_per_hour
