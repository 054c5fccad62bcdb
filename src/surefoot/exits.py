"""Exit codes, and the exits that are not errors: eviction, and being superseded by a newer launch."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

FINISHED = 0
SUPERSEDED = 73
"""A newer launch of the same run took over. Do not restart this one."""
EVICTED_UNSAVED = 74
"""Evicted, and the newest finished step could not be made safe in time. Start the run again."""
EVICTED = 75
"""Evicted, and the newest finished step is safe. Start the run again."""


class Evicted(SystemExit):
    """Raised by the step iterator when an eviction ended the run before its last step.

    It is a ``SystemExit`` with the reserved code 75, so that nothing after the loop runs as if training were complete.
    """

    def __init__(self, step: int) -> None:
        super().__init__(EVICTED)
        self.step = step
        """Number of optimizer steps finished when the run stopped."""

    def __str__(self) -> str:
        return f"evicted after step {self.step}; start the run again to go on from there"


class Superseded(SystemExit):
    """Raised by the step iterator when a newer launch of the same run took over."""

    def __init__(self, reason: str) -> None:
        super().__init__(SUPERSEDED)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


def hasten_end() -> None:
    """Spare this process the interpreter's last search for garbage, whenever it ends.

    That search looks at everything that torch has ever imported, which takes seconds (about 2.3 of 3.0, measured with
    what FSDP imports), and a machine that is taken away has none to spare. Handlers of `atexit` run as ever, and so do
    finalizers of objects that end with their last reference.
    """
    atexit.register(gc.freeze)


def bound_end(within_s: float) -> None:
    """Have SIGALRM end this process that long after its script's end, if it still runs then.

    The interpreter's end frees the script's process groups, and that joins their threads. A thread of gloo's may wait
    for a peer that is gone until the group's time-out, half an hour by default, and the launch would wait with it.
    """
    atexit.register(_alarm, within_s)


def let_end() -> None:
    """Undo `bound_end`."""
    atexit.unregister(_alarm)


def _alarm(within_s: float) -> None:
    # The script may have set a handler or blocked the signal; none of its handlers would run any more.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.setitimer(signal.ITIMER_REAL, within_s)


def leave(code: int) -> NoReturn:
    """End this process with that code, without the interpreter's own end.

    A thread of the object store's library that hands over its last result while the interpreter ends is unwound through
    frames that allow no such thing (CPython before 3.14 ends threads that want its lock then by pthread_exit), and the
    process aborts: it ends with SIGABRT's exit code instead of this one.
    """
    for stream in (sys.stdout, sys.stderr):
        # The reader of this output may be gone.
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
