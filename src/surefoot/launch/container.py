"""Containers: find out whether the signal that announces a container's end can arrive in this process."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def unheard() -> str | None:
    """The warning for the user if this process, which is not the container's first, will get no signal at its end.

    A container's end is announced to its process 1 alone, by SIGTERM, and the kernel drops a signal for which that
    process has no handler (pid_namespaces(7)). A shell has none, unless it was given a trap, and passes none on.
    """
    if os.getppid() != 1:
        return None
    try:
        text = Path("/proc/1/status").read_text()
    except OSError:
        # Process 1 is hidden from this one: nothing is known, so there is no warning.
        return None
    status = dict(line.split(":", 1) for line in text.splitlines())
    # Blocked: it waits for signals instead of handling them, as small inits do.
    heard = int(status["SigCgt"], 16) | int(status["SigBlk"], 16)
    if heard >> (signal.SIGTERM - 1) & 1:
        return None
    return (
        f"process 1 of this container ({status['Name'].strip()}) ignores SIGTERM, so surefoot gets no notice of the "
        "container's end: start surefoot as process 1 (in a shell: exec surefoot run …), under an init, or with --watch"
    )
