"""Small cases worked by hand. The arithmetic is in each test."""

from __future__ import annotations

from math import e, exp, isinf

import pytest
from money_samples import every, one_node_job

from surefoot.money.closed_form import expected, goodput
from surefoot.money.hazards import Renewal
from surefoot.money.job import Job, Timing
from surefoot.money.money import NodeRates, cost_usd
from surefoot.money.phases import Phase
from surefoot.money.transfer import Keeping, move_rates, route_named, store_named

NEVER = every(1e15)


def test_without_evictions_only_the_stalls_are_lost() -> None:
    """36,000 s of work, ten saves of 60 s: 36,600 s, goodput 0.98361."""
    outcome = expected(one_node_job(36_000), Timing(interval_s=3600, stall_s=60), NEVER)
    assert outcome.wall_s == pytest.approx(36_600, rel=1e-9)
    assert outcome.goodput == pytest.approx(36_000 / 36_600, rel=1e-9)
    assert outcome.node_s[Phase.CHECKPOINT_SAVE] == pytest.approx(600, rel=1e-6)


def test_one_segment_as_long_as_the_mean_gap() -> None:
    """900 s of work, a save of 100 s, M = 1,000 s: M (e¹ − 1) = 1,718.2818 s."""
    outcome = expected(one_node_job(900), Timing(interval_s=900, stall_s=100), every(1000))
    assert outcome.wall_s == pytest.approx(1000 * (e - 1), rel=1e-12)


def test_downtime_is_paid_for_each_eviction() -> None:
    """The same with 500 s of waiting: (M + D)(e − 1) = 2,577.4227 s; 1.71828 evictions."""
    timing = Timing(interval_s=900, stall_s=100, replacement_s=500)
    outcome = expected(one_node_job(900), timing, every(1000))
    assert outcome.wall_s == pytest.approx(1500 * (e - 1), rel=1e-12)
    assert outcome.events == pytest.approx(e - 1, rel=1e-12)


def test_a_load_can_be_interrupted() -> None:
    """The same with a load of 1,000 s and no waiting: e^(R/M) M (e − 1) = 4,670.7742 s."""
    timing = Timing(interval_s=900, stall_s=100, load_s=1000)
    outcome = expected(one_node_job(900), timing, every(1000))
    assert outcome.wall_s == pytest.approx(e * 1000 * (e - 1), rel=1e-12)
    assert outcome.loads == pytest.approx(e * (e - 1), rel=1e-12)


def test_two_segments_take_twice_as_long() -> None:
    """1,800 s of work in two segments: 2 · 1,718.2818 s."""
    outcome = expected(one_node_job(1800), Timing(interval_s=900, stall_s=100), every(1000))
    assert outcome.wall_s == pytest.approx(2000 * (e - 1), rel=1e-12)


def test_the_last_upload_must_end_too() -> None:
    """600 s of work, an upload of 400 s, M = 1,000 s: an attempt takes 1,000 s: M (e − 1)."""
    outcome = expected(one_node_job(600), Timing(interval_s=600, stall_s=0, lag_s=400), every(1000))
    assert outcome.wall_s == pytest.approx(1000 * (e - 1), rel=1e-12)


def test_a_save_counts_from_the_end_of_its_upload() -> None:
    """Two intervals of 500 s, uploads of 500 s, M = 1,000 s.

    From the second interval: T₀ = M (e − 1). From the start an attempt takes 1,500 s; before 1,000 s nothing is saved:
    T₁ e⁻¹ = M (1 − e^(−1.5)) + (e⁻¹ − e^(−1.5)) T₀, so T₁ = 2,787.84 s.
    """
    outcome = expected(one_node_job(1000), Timing(interval_s=500, stall_s=0, lag_s=500), every(1000))
    last = 1000 * (e - 1)
    first = (1000 * (1 - exp(-1.5)) + (exp(-1) - exp(-1.5)) * last) / exp(-1)
    assert first == pytest.approx(2787.84, abs=0.01)
    assert outcome.wall_s == pytest.approx(first, rel=1e-12)


