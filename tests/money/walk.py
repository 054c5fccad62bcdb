"""One run, event by event, deciding with the product's own rules.

When the next save starts is `surefoot.core.cadence.next_start`; which image a restart takes is
`surefoot.core.recovery.ranking`, over the images that the loss left. Slow and literal, so that the quick engines can be
checked against it, and the source of a timeline that a person can read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import floor, inf

from surefoot.core.cadence import Cadence, next_start
from surefoot.core.layout import BoundaryId
from surefoot.core.recovery import Source, ranking
from surefoot.money.closed_form import Outcome
from surefoot.money.job import Job, Timing
from surefoot.money.phases import Phase

_TICKS_PER_S = 1000
"""Positions in the history are whole milliseconds of compute: the step numbers of `surefoot.core`."""
_CHAIN = {1: inf}
"""One generation, nothing cut off: a loss of nodes never forks the history here."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """The next loss: after this exposure, of so many nodes, with this chance drawn in advance."""

    gap_s: float
    nodes: int
    chance: float
    """Uniform in 0 … 1; below P(hot) the memory survives."""


@dataclass(frozen=True, slots=True)
class Happening:
    """One line of the timeline."""

    wall_s: float
    what: str
    position_s: float


@dataclass
class _State:
    job: Job
    timing: Timing
    wall: float = 0.0
    position: float = 0.0
    """Compute of the history so far, in seconds at full speed."""
    clock: float = 0.0
    """Training clock: compute and stalls at full speed."""
    since: float = 0.0
    save_at: float = inf
    """Training clock at which the next save is due."""
    stalled_until: float = inf
    """Training clock at which the save under way lets training go on."""
    uploads: list[tuple[float, float]] = field(default_factory=list)
    """(training clock at which it is durable, position), oldest first."""
    durable: float = 0.0
    present: int = 0
    spare: int = 0
    arrivals: list[float] = field(default_factory=list)
    node_s: dict[Phase, float] = field(default_factory=dict)
    timeline: list[Happening] = field(default_factory=list)
    evictions: int = 0
    lost_work: float = 0.0
    lost_steps: float = 0.0
    saves: int = 0
    loads: int = 0

    def spend(self, phase: Phase, node_s: float) -> None:
        self.node_s[phase] = self.node_s.get(phase, 0.0) + node_s

    def note(self, what: str) -> None:
        self.timeline.append(Happening(self.wall, what, self.position))

    def pass_wall(self, seconds: float, phase: Phase, nodes: float) -> None:
        self.wall += seconds
        self.spend(phase, seconds * nodes)
        self.spend(Phase.STANDBY, seconds * self.timing.standby)


def walk(
    job: Job, timing: Timing, evictions: Iterator[Eviction], announced: float = 0.0
) -> tuple[Outcome, list[Happening]]:
    """The run that these evictions make of the job, and its timeline."""
    state = _State(job, timing, present=job.nodes, spare=timing.standby)
    coming = next(evictions)
    gap = coming.gap_s
    state.save_at = timing.interval_s
    while True:
        gap = _train(state, gap)
        if state.durable >= job.work_s - 1e-6:
            return _outcome(state), state.timeline
        cold = _lose(state, coming, announced)
        coming = next(evictions)
        gap = coming.gap_s
        while not _recover(state, cold, gap):
            # The load was cut short: another loss, from which only the durable tier is left.
            _lose_nodes(state, coming.nodes)
            coming = next(evictions)
            gap, cold = coming.gap_s, _Cold(0.0)
        gap -= timing.load_s if cold.is_cold else 0.0


@dataclass(frozen=True, slots=True)
class _Cold:
    redo_s: float
    is_cold: bool = True


def _train(state: _State, gap_s: float) -> float:
    """Train until the next eviction or the end; the exposure that is left."""
    while True:
        usable = state.job.usable(state.present) if _may_shrink(state) else 0
        speed = state.job.speed(usable)
        due = _next_due(state)
        to_due = max(0.0, (due - state.clock) / speed) if speed else inf
        exposure = state.present / state.job.nodes
        to_event = gap_s / exposure if speed else inf
        to_arrival = max(0.0, min(state.arrivals, default=inf) - state.wall)
        step = min(to_due, to_event, to_arrival)
        _advance(state, step, speed)
        gap_s -= step * exposure if speed else 0.0
        if step == to_event:
            return 0.0
        if step == to_due:
            _handle_due(state)
            if state.durable >= state.job.work_s - 1e-6:
                return gap_s
        else:
            _arrive(state, usable)


def _may_shrink(state: _State) -> bool:
    return state.timing.shrink or state.present == state.job.nodes


def _next_due(state: _State) -> float:
    """Training clock of the next thing that happens by itself."""
    upload = state.uploads[0][0] if state.uploads else inf
    if state.stalled_until < inf:
        return min(upload, state.stalled_until)
    end = state.clock + state.job.work_s - state.position if state.position < state.job.work_s else inf
    return min(upload, state.save_at, end)


def _advance(state: _State, wall_s: float, speed: float) -> None:
    job = state.job
    done = wall_s * speed
    working = state.stalled_until == inf and state.position < job.work_s
    phase = Phase.USEFUL if working else Phase.CHECKPOINT_SAVE
    state.spend(phase if speed else Phase.INFRASTRUCTURE_RECOVERY, (done if speed else wall_s) * _weight(state, speed))
    if speed:
        state.spend(Phase.ELASTIC_SLICE_DOWN, wall_s * state.present - done * job.nodes)
    state.spend(Phase.STANDBY, wall_s * state.timing.standby)
    state.wall += wall_s
    state.clock += done
    state.since += done
    if working:
        state.position = min(job.work_s, state.position + done)


def _weight(state: _State, speed: float) -> float:
    return float(state.job.nodes if speed else state.present)


def _handle_due(state: _State) -> None:
    now = state.clock + 1e-9
    if state.uploads and state.uploads[0][0] <= now:
        state.durable = state.uploads.pop(0)[1]
    elif state.stalled_until <= now:
        _end_stall(state)
    else:
        if state.position >= state.job.work_s - 1e-6:
            state.position = state.job.work_s
        state.saves += 1
        state.save_at = inf
        state.stalled_until = state.clock + state.timing.stall_s


def _end_stall(state: _State) -> None:
    """The image is taken: its upload begins, and the product's rule says when the next save may start."""
    timing, job = state.timing, state.job
    state.stalled_until = inf
    durable_at = state.clock + timing.lag_s
    state.uploads.append((durable_at, state.position))
    if state.position < job.work_s:
        cadence = Cadence(interval_s=timing.period_s, max_bytes_per_hour=inf)
        state.save_at = next_start(cadence, state.clock - timing.stall_s, durable_at, int(job.state_bytes))


