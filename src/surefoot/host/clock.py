"""The two clocks in use: wall time for people, boot time for durations and deadlines.

CLOCK_BOOTTIME also runs while a process or the machine is stopped, so a process sees how long it was stopped.
It is the same for all processes of a machine, so deadlines can lie in shared memory.
"""

from __future__ import annotations

import time


def wall_s() -> float:
    """Seconds since the epoch."""
    return time.time()


def boot_ns() -> int:
    """Nanoseconds since boot, stops included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boot_s() -> float:
    """Seconds since boot, stops included."""
    return boot_ns() / 1e9
