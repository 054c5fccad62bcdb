"""Loader workers that are deaf to SIGTERM: it is meant for the job, and the trainer decides."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader


class Shielded:
    """A worker_init_fn that makes a worker deaf to SIGTERM.

    torch gives its workers a handler of their own, so that being started with SIGTERM ignored is not enough. The
    trainer's own SIGTERM still ends a worker: that is how Python ends those that are left when a program is over.
    """

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self._inner = inner
        self._trainer_pid = os.getpid()

    def __call__(self, worker: int) -> None:
        # Blocked in every thread, so that it stays for the one that waits for it and can see who sent it.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_obey, args=(self._trainer_pid,), name="surefoot-shield", daemon=True).start()
        if self._inner is not None:
            self._inner(worker)


def shield(loader: Any) -> None:
    """Make the workers that a DataLoader will start deaf to SIGTERM."""
    if isinstance(loader, DataLoader) and not isinstance(loader.worker_init_fn, Shielded):
        loader.worker_init_fn = Shielded(loader.worker_init_fn)


@contextmanager
def born_shielded() -> Iterator[None]:
    """Workers that are started inside never meet a SIGTERM unshielded: they inherit that it is blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _obey(trainer_pid: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != trainer_pid:
        pass
    os._exit(0)
