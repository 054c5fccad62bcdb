"""Numbers out of a training log: losses, progress over time, time between steps. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from math import ceil

from surefoot.scenario.log import Line

_FORMATS = {2: "e", 4: "f", 8: "d"}
Points = list[tuple[float, float]]


def loss_of(line: Line) -> float:
    """The loss, from its bits as this machine's floating point numbers have them."""
    data = bytes.fromhex(line.loss_bits)
    return float(struct.unpack(f"={_FORMATS[len(data)]}", data)[0])


def losses(lines: Sequence[Line]) -> list[Points]:
    """(steps finished, loss) of each attempt in turn, the mean over all ranks.

    An attempt begins at the point from which it went on, so that the curve has no gap.
    """
    curves: list[Points] = []
    before: dict[float, float] = {}
    for steps in _attempts(lines):
        points: Points = [(step + 1, sum(map(loss_of, done)) / len(done)) for step, done in steps]
        start = points[0][0] - 1 if points else 0
        curves.append([(start, before[start]), *points] if start in before else points)
        before.update(points)
    return curves


def progress(lines: Sequence[Line]) -> list[Points]:
    """(seconds since the first line, steps finished) of each attempt in turn. A step is finished with its last rank."""
    began_s = min((line.t for line in lines), default=0.0)
    return [[(max(line.t for line in done) - began_s, step + 1) for step, done in steps] for steps in _attempts(lines)]


def step_times(lines: Sequence[Line]) -> list[float]:
    """Seconds between one finished step and the next of the same attempt."""
    return [later[0] - earlier[0] for part in progress(lines) for earlier, later in pairwise(part)]


def quantile(values: Sequence[float], share: float) -> float:
    """Smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def _attempts(lines: Sequence[Line]) -> list[list[tuple[int, list[Line]]]]:
    """Of each attempt in turn the steps that every rank has finished, with their lines."""
    ranks = len({line.rank for line in lines})
    found: dict[int, dict[int, list[Line]]] = {}
    for line in lines:
        found.setdefault(line.attempt, {}).setdefault(line.step, []).append(line)
    return [
        [(step, done) for step, done in sorted(steps.items()) if len(done) == ranks]
        for _, steps in sorted(found.items())
    ]
