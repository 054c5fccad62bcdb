"""A full memory barrier, for words in shared memory that are written in one order and must be read in it."""

from __future__ import annotations

import threading

_lock = threading.Lock()


def full_barrier() -> None:
    """Order all loads and stores before against those after: taking a lock does on the machines in use."""
    with _lock:
        pass
