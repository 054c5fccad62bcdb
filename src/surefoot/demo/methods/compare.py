"""Let another way go through the same events, and judge it by the same log.

The same engine strikes and starts again. An event without a counterpart there is skipped and reported so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefoot.demo.methods.methods import Method
from surefoot.demo.methods.torchrun_job import TRAINING, TorchrunJob
from surefoot.scenario.engine import BREATH_STEPS, Outcome, Scenario, View
from surefoot.scenario.events import Event, Kind, Strike
from surefoot.scenario.job import Node
from surefoot.scenario.log import DISTURBED, UNDISTURBED, Line, gather, read
from surefoot.scenario.verdict import Recovery, Verdict, first_difference, judge

_SKIPPED = {Kind.KILL_AGENT: "no such process", Kind.KILL_SUPERVISOR: "no such process"}
_NOT_CARRIED_OUT = "not carried out here"
_CARRIED_OUT = (Kind.EVICT, Kind.KILL_TRAINER, Kind.KILL_ALL)
_MAX_RESTARTS = 10
_PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What is the same for all ways."""

    steps: int
    seed: int
    ranks: int
    events: Sequence[Event]
    save_every: int
    """Steps between periodic saves."""
    memory: Path
    """As a node's."""


@dataclass(frozen=True, slots=True)
class Met:
    """An event, and what it cost; or why it was passed over."""

    event: Event
    strike: Strike | None
    recovery: Recovery | None
    skipped: str | None


@dataclass(frozen=True, slots=True)
class PeerResult:
    """What became of one way."""

    method: Method
    save_every: int
    lines: tuple[Line, ...]
    met: tuple[Met, ...]
    bit_identical: bool
    first_difference: int | None
    """First step at which samples or loss of any rank are not the undisturbed ones."""
    checkpoints: int
    unusable: tuple[str, ...]
    """What it left that no start can load."""
    problems: tuple[str, ...]
    """Why it did not come to its end."""

    @property
    def recoveries(self) -> list[Recovery]:
        return [met.recovery for met in self.met if met.recovery is not None]

    @property
    def redone_steps(self) -> int:
        return sum(recovery.redone_steps for recovery in self.recoveries)

    @property
    def seconds_lost(self) -> float | None:
        return seconds_lost(self.recoveries)

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method.name,
            "redone_steps": self.redone_steps,
            "bit_identical": self.bit_identical,
            "first_difference": self.first_difference,
            "seconds_lost": self.seconds_lost,
            "events": [_met_json(met) for met in self.met],
            "save_every": self.save_every,
            "checkpoints": self.checkpoints,
            "unusable": list(self.unusable),
            "problems": list(self.problems),
        }


def seconds_lost(recoveries: Sequence[Recovery]) -> float | None:
    """From each event to the end of a new step, in all; None if one of them never saw a new step."""
    seconds = [recovery.seconds_to_new_step for recovery in recoveries]
    known = [each for each in seconds if each is not None]
    return round(sum(known), 3) if len(known) == len(seconds) else None


def run_peer(
    method: Method,
    conditions: Conditions,
    undisturbed: Sequence[Line],
    place: Path,
    look_on: Callable[[View], None],
) -> PeerResult:
    """Train under the events, and judge.

    Args:
        method: what to run.
        conditions: what is the same for all.
        undisturbed: the log of training that nothing befell.
        place: an existing directory for lines, output, checkpoints and the gathered log.
        look_on: called about ten times a second.
    """
    for name in ("lines", "checkpoints"):
        (place / name).mkdir()
    outcome = _train(method, conditions, place, look_on)
    log = place / "log.jsonl"
    gather((place / "lines").iterdir(), log)
    return _judged(method, conditions, outcome, read(log), undisturbed, place / "checkpoints")


def _train(method: Method, conditions: Conditions, place: Path, look_on: Callable[[View], None]) -> Outcome:
    lines = place / "lines"
    events = [_translated(event) for event in conditions.events if event.kind in _CARRIED_OUT]
    node = Node(
        name=method.name,
        command=_command(method, conditions, lines, place / "checkpoints"),
        memory=conditions.memory,
        output=place,
        environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
    )
    scenario = Scenario(
        [node],
        events,
        num_ranks=conditions.ranks,
        look_on=look_on,
        patience_s=_PATIENCE_S,
        breath_steps=BREATH_STEPS,
        make_job=lambda given: TorchrunJob(given, lines, conditions.ranks),
    )
    return scenario.run()


def _command(method: Method, conditions: Conditions, lines: Path, checkpoints: Path) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    options = {
        "--steps": conditions.steps,
        "--seed": conditions.seed,
        "--log": lines,
        "--name": DISTURBED,
        "--to": checkpoints,
        "--save-every": conditions.save_every,
    }
    arguments = [str(word) for option in options.items() for word in option]
    return [*torchrun, str(conditions.ranks), f"--max-restarts={_MAX_RESTARTS}", "--", str(method.script), *arguments]


def _translated(event: Event) -> Event:
    """A script reports nothing about itself except that it trains."""
    return replace(event, phase=TRAINING)


# ---------------------------------------------------------------------- the judgement


def _judged(
    method: Method,
    conditions: Conditions,
    outcome: Outcome,
    lines: Sequence[Line],
    undisturbed: Sequence[Line],
    checkpoints: Path,
) -> PeerResult:
    both = [*lines, *(line for line in undisturbed if line.run == UNDISTURBED)]
    verdict = judge(both, outcome.strikes, steps=conditions.steps, num_ranks=conditions.ranks)
    whole = list(checkpoints.glob(method.complete))
    return PeerResult(
        method,
        conditions.save_every,
        tuple(lines),
        tuple(_met(conditions.events, outcome.strikes, verdict)),
        verdict.bit_identical and not outcome.problems,
        first_difference(both),
        len(whole),
        tuple(sorted(_names(checkpoints, method.any) - {path.relative_to(checkpoints).parts[0] for path in whole})),
        outcome.problems,
    )


def _names(place: Path, pattern: str) -> set[str]:
    return {path.name for path in place.glob(pattern)}


def _met(events: Sequence[Event], strikes: Sequence[Strike], verdict: Verdict) -> list[Met]:
    carried = iter(zip(strikes, verdict.recoveries, strict=True))
    return [_met_one(event, carried) for event in events]


def _met_one(event: Event, carried: Any) -> Met:
    if event.kind not in _CARRIED_OUT:
        return Met(event, None, None, _SKIPPED.get(event.kind, _NOT_CARRIED_OUT))
    strike, recovery = next(carried, (None, None))
    return Met(event, strike, recovery, None if strike is not None else "never struck: it had ended before")


def _met_json(met: Met) -> dict[str, Any]:
    told: dict[str, Any] = {"event": str(met.event.kind)}
    if met.strike is None or met.recovery is None:
        return {**told, "skipped": met.skipped}
    return {
        **told,
        "resumed_from": met.recovery.resumed_from,
        "redone_steps": met.recovery.redone_steps,
        "seconds_to_new_step": met.recovery.seconds_to_new_step,
        "at_step": met.strike.at_step,
        "rank": met.strike.event.rank,
        "exit_code": met.strike.exit_code,
    }