def _lose(state: _State, eviction: Eviction, announced: float) -> _Cold:
    """Take the nodes, choose the image to go on from, and go back to it."""
    _lose_nodes(state, eviction.nodes)
    by_notice, by_replica = state.timing.hot_shares(eviction.nodes, announced)
    images = [_image(state.durable, "object")]
    if eviction.chance < by_notice + by_replica:
        lag = 0.0 if eviction.chance < by_notice else state.timing.hot_lag_s
        images.append(_image(_newest_image_s(state, lag), "ram"))
    chosen = ranking(images, _CHAIN)[0]
    redo = state.position - chosen.at.boundary / _TICKS_PER_S
    finished_before = floor(state.position / state.job.step_s + 1e-9)
    state.lost_steps += max(0, finished_before - floor((state.position - redo) / state.job.step_s + 1e-3))
    state.lost_work += redo
    state.since = 0.0
    state.note(f"lost {eviction.nodes} node(s); back by {redo:.1f} s to the image in {chosen.place}")
    if chosen.place == "ram":
        return _Cold(redo, is_cold=False)
    _go_back(state, redo)
    return _Cold(0.0)


def _image(position_s: float, place: str) -> Source:
    at = BoundaryId(round(position_s * _TICKS_PER_S), 1)
    return Source(at=at, place="ram" if place == "ram" else "object", plan="", committed=place == "object")


