"""The `surefoot` command. One module per command; this one only puts them together."""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from surefoot import __version__
from surefoot.cli import bench, clean, evict, ls, plan, prices, run, show, status, verify
from surefoot.errors import SurefootError
from surefoot.exits import leave

DEBUG_VARIABLE = "SUREFOOT_DEBUG"
"""Set to anything, the command lets an error's traceback through."""
_COMMANDS = (run, ls, show, verify, status, evict, clean, bench, plan, prices)


def build(wanted: str | None = None) -> typer.Typer:
    """The command line.

    Args:
        wanted: the command that is asked for, if it is known. A command that looks at files shall not wait for the
            libraries of the demo.
    """
    app = typer.Typer(
        help="Train PyTorch models on preemptible machines without losing work.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for command in _COMMANDS:
        command.register(app)
    if wanted not in {info.name for info in app.registered_commands}:
        from surefoot.cli import demo

        demo.register(app)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"surefoot {__version__}")
        raise typer.Exit


def _options(
    _shown: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Train PyTorch models on preemptible machines without losing work."""


def main() -> None:
    """Entry point: an error is one sentence, not a traceback; exit code 2 if it is Surefoot's own, else 1."""
    try:
        build(sys.argv[1] if len(sys.argv) > 1 else None)()
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        expected = isinstance(error, SurefootError)
        said = f"{error}" if expected else f"{type(error).__name__}: {error} ({DEBUG_VARIABLE}=1 shows where)"
        print(f"surefoot: {said}", file=sys.stderr)  # noqa: T201
        sys.exit(2 if expected else 1)


def entry() -> NoReturn:
    """`main` as a program: its exit code stands, whatever the store's library does at the interpreter's end."""
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)  # noqa: T201 - as the interpreter would
        leave(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)
    leave(0)


if __name__ == "__main__":
    entry()
