"""A deadline, a spot market that comes and goes, and on-demand at its price: four policies on availability traces.

The world moves in ticks. Spot is what the trace offers in a tick; on-demand is always there. Every change to what is
running costs ``restart_s`` without progress. Late: finished more than one tick after the deadline.

    spot only         take spot when all nodes can be had, else wait
    greedy            the same, and on-demand to the end once the remaining time would not allow another wait
    uniform progress  Wu et al., "Can't Be Late" (NSDI 2024): on-demand when behind the straight line and spot is away;
                      back to spot only when ahead by two restarts; the same safety net
    surefoot          train on whatever part of the nodes spot offers (elastic), fill up with on-demand only when the
                      slack is used up, and go back to spot as soon as it returns while the slack pays for the restart
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surefoot.errors import ConfigError
from surefoot.money.hazards import Floats, Ints
from surefoot.money.job import Job
from surefoot.money.traces import Trace
from surefoot.money.units import HOUR_S

Bools = NDArray[np.bool_]

HOLD_S = 1800.0
"""How long a grown world is expected to last: half of the up-times in public V100 traces are about that short."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Nodes that spot offers in each tick; wraps around."""

    name: str
    tick_s: float
    nodes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Market:
    """What an hour of one node costs."""

    spot_usd_per_node_h: float
    on_demand_usd_per_node_h: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One entry a random start."""

    policy: str
    cost_usd: Floats
    finish_s: Floats
    late: Bools

    @property
    def late_share(self) -> float:
        return float(self.late.mean())


def offered(trace: Trace, nodes: int, tick_s: float = 300.0) -> Availability:
    """A job of ``nodes`` nodes in the trace's fleet: the fleet's peak stands for all of them."""
    count = max(1, int(trace.length_s // tick_s))
    at = np.arange(count) * tick_s
    index = np.searchsorted(np.array(trace.times_s), at, side="right") - 1
    counts = np.array(trace.counts)[index]
    return Availability(trace.name, tick_s, tuple(int(n) for n in counts * nodes // trace.peak))


def coarser(offer: Availability, tick_s: float) -> Availability:
    """The same in longer ticks: what is there all through each."""
    step = max(1, round(tick_s / offer.tick_s))
    pieces = [offer.nodes[i : i + step] for i in range(0, len(offer.nodes), step)]
    return Availability(offer.name, offer.tick_s * step, tuple(min(piece) for piece in pieces))


@dataclass
class _World:
    """All starts in the same tick."""

    job: Job
    work_s: float
    deadline_s: float
    restart_s: float
    tick_s: float
    elapsed_s: float
    spot: Ints
    """Offered now."""
    done_s: Floats
    on_spot: Ints
    on_demand: Ints
    sticky: Bools
    """On-demand to the end."""

    @property
    def left_s(self) -> Floats:
        return self.work_s - self.done_s

    @property
    def slack_s(self) -> Floats:
        """Time that may pass without progress."""
        return self.deadline_s - self.elapsed_s - self.left_s

    @property
    def full(self) -> Bools:
        return self.spot >= self.job.nodes


Choice = tuple[Ints, Ints]
Policy = Callable[[_World], Choice]


def spot_only(world: _World) -> Choice:
    nodes = np.where(world.full, world.job.nodes, 0)
    return nodes, np.zeros_like(nodes)


def greedy(world: _World) -> Choice:
    idle = ~world.full | world.sticky
    world.sticky |= idle & (world.slack_s <= 2 * world.restart_s + world.tick_s)
    spot = np.where(world.full & ~world.sticky, world.job.nodes, 0)
    return spot, np.where(world.sticky, world.job.nodes, 0)


def uniform_progress(world: _World) -> Choice:
    pace = world.work_s / world.deadline_s
    behind = world.done_s < world.elapsed_s * pace
    ahead = world.done_s >= (world.elapsed_s + 2 * world.restart_s) * pace
    world.sticky |= ~world.full & (world.slack_s <= 2 * world.restart_s + world.tick_s)
    was_on_demand = world.on_demand > 0
    on_demand = world.sticky | (was_on_demand & ~ahead) | (~world.full & behind)
    spot = np.where(world.full & ~on_demand, world.job.nodes, 0)
    return spot, np.where(on_demand, world.job.nodes, 0)


def surefoot(world: _World) -> Choice:
    nodes = world.job.nodes
    sizes = np.array([world.job.usable(n) for n in range(nodes + 1)])
    # One more change must always be affordable: after it, on-demand alone still makes the deadline.
    world.sticky |= world.slack_s <= 2 * world.restart_s + world.tick_s
    filled = world.slack_s <= 6 * world.restart_s + 2 * world.tick_s
    offer = np.minimum(world.spot, nodes)
    best = np.where(filled, offer, sizes[offer])
    # Growing stops the job once: worth it when what is won in HOLD_S is more than what stands still.
    pays = (best - world.on_spot) * HOLD_S > world.restart_s * (world.on_spot + world.on_demand)
    forced = world.on_spot > best
    spot = np.where(world.sticky, 0, np.where(forced | pays, best, world.on_spot))
    return spot, np.where(world.sticky | filled, nodes - spot, 0)


POLICIES: dict[str, Policy] = {
    "spot only": spot_only,
    "greedy": greedy,
    "uniform progress": uniform_progress,
    "surefoot": surefoot,
}


def run_policy(
    policy: str,
    job: Job,
    market: Market,
    offer: Availability,
    *,
    deadline_s: float,
    restart_s: float,
    starts: int = 60,
    seed: int = 1,
    patience: float = 6.0,
) -> Trial:
    """``starts`` random starts in the wrapped trace, until the work is done or ``patience`` deadlines have passed."""
    if policy not in POLICIES:
        raise ConfigError(f"no policy {policy!r}; there are {', '.join(POLICIES)}")
    if deadline_s <= job.work_s:
        hours, work = deadline_s / HOUR_S, job.work_s / HOUR_S
        raise ConfigError(f"deadline of {hours:.1f} h is not above the {work:.1f} h of work")
    start = np.random.default_rng(seed).integers(len(offer.nodes), size=starts)
    world = _start(job, deadline_s, restart_s, offer.tick_s, starts)
    nodes = np.array(offer.nodes, dtype=np.int64)
    cost, finish = np.zeros(starts), np.full(starts, np.inf)
    paused = np.zeros(starts)
    for tick in range(int(patience * deadline_s // offer.tick_s)):
        world.elapsed_s = tick * offer.tick_s
        world.spot = nodes[(start + tick) % len(nodes)]
        spot, on_demand = POLICIES[policy](world)
        changed = (spot != world.on_spot) | (on_demand != world.on_demand)
        paused = np.where(changed, restart_s, paused)
        world.on_spot, world.on_demand = spot, on_demand
        live = np.isinf(finish)
        used = _progress(world, paused, finish, live)
        paid = spot * market.spot_usd_per_node_h + on_demand * market.on_demand_usd_per_node_h
        cost += np.where(live, paid * used / HOUR_S, 0.0)
        if not np.isinf(finish).any():
            break
    return Trial(policy, cost, finish, finish > deadline_s + offer.tick_s)


def _start(job: Job, deadline_s: float, restart_s: float, tick_s: float, starts: int) -> _World:
    def whole() -> Ints:
        return np.zeros(starts, dtype=np.int64)

    never = np.zeros(starts, dtype=np.bool_)
    return _World(
        job, job.work_s, deadline_s, restart_s, tick_s, 0.0, whole(), np.zeros(starts), whole(), whole(), never
    )


def _progress(world: _World, paused: Floats, finish: Floats, live: Bools) -> Floats:
    """Train for a tick; seconds of the tick that are paid for. Updates progress, pauses and finishing times."""
    running = (world.on_spot + world.on_demand).clip(0, world.job.nodes)
    speed = np.array([world.job.speed(n) for n in range(world.job.nodes + 1)])[running]
    pause = np.minimum(paused, world.tick_s)
    paused -= np.where(running > 0, pause, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        needed = np.where(speed > 0, world.left_s / speed, np.inf) + pause
    used = np.minimum(needed, world.tick_s)
    world.done_s += np.where(live, np.maximum(used - pause, 0.0) * speed, 0.0)
    ended = live & (needed <= world.tick_s)
    finish[ended] = world.elapsed_s + used[ended]
    return np.asarray(used)