def _newest_image_s(state: _State, lag_s: float) -> float:
    """Position of the newest image in memory that is older than ``lag_s``: taken at whole steps of the history."""
    every = state.timing.hot_interval_s
    return every * floor((state.position - min(lag_s, state.since)) / every + 1e-9)


def _go_back(state: _State, redo_s: float) -> None:
    nodes = state.job.nodes
    state.spend(Phase.USEFUL, -redo_s * nodes)
    state.spend(Phase.WASTED_PROGRESS, redo_s * nodes)
    state.position -= redo_s
    state.stalled_until = inf
    state.uploads.clear()
    state.save_at = state.clock + state.timing.interval_s


def _lose_nodes(state: _State, count: int) -> None:
    swapped = min(count, state.spare)
    lost = min(count - swapped, state.present)
    state.spare -= swapped
    state.present -= lost
    state.evictions += 1
    state.arrivals += [state.wall + state.timing.replacement_s] * (swapped + lost)


def _arrive(state: _State, usable_before: int) -> None:
    here = [at for at in state.arrivals if at <= state.wall]
    state.arrivals = [at for at in state.arrivals if at > state.wall]
    joining = min(len(here), state.job.nodes - state.present)
    state.present += joining
    state.spare += len(here) - joining
    if 0 < usable_before < state.job.usable(state.present) and _may_shrink(state):
        state.pass_wall(state.timing.rejoin_s, Phase.ELASTIC_RESIZE, state.present)


def _recover(state: _State, loss: _Cold, gap_s: float) -> bool:
    """Wait for enough nodes, restart, load. False when an eviction came during the load."""
    job, timing = state.job, state.timing
    while not (_may_shrink(state) and job.usable(state.present)):
        wait = max(0.0, min(state.arrivals) - state.wall)
        state.pass_wall(wait, Phase.INFRASTRUCTURE_RECOVERY, state.present)
        _arrive(state, 0)
    state.pass_wall(timing.restart_s, Phase.PROGRAM_STARTUP, state.present)
    speed = job.speed(job.usable(state.present))
    redo_wall = loss.redo_s / speed
    state.spend(Phase.WASTED_PROGRESS, loss.redo_s * job.nodes)
    state.pass_wall(redo_wall, Phase.ELASTIC_SLICE_DOWN, state.present - job.nodes * speed)
    if not loss.is_cold:
        return True
    return _load(state, gap_s)


def _load(state: _State, gap_s: float) -> bool:
    left = state.timing.load_s
    state.loads += 1
    while left > 0:
        to_arrival = max(0.0, min(state.arrivals, default=inf) - state.wall)
        step = min(left, gap_s, to_arrival)
        state.pass_wall(step, Phase.RESTORE, state.present)
        left, gap_s = left - step, gap_s - step
        if gap_s <= 0 and left > 0:
            return False
        if left > 0:
            _arrive(state, state.job.usable(state.present))
    return True


def _outcome(state: _State) -> Outcome:
    return Outcome(
        wall_s=state.wall,
        node_s=state.node_s,
        events=state.evictions,
        lost_work_s=state.lost_work,
        lost_steps=state.lost_steps,
        saves=state.saves,
        loads=state.loads,
        work_s=state.job.work_s,
    )


def draws(gap_s: Callable[[], float], nodes: Callable[[], int], chance: Callable[[], float]) -> Iterator[Eviction]:
    """Evictions without end from three sources of chance."""
    while True:
        yield Eviction(gap_s(), nodes(), chance())
