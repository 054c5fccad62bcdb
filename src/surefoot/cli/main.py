"""The `surefoot` command. One module a command; this one only puts them together."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from surefoot.errors import SurefootError

_COMMANDS = ("run", "ls", "show", "verify", "status", "evict", "clean", "plan", "prices", "demo")
"""In the order of `surefoot --help`; each is a module of this package with `register(app)`."""


def build(only: str | None = None) -> typer.Typer:
    """The command line.

    Args:
        only: the command that is asked for. If there is such a one, the others are not even imported: a command
            that looks at files shall not wait for the libraries of one that trains.
    """
    app = typer.Typer(
        help="Train PyTorch models on preemptible machines without losing work.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def root() -> None:
        """Keeps a command a command also while it is the only one."""

    for name in (only,) if only in _COMMANDS else _COMMANDS:
        import_module(f"surefoot.cli.{name}").register(app)
    return app


def main() -> None:
    """Entry point: a Surefoot error is one sentence and exit code 2, not a traceback."""
    try:
        build(sys.argv[1] if len(sys.argv) > 1 else None)()
    except SurefootError as error:
        print(f"surefoot: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)


if __name__ == "__main__":
    main()
