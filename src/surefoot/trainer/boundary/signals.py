"""Turns SIGTERM into a notice in a trainer that no supervisor shields; the handler itself does nothing."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

SIGTERM_BYTE = bytes([signal.SIGTERM])
"""The byte that `signal.set_wakeup_fd` writes for SIGTERM."""


class SigtermNotice:
    """Makes SIGTERM wake the watcher thread, which notifies the agent. Python's own handlers would wait for the C call
    that the main thread sits in; the wake-up descriptor does not."""

    def __init__(self) -> None:
        self._previous: object = None
        self._previous_fd = -1
        self._installed = False
        self._forking = threading.local()

    def install(self, wake_fd: int) -> str | None:
        """Install, from the main thread. Returns a warning for the user if that is not possible."""
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
            return None
        if threading.current_thread() is not threading.main_thread():
            return "not in the main thread: SIGTERM is not taken as a notice; use `surefoot run` or `surefoot evict`"
        self._previous = signal.signal(signal.SIGTERM, self._note)
        self._previous_fd = signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
        self._installed = True
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork_in_child
        )
        return None

    def remove(self) -> None:
        if self._installed and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._previous_fd)
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)  # type: ignore[arg-type]
        self._installed = False

    # A SIGTERM to a forked child is not a notice for the trainer: in the child it has the effect that it had before.
    # SIGTERM is blocked during the fork, so that one which arrives before the child's handler is restored waits.

    def _before_fork(self) -> None:
        if self._installed:
            self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def _after_fork(self) -> None:
        if self._installed:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _after_fork_in_child(self) -> None:
        if self._installed:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)  # type: ignore[arg-type]
            signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        # The byte on the wake-up descriptor has already woken the watcher thread.
        return
