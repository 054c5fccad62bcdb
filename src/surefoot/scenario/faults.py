"""What lasts: how it begins, and how it ends."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from typing import Protocol

from surefoot.errors import ConfigError
from surefoot.scenario.events import Event, Kind
from surefoot.scenario.job import Job, Link, Node, Pausable

SLOW_BYTES_PER_S = 200e3
CLOCK_WRONG_BY_S = -600
_BALLAST = "ballast"
_CHUNK_BYTES = 1 << 20


class Fault(Protocol):
    """A fault that begins, possibly twice, and ends."""

    def begin(self, job: Job) -> list[int]:
        """Returns ids of processes that felt it at once."""

    def end(self, job: Job) -> None: ...


class _Pause:
    def begin(self, job: Job) -> list[int]:
        return job.pause()

    def end(self, job: Job) -> None:
        job.go_on()


class _Hang:
    def __init__(self, store: Pausable) -> None:
        self._store = store

    def begin(self, job: Job) -> list[int]:
        self._store.pause()
        return []

    def end(self, job: Job) -> None:
        self._store.go_on()


class _Cut:
    def __init__(self, link: Link) -> None:
        self._link = link

    def begin(self, job: Job) -> list[int]:
        self._link.cut()
        return []

    def end(self, job: Job) -> None:
        self._link.heal()


class _Slow:
    def __init__(self, link: Link) -> None:
        self._link = link

    def begin(self, job: Job) -> list[int]:
        self._link.limit(SLOW_BYTES_PER_S)
        return []

    def end(self, job: Job) -> None:
        self._link.unlimit()


class _FullDisk:
    """Takes every byte that is left on a file system."""

    def __init__(self, directory: Path) -> None:
        self._ballast = directory / _BALLAST

    def begin(self, job: Job) -> list[int]:
        with self._ballast.open("ab", buffering=0) as file:
            size_bytes = _CHUNK_BYTES
            while size_bytes:
                try:
                    file.write(os.urandom(size_bytes))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size_bytes //= 2
        return []

    def end(self, job: Job) -> None:
        self._ballast.unlink(missing_ok=True)


class _Clock:
    def __init__(self, file: Path) -> None:
        self._file = file

    def begin(self, job: Job) -> list[int]:
        write_number(self._file, CLOCK_WRONG_BY_S)
        return []

    def end(self, job: Job) -> None:
        write_number(self._file, 0)


def write_number(file: Path, number: int) -> None:
    """Publish a number to every process that reads or has mapped `file`: it is changed in place."""
    with file.open("r+b" if file.exists() else "w+b") as out:
        out.write(struct.pack("q", number))


def fault_of(event: Event, job: Job, store_link: Link | None, store: Pausable | None = None) -> Fault:
    """What an event that lasts does.

    Args:
        event: one of `surefoot.scenario.events.LASTING`.
        job: of its node.
        store_link: what joins the store to the nodes; None: it cannot be cut.
        store: the store's server; None: it cannot be stopped.

    Raises:
        ConfigError: there is nothing here that it could be done to.
    """
    fault = _make(event.kind, job.node, store_link, store)
    if fault is None:
        raise ConfigError(f"{event.kind} of {job.node.name}: there is nothing there that it could be done to")
    return fault


def _make(kind: Kind, node: Node, store_link: Link | None, store: Pausable | None) -> Fault | None:
    if kind is Kind.PAUSE:
        return _Pause()
    if kind is Kind.STORE_HANG:
        return _Hang(store) if store is not None else None
    if kind is Kind.FULL_DISK:
        return _FullDisk(node.copies) if node.copies is not None else None
    if kind is Kind.CLOCK:
        return _Clock(node.clock) if node.clock is not None else None
    link = store_link if kind in (Kind.STORE_CUT, Kind.STORE_SLOW) else node.link
    if link is None:
        return None
    return _Cut(link) if kind in (Kind.CUT, Kind.STORE_CUT) else _Slow(link)
