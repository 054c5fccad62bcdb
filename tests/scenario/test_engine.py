"""The engine on real processes that go through the phases and do nothing else."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from surefoot.scenario.engine import Outcome, Scenario, View
from surefoot.scenario.events import AGENT_PHASES, Event, Kind
from surefoot.scenario.job import Job, Node

_JOB = Path(__file__).with_name("phased_job.py")
_RANKS = 2
_TRAINER_PHASES = ("training", "filling", "sealed")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A base directory of the test's own in shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sf-test-") as path:
        yield Path(path)


def _node(memory: Path, output: Path, *options: str, steps: int = 200) -> Node:
    (output / "out").mkdir(exist_ok=True)
    arguments = [str(steps), str(_RANKS), "--progress", str(output / "progress"), *options]
    return Node(name="n", command=[sys.executable, str(_JOB), *arguments], memory=memory, output=output / "out")


def _processes_beside(memory: Path) -> list[str]:
    """Processes whose base directory is this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"SUREFOOT_SHM={memory}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def _run(memory: Path, output: Path, events: list[Event], *options: str) -> Outcome:
    outcome = Scenario([_node(memory, output, *options)], events, num_ranks=_RANKS).run()
    assert _processes_beside(memory) == []
    assert list(memory.iterdir()) == []
    return outcome


class _Trained(Job):
    """Its start takes until three steps are done, however slow the machine is."""

    def start(self) -> None:
        super().start()
        while self.finished() < 3:
            time.sleep(0.01)


def test_kills_a_worker_inside_each_phase(memory: Path, tmp_path: Path) -> None:
    """A worker dies in exactly the phase that was asked for, phase after phase, on the rank that was asked for."""
    phases = ("training", "starting", "filling", "restoring", "sealed")
    events = [
        Event(kind=Kind.KILL_TRAINER, phase=phase, step=20 * number, rank=number % _RANKS)
        for number, phase in enumerate(phases)
    ]
    # So that a phase of the beginning comes again and again.
    outcome = _run(memory, tmp_path, events, "--fail-every", "10")
    assert outcome.problems == ()
    assert [strike.struck_in for strike in outcome.strikes] == [event.phase for event in events]
    assert [strike.event for strike in outcome.strikes] == events
    late = [s for s in outcome.strikes if s.event.phase in _TRAINER_PHASES]
    assert all(strike.at_step >= strike.event.step for strike in late)


def test_the_next_event_waits_for_a_breath(memory: Path, tmp_path: Path) -> None:
    """Events that are due at once strike one after the other, with so many new steps between as were asked for."""
    events = [Event(kind=Kind.KILL_TRAINER, phase="training", step=20, rank=rank) for rank in (0, 1, 0)]
    node = _node(memory, tmp_path)
    outcome = Scenario([node], events, num_ranks=_RANKS, breath_steps=7).run()
    assert outcome.problems == ()
    steps = [strike.at_step for strike in outcome.strikes]
    assert all(later - earlier >= 7 for earlier, later in pairwise(steps))


def test_kills_an_agent_inside_each_phase(memory: Path, tmp_path: Path) -> None:
    """An agent dies in exactly the phase that was asked for, and its successor is another process."""
    events = [Event(kind=Kind.KILL_AGENT, phase=phase, step=10) for phase in (*AGENT_PHASES, *AGENT_PHASES)]
    outcome = _run(memory, tmp_path, events)
    assert outcome.problems == ()
    assert [strike.struck_in for strike in outcome.strikes] == [event.phase for event in events]
    assert len({strike.pids for strike in outcome.strikes}) == len(events)


@pytest.mark.parametrize("phase", ["sealed", "flushing"])
def test_kill_all_leaves_no_process_and_no_memory(memory: Path, tmp_path: Path, phase: str) -> None:
    """When the newest durable step is asked for, every process is dead and the memory empty; then training goes on."""
    seen: list[tuple[list[str], list[Path]]] = []

    def newest_durable() -> int:
        seen.append((_processes_beside(memory), list(memory.iterdir())))
        return 7

    events = [Event(kind=Kind.KILL_ALL, phase=phase, step=30)]
    node = _node(memory, tmp_path)
    outcome = Scenario([node], events, num_ranks=_RANKS, newest_durable=newest_durable).run()
    assert outcome.problems == ()
    assert seen == [([], [])]
    (strike,) = outcome.strikes
    assert (strike.durable, strike.exit_code, strike.struck_in) == (7, -signal.SIGKILL, phase)
    assert len(strike.pids) == 2 + _RANKS
    assert len(list((tmp_path / "out").glob("n-start*.out"))) == 2


@pytest.mark.parametrize(
    ("kind", "code"), [(Kind.EVICT, 75), (Kind.KILL_SUPERVISOR, -signal.SIGKILL)], ids=["evict", "kill_supervisor"]
)
def test_starts_the_same_command_again(memory: Path, tmp_path: Path, kind: Kind, code: int) -> None:
    """After an eviction and after the supervisor's death its exit code is noted and the command runs once more."""
    events = [Event(kind=kind, phase="training", step=5), Event(kind=kind, phase="committing", step=15)]
    outcome = _run(memory, tmp_path, events)
    assert outcome.problems == ()
    assert [(strike.exit_code, strike.struck_in) for strike in outcome.strikes] == [
        (code, "training"),
        (code, "committing"),
    ]
    assert len(list((tmp_path / "out").glob("n-start*.out"))) == 3


