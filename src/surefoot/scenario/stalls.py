"""How long training waited at its boundaries, from the events that Surefoot wrote (`surefoot.events`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Stall:
    """The time that one boundary of one rank took. At most one per second is written down."""

    run: str
    generation: int
    rank: int
    step: int
    stall_s: float


def find(run: str, files: Iterable[Path]) -> list[Stall]:
    """Stalls among the events of a run. The line that a killed process did not end is left out."""
    lines = [line for file in sorted(files) for line in file.read_text().split("\n")[:-1]]
    events = [json.loads(line) for line in lines if '"stall"' in line]
    return [
        Stall(run, event["generation"], event["rank"], event["step"], event["stall_s"])
        for event in events
        if event["event"] == "stall"
    ]


def write(stalls: Sequence[Stall], file: Path) -> None:
    """One JSON object a line."""
    file.write_text("".join(f"{json.dumps(asdict(stall))}\n" for stall in stalls))
