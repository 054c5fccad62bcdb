"""Did disturbed training do what undisturbed training does? Judged from the log alone, and the times of the events.

Pure: lines and strikes in, a verdict out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from surefoot.scenario.events import LASTING, Kind, Strike
from surefoot.scenario.log import DISTURBED, UNDISTURBED, Line

_OF_A_START = ("starting", "restoring")
MOST_REDONE = {
    Kind.EVICT: 0,
    Kind.KILL_AGENT: 0,
    **dict.fromkeys((Kind.KILL_TRAINER, Kind.KILL_GROUP, Kind.KILL_SUPERVISOR, *LASTING), 1),
}
"""Steps that all ranks had finished and that may be trained again. After a loss of memory: those past the newest
durable."""
_NAMED = 5
"""How many of many differences are named."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What an event cost."""

    event: Kind
    resumed_from: int | None
    """Steps finished when training went on: what the new start restored, or, if no trainer was ended, where it was.
    None: it never went on."""
    redone_steps: int
    """Steps that all ranks had finished before and that were trained again."""
    seconds_to_new_step: float | None
    """From the event to the end of a step that was not trained before. None: there was none before the next event."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement."""

    bit_identical: bool
    recoveries: tuple[Recovery, ...]
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems


def judge(lines: Sequence[Line], strikes: Sequence[Strike], *, steps: int, num_ranks: int) -> Verdict:
    """Judge a pair of runs.

    Args:
        lines: the log of both runs.
        strikes: what befell the disturbed one, in order.
        steps: how many steps both were to do.
        num_ranks: ranks of both.
    """
    disturbed = [line for line in lines if line.run == DISTURBED]
    undisturbed = [line for line in lines if line.run == UNDISTURBED]
    differences = [*_differences(disturbed, undisturbed), *_unexpected(lines, steps, num_ranks)]
    absent = [
        *_absent(disturbed, DISTURBED, steps, num_ranks),
        *_absent(undisturbed, UNDISTURBED, steps, num_ranks),
        *_twice(lines),
    ]
    recoveries, excesses = [], []
    most: int | None = 0
    durable: int | None = None
    for number, strike in enumerate(strikes):
        most = _most_redone(strike, most)
        durable = strike.durable if strike.durable is not None or strike.struck_in not in _OF_A_START else durable
        following = strikes[number + 1] if number + 1 < len(strikes) else None
        recovery = _recovery(disturbed, strike, float("inf") if following is None else following.t, num_ranks)
        recoveries.append(recovery)
        if recovery.resumed_from is None and following is not None and following.struck_in in _OF_A_START:
            # It befell the recovery from this one, and what that came to is seen after it.
            continue
        excesses += _excess(replace(strike, durable=durable), recovery, most)
    identical = bool(disturbed) and bool(undisturbed) and not differences
    return Verdict(identical, tuple(recoveries), (*differences, *absent, *excesses))


# ---------------------------------------------------------------------- the same, to the last bit


def first_difference(lines: Sequence[Line]) -> int | None:
    """First step of the disturbed run at which samples or loss of a rank are not the undisturbed ones."""
    wanted = {(line.rank, line.step): line for line in lines if line.run == UNDISTURBED}
    others = (
        line.step
        for line in lines
        if line.run == DISTURBED and (other := wanted.get((line.rank, line.step))) and not _same(line, other)
    )
    return min(others, default=None)


def _same(line: Line, other: Line) -> bool:
    return (line.samples, line.loss_bits) == (other.samples, other.loss_bits)


def _differences(disturbed: Sequence[Line], undisturbed: Sequence[Line]) -> list[str]:
    wanted = {(line.rank, line.step): line for line in undisturbed}
    found = []
    for line in disturbed:
        other = wanted.get((line.rank, line.step))
        if other is None:
            continue  # reported as absent
        if line.samples != other.samples:
            found.append(f"{_where(line)}: samples {list(line.samples)}, undisturbed {list(other.samples)}")
        if line.loss_bits != other.loss_bits:
            found.append(f"{_where(line)}: loss {line.loss_bits}, undisturbed {other.loss_bits}")
    return _some(found, "differences")


