"""Priority: makes threads whose work is never urgent give way to the threads that train."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

_NICER = 10
_NICEST = 19


def give_way() -> None:
    """From here on the calling thread gives way to others. Threads that it starts inherit that.

    On Linux each thread has a nice value of its own: setpriority(2), NOTES.
    """
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, min(_NICEST, os.getpriority(os.PRIO_PROCESS, thread) + _NICER))
