"""Exact expectations for memoryless interruptions.

Setting. Events arrive at rate 1/M of exposure. A save is taken every ``interval_s`` of compute, stops training for
``stall_s`` and is durable ``lag_s`` later, while training goes on: with P = interval + stall, save j is durable at
j·P + lag after a (re)start. An event is *hot* (memory survives; back by at most one hot interval) or *cold* (back to
the newest durable save). Cold events thin the process to mean gap M_c = M ÷ P(cold).

Between two cold events the clock of training runs for an exponential time X of mean M_c, so that

    E[durable progress] = interval · Σ_j P(X ≥ j·P + lag) = interval · e^(−lag/M_c) / (e^(P/M_c) − 1)
    E[compute]          = M_c · (1 − e^(−interval/M_c)) / (1 − e^(−P/M_c))

With lag 0 and no hot path this is the exact makespan of Hérault and Robert (Fault-Tolerance Techniques for
High-Performance Computing, 2015): E[T] = (W/τ) e^(R/M) (M + D) (e^((τ+C)/M) − 1). Loading can be interrupted and starts
again (mean M(e^(R/M) − 1)); the other phases of a recovery cannot. Young's and Daly's formulas are first and higher
order approximations of the interval that is best here.

What is not in it and is seen by simulation only: an eviction while an earlier one's replacement is still missing and
the nodes left are too few (or the standby is used up), a speed that is no multiple of the number of nodes, gaps that
are not exponential.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil, exp, expm1, inf, isinf, log, sqrt

from surefoot.money.hazards import Hazard
from surefoot.money.job import Job, Timing
from surefoot.money.phases import Phase, total


@dataclass(frozen=True, slots=True)
class Outcome:
    """Expectations for one run."""

    wall_s: float
    node_s: Mapping[Phase, float]
    """Billed node-seconds by phase."""
    events: float
    lost_work_s: float
    """Compute that was done again, in seconds of the full job."""
    lost_steps: float
    """Finished optimizer steps that were done again."""
    saves: float
    """Durable saves taken."""
    loads: float
    """Loads of the whole state from the durable tier, interrupted ones too."""
    work_s: float

    @property
    def goodput(self) -> float:
        """Useful compute ÷ wall time."""
        return self.work_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def billed_node_s(self) -> float:
        return total(self.node_s)


def expected(job: Job, timing: Timing, hazard: Hazard, announced: float = 0.0) -> Outcome:
    """Expected outcome of the whole job, its last save included."""
    shares = _Shares.of(job, timing, hazard, announced)
    up_s, compute_s = _clock_until_done(job.work_s, timing, shares.cold_gap_s)
    if isinf(up_s):
        return Outcome(inf, {Phase.USEFUL: inf}, inf, inf, inf, inf, inf, job.work_s)
    losses = _losses(job, timing, hazard, announced, shares)
    return _assemble(job, timing, up_s, compute_s, losses)


def goodput(job: Job, timing: Timing, hazard: Hazard, announced: float = 0.0) -> float:
    """Long-run share of wall time that is useful: the limit of a job that never ends."""
    shares = _Shares.of(job, timing, hazard, announced)
    losses = _losses(job, timing, hazard, announced, shares)
    rate = durable_rate(timing, shares.cold_gap_s)
    return rate / (1.0 + losses.wall_s_per_up_s)


def durable_rate(timing: Timing, cold_gap_s: float) -> float:
    """Long-run durable progress for each second of training, before the time that recoveries take."""
    if isinf(cold_gap_s):
        return timing.interval_s / timing.period_s
    growth = _expm1(timing.period_s / cold_gap_s)
    return timing.interval_s * exp(-timing.lag_s / cold_gap_s) / growth / cold_gap_s


def best_interval_s(job: Job, timing: Timing, hazard: Hazard, announced: float, least_s: float) -> float:
    """The interval, at least ``least_s``, with the highest goodput: golden-section search, to a second or 0.1 %."""

    def loss(interval_s: float) -> float:
        return -goodput(job, replace(timing, interval_s=interval_s), hazard, announced)

    low, high = max(least_s, 1e-3), max(least_s * 2.0, min(job.work_s, 50.0 * hazard.mean_gap_s))
    return _golden(loss, low, high)


@dataclass(frozen=True, slots=True)
class _Shares:
    cold_gap_s: float
    cold: float

    @classmethod
    def of(cls, job: Job, timing: Timing, hazard: Hazard, announced: float) -> _Shares:
        cold = 0.0
        for k, share in hazard.sizes.items():
            cold += share * (1.0 - sum(timing.hot_shares(k, announced)))
        # Rounding in "1 − shares" must not turn "never" into "once in a million years".
        cold = cold if cold > 1e-12 else 0.0
        return cls(hazard.mean_gap_s / cold if cold else inf, cold)


@dataclass(frozen=True, slots=True)
class _Losses:
    """For each second of the training clock."""

    wall_s_per_up_s: float
    events: float
    node_s: Mapping[Phase, float]
    hot_lost_s: float
    hot_lost_steps: float
    cold_events: float
    loads: float


def _losses(job: Job, timing: Timing, hazard: Hazard, announced: float, shares: _Shares) -> _Losses:
    wall = lost = steps = 0.0
    gap_s = hazard.mean_gap_s
    node: dict[Phase, float] = {}
    again = _expm1(timing.load_s / gap_s)  # interrupted loads for each cold event
    for k, share in hazard.sizes.items():
        rate = share / gap_s
        by_notice, by_replica = timing.hot_shares(k, announced)
        for hot_share, lag_s in ((by_notice, 0.0), (by_replica, timing.hot_lag_s)):
            if hot_share > 0:
                redo_s, redo_steps = _hot_loss(timing, gap_s, lag_s)
                recovery = _recovery(job, timing, k, redo_s, 0.0)
                wall += rate * hot_share * recovery.wall_s
                _add(node, recovery.node_s, rate * hot_share)
                lost += rate * hot_share * redo_s
                steps += rate * hot_share * redo_steps
        cold = rate * (1.0 - by_notice - by_replica) if shares.cold else 0.0
        # Each interrupted load is an event like any other: of the sizes of all events, hence share × all cold ones.
        first_and_again = cold + share * again * shares.cold / gap_s
        recovery = _recovery(job, timing, k, 0.0, timing.load_s)
        wall += first_and_again * recovery.wall_s
        _add(node, recovery.node_s, first_and_again)
    load_s = again * shares.cold  # M · (e^(R/M) − 1) for each cold event, of which there are P(cold) ÷ M a second
    wall += load_s
    _add(node, {Phase.RESTORE: load_s * _nodes_while_loading(job, timing, hazard)}, 1.0)
    events = (1.0 + again * shares.cold) / gap_s
    loads = shares.cold * (1.0 + again) / gap_s
    return _Losses(wall, events, node, lost, steps, shares.cold / gap_s, loads)


@dataclass(frozen=True, slots=True)
class _Recovery:
    wall_s: float
    node_s: Mapping[Phase, float]


def _recovery(job: Job, timing: Timing, k: int, redo_s: float, load_s: float) -> _Recovery:
    """What one event of ``k`` nodes costs, without the load itself and without what is lost since the durable save."""
    missing = max(0, k - timing.standby)
    left = max(0, job.nodes - missing)
    usable = job.usable(left) if timing.shrink else (job.nodes if missing == 0 else 0)
    if usable == 0:
        node_s = {
            Phase.INFRASTRUCTURE_RECOVERY: timing.replacement_s * left,
            Phase.PROGRAM_STARTUP: timing.restart_s * job.nodes,
            Phase.WASTED_PROGRESS: redo_s * job.nodes,
        }
        return _Recovery(timing.replacement_s + timing.restart_s + redo_s, node_s)
    speed = job.speed(usable)
    redo_wall_s = redo_s / speed
    small_s = max(0.0, timing.replacement_s - timing.restart_s - redo_wall_s - load_s) if missing else 0.0
    rejoin_s = timing.rejoin_s if missing else 0.0
    node_s = {
        Phase.PROGRAM_STARTUP: timing.restart_s * left,
        Phase.WASTED_PROGRESS: redo_s * job.nodes,
        Phase.ELASTIC_SLICE_DOWN: redo_wall_s * left - redo_s * job.nodes + small_s * (left - speed * job.nodes),
        Phase.ELASTIC_RESIZE: rejoin_s * job.nodes,
    }
    return _Recovery(timing.restart_s + redo_wall_s + small_s * (1.0 - speed) + rejoin_s, node_s)


def _nodes_while_loading(job: Job, timing: Timing, hazard: Hazard) -> float:
    """Mean number of nodes billed during a load: fewer until the lost ones are replaced."""
    if not timing.shrink:
        return float(job.nodes)
    alone_s = max(0.0, timing.replacement_s - timing.restart_s)
    alone = min(1.0, alone_s / timing.load_s) if timing.load_s else 0.0
    missing = sum(share * min(job.nodes, max(0, k - timing.standby)) for k, share in hazard.sizes.items())
    return job.nodes - alone * missing


def _hot_loss(timing: Timing, gap_s: float, lag_s: float) -> tuple[float, float]:
    """Compute and finished hot intervals lost when the newest image in memory older than ``lag_s`` is taken."""
    every_s = timing.hot_interval_s
    images = 1.0 / _expm1(every_s / gap_s)
    outlived = exp(-lag_s / gap_s) * images
    return gap_s - every_s * outlived, images - outlived


def _assemble(job: Job, timing: Timing, up_s: float, compute_s: float, losses: _Losses) -> Outcome:
    wall_s = up_s * (1.0 + losses.wall_s_per_up_s)
    cold_lost_s = max(0.0, compute_s - job.work_s)
    node = {phase: up_s * value for phase, value in losses.node_s.items()}
    _add(
        node,
        {
            Phase.USEFUL: job.work_s * job.nodes,
            Phase.WASTED_PROGRESS: cold_lost_s * job.nodes,
            Phase.CHECKPOINT_SAVE: (up_s - compute_s) * job.nodes,
            # Paid all the time, also while its own replacement is on the way: else evictions would make it cheaper.
            Phase.STANDBY: timing.standby * wall_s,
        },
        1.0,
    )
    cold_steps = max(0.0, cold_lost_s / job.step_s - 0.5 * losses.cold_events * up_s)
    hot_steps = losses.hot_lost_steps * up_s * (timing.hot_interval_s / job.step_s)
    return Outcome(
        wall_s=wall_s,
        node_s=node,
        events=losses.events * up_s,
        lost_work_s=cold_lost_s + losses.hot_lost_s * up_s,
        lost_steps=cold_steps + hot_steps,
        saves=up_s / timing.period_s,
        loads=losses.loads * up_s,
        work_s=job.work_s,
    )


def _clock_until_done(work_s: float, timing: Timing, gap_s: float) -> tuple[float, float]:
    """Expected seconds on the training clock, and of compute in them, until the last save is durable.

    Backwards over the number of durable intervals: from a restart with w = work − i·interval to do, an attempt needs
    L = w + stall·⌈w/interval⌉ + lag; ended at x < L by an event, it has saved the j with j·P + lag ≤ x. The geometric
    weights of j allow a running sum, so that this is linear in the number of saves.
    """
    count = max(1, ceil(work_s / timing.interval_s - 1e-9))
    if isinf(gap_s):
        return _attempt_s(work_s, timing), work_s
    decay = exp(-timing.period_s / gap_s)
    late = exp(-timing.lag_s / gap_s)
    up_later = compute_later = up_sum = compute_sum = 0.0  # of i + 1; sums: Σ decay^j · value(i + j), 0 < j < J
    last = (0.0, 0.0)
    for behind in range(count):  # J: durable saves before the end
        left_s = work_s - (count - 1 - behind) * timing.interval_s
        end_s = _attempt_s(left_s, timing)
        ended = exp(-end_s / gap_s)
        up = gap_s * -_expm1(-end_s / gap_s)
        compute = _compute_s(left_s, timing, gap_s)
        if behind == 0:
            again = ended  # 1 − P(event before the end, nothing saved)
        else:
            if behind > 1:
                up_sum = decay * (up_later + up_sum)
                compute_sum = decay * (compute_later + compute_sum)
            at_last = late * decay**behind - ended
            up += late * (1.0 - decay) * up_sum + at_last * last[0]
            compute += late * (1.0 - decay) * compute_sum + at_last * last[1]
            again = late * decay
        if again < 1e-300:
            return inf, inf
        up_later, compute_later = up / again, compute / again
        if behind == 0:
            last = (up_later, compute_later)  # has its own weight, not a geometric one
    return up_later, compute_later


def _attempt_s(left_s: float, timing: Timing) -> float:
    return left_s + timing.stall_s * max(1, ceil(left_s / timing.interval_s - 1e-9)) + timing.lag_s


def _compute_s(left_s: float, timing: Timing, gap_s: float) -> float:
    """E[compute within an attempt that an event may end]."""
    full = max(0, ceil(left_s / timing.interval_s - 1e-9) - 1)
    period, interval = timing.period_s / gap_s, timing.interval_s / gap_s
    rest = (left_s - full * timing.interval_s) / gap_s
    whole = _expm1(-interval) * _expm1(-full * period) / -_expm1(-period) if full else 0.0
    return gap_s * (whole - exp(-full * period) * _expm1(-rest))


def _add(into: dict[Phase, float], values: Mapping[Phase, float], weight: float) -> None:
    for phase, value in values.items():
        into[phase] = into.get(phase, 0.0) + weight * value


def _expm1(x: float) -> float:
    return expm1(x) if x < 700.0 else inf


def _golden(loss: Callable[[float], float], low: float, high: float) -> float:
    """Minimum of a function with one valley, on a logarithmic scale."""
    ratio = (sqrt(5.0) - 1.0) / 2.0
    a, b = log(low), log(high)
    left, right = b - ratio * (b - a), a + ratio * (b - a)
    at_left, at_right = loss(exp(left)), loss(exp(right))
    while b - a > 1e-3:
        if at_left <= at_right:
            b, right, at_right = right, left, at_left
            left = b - ratio * (b - a)
            at_left = loss(exp(left))
        else:
            a, left, at_left = left, right, at_right
            right = a + ratio * (b - a)
            at_right = loss(exp(right))
    # The edge is worth a look: where saves are nearly free the best interval is the least.
    return min((low, exp((a + b) / 2.0), high), key=loss)
