"""Carry out events on real processes: wait for the phase, strike, start again, see the run to its end.

Never waits for a time: a process is watched until its board says the wanted phase, stopped, looked at once more, and
only then is the signal sent; so what it dies of is what it was in. All waiting is bounded by signs of life on the
board: where nothing moves any more the scenario ends with a report, not never. Knows nothing of what is trained.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from surefoot.board import NodeWord
from surefoot.clock import boot_s, wall_s
from surefoot.exits import EVICTED, FINISHED
from surefoot.scenario.events import Event, Kind, Strike
from surefoot.scenario.job import Job, Node
from surefoot.scenario.processes import ahead_of_others, send, stopped, wait_for_end

PATIENCE_S = 120.0
LIMIT_S = 3600.0
_TELL_EVERY_S = 0.1
_FAR_LOOK_S = 0.005
_NEAR_LOOK_S = 0.00002
_START_LOOK_S = 0.0002
"""A start's phases last a message there and back at least, and are waited for through all of a restart."""
_DUMP_S = 3.0
LINGER_S = 15.0
BREATH_STEPS = 5
"""Enough to be past what is still finished after an event: an evicted job leaves a step or two later."""
_GONE = "gone"
_BEFORE_THE_FIRST_STEP = ("starting", "restoring")


@dataclass(frozen=True, slots=True)
class View:
    """A moment of a scenario, for whoever looks on."""

    step: int
    trainers: tuple[str, ...]
    """Phase of each local rank of the first node, or "gone"."""
    agent: str
    durable: int | None
    """Newest committed step."""
    durable_age_s: float | None
    strikes: tuple[Strike, ...]
    next_event: Event | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a scenario."""

    strikes: tuple[Strike, ...]
    problems: tuple[str, ...]
    """Why it is no success; empty if every event struck as wanted, or nearly, and every node ended with 0."""


class _Stopped(Exception):  # noqa: N818 - the way out of nested waiting; `run` turns it into a problem
    """The scenario cannot go on, and why."""


class Scenario:
    """Events on nodes, in order. Use once.

    Args:
        nodes: where; each is started at the beginning and after each event that ended it.
        events: what happens, settled by `draw`.
        num_ranks: local ranks of each node, for the view.
        newest_durable: asked after `kill_all`, before the next start: the newest committed step, 0 if there is none.
        look_on: called about ten times a second.
        patience_s: how long nothing may move.
        limit_s: how long the whole may take.
        linger_s: how long processes may take to follow their supervisor.
        make_job: what runs a node; another than `Job` for what has no board.
        breath_steps: how many steps past the last event must be finished before the next one strikes, so that each is
            seen to be recovered from. 0: it may strike during the recovery.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        events: Sequence[Event],
        *,
        num_ranks: int = 1,
        newest_durable: Callable[[], int] | None = None,
        look_on: Callable[[View], None] | None = None,
        patience_s: float = PATIENCE_S,
        limit_s: float = LIMIT_S,
        linger_s: float = LINGER_S,
        make_job: Callable[[Node], Job] = Job,
        breath_steps: int = 0,
    ) -> None:
        self._breath_steps = breath_steps
        self._jobs = [make_job(node) for node in nodes]
        self._events = list(events)
        self._num_ranks = num_ranks
        self._newest_durable = newest_durable
        self._look_on = look_on
        self._patience_s = patience_s
        self._limit_s = limit_s
        self._linger_s = linger_s
        self._strikes: list[Strike] = []
        self._problems: list[str] = []
        self._signs: tuple[tuple[int, ...], ...] = ()
        self._began_s = 0.0
        self._moved_s = 0.0
        self._told_s = 0.0

    def run(self) -> Outcome:
        """Run to the end. No process and no memory of the nodes is left, however it ends."""
        self._began_s = self._moved_s = boot_s()
        try:
            for job in self._jobs:
                job.start()
            with ahead_of_others():
                self._carry_out()
            self._until(lambda: all(job.exit_code() is not None for job in self._jobs))
            self._check_ends()
        except _Stopped as stop:
            self._problems.append(str(stop))
        finally:
            for job in self._jobs:
                job.kill()
                job.wipe()
        return Outcome(tuple(self._strikes), tuple(self._problems))

    def _carry_out(self) -> None:
        for event in self._events:
            job = self._jobs[event.node]
            strike = self._wait_and_strike(job, event)
            self._strikes.append(strike)
            self._strikes[-1] = self._follow_up(job, strike)

    # ------------------------------------------------------------------ striking

    def _wait_and_strike(self, job: Job, event: Event) -> Strike:
        found: list[Strike] = []

        def struck() -> bool:
            if job.exit_code() is not None:
                raise _Stopped(
                    f"{event.kind} never struck: before a process was in {event.phase!r} {_ended(job)}; "
                    f"it printed:\n{job.output_tail()}"
                )
            strike = self._try(job, event)
            if strike is not None:
                found.append(strike)
            return strike is not None

        near_s = _START_LOOK_S if event.phase in _BEFORE_THE_FIRST_STEP else _NEAR_LOOK_S
        self._until(struck, lambda: near_s if self._is_due(job, event) else _FAR_LOOK_S)
        return found[0]

    def _try(self, job: Job, event: Event) -> Strike | None:
        """Strike if this is the moment, else None."""
        if _phase(job, event) != event.phase or not self._is_due(job, event):
            return None
        watched, target = _watched(job, event), _target(job, event)
        if watched is None or target is None:
            return None
        with stopped(watched) as still:
            # It moved on until it stood still, or another took its place; from here on it cannot.
            if not still or _watched(job, event) != watched:
                return None
            phase, at_step = _phase(job, event), job.finished()
            if phase != event.phase:
                return None
            struck_s, pids = wall_s(), self._strike(job, event, target)
        return Strike(event=event, t=struck_s, at_step=at_step, struck_in=phase, pids=tuple(pids))

    def _is_due(self, job: Job, event: Event) -> bool:
        finished = job.finished()
        if event.phase in _BEFORE_THE_FIRST_STEP:
            # Meant for the recovery from the last event. A trainer says how far it is only once it has restored.
            return job.furthest >= event.step
        if self._breath_steps and self._strikes and finished < self._strikes[-1].at_step + self._breath_steps:
            return False
        return finished >= event.step

    def _strike(self, job: Job, event: Event, target: int) -> list[int]:
        if event.kind is Kind.KILL_ALL:
            return job.kill()
        if event.kind is Kind.EVICT:
            send(target, signal.SIGTERM)
            return [target]
        if event.kind is Kind.KILL_GROUP:
            return job.kill_trainers()
        send(target, signal.SIGKILL)
        if event.kind is Kind.KILL_SUPERVISOR and job.supervisor is not None:
            job.supervisor.wait()
        elif not wait_for_end(target):
            raise _Stopped(f"process {target} lives on after SIGKILL")
        return [target]

    # ------------------------------------------------------------------ what follows

    def _follow_up(self, job: Job, strike: Strike) -> Strike:
        kind = strike.event.kind
        if kind is Kind.EVICT:
            self._until(lambda: job.exit_code() is not None)
            code = job.exit_code()
            evicted = code is not None and job.was_evicted(code)
            if not evicted and code != FINISHED:
                raise _Stopped(f"after evict {_ended(job)}, not {EVICTED}; it printed:\n{job.output_tail()}")
            if evicted:
                self._check_nobody_left(job)
                job.start()
            return replace(strike, exit_code=code)
        if kind is Kind.KILL_ALL:
            job.wipe()
            strike = replace(strike, durable=self._newest_durable() if self._newest_durable is not None else None)
        if kind in (Kind.KILL_ALL, Kind.KILL_SUPERVISOR):
            code = job.exit_code()
            job.start()
            return replace(strike, exit_code=code)
        return strike

    def _check_ends(self) -> None:
        for job in self._jobs:
            if job.exit_code() != FINISHED:
                raise _Stopped(f"{_ended(job)}; it printed:\n{job.output_tail()}")
            self._check_nobody_left(job)
            if left := job.leftovers():
                self._problems.append(f"{job.node.name} left {', '.join(left)} in memory")

    def _check_nobody_left(self, job: Job) -> None:
        end_s = boot_s() + self._linger_s
        while job.members() and boot_s() < end_s:
            time.sleep(_FAR_LOOK_S)
        if left := job.describe_members():
            self._problems.append(f"{job.node.name} ended, but not its processes {'; '.join(left)}")

    # ------------------------------------------------------------------ waiting

    def _until(self, done: Callable[[], bool], pause_s: Callable[[], float] = lambda: _FAR_LOOK_S) -> None:
        while not done():
            now_s = boot_s()
            if now_s - self._told_s > _TELL_EVERY_S:
                self._told_s = now_s
                self._tell()
                self._look_for_life(now_s)
            time.sleep(pause_s())
        self._moved_s = boot_s()

    def _look_for_life(self, now_s: float) -> None:
        signs = tuple(job.signs_of_life() for job in self._jobs)
        if signs != self._signs:
            self._signs, self._moved_s = signs, now_s
        elif now_s - self._moved_s > self._patience_s:
            raise _Stopped(self._report(f"nothing moved for {self._patience_s:g} s"))
        if now_s - self._began_s > self._limit_s:
            raise _Stopped(self._report(f"no end within {self._limit_s:g} s"))

    def _report(self, what: str) -> str:
        lines = [what]
        for job in self._jobs:
            phases = [job.trainer_phase(rank) for rank in range(self._num_ranks)]
            lines.append(f"{job.node.name}: step {job.finished()}, trainers {phases}, agent {job.agent_phase()}")
            lines += job.describe_members()
            # Python's fault handler writes where every thread is. All are stopped first: none can see another's end,
            # and leave because of it without a word.
            members = job.members()
            for number in (signal.SIGSTOP, signal.SIGABRT, signal.SIGCONT):
                for pid in members:
                    send(pid, number)
        end_s = boot_s() + _DUMP_S
        while boot_s() < end_s and any(job.members() for job in self._jobs):
            time.sleep(_FAR_LOOK_S)
        lines += [f"{job.output} ends:\n{job.output_tail()}" for job in self._jobs]
        return "\n".join(lines)

    def _tell(self) -> None:
        if self._look_on is None:
            return
        job = self._jobs[0]
        board = job.board()
        committed = board.node(NodeWord.COMMITTED) if board is not None else 0
        staged_ns = board.node(NodeWord.COMMITTED_NS) if board is not None else 0
        left = self._events[len(self._strikes) :]
        self._look_on(
            View(
                step=job.finished(),
                trainers=tuple(
                    job.trainer_phase(rank) if job.trainer_pid(rank) else _GONE for rank in range(self._num_ranks)
                ),
                agent=job.agent_phase() if job.agent_pid() else _GONE,
                durable=committed - 1 if committed else None,
                durable_age_s=boot_s() - staged_ns / 1e9 if staged_ns else None,
                strikes=tuple(self._strikes),
                next_event=left[0] if left else None,
            )
        )


def _phase(job: Job, event: Event) -> str:
    return job.agent_phase() if event.of_agent else job.trainer_phase(event.rank or 0)


def _watched(job: Job, event: Event) -> int | None:
    return job.agent_pid() if event.of_agent else job.trainer_pid(event.rank or 0)


def _target(job: Job, event: Event) -> int | None:
    """Who gets the signal, if he lives."""
    if event.kind in (Kind.KILL_WORKER, Kind.KILL_GROUP):
        return job.trainer_pid(event.rank or 0)
    if event.kind is Kind.KILL_AGENT:
        return job.agent_pid()
    return job.supervisor.pid if job.supervisor is not None and job.supervisor.poll() is None else None


def _ended(job: Job) -> str:
    return f"{job.node.name}'s supervisor ended with {job.exit_code()}"
