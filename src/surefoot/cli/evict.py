"""`surefoot evict`: announce an eviction to a run on this machine."""

from __future__ import annotations

import asyncio
import math
from typing import Annotated

import typer

from surefoot.cli import printing
from surefoot.cli.arguments import AsJson


def register(app: typer.Typer) -> None:
    app.command("evict")(evict)


def evict(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's URI, directory or id.")],
    grace_s: Annotated[
        float | None, typer.Option(help="Seconds until the machine may vanish (default: the run's own --grace-s).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Have RUN, if it trains on this machine, save its last step and leave, as on a notice of the provider."""
    from surefoot.errors import ConfigError
    from surefoot.inspect.machine import ask, find_live

    if grace_s is not None and not (grace_s > 0 and math.isfinite(grace_s)):
        raise ConfigError(f"--grace-s is {grace_s}: give the seconds that are left, more than 0")
    found = asyncio.run(find_live(run))
    ask(found, {"op": "evict"} if grace_s is None else {"op": "evict", "grace_s": grace_s})
    if as_json:
        printing.print_json({"run": found.run, "ok": True})
    else:
        printing.say(f"run {found.run} knows: it saves its last step and leaves")