def test_two_nodes_do_not_meet(tmp_path: Path) -> None:
    """An event on one node kills nothing of the other."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as first, tempfile.TemporaryDirectory(dir="/dev/shm") as second:
        nodes = []
        for name, memory in (("a", first), ("b", second)):
            (tmp_path / name).mkdir()
            nodes.append(_node(Path(memory), tmp_path / name))
        events = [Event(kind=Kind.KILL_ALL, phase="filling", step=10, node=1)]
        outcome = Scenario(nodes, events, num_ranks=_RANKS).run()
        assert outcome.problems == ()
        assert len(list((tmp_path / "a" / "out").iterdir())) == 1
        assert len(list((tmp_path / "b" / "out").iterdir())) == 2


def test_says_when_an_event_never_struck(memory: Path, tmp_path: Path) -> None:
    """A run that ends before the phase comes is a problem, not a success with fewer events."""
    events = [Event(kind=Kind.KILL_TRAINER, phase="filling", step=100_000)]
    outcome = _run(memory, tmp_path, events)
    assert outcome.strikes == ()
    assert outcome.problems == (
        "kill_trainer never struck: before a process was in 'filling' n's supervisor ended with 0; it printed:\n"
        "a word on the way\n",
    )


@pytest.mark.parametrize(
    ("options", "bounds", "says"),
    [(["--hang-at", "3"], {"patience_s": 1.0}, "nothing moved for 1 s"), ([], {"limit_s": 1.0}, "no end within 1 s")],
    ids=["hang", "endless"],
)
def test_a_job_that_does_not_end_is_reported_and_ended(
    memory: Path, tmp_path: Path, options: list[str], bounds: dict[str, float], says: str
) -> None:
    """Where nothing moves, or no end comes, the scenario ends, and tells on which line of code each process was."""
    node = _node(memory, tmp_path, *options, steps=1_000_000)
    outcome = Scenario([node], [], num_ranks=_RANKS, make_job=_Trained, **bounds).run()
    (problem,) = outcome.problems
    assert problem.startswith(says)
    assert f"{_JOB} 1000000" in problem
    assert ("in stay_here_for_ever" if options else "in beat") in problem
    assert _processes_beside(memory) == []
    assert list(memory.iterdir()) == []


def test_a_process_that_stays_behind_is_named_and_ended(memory: Path, tmp_path: Path) -> None:
    """What outlives its supervisor, in whatever session, is found, named and killed."""
    node = _node(memory, tmp_path, "--leave-child", steps=3)
    outcome = Scenario([node], [], num_ranks=_RANKS, linger_s=0.2).run()
    (problem,) = outcome.problems
    assert problem.startswith("n ended, but not its processes")
    assert "phased_job.py" in problem
    assert _processes_beside(memory) == []


def test_an_unexpected_end_is_told_with_what_was_printed(memory: Path, tmp_path: Path) -> None:
    """A supervisor that ends with an error ends the scenario, with its code and its last words."""
    outcome = _run(memory, tmp_path, [], "--exit", "3")
    assert outcome.problems == ("n's supervisor ended with 3; it printed:\na word on the way\n",)


def test_a_looker_on_sees_steps_phases_and_events(memory: Path, tmp_path: Path) -> None:
    """Views show growing steps, real phases of those who live, and each strike once it happened."""
    views: list[View] = []
    events = [Event(kind=Kind.KILL_AGENT, phase="idle", step=100)]
    Scenario([_node(memory, tmp_path)], events, num_ranks=_RANKS, look_on=views.append).run()
    steps = [view.step for view in views]
    assert steps == sorted(steps)
    assert steps[-1] > 100
    phases = {phase for view in views for phase in view.trainers}
    assert phases & set(_TRAINER_PHASES)
    assert phases <= {"gone", "starting", "restoring", *_TRAINER_PHASES}
    assert {agent for view in views for agent in view.agents} <= {"gone", *AGENT_PHASES}
    assert [len(view.strikes) for view in views] == sorted(len(view.strikes) for view in views)
    assert views[-1].strikes[0].event == events[0]
    assert {view.next_event for view in views} == {events[0], None}


def test_nothing_is_left_when_it_is_interrupted(memory: Path, tmp_path: Path) -> None:
    """Ctrl-C in the middle of a scenario ends its processes and empties its memory."""

    def interrupt(view: View) -> None:
        if view.step > 20:
            raise KeyboardInterrupt

    scenario = Scenario([_node(memory, tmp_path)], [], num_ranks=_RANKS, look_on=interrupt)
    with pytest.raises(KeyboardInterrupt):
        scenario.run()
    assert _processes_beside(memory) == []
    assert list(memory.iterdir()) == []
