"""What lasts: how it begins, and how it ends."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from surefoot.errors import ConfigError
from surefoot.scenario.events import Event, Kind
from surefoot.scenario.job import Job, Link

SLOW_BYTES_PER_S = 200e3
CLOCK_WRONG_BY_S = -600
_BALLAST = "ballast"
_CHUNK_BYTES = 1 << 20


class Fault(Protocol):
    """Something that begins and ends. Both may be called twice."""

    def begin(self, job: Job) -> list[int]:
        """Returns ids of processes that felt it at once."""

    def end(self, job: Job) -> None: ...


class _Pause:
    def begin(self, job: Job) -> list[int]:
        return job.pause()

    def end(self, job: Job) -> None:
        job.go_on()


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
        self._limited = False

    def begin(self, job: Job) -> list[int]:
        self._link.limit(SLOW_BYTES_PER_S)
        self._limited = True
        return []

    def end(self, job: Job) -> None:
        if self._limited:
            self._link.unlimit()
            self._limited = False


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
    """Tell a number to whoever looks at `file`, or has mapped it: it is changed in place."""
    with file.open("r+b" if file.exists() else "w+b") as out:
        out.write(struct.pack("q", number))


def fault_of(event: Event, job: Job, store_link: Link | None) -> Fault:
    """What an event that lasts does.

    Raises:
        ConfigError: there is nothing here that it could be done to.
    """
    needs: Mapping[Kind, object] = {
        Kind.CUT: job.node.link,
        Kind.SLOW: job.node.link,
        Kind.STORE_CUT: store_link,
        Kind.STORE_SLOW: store_link,
        Kind.FULL_DISK: job.node.copies,
        Kind.CLOCK: job.node.clock,
    }
    if event.kind in needs and needs[event.kind] is None:
        raise ConfigError(f"{event.kind} of {job.node.name}: there is nothing there that it could be done to")
    return _make(event.kind, job, store_link)


def _make(kind: Kind, job: Job, store_link: Link | None) -> Fault:
    link = store_link if kind in (Kind.STORE_CUT, Kind.STORE_SLOW) else job.node.link
    if kind is Kind.PAUSE:
        return _Pause()
    if kind is Kind.FULL_DISK:
        assert job.node.copies is not None
        return _FullDisk(job.node.copies)
    if kind is Kind.CLOCK:
        assert job.node.clock is not None
        return _Clock(job.node.clock)
    assert link is not None
    return _Cut(link) if kind in (Kind.CUT, Kind.STORE_CUT) else _Slow(link)
