"""The `surefoot` command. One module a command; this one only puts them together."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from surefoot.cli import bench, clean, evict, ls, plan, prices, run, show, status, verify
from surefoot.errors import SurefootError
from surefoot.exits import leave

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
    for command in _COMMANDS:
        command.register(app)
    if wanted not in {info.name for info in app.registered_commands}:
        from surefoot.cli import demo

        demo.register(app)
    return app


def main() -> None:
    """Entry point: a Surefoot error is one sentence and exit code 2, not a traceback."""
    try:
        build(sys.argv[1] if len(sys.argv) > 1 else None)()
    except SurefootError as error:
        print(f"surefoot: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)


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
