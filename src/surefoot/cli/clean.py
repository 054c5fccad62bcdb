"""`surefoot clean`: remove what dead runs left on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli import printing
from surefoot.cli.arguments import AsJson

if TYPE_CHECKING:
    from surefoot.inspect.machine import Cleaned


def register(app: typer.Typer) -> None:
    app.command("clean")(clean)


def clean(
    run: Annotated[str | None, typer.Option("--run", metavar="ID", help="Only what this run left.")] = None,
    as_json: AsJson = False,
) -> None:
    """Remove what dead runs of yours left in this machine's memory. Live runs and checkpoints are never touched."""
    from surefoot.inspect.machine import clean as clean_machine

    cleaned = clean_machine(run)
    if as_json:
        printing.print_json(_to_json(cleaned))
        return
    for removed in cleaned.removed:
        lost = "" if removed.unsaved_step is None else f"; step {removed.unsaved_step} was in memory only"
        printing.say(f"removed run {removed.run}: {printing.size(removed.size_bytes)}{lost}")
    for _run, why in cleaned.alive:
        printing.say(f"left alone: {why}")
    notes = f" and {cleaned.notes} note(s) of launches that are over" if cleaned.notes else ""
    printing.say(f"freed {printing.size(cleaned.size_bytes)}{notes}")


def _to_json(cleaned: Cleaned) -> dict[str, object]:
    return {
        "freed_bytes": cleaned.size_bytes,
        "removed": [
            {"run": removed.run, "bytes": removed.size_bytes, "unsaved_step": removed.unsaved_step}
            for removed in cleaned.removed
        ],
        "alive": [{"run": run, "why": why} for run, why in cleaned.alive],
        "notes": cleaned.notes,
    }
