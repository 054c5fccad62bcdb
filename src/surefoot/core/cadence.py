"""Cadence: how often a step is staged, and when the next durable save may start."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from surefoot.errors import ConfigError

CONTINUOUS_BELOW_S = 10.0
"""A save that takes less is repeated with no pause except `CONTINUOUS_GAP_S`."""
CONTINUOUS_GAP_S = 2.0
"""Least time between the starts of two continuous saves: each costs some requests, which bucket owners pay for."""
DEFAULT_INTERVAL_S = 300.0
LONG_INTERVAL_S = 1800.0
"""Above this a warning is due: half an hour of work hangs on one machine's memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cadence:
    """When durable saves are due."""

    interval_s: float | None = None
    """Seconds between the starts of two saves. None: continuous if saves are quick, else 300 s."""
    max_bytes_per_s: float | None = None
    """Bound on the bandwidth of one upload. None: unbounded."""
    max_bytes_per_hour: float = 64e9
    """Bound on the bytes that continuous saves may leave on a tier in an hour, which is how long given-up ones stay.
    It spaces them out to `DEFAULT_INTERVAL_S` at most: a large state is not saved less often than that."""

    def __post_init__(self) -> None:
        if self.interval_s is not None and not self.interval_s >= 0:
            raise ConfigError(f"interval_s is {self.interval_s}: give seconds, 0 or more")
        if self.max_bytes_per_s is not None and not self.max_bytes_per_s > 0:
            raise ConfigError(f"max_bytes_per_s is {self.max_bytes_per_s}: give a positive number")
        if not self.max_bytes_per_hour > 0:
            raise ConfigError(f"max_bytes_per_hour is {self.max_bytes_per_hour}: give a positive number")


def next_start(cadence: Cadence, started: float, ended: float, size_bytes: int, before_s: float = inf) -> float:
    """Earliest time of the next periodic save, from the last one's start, end and size. Times in seconds, one clock.

    Args:
        cadence: as the user asked for it.
        started: of the last save.
        ended: of the last save.
        size_bytes: of the last save.
        before_s: duration of the save before it. A single save that an outage slowed down does not make saves rare.
    """
    took_s = min(ended - started, before_s)
    if cadence.interval_s is not None:
        wanted = started + cadence.interval_s
    elif took_s < CONTINUOUS_BELOW_S:
        wanted = started + CONTINUOUS_GAP_S
    else:
        wanted = started + DEFAULT_INTERVAL_S
    # The byte cap is an average over the hour during which given-up checkpoints stay.
    spaced_s = min(size_bytes / cadence.max_bytes_per_hour * 3600.0, DEFAULT_INTERVAL_S)
    return max(wanted, ended, started + spaced_s)


def stage_every(copy_s: float, step_s: float) -> int:
    """Stage every n-th step: the copy then costs at most about the time of one step in n + 1.

    ceil(copy ÷ step), as long as copies stand in the way of training.
    """
    if copy_s <= 0 or step_s <= 0:
        return 1
    return max(1, ceil(copy_s / step_s))
