"""SIGKILL inside every phase: each next start finds a whole step, loads it bit-identical, and nothing stays behind."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from surefoot.demo.demo import DemoConfig, run_demo
from surefoot.scenario.events import AGENT_PHASES, Event, Kind

_SCRIPT = Path(__file__).with_name("register_dots.py")
_SUREFOOT = Path(sys.executable).parent / "surefoot"
_TIMES = 20
_STEPS_APART = 120
"""Enough of these short steps for whatever was killed to be back, mostly; where it is not, its phase is waited for."""
_STEPS_AFTER = 2000
"""Room for events that had to wait. Once the last has struck these steps take no time."""
_AFTER_A_START = ("starting", "restoring")
_ALWAYS = ("training", "filling", "sealed", *AGENT_PHASES)
Endure = Callable[[Sequence[Event]], None]


@pytest.fixture
def endure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endure]:
    """Trains through events and judges, in a memory of its own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sf-test-") as path:
        monkeypatch.setenv("SUREFOOT_SHM", path)
        yield lambda events: _endure(Path(path), tmp_path, monkeypatch, events)


def _endure(memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Sequence[Event]) -> None:
    """Train through the events and undisturbed; the losses come from a generator, so one wrong bit shows."""
    steps = max(event.step for event in events) + _STEPS_AFTER
    config = DemoConfig(steps=steps, ranks=1, store=tmp_path / "store", script=_SCRIPT, events=events)
    fast = tmp_path / "fast"
    monkeypatch.setenv("DOTS_FAST", str(fast))
    result = run_demo(config, lambda _name, view: fast.touch() if view.next_event is None else None)
    # An event inside a start strikes before the one that caused that start was got over.
    problems = [problem for problem in result.verdict.problems if not problem.endswith("training never went on")]
    assert problems == [], result.output_tail
    assert result.verdict.bit_identical
    assert [strike.struck_in for strike in result.strikes] == [event.phase for event in events]
    subprocess.run([_SUREFOOT, "clean"], check=True, capture_output=True)
    assert list(memory.iterdir()) == []


def _often(kind: Kind, phase: str, times: int) -> list[Event]:
    """Events of one kind in one phase. The phases of a start come only after an end, so a trainer is killed first."""
    events: list[Event] = []
    for number in range(1, times + 1):
        if phase in _AFTER_A_START:
            events.append(Event(kind=Kind.KILL_TRAINER, phase="training", step=_STEPS_APART * number))
        events.append(Event(kind=kind, phase=phase, step=_STEPS_APART * number))
    return events


@pytest.mark.holds("strict-fence", "start-during-save")
def test_each_of_them_once(endure: Endure) -> None:
    """A trainer, the group, the agent and the supervisor are killed in turn, in turn in each phase."""
    kinds = (Kind.KILL_TRAINER, Kind.KILL_AGENT, Kind.KILL_GROUP, Kind.KILL_SUPERVISOR)
    events = [
        Event(kind=kinds[number % len(kinds)], phase=phase, step=_STEPS_APART * (number + 1))
        for number, phase in enumerate(_ALWAYS)
    ]
    # The phases of a start strike the recoveries from a trainer's and from the group's end.
    for number, phase in ((2, "restoring"), (0, "starting")):
        kind = Kind.KILL_TRAINER if phase == "restoring" else Kind.KILL_AGENT
        events.insert(number + 1, Event(kind=kind, phase=phase, step=events[number].step))
    endure(events)


@pytest.mark.campaign
@pytest.mark.parametrize("phase", [*_ALWAYS, *_AFTER_A_START])
@pytest.mark.parametrize("kind", [Kind.KILL_TRAINER, Kind.KILL_GROUP, Kind.KILL_AGENT, Kind.KILL_SUPERVISOR])
def test_twenty_times_inside_each_phase(endure: Endure, kind: Kind, phase: str) -> None:
    """One of them is killed twenty times inside one phase."""
    endure(_often(kind, phase, _TIMES))
