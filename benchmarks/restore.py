"""`python -m benchmarks restore`: a restart from the memory that the agent keeps, beside memcpy of the same bytes.

Trainers are killed, and others, which wait for that with everything imported, take over.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.jobs import events, wait_until_there
from surefoot.bench.jobs import Trainers, trainers, workplace
from surefoot.errors import SurefootError

WAITING = "waiting-{round}-{rank}"
GO = "go-{round}"
DONE = "done-{round}-{rank}"
_WITHIN_S = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreBench:
    """What to measure."""

    state_bytes: int = 1_000_000_000
    """Of all ranks together: parameters and AdamW's two moments."""
    ranks: int = 2
    tensors: int = 64
    """Tensors of a rank's state."""
    rounds: int = 3
    """Restarts."""


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """Medians over the restarts, in seconds; of a restart the slowest rank's."""

    bytes: int
    restore_s: float
    """`run.restore()`, all of it: from asking the agent to the last byte in the objects."""
    choose_s: float
    """Of that, what has nothing to do with the bytes: reading the run's records."""
    verify_s: float
    """Hashing the images again."""
    load_s: float
    """Copying them into the objects, on all ranks."""
    memcpy_s: float
    """Copy of the same tensors, one thread a rank: parameters into memory that is there, the optimizer's state into
    new memory, which a new process cannot have yet."""
    memcpy_warm_s: float
    """The same with all memory there: the machine's bare copying speed, which no restart can have."""
    ratio: float
    """`memcpy_s` over `load_s`."""
    ratio_whole: float
    """`memcpy_s` over `restore_s`."""
    ratio_warm: float
    """`memcpy_warm_s` over `load_s`."""


def measure(bench: RestoreBench) -> RestoreResult:
    """Train, kill, restore; as often as wanted.

    Raises:
        SurefootError: a worker failed, or what came back is not what was there, or it did not come from memory.
    """
    settings = {"tensors": bench.tensors, "rank_bytes": bench.state_bytes // bench.ranks}
    with workplace() as place, ExitStack() as stack:

        def start(number: int) -> Trainers:
            given = {**settings, "round": number, "last": number == bench.rounds}
            started = trainers("benchmarks.restore_worker", bench.ranks, given, place, tag=f"-{number}")
            waiting = stack.enter_context(started)
            for rank in range(bench.ranks):
                wait_until_there(waiting, place.files / WAITING.format(round=number, rank=rank), _WITHIN_S)
            return waiting

        def go(started: Trainers, number: int) -> None:
            (place.files / GO.format(round=number)).touch()
            for rank in range(bench.ranks):
                wait_until_there(started, place.files / DONE.format(round=number, rank=rank), _WITHIN_S)

        training = start(0)
        go(training, 0)
        figures = []
        for number in range(1, bench.rounds + 1):
            waiting = start(number)
            training.kill()
            go(waiting, number)
            figures.append(waiting.left())
            training = waiting
        resumed = [event for event in events(place.files, "resumed") if event["from_step"] is not None]
    return _result(bench, figures, resumed)


def to_json(result: RestoreResult) -> dict[str, object]:
    return asdict(result)


def _result(bench: RestoreBench, figures: list[list[dict[str, Any]]], resumed: list[dict[str, Any]]) -> RestoreResult:
    if [event["tier"] for event in resumed] != ["ram"] * bench.rounds:
        raise SurefootError(f"not restored from memory: {[event['tier'] for event in resumed]}")

    def worst(name: str) -> float:
        return float(statistics.median(max(rank[name] for rank in ranks) for ranks in figures))

    def phase(name: str) -> float:
        return float(statistics.median(event["phases"][name] for event in resumed))

    return RestoreResult(
        sum(rank["bytes"] for rank in figures[0]),
        round(worst("restore_s"), 4),
        round(phase("choose"), 4),
        round(phase("fetch"), 4),
        round(phase("load"), 4),
        round(worst("memcpy_s"), 4),
        round(worst("memcpy_warm_s"), 4),
        round(worst("memcpy_s") / phase("load"), 3),
        round(worst("memcpy_s") / worst("restore_s"), 3),
        round(worst("memcpy_warm_s") / phase("load"), 3),
    )