def _absent(lines: Sequence[Line], run: str, steps: int, num_ranks: int) -> list[str]:
    there = {(line.rank, line.step) for line in lines}
    gone = [
        f"{run}: no line of rank {r}, step {s}" for s in range(steps) for r in range(num_ranks) if (r, s) not in there
    ]
    return _some(gone, "absent lines")


def _unexpected(lines: Sequence[Line], steps: int, num_ranks: int) -> list[str]:
    odd = [
        f"{_where(line)}: not one of {steps} steps of {num_ranks} ranks"
        for line in lines
        if line.run not in (DISTURBED, UNDISTURBED) or not (0 <= line.step < steps and 0 <= line.rank < num_ranks)
    ]
    return _some(odd, "unexpected lines")


def _twice(lines: Sequence[Line]) -> list[str]:
    counts = Counter((line.run, line.attempt, line.rank, line.step) for line in lines)
    return _some([f"{key}: {count} lines" for key, count in counts.items() if count > 1], "repeated lines")


def _where(line: Line) -> str:
    return f"{line.run} attempt {line.attempt}, rank {line.rank}, step {line.step}"


def _some(found: list[str], what: str) -> list[str]:
    if len(found) <= _NAMED:
        return found
    return [*found[:_NAMED], f"… {len(found)} {what} in all"]


# ---------------------------------------------------------------------- what an event cost


def _recovery(lines: Sequence[Line], strike: Strike, until_s: float, num_ranks: int) -> Recovery:
    before, after = _around(lines, strike, until_s)
    resumed_in = min((line.attempt for line in after), default=0)
    newest = max((line.step for line in before), default=-1)
    new_s = min((line.t for line in after if line.step > newest), default=None)
    return Recovery(
        strike.event.kind,
        min((line.step for line in after if line.attempt == resumed_in), default=None),
        len(_on_all_ranks(before, num_ranks) & {line.step for line in after}),
        None if new_s is None else round(new_s - strike.t, 3),
    )


def _around(lines: Sequence[Line], strike: Strike, until_s: float) -> tuple[list[Line], list[Line]]:
    """What was done before an event, and what after it, up to the next.

    The attempt that was struck may still have finished a step or two: those count as before, so that losing them is
    seen. Where no trainer was ended no later attempt begins, and the time of the event is what divides.
    """
    struck = max((line.attempt for line in lines if line.t <= strike.t), default=0)
    after = [line for line in lines if line.attempt > struck and line.t <= until_s]
    if after:
        return [line for line in lines if line.attempt <= struck], after
    before = [line for line in lines if line.t <= strike.t]
    return before, [line for line in lines if strike.t < line.t <= until_s]


def _on_all_ranks(lines: Sequence[Line], num_ranks: int) -> set[int]:
    ranks: dict[int, set[int]] = {}
    for line in lines:
        ranks.setdefault(line.step, set()).add(line.rank)
    return {step for step, there in ranks.items() if len(there) == num_ranks}


def _most_redone(strike: Strike, before: int | None) -> int | None:
    """How many finished steps may be trained again after an event; None: any number.

    Args:
        strike: the event.
        before: the same of the event before it. One that strikes inside a start shows what that one cost as well.
    """
    own = MOST_REDONE.get(strike.event.kind)
    if strike.struck_in not in _OF_A_START:
        return own
    return None if own is None or before is None else max(own, before)


def _excess(strike: Strike, recovery: Recovery, most: int | None) -> list[str]:
    name = f"{strike.event.kind} at step {strike.at_step}"
    if recovery.resumed_from is None:
        return [f"{name}: training never went on"]
    if most is not None and recovery.redone_steps > most:
        return [f"{name}: {recovery.redone_steps} finished steps were trained again, at most {most} may be"]
    if strike.durable is not None and recovery.resumed_from < strike.durable:
        # More is possible: a start completes a commit that lacked but its last record.
        return [f"{name}: resumed from step {recovery.resumed_from}, but step {strike.durable} was durable"]
    return []
