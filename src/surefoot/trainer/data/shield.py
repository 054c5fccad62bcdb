"""Makes loader workers ignore SIGTERM: it is meant for the whole job, and the trainer decides about its workers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader


class Shielded:
    """A worker_init_fn that makes a worker ignore SIGTERM.

    torch gives its workers a handler of their own, so that starting them with SIGTERM ignored is not enough. The
    trainer's own SIGTERM still ends a worker: so Python ends the workers that are left when a program is over.
    """

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self._inner = inner
        self._trainer_pid = os.getpid()

    def __call__(self, worker: int) -> None:
        # Blocked in every thread, so that only the thread that waits for it takes it, and can see who sent it.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_obey, args=(self._trainer_pid,), name="surefoot-shield", daemon=True).start()
        if self._inner is not None:
            self._inner(worker)


def shield(loader: Any) -> None:
    """Make the workers that a DataLoader will start ignore SIGTERM."""
    if isinstance(loader, DataLoader) and not isinstance(loader.worker_init_fn, Shielded):
        loader.worker_init_fn = Shielded(loader.worker_init_fn)


@contextmanager
def born_shielded() -> Iterator[None]:
    """Workers that are started inside never get a SIGTERM before they are shielded: they inherit that it is blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _obey(trainer_pid: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != trainer_pid:
        pass
    os._exit(0)
