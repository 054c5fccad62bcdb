"""`python -m benchmarks agree`: what the trainers' agreement at each boundary adds to a step.

Beside it, in the same run: the form that ranks of several machines use, and what people write instead, an all-reduce
whose result every rank reads at once (`.item()`). And steps without any, which say how much of a figure is noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from surefoot.bench.jobs import trainers, workplace
from surefoot.bench.save import percentile

FORMS = ("agreement", "across_machines", "blocking")
NOTHING = "nothing"
"""Not a form: undisturbed steps, in the place of one."""
_WITHIN_S = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AgreeBench:
    """What to measure."""

    ranks: tuple[int, ...] = (2, 4)
    rounds: int = 40
    """In each round every form has its turn, and so have steps without any, before and after each."""
    steps: int = 10
    """Of a turn."""
    step_s: float = 0.004
    """Forward and backward of one rank that has its core for itself."""


@dataclass(frozen=True, slots=True)
class AgreeRow:
    """Time that a step spends in the boundary, over all steps; of each the slowest rank's."""

    form: str
    ranks: int
    p50_ms: float
    p95_ms: float
    longer_ms: float
    """Median, over all turns, of what the whole step took longer than undisturbed ones before and after the turn, mean
    of the ranks: it has what goes on behind the boundary, too, and the machine's noise. Only for people."""


def measure(bench: AgreeBench) -> list[AgreeRow]:
    """All forms at each number of ranks; the last row of each number is noise, and not in the JSON.

    Raises:
        SurefootError: a worker failed; the message ends with what it printed.
    """
    rows: list[AgreeRow] = []
    for ranks in bench.ranks:
        with workplace() as place:
            settings: dict[str, Any] = {"rounds": bench.rounds, "steps": bench.steps, "step_s": bench.step_s}
            settings |= {"memory": str(place.memory)}
            with trainers("benchmarks.agree_worker", ranks, settings, place) as started:
                figures = started.figures(_WITHIN_S)
        rows += [_row(form, ranks, figures) for form in (*FORMS, NOTHING)]
    return rows


def to_json(rows: Iterable[AgreeRow]) -> dict[str, object]:
    shown = [asdict(row) for row in rows if row.form != NOTHING]
    return {"results": [{name: row[name] for name in ("form", "ranks", "p50_ms", "p95_ms")} for row in shown]}


def _row(form: str, ranks: int, figures: Sequence[dict[str, Any]]) -> AgreeRow:
    # A step's cost is that of its slowest rank: the next collective waits for it.
    inside_ms = [1000 * max(step) for step in zip(*(rank["inside_s"][form] for rank in figures), strict=True)]
    # Not so here: the largest of several differences would be above zero by noise alone.
    longer_ms = [
        1000 * statistics.fmean(turn) for turn in zip(*(rank["longer_s"][form] for rank in figures), strict=True)
    ]
    return AgreeRow(
        form,
        ranks,
        round(statistics.median(inside_ms), 4),
        round(percentile(inside_ms, 0.95), 4),
        round(statistics.median(longer_ms), 4),
    )
