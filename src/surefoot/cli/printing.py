"""How commands print: JSON for programs, short tables for people."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from surefoot.events import human_bytes
from surefoot.inspect.progress import Progress, Silent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress


def print_json(body: Any) -> None:
    """One JSON text on standard output."""
    typer.echo(json.dumps(body, indent=2 if sys.stdout.isatty() else None, allow_nan=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """A plain table; columns named in `right` are aligned to the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        # Text, because a name from a run must not be read as markup.
        table.add_row(*(Text(cell) for cell in row))
    _console().print(table)


def say(line: str) -> None:
    """One line on standard output."""
    typer.echo(line)


def warn(line: str) -> None:
    """One line on standard error."""
    typer.echo(f"surefoot: {line}", err=True)


def size(count: int | None) -> str:
    """A number of bytes for people."""
    return "?" if count is None else human_bytes(count)


def moment(seconds: float | None) -> str:
    """Seconds since the epoch as local time."""
    return "?" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def span(seconds: float | None) -> str:
    """A duration for people."""
    if seconds is None:
        return "?"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


@contextmanager
def progress(what: str, *, wanted: bool) -> Iterator[Progress]:
    """A bar on standard error for people at a terminal; silence for everybody else."""
    if not (wanted and sys.stderr.isatty()):
        yield Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        yield _Bar(bars)


class _Bar:
    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._task = bars.add_task("")

    def start(self, total_bytes: int) -> None:
        self._bars.update(self._task, total=total_bytes)

    def advance(self, size_bytes: int) -> None:
        self._bars.advance(self._task, size_bytes)


def _console() -> Console:
    from rich.console import Console

    # Into a pipe nothing is wrapped: one row stays one line.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 400)