def test_from_memory_only_the_hot_interval_is_lost() -> None:
    """Every loss survives in memory; images each 1,000 s, M = 1,000 s: lost M − h/(e^(h/M) − 1) = 418.02 s.

    One expected eviction in 1,000 s, restart 100 s: 1,518.02 s.
    """
    timing = Timing(interval_s=1000, stall_s=0, hot_interval_s=1000, hot_announced=True, restart_s=100)
    outcome = expected(one_node_job(1000, step_s=1000), timing, every(1000), announced=1.0)
    assert outcome.lost_work_s == pytest.approx(1000 - 1000 / (e - 1), rel=1e-12)
    assert outcome.wall_s == pytest.approx(1100 + 1000 - 1000 / (e - 1), rel=1e-12)
    assert outcome.loads == 0


def test_shrinking_loses_one_nodes_share_of_the_wait() -> None:
    """Four nodes, one lost, 400 s until its replacement: 400 ÷ 4 = 100 s of wall time and not one paid node-second."""
    job = Job(work_s=1000, state_bytes=1e9, step_s=1e-3, nodes=4)
    timing = Timing(interval_s=1000, stall_s=0, hot_interval_s=1e-3, hot_announced=True, replacement_s=400, shrink=True)
    outcome = expected(job, timing, every(1000), announced=1.0)
    assert outcome.wall_s == pytest.approx(1000 + 100, rel=1e-4)
    assert outcome.billed_node_s == pytest.approx(4000, rel=1e-4)


def test_waiting_pays_the_idle_nodes() -> None:
    """The same without shrinking: 400 s more, in which three nodes are paid: 1,200 node-seconds."""
    job = Job(work_s=1000, state_bytes=1e9, step_s=1e-3, nodes=4)
    timing = Timing(interval_s=1000, stall_s=0, hot_interval_s=1e-3, hot_announced=True, replacement_s=400)
    outcome = expected(job, timing, every(1000), announced=1.0)
    assert outcome.wall_s == pytest.approx(1400, rel=1e-4)
    assert outcome.node_s[Phase.INFRASTRUCTURE_RECOVERY] == pytest.approx(1200, rel=1e-9)


def test_a_standby_costs_its_hours() -> None:
    """10 h on 4 nodes at 2 USD and a standby at 3 USD, nothing moved: 4 · 10 · 2 + 10 · 3 = 110 USD."""
    job = Job(work_s=36_000, state_bytes=1e-9, step_s=1, nodes=4)
    timing = Timing(interval_s=36_000, stall_s=0, standby=1)
    keeping = Keeping(store=store_named("r2"), route=route_named("same-region"))
    moves = move_rates(job, timing, keeping, 0)
    cost = cost_usd(expected(job, timing, NEVER), NodeRates(2.0, 3.0), moves)
    assert cost == pytest.approx(110.0, abs=1e-3)


def test_a_checkpoint_that_takes_longer_than_a_node_lives_never_ends() -> None:
    """A segment of 1,000 mean gaps: e^1000 attempts."""
    outcome = expected(one_node_job(1000), Timing(interval_s=1000, stall_s=0), every(1))
    assert isinf(outcome.wall_s)
    assert goodput(one_node_job(1000), Timing(interval_s=1000, stall_s=0), every(1)) == pytest.approx(0.0, abs=1e-12)


def test_losses_of_several_nodes_wait_for_all_of_them() -> None:
    """Of four nodes two go at once: the wait of 100 s is paid for the two that are left."""
    job = Job(work_s=1000, state_bytes=1e9, step_s=1e-3, nodes=4)
    timing = Timing(interval_s=1000, stall_s=0, hot_interval_s=1e-3, hot_announced=True, replacement_s=100)
    outcome = expected(job, timing, Renewal(mean_gap_s=1000, sizes={2: 1.0}), announced=1.0)
    assert outcome.node_s[Phase.INFRASTRUCTURE_RECOVERY] == pytest.approx(200, rel=1e-9)
