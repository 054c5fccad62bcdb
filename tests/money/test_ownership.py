"""Owning, reserving, renting; payback."""

from __future__ import annotations

from math import inf

import pytest

from surefoot.errors import ConfigError
from surefoot.money.ownership import (
    Need,
    Way,
    adoption_payback_months,
    break_even_utilisation,
    owned,
    payback_months,
    rented,
    reserved,
)
from surefoot.money.reservations import reservation_discounts

NEED = Need(gpus=64, month_h=730.0, months=36)


def _cheapest(ways: list[Way], months: int) -> str:
    return min(ways, key=lambda way: way.cumulated_usd(months)[-1]).name


def test_three_years_all_upfront() -> None:
    """60 % off 9.80 for 64 GPUs and 26,280 h: 6.59 M USD; against 451,584 a month 14.6 months, against spot never."""
    way = reserved(NEED, "3y", 9.80, 0.60, 1.0, 36)
    assert way.upfront_usd == pytest.approx(6.59e6, rel=1e-3)
    assert payback_months(way, Way(name="od", upfront_usd=0, monthly_usd=451_584)) == pytest.approx(14.6, abs=0.05)
    assert payback_months(way, rented(NEED, "spot", 3.10, 0.9933)) == inf


def test_adoption() -> None:
    """20,000 USD of engineers' time against 35,400 or 12,500 USD a month: 0.6 and 1.6 months."""
    assert adoption_payback_months(160, 125, 35_400) == pytest.approx(0.565, abs=0.001)
    assert adoption_payback_months(160, 125, 12_500) == pytest.approx(1.6)
    assert adoption_payback_months(160, 125, 0.0) == inf


def test_utilisation_decides() -> None:
    """A commitment at 3.92 USD against 9.80 at goodput 0.985: above 39.4 % of the month."""
    assert break_even_utilisation(3.92, 9.80, 0.985) == pytest.approx(0.394)
    half = Need(gpus=64, utilisation=0.3, months=36)
    assert _cheapest([rented(half, "od", 9.80, 0.985), reserved(half, "3y", 9.80, 0.6, 0.0, 36)], 36) == "od"
    busy = Need(gpus=64, utilisation=0.9, months=36)
    assert _cheapest([rented(busy, "od", 9.80, 0.985), reserved(busy, "3y", 9.80, 0.6, 0.0, 36)], 36) == "3y"


def test_a_term_is_paid_again() -> None:
    """A year upfront over 30 months is paid three times; what pays back after its term does not."""
    way = reserved(NEED, "1y", 9.80, 0.36, 1.0, 12)
    assert way.cumulated_usd(30)[-1] == pytest.approx(3 * way.upfront_usd)
    assert way.cumulated_usd(12)[-1] == pytest.approx(way.upfront_usd)
    assert payback_months(way, Way(name="x", upfront_usd=0, monthly_usd=way.upfront_usd / 13)) == inf


def test_owning() -> None:
    """64 GPUs at 40,000 less 8,000 at the end, 600 a month each: 2.048 M at the start, 38,400 a month."""
    way = owned(NEED, "owned", 40_000, 600, 8_000)
    assert (way.upfront_usd, way.monthly_usd) == (64 * 32_000, 64 * 600)


def test_parts_add_up() -> None:
    """Storage and egress are in every way alike."""
    need = Need(gpus=64, storage_usd_per_month=100, egress_usd_per_month=50)
    bare = Need(gpus=64)
    assert rented(need, "x", 1, 1).monthly_usd - rented(bare, "x", 1, 1).monthly_usd == pytest.approx(150)
    assert owned(need, "x", 1, 1, 0).monthly_usd - owned(bare, "x", 1, 1, 0).monthly_usd == pytest.approx(150)


def test_discounts_by_cloud() -> None:
    """AWS: 32 % for a year without upfront, 60 % for three with; an unknown cloud is named."""
    aws = reservation_discounts("aws")
    assert aws["1yr_no_upfront"] == (12, 0.0, 0.32)
    assert aws["3yr_all_upfront"] == (36, 1.0, 0.60)
    with pytest.raises(ConfigError, match="no reservation discounts"):
        reservation_discounts("moon")


def test_impossible_needs_are_refused() -> None:
    """No GPUs, or busy more than all the time."""
    with pytest.raises(ConfigError):
        Need(gpus=0)
    with pytest.raises(ConfigError):
        Need(gpus=8, utilisation=1.2)
