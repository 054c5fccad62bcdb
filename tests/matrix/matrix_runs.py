"""Jobs of the matrix, each run once, and what their logs say of one kind."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from surefoot.scenario.engine import Outcome, Scenario
from surefoot.scenario.events import Event, Kind
from surefoot.scenario.job import Node
from surefoot.scenario.log import DISTURBED, UNDISTURBED, Line

SCRIPT = Path(__file__).with_name("matrix_job.py")
STEPS = 30
RANKS = {"plain": 1, "ddp": 2, "fsdp2": 2}
EVENTS: dict[str, tuple[Event, ...]] = {
    # Three within the first epoch of twenty steps, before and after layers are frozen.
    "evict": (
        Event(kind=Kind.EVICT, phase="filling", step=3),
        Event(kind=Kind.EVICT, phase="sealed", step=7),
        Event(kind=Kind.EVICT, phase="filling", step=12),
    ),
    "evict_once": (Event(kind=Kind.EVICT, phase="filling", step=12),),
    "kill_trainer": (
        Event(kind=Kind.KILL_TRAINER, phase="sealed", step=2),
        Event(kind=Kind.KILL_TRAINER, phase="filling", step=14),
    ),
}
WORKERS = {"evict": 2, "evict_once": 2, "kill_trainer": 0, None: 0}
"""Of the data loader. The run that they are compared with has none: who fetches a sample changes nothing."""


@dataclass(frozen=True)
class Played:
    """A job that ran to its end."""

    outcome: Outcome
    lines: list[dict[str, Any]]
    """All that its processes logged, in the order of time."""
    said: str

    def of_kind(self, kind: str, run: str) -> list[Line]:
        """Its steps, as the scenario's verdict wants them."""
        return [
            Line(
                run, line["attempt"], line["rank"], line["step"], tuple(line["samples"]), line["bits"][kind], line["t"]
            )
            for line in self.steps
        ]

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "step" in line]

    def ends(self, kind: str) -> dict[int, dict[str, str]]:
        """By rank, what each leaf came to."""
        ends = [line for line in self.lines if "end" in line]
        found = {line["rank"]: line["end"][kind] for line in ends}
        assert len(found) == len(ends), "a rank came to its end twice"
        return found


def play(mode: str, event: str | None, place: Path) -> Played:
    """Run the job of a mode through the events of one kind; None: through nothing.

    Raises:
        AssertionError: it did not come to its end, or an event did not strike as wanted.
    """
    lines, ranks = place / "lines", RANKS[mode]
    lines.mkdir()
    wanted = EVENTS[event] if event is not None else ()
    # Now one rank is watched, and killed, now the other.
    events = [replace(one, rank=number % ranks) for number, one in enumerate(wanted)]
    supervisor = [sys.executable, "-m", "surefoot.cli.main", "run", "--to", str(place / "run"), "--nproc", str(ranks)]
    options = {"--mode": mode, "--steps": STEPS, "--workers": WORKERS[event], "--log": lines}
    # A socket's path is short; a test's own directory may not be.
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sf-matrix-") as memory:
        node = Node(
            name="node",
            command=[*supervisor, str(SCRIPT), *(str(word) for pair in options.items() for word in pair)],
            memory=Path(memory),
            output=place,
            environment={"XDG_STATE_HOME": str(place / "state"), "OMP_NUM_THREADS": "1"},
        )
        outcome = Scenario([node], events, num_ranks=ranks).run()
    said = "\n".join(path.read_text(errors="replace") for path in sorted(place.glob("*.out")))
    assert outcome.problems == (), "\n".join([*outcome.problems, said[-6000:]])
    assert [strike.struck_in for strike in outcome.strikes] == [event.phase for event in events]
    return Played(outcome, _read(sorted(lines.iterdir())), said)


def _read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    # The line that a killed process did not end is left out.
    texts = [text for path in paths for text in path.read_text().split("\n")[:-1]]
    return sorted(map(json.loads, texts), key=lambda line: line.get("t", float("inf")))


def both(disturbed: Played, undisturbed: Played, kind: str) -> list[Line]:
    return disturbed.of_kind(kind, DISTURBED) + undisturbed.of_kind(kind, UNDISTURBED)
