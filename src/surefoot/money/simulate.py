"""Thousands of seeded runs at once: a discrete-event simulation in lockstep.

Each round takes every run to its own next event: an eviction, a node's arrival, the end of a load, the end of the job.
Runs are rows of arrays, so that a round costs the same for one run and for four thousand. The closed form gives the
means; a walk in the tests does one run literally, event by event. The three are tested against one another.

The rules are those of `surefoot.money.closed_form`, and also what that leaves out: replacements that overlap, too few
nodes, used-up standbys, any hazard, any speed of a smaller world.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surefoot.money.closed_form import Outcome
from surefoot.money.hazards import Floats, Hazard, Ints, Sampler
from surefoot.money.job import Job, Timing
from surefoot.money.phases import PHASES, Phase

Bools = NDArray[np.bool_]

NEVER = np.inf
MAX_ROUNDS = 200_000
"""A job that cannot end (it loses more than it does) is cut here and reported as unfinished."""


@dataclass(frozen=True, slots=True)
class Runs:
    """One entry a run."""

    wall_s: Floats
    node_s: dict[Phase, Floats]
    paid_node_s: Floats
    """Nodes that were there, standby included, integrated over the wall time: what a bill counts."""
    events: Ints
    lost_work_s: Floats
    lost_steps: Floats
    saves: Floats
    loads: Ints
    work_s: float
    finished: Bools

    @property
    def goodput(self) -> Floats:
        return self.work_s / self.wall_s

    @property
    def billed_node_s(self) -> Floats:
        return np.asarray(sum(self.node_s.values()), dtype=np.float64)

    def mean(self) -> Outcome:
        """Means over all runs, comparable with the closed form."""
        return Outcome(
            wall_s=float(self.wall_s.mean()),
            node_s={phase: float(values.mean()) for phase, values in self.node_s.items()},
            events=float(self.events.mean()),
            lost_work_s=float(self.lost_work_s.mean()),
            lost_steps=float(self.lost_steps.mean()),
            saves=float(self.saves.mean()),
            loads=float(self.loads.mean()),
            work_s=self.work_s,
        )


def simulate(
    job: Job,
    timing: Timing,
    hazard: Hazard,
    *,
    runs: int = 2000,
    seed: int = 1,
    announced: float = 0.0,
    horizon_s: float = NEVER,
) -> Runs:
    """Runs of the whole job. A run that is not done after ``horizon_s`` of wall time is cut and not ``finished``."""
    rng = np.random.default_rng(seed)
    fleet = _Fleet.start(job, timing, hazard.sampler(rng, runs), rng, runs, announced)
    for _ in range(MAX_ROUNDS):
        if not fleet.advance(horizon_s):
            break
    return fleet.result()


@dataclass
class _Fleet:
    """The state of all runs between two rounds."""

    job: Job
    timing: Timing
    sampler: Sampler
    rng: np.random.Generator
    usable_of: Ints
    """Nodes that can train, by nodes present."""
    speed_of: Floats
    hot_notice: Floats
    """P(hot by the notice), P(hot by a replica), by nodes lost at once."""
    hot_replica: Floats
    wall: Floats
    clock: Floats
    """Training clock since the last cold restart."""
    since: Floats
    """Training clock since the last event of any kind."""
    base: Floats
    """Durable compute at the last cold restart."""
    gap: Floats
    size: Ints
    present: Ints
    spare: Ints
    arrivals: Floats
    """Wall time of each node on its way, a row a run."""
    recovering: Bools
    """A loss has not been recovered from: too few nodes so far."""
    cold: Bools
    redo: Floats
    load: Floats
    live: Bools
    node_s: Floats
    """Billed node-seconds, a row a phase."""
    paid: Floats
    """Billed node-seconds, counted on their own."""
    events: Ints
    lost_work: Floats
    lost_steps: Floats
    up: Floats
    loads: Ints
    finished: Bools

    @classmethod
    def start(
        cls, job: Job, timing: Timing, sampler: Sampler, rng: np.random.Generator, runs: int, announced: float
    ) -> _Fleet:
        counts = range(job.nodes + 1)
        usable = [job.usable(n) if timing.shrink or n == job.nodes else 0 for n in counts]
        shares = [(0.0, 0.0), *(timing.hot_shares(k, announced) for k in counts[1:])]
        gap, size = sampler.draw(np.arange(runs))

        def zeros() -> Floats:
            return np.zeros(runs)

        return cls(
            job=job,
            timing=timing,
            sampler=sampler,
            rng=rng,
            usable_of=np.array(usable, dtype=np.int64),
            speed_of=np.array([job.speed(n) for n in usable]),
            hot_notice=np.array([by_notice for by_notice, _ in shares]),
            hot_replica=np.array([by_replica for _, by_replica in shares]),
            wall=zeros(),
            clock=zeros(),
            since=zeros(),
            base=zeros(),
            gap=gap,
            size=size,
            present=np.full(runs, job.nodes, dtype=np.int64),
            spare=np.full(runs, timing.standby, dtype=np.int64),
            arrivals=np.full((runs, job.nodes + timing.standby), NEVER),
            recovering=np.zeros(runs, dtype=np.bool_),
            cold=np.zeros(runs, dtype=np.bool_),
            redo=zeros(),
            load=zeros(),
            live=np.ones(runs, dtype=np.bool_),
            node_s=np.zeros((len(PHASES), runs)),
            paid=zeros(),
            events=np.zeros(runs, dtype=np.int64),
            lost_work=zeros(),
            lost_steps=zeros(),
            up=zeros(),
            loads=np.zeros(runs, dtype=np.int64),
            finished=np.zeros(runs, dtype=np.bool_),
        )

    def advance(self, horizon_s: float) -> bool:
        """One round. False when every run has ended."""
        self._begin_recoveries()
        usable = self.usable_of[self.present]
        loading = (self.load > 0) & (usable > 0)
        training = ~loading & (usable > 0)
        speed = np.where(training, self.speed_of[self.present], 0.0)
        exposure = np.where(training, self.present / self.job.nodes, np.where(loading, 1.0, 0.0))
        with np.errstate(divide="ignore", invalid="ignore"):
            to_event = np.where(exposure > 0, self.gap / exposure, NEVER)
            to_end = np.where(training, (self._end_s() - self.clock) / speed, np.where(loading, self.load, NEVER))
        to_arrival = np.maximum(self.arrivals.min(axis=1) - self.wall, 0.0)
        step = np.minimum(np.minimum(to_event, to_end), to_arrival)
        step = np.where(self.live, step, 0.0)
        self._bill(step, usable, training, loading, speed)
        self.wall += step
        self.clock += step * speed
        self.since += step * speed
        self.up += step * speed
        self.gap = np.maximum(self.gap - step * exposure, 0.0)
        self.load = np.where(loading, np.maximum(self.load - step, 0.0), self.load)
        first = self.live & (to_event <= np.minimum(to_end, to_arrival))
        ended = self.live & ~first & (to_end <= to_arrival)
        self.load[ended & loading] = 0.0
        self._finish(ended & training)
        self._arrive(self.live & ~first & ~ended)
        self._evict(np.flatnonzero(first), loading)
        self.live &= self.wall < horizon_s
        return bool(self.live.any())

    def _end_s(self) -> Floats:
        """The training clock at which the job is done and its last save durable."""
        timing = self.timing
        left = self.job.work_s - self.base
        saves = np.maximum(np.ceil(left / timing.interval_s - 1e-9), 1.0)
        return left + timing.stall_s * saves + timing.lag_s

    def _compute_s(self) -> Floats:
        """Compute done since the last cold restart."""
        timing = self.timing
        saves = np.floor(self.clock / timing.period_s)
        within = np.minimum(self.clock - saves * timing.period_s, timing.interval_s)
        return np.minimum(saves * timing.interval_s + within, self.job.work_s - self.base)

    def _bill(self, step: Floats, usable: Ints, training: Bools, loading: Bools, speed: Floats) -> None:
        billed = step * self.present
        self.paid += billed + step * self.timing.standby
        full = step * speed * self.job.nodes
        self._add(Phase.USEFUL, np.where(training, full, 0.0))
        self._add(Phase.ELASTIC_SLICE_DOWN, np.where(training, billed - full, 0.0))
        self._add(Phase.RESTORE, np.where(loading, billed, 0.0))
        self._add(Phase.INFRASTRUCTURE_RECOVERY, np.where(training | loading, 0.0, billed))
        self._add(Phase.STANDBY, step * self.timing.standby)

    def _add(self, phase: Phase, node_s: Floats) -> None:
        self.node_s[PHASES.index(phase)] += node_s

    def _pause(self, who: Bools, seconds: Floats, phase: Phase, node_s: Floats) -> None:
        """Wall time in which nothing is evicted."""
        self.wall += np.where(who, seconds, 0.0)
        self.paid += np.where(who, seconds * (self.present + self.timing.standby), 0.0)
        self._add(phase, np.where(who, node_s, 0.0))
        self._add(Phase.STANDBY, np.where(who, seconds * self.timing.standby, 0.0))

    def _begin_recoveries(self) -> None:
        who = self.live & self.recovering & (self.usable_of[self.present] > 0)
        if not who.any():
            return
        timing = self.timing
        restart = np.full(len(who), timing.restart_s)
        self._pause(who, restart, Phase.PROGRAM_STARTUP, restart * self.present)
        speed = np.where(who, self.speed_of[self.present], 1.0)
        redo_wall = self.redo / speed
        self._pause(who, redo_wall, Phase.WASTED_PROGRESS, self.redo * self.job.nodes)
        self._add(Phase.ELASTIC_SLICE_DOWN, np.where(who, redo_wall * self.present - self.redo * self.job.nodes, 0.0))
        self.load = np.where(who & self.cold, timing.load_s, self.load)
        self.loads += who & self.cold
        self.redo[who] = 0.0
        self.cold[who] = False
        self.recovering[who] = False

    def _finish(self, who: Bools) -> None:
        if not who.any():
            return
        left = self.job.work_s - self.base
        save = np.where(who, (self.clock - left) * self.job.nodes, 0.0)
        self._add(Phase.CHECKPOINT_SAVE, save)
        self._add(Phase.USEFUL, -save)
        self.finished |= who
        self.live &= ~who

    def _arrive(self, who: Bools) -> None:
        if not who.any():
            return
        runs = np.flatnonzero(who)
        here = self.arrivals[runs] <= self.wall[runs, None]
        self.arrivals[runs] = np.where(here, NEVER, self.arrivals[runs])
        count = here.sum(axis=1)
        before = self.usable_of[self.present[runs]]
        joining = np.minimum(count, self.job.nodes - self.present[runs])
        self.present[runs] += joining
        self.spare[runs] += count - joining
        grown = np.zeros(len(who), dtype=np.bool_)
        grown[runs] = (before > 0) & (self.usable_of[self.present[runs]] > before)
        rejoin = np.full(len(who), self.timing.rejoin_s)
        self._pause(grown, rejoin, Phase.ELASTIC_RESIZE, rejoin * self.present)

    def _evict(self, runs: Ints, loading: Bools) -> None:
        if not len(runs):
            return
        size = self.size[runs]
        swapped = np.minimum(size, self.spare[runs])
        self.spare[runs] -= swapped
        lost = np.minimum(size - swapped, self.present[runs])
        self.present[runs] -= lost
        self._order_replacements(runs, swapped + lost)
        self.events[runs] += 1
        self._lose_progress(runs, size, loading[runs] | self.cold[runs])
        self.recovering[runs] = True
        self.since[runs] = 0.0
        self.load[runs] = 0.0
        self.gap[runs], self.size[runs] = self.sampler.draw(runs)

    def _order_replacements(self, runs: Ints, count: Ints) -> None:
        # Free places come first when sorted backwards; one place for each node there is, so they are never short.
        rows = -np.sort(-self.arrivals[runs], axis=1)
        place = np.arange(rows.shape[1])
        due = (self.wall[runs] + self.timing.replacement_s)[:, None]
        self.arrivals[runs] = np.where(place < count[:, None], due, rows)

    def _lose_progress(self, runs: Ints, size: Ints, was_cold: Bools) -> None:
        chance = self.rng.random(len(runs))
        by_notice = chance < self.hot_notice[size]
        hot = ~was_cold & (chance < self.hot_notice[size] + self.hot_replica[size])
        lag = np.where(by_notice, 0.0, self.timing.hot_lag_s)
        self._lose_hot(runs[hot], lag[hot])
        self._lose_cold(runs[~hot & ~was_cold])
        self.cold[runs] = ~hot

    def _lose_hot(self, runs: Ints, lag: Floats) -> None:
        if not len(runs):
            return
        every, since = self.timing.hot_interval_s, self.since[runs]
        kept = every * np.floor(np.maximum(since - lag, 0.0) / every)
        self.redo[runs] = since - kept
        self.lost_work[runs] += since - kept
        step = self.job.step_s
        self.lost_steps[runs] += np.floor(since / step + 1e-9) - np.floor(kept / step + 1e-9)

    def _lose_cold(self, runs: Ints) -> None:
        if not len(runs):
            return
        timing, nodes = self.timing, self.job.nodes
        done = self._compute_s()[runs]
        saved = timing.interval_s * np.floor(np.maximum(self.clock[runs] - timing.lag_s, 0.0) / timing.period_s)
        lost = done - saved
        stalled = (self.clock[runs] - done) * nodes
        self.node_s[PHASES.index(Phase.USEFUL), runs] -= stalled + lost * nodes
        self.node_s[PHASES.index(Phase.CHECKPOINT_SAVE), runs] += stalled
        self.node_s[PHASES.index(Phase.WASTED_PROGRESS), runs] += lost * nodes
        self.lost_work[runs] += lost
        step, base = self.job.step_s, self.base[runs]
        self.lost_steps[runs] += np.floor((base + done) / step + 1e-9) - np.ceil((base + saved) / step - 1e-9).clip(0)
        self.base[runs] += saved
        self.clock[runs] = 0.0

    def result(self) -> Runs:
        return Runs(
            wall_s=self.wall,
            node_s={phase: self.node_s[index] for index, phase in enumerate(PHASES)},
            paid_node_s=self.paid,
            events=self.events,
            lost_work_s=self.lost_work,
            lost_steps=np.maximum(self.lost_steps, 0.0),
            saves=self.up / self.timing.period_s,
            loads=self.loads,
            work_s=self.job.work_s,
            finished=self.finished,
        )
