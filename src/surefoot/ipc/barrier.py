"""A full memory barrier, for words in shared memory that are written in one order and must be read in it."""

from __future__ import annotations

import threading

_lock = threading.Lock()


def full_barrier() -> None:
    """Order all earlier loads and stores before all later ones. Taking a lock does this on the machines in use."""
    with _lock:
        pass
