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
    """(steps finished, loss) of each attempt in turn, the mean over its ranks."""
    return [
        [(step + 1, sum(map(loss_of, done)) / len(done)) for step, done in sorted(_by_step(part).items())]
        for part in _attempts(lines)
    ]


def progress(lines: Sequence[Line]) -> list[Points]:
    """(seconds since the first line, steps finished) of each attempt in turn. A step is finished with its last rank."""
    began_s = min((line.t for line in lines), default=0.0)
    return [
        [(max(line.t for line in done) - began_s, step + 1) for step, done in sorted(_by_step(part).items())]
        for part in _attempts(lines)
    ]


def step_times(lines: Sequence[Line]) -> list[float]:
    """Seconds between one finished step and the next of the same attempt."""
    return [later[0] - earlier[0] for part in progress(lines) for earlier, later in pairwise(part)]


def quantile(values: Sequence[float], share: float) -> float:
    """Smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def _attempts(lines: Sequence[Line]) -> list[list[Line]]:
    numbers = sorted({line.attempt for line in lines})
    return [[line for line in lines if line.attempt == number] for number in numbers]


def _by_step(lines: Sequence[Line]) -> dict[int, list[Line]]:
    found: dict[int, list[Line]] = {}
    for line in lines:
        found.setdefault(line.step, []).append(line)
    return found
