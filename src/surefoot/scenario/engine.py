"""Carry out events on real processes: wait for the phase, strike, start again, see the run to its end.

Never waits for a time: a process is watched until its board shows the wanted phase, stopped, looked at once more, and
only then is the signal sent; so what it dies of is what it was in. All waiting is bounded by signs of life on the
board: where nothing moves any more the scenario ends with a report, not never. Knows nothing of what is trained.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from surefoot.exits import EVICTED, FINISHED
from surefoot.host.clock import boot_s, wall_s
from surefoot.ipc.board import NodeWord
from surefoot.scenario.events import LASTING, Event, Kind, Strike
from surefoot.scenario.faults import Fault, fault_of
from surefoot.scenario.job import Job, Link, Node, Pausable
from surefoot.scenario.processes import ahead_of_others, send, stopped, wait_for_end

PATIENCE_S = 120.0
LIMIT_S = 3600.0
_TELL_EVERY_S = 0.1
_FAR_LOOK_S = 0.005
_NEAR_LOOK_S = 0.0002
"""Most phases last a message there and back at least, and may be waited for through all of a restart."""
_SHORTEST_LOOK_S = 0.00002
_SHORTEST = ("filling", "sealed")
"""A small image is copied in less than the others take, and then the trainer goes on at once."""
_DUMP_S = 3.0
LINGER_S = 15.0
BREATH_STEPS = 5
"""Enough to be past what is still finished after an event: an evicted job leaves a step or two later."""
_GONE = "gone"
_BEFORE_THE_FIRST_STEP = ("starting", "restoring")


@dataclass(frozen=True, slots=True)
class View:
    """A moment of a scenario, for an observer."""

    step: int
    trainers: tuple[str, ...]
    """Phase of each rank, node after node, or "gone"."""
    agents: tuple[str, ...]
    """Of each node."""
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
    """Why it is not a success; empty if every event struck as wanted, or nearly, and every node ended with 0."""


class _Stopped(Exception):  # noqa: N818 - the way out of nested waiting; `run` turns it into a problem
    """The scenario cannot go on, and why."""


class Scenario:
    """Events on nodes, in order. Use once.

    Args:
        nodes: where; each is started at the beginning and after each event that ended it.
        events: what happens, settled by `draw`.
        num_ranks: local ranks of each node, for the view.
        newest_durable: asked after a loss of memory, before the next start: the newest committed step, 0 if there is
            none.
        damage: of `rot`: damages the newest committed step in the store; what comes after counts without it.
        may_damage: whether another committed step would be left: a run whose every checkpoint is damaged is refused.
        store_link: what joins the store to the nodes; None: it cannot be cut.
        store: the store's server; None: it cannot be stopped.
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
        damage: Callable[[], None] | None = None,
        may_damage: Callable[[], bool] | None = None,
        store_link: Link | None = None,
        store: Pausable | None = None,
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
        self._damage = damage
        self._may_damage = may_damage
        self._store_link = store_link
        self._store = store
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
        self._asked_s = 0.0
        self._allowed = False

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
            job = self._jobs[event.node or 0]
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
            self._check_nobody_failed()
            strike = self._try(job, event)
            if strike is not None:
                found.append(strike)
            return strike is not None

        near_s = _SHORTEST_LOOK_S if event.phase in _SHORTEST else _NEAR_LOOK_S
        self._until(struck, lambda: near_s if self._is_due(job, event) else _FAR_LOOK_S)
        return found[0]

    def _try(self, job: Job, event: Event) -> Strike | None:
        """Strike if this is the moment, else None."""
        if _phase(job, event) != event.phase or not self._is_due(job, event) or not self._is_allowed(event):
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

    def _is_allowed(self, event: Event) -> bool:
        if event.kind is not Kind.ROT or self._may_damage is None:
            return True
        # It asks the store, whose answers are not for every look.
        if boot_s() - self._asked_s > _TELL_EVERY_S:
            self._allowed = self._may_damage()
            self._asked_s = boot_s()
        return self._allowed

    def _is_due(self, job: Job, event: Event) -> bool:
        finished = job.finished()
        if event.phase in _BEFORE_THE_FIRST_STEP:
            # Meant for the recovery from the last event. A trainer reports how far it is only once it has restored.
            return job.furthest >= event.step
        if self._breath_steps and self._strikes and finished < self._strikes[-1].at_step + self._breath_steps:
            return False
        return finished >= event.step

    def _strike(self, job: Job, event: Event, target: int) -> list[int]:
        if event.kind is Kind.KILL_ALL:
            return job.kill()
        if event.kind in (Kind.KILL_JOB, Kind.ROT):
            return self._kill_job()
        if event.kind in LASTING:
            return self._fault_of(event, job).begin(job)
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

    def _kill_job(self) -> list[int]:
        # None may act on the others' end.
        for job in self._jobs:
            job.pause()
        return [pid for job in self._jobs for pid in job.kill()]

    # ------------------------------------------------------------------ what follows

    def _follow_up(self, job: Job, strike: Strike) -> Strike:
        kind = strike.event.kind
        if kind is Kind.EVICT:
            return self._see_evicted(job, strike)
        if kind in LASTING:
            self._see_end(job, strike.event)
            return strike
        if kind is Kind.KILL_ALL:
            return self._start_again([job], replace(strike, durable=self._lose_memory([job])))
        if kind in (Kind.KILL_JOB, Kind.ROT):
            if kind is Kind.ROT and self._damage is not None:
                self._damage()
            return self._start_again(self._jobs, replace(strike, durable=self._lose_memory(self._jobs)))
        if kind is Kind.KILL_SUPERVISOR:
            return self._start_again([job], strike)
        return strike

    def _see_evicted(self, job: Job, strike: Strike) -> Strike:
        """An eviction of one node ends the job on all, each with the code for it."""
        self._until(lambda: all(each.exit_code() is not None for each in self._jobs))
        evicted = [each for each in self._jobs if each.was_evicted(each.exit_code() or 0)]
        for each in self._jobs:
            if each not in evicted and each.exit_code() != FINISHED:
                raise _Stopped(f"after evict {_ended(each)}, not {EVICTED}; it printed:\n{each.output_tail()}")
        code = job.exit_code()
        if evicted:
            for each in self._jobs:
                self._check_nobody_left(each)
                each.start()
        return replace(strike, exit_code=code)

    def _see_end(self, job: Job, event: Event) -> None:
        """Wait as long as it is to last, and end it. Nothing has to move meanwhile."""
        fault, end_s = self._fault_of(event, job), boot_s() + event.lasts_s
        # A process that was stopped to be looked at was let go on.
        fault.begin(job)
        try:
            self._until(lambda: boot_s() >= end_s, patience_s=event.lasts_s + self._patience_s)
        finally:
            fault.end(job)

    def _fault_of(self, event: Event, job: Job) -> Fault:
        return fault_of(event, job, self._store_link, self._store)

    def _lose_memory(self, jobs: Sequence[Job]) -> int | None:
        for job in jobs:
            job.wipe()
        return self._newest_durable() if self._newest_durable is not None else None

    def _start_again(self, jobs: Sequence[Job], strike: Strike) -> Strike:
        code = jobs[0].exit_code()
        for job in jobs:
            job.start()
        return replace(strike, exit_code=code)

    def _check_nobody_failed(self) -> None:
        for job in self._jobs:
            if job.exit_code() not in (None, FINISHED):
                raise _Stopped(f"{_ended(job)}; it printed:\n{job.output_tail()}")

    def _check_ends(self) -> None:
        for job in self._jobs:
            if job.exit_code() != FINISHED:
                raise _Stopped(f"{_ended(job)}; it printed:\n{job.output_tail()}")
            self._check_nobody_left(job)
            if left := job.left_behind():
                self._problems.append(f"{job.node.name} left {', '.join(left)} in memory")

    def _check_nobody_left(self, job: Job) -> None:
        end_s = boot_s() + self._linger_s
        while job.members() and boot_s() < end_s:
            time.sleep(_FAR_LOOK_S)
        if left := job.describe_members():
            self._problems.append(f"{job.node.name} ended, but not its processes {'; '.join(left)}")

    # ------------------------------------------------------------------ waiting

    def _until(
        self,
        done: Callable[[], bool],
        pause_s: Callable[[], float] = lambda: _FAR_LOOK_S,
        patience_s: float | None = None,
    ) -> None:
        while not done():
            now_s = boot_s()
            if now_s - self._told_s > _TELL_EVERY_S:
                self._told_s = now_s
                self._tell()
                self._look_for_life(now_s, self._patience_s if patience_s is None else patience_s)
            time.sleep(pause_s())
        self._moved_s = boot_s()

    def _look_for_life(self, now_s: float, patience_s: float) -> None:
        signs = tuple(job.signs_of_life() for job in self._jobs)
        if signs != self._signs:
            self._signs, self._moved_s = signs, now_s
        elif now_s - self._moved_s > patience_s:
            raise _Stopped(self._report(f"nothing moved for {patience_s:g} s"))
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
        boards = [board for job in self._jobs if (board := job.board()) is not None]
        committed = max((board.node(NodeWord.COMMITTED_STEP) for board in boards), default=0)
        staged_ns = max((board.node(NodeWord.COMMITTED_NS) for board in boards), default=0)
        left = self._events[len(self._strikes) :]
        self._look_on(
            View(
                step=min(job.finished() for job in self._jobs),
                trainers=tuple(
                    job.trainer_phase(rank) if job.trainer_pid(rank) else _GONE
                    for job in self._jobs
                    for rank in range(self._num_ranks)
                ),
                agents=tuple(job.agent_phase() if job.agent_pid() else _GONE for job in self._jobs),
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
    if event.kind in (Kind.KILL_TRAINER, Kind.KILL_GROUP):
        return job.trainer_pid(event.rank or 0)
    if event.kind is Kind.KILL_AGENT:
        return job.agent_pid()
    return job.noticed_pid(event.rank or 0)


def _ended(job: Job) -> str:
    return f"{job.node.name}'s supervisor ended with {job.exit_code()}"
