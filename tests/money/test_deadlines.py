"""Four policies under a deadline, on the shipped traces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from money_samples import H, brief_job

from surefoot.errors import ConfigError
from surefoot.money.deadlines import POLICIES, Availability, Market, Trial, coarser, offered, run_policy
from surefoot.money.traces import SHIPPED, load_trace

MARKET = Market(spot_usd_per_node_h=24.80, on_demand_usd_per_node_h=78.40)
JOB = replace(brief_job(), work_s=48 * H)
ON_DEMAND_USD = 48 * 8 * 78.40


def _run(policy: str, offer: Availability, restart_s: float) -> Trial:
    return run_policy(policy, JOB, MARKET, offer, deadline_s=72 * H, restart_s=restart_s, starts=60, seed=1)


def test_with_spot_always_there_everybody_takes_it() -> None:
    """48 h of eight spot nodes and one start of 18 s; uniform progress too, as it is never behind for long."""
    offer = Availability("always", 300.0, (8,))
    for policy in POLICIES:
        trial = _run(policy, offer, 18.0)
        assert trial.cost_usd == pytest.approx((48 + 18 / 3600) * 8 * 24.80)
        assert not trial.late.any()


def test_without_spot_the_deadline_is_met_on_demand() -> None:
    """Nobody but "spot only" is late; on-demand is paid for the work and the starts (uniform progress starts often)."""
    offer = Availability("never", 300.0, (0,))
    assert _run("spot only", offer, 18.0).late.all()
    for policy in ("greedy", "uniform progress", "surefoot"):
        trial = _run(policy, offer, 18.0)
        assert not trial.late.any()
        assert trial.cost_usd == pytest.approx(ON_DEMAND_USD, rel=0.03 if policy == "uniform progress" else 0.005)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("restart_s", [18.0, 600.0])
def test_ours_is_never_late_and_at_most_one_percent_dearer(name: str, restart_s: float) -> None:
    """On every shipped trace: never late, never above on-demand, within 1 % of the better of the published policies."""
    offer = offered(load_trace(name), JOB.nodes)
    trials = {policy: _run(policy, offer, restart_s) for policy in POLICIES}
    for policy in ("greedy", "uniform progress", "surefoot"):
        assert not trials[policy].late.any(), policy
    ours = trials["surefoot"].cost_usd.mean()
    better = min(trials["greedy"].cost_usd.mean(), trials["uniform progress"].cost_usd.mean())
    assert ours <= better * 1.01
    assert ours <= ON_DEMAND_USD * 1.01


def test_part_of_the_nodes_is_used() -> None:
    """Four of eight nodes all the time: 48 h of work take 72 h less slack; the all-or-nothing policies wait and buy."""
    offer = Availability("half", 300.0, (6,))
    ours, greedy = _run("surefoot", offer, 18.0), _run("greedy", offer, 18.0)
    assert ours.cost_usd.mean() < 0.5 * greedy.cost_usd.mean()
    assert not ours.late.any()


def test_offers_scale_with_the_fleets_peak() -> None:
    """A fleet of 64 at its peak stands for all eight nodes; 57 of 64 for seven."""
    offer = offered(load_trace("bamboo-a100"), 8)
    assert max(offer.nodes) == 8
    assert len(offer.nodes) == int(27.0183 * 3600 // 300)


def test_longer_ticks_keep_the_worst() -> None:
    """What is there all through each longer tick."""
    assert coarser(Availability("x", 60.0, (8, 7, 8, 8, 8, 3)), 180.0) == Availability("x", 180.0, (7, 3))


def test_a_deadline_before_the_work_is_refused() -> None:
    """With both figures; and an unknown policy with those there are."""
    offer = Availability("always", 300.0, (8,))
    with pytest.raises(ConfigError, match=r"48\.0 h is not above the 48\.0 h"):
        run_policy("greedy", JOB, MARKET, offer, deadline_s=48 * H, restart_s=18)
    with pytest.raises(ConfigError, match="uniform progress"):
        run_policy("hope", JOB, MARKET, offer, deadline_s=72 * H, restart_s=18)


def test_trials_are_reproducible() -> None:
    """The same seed draws the same starts."""
    offer = offered(load_trace("bamboo-p3"), 8)
    assert np.array_equal(_run("surefoot", offer, 18).cost_usd, _run("surefoot", offer, 18).cost_usd)
