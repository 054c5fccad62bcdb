"""Storage, requests, the transfer traps, and the split of the saving."""

from __future__ import annotations

import pytest
from money_samples import brief_job

from surefoot.errors import ConfigError
from surefoot.money.job import Timing
from surefoot.money.money import Saving
from surefoot.money.transfer import (
    Keeping,
    move_rates,
    route_named,
    routes,
    store_named,
    stores,
)

_SAVES_A_MONTH = 720 * 12
_TIMING = Timing(interval_s=299.15, stall_s=0.85)


@pytest.mark.parametrize(
    ("route", "month_usd"), [("nat", 326_592), ("cross-region", 145_152), ("cross-zone", 145_152), ("same-region", 0)]
)
def test_transfer_traps_of_a_month(route: str, month_usd: float) -> None:
    """840 GB each 5 min for 720 h: 8,640 checkpoints."""
    moves = move_rates(brief_job(), _TIMING, Keeping(store=store_named("aws"), route=route_named(route)), 1)
    assert moves.route_usd_per_save * _SAVES_A_MONTH == pytest.approx(month_usd)


def test_requests_and_capacity_of_a_month() -> None:
    """Parts of 64 MiB at 5 USD a million: 541 USD; three checkpoints at 0.023: 58 USD."""
    moves = move_rates(brief_job(), _TIMING, Keeping(store=store_named("aws"), route=route_named("same-region")), 1)
    # 13.125 GB are 196 parts for each of 64 GPUs: 12,544 where 840 GB in one piece would be 12,517.
    assert moves.puts_usd_per_save * _SAVES_A_MONTH == pytest.approx(541, rel=0.003)
    assert moves.storage_usd_per_wall_s * 720 * 3600 == pytest.approx(3 * 840 * 0.023)


def test_replicas_across_zones_are_paid_for_each_step() -> None:
    """840 GB each 12 s at 0.02 USD/GB: 16.80 USD a step, 25 steps a save."""
    keeping = Keeping(store=store_named("aws"), route=route_named("same-region"), peer_usd_per_gb=0.02)
    timing = Timing(interval_s=300, stall_s=0, hot_interval_s=12)
    assert move_rates(brief_job(), timing, keeping, 1).peers_usd_per_save == pytest.approx(25 * 16.80)


def test_a_store_without_egress_fee() -> None:
    """R2 takes nothing for reading; the way out of the cloud is paid all the same."""
    moves = move_rates(brief_job(), _TIMING, Keeping(store=store_named("r2"), route=route_named("internet")), 0)
    assert moves.back_usd_per_load == 0
    assert moves.route_usd_per_save == pytest.approx(840 * 0.05)


def test_every_rate_has_source_and_date() -> None:
    """Of each store and of each way."""
    for entry in [*routes().values(), *stores().values()]:
        assert entry.source
        assert entry.as_of


def test_unknown_names_say_what_there_is() -> None:
    """A store or a way that is not known."""
    with pytest.raises(ConfigError, match="same-region"):
        route_named("carrier-pigeon")
    with pytest.raises(ConfigError, match="r2"):
        store_named("floppy")


def test_the_saving_splits_into_price_and_scheme() -> None:
    """45,158 on demand, 17,910 with the baseline, 14,422 with ours."""
    saving = Saving(45_158, 17_910, 14_422)
    assert saving.price + saving.scheme == pytest.approx(saving.net)
    assert saving.net == pytest.approx(1 - 14_422 / 45_158)
    assert Saving(45_158, 17_910, float("inf")).net == float("-inf")
