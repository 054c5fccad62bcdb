"""What several measurements ask of their trainers: a file that one makes, and the events of the run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from surefoot.bench.jobs import Trainers
from surefoot.host.clock import boot_s

_LOOK_EVERY_S = 0.02


def wait_until_there(trainers: Trainers, path: Path, within_s: float) -> None:
    """Wait until a rank has made a file.

    Raises:
        SurefootError: a rank ended instead, or the time is over.
    """
    end_s = boot_s() + within_s
    while not path.exists():
        trainers.check()
        if boot_s() > end_s:
            raise trainers.failed(0, f"made no {path.name} within {within_s:.0f} s")
        time.sleep(_LOOK_EVERY_S)


def events(place: Path, kind: str) -> list[dict[str, Any]]:
    """A measurement's events of one kind, in their order."""
    found: list[dict[str, Any]] = []
    for path in sorted((place / "state").glob("surefoot/*/*.jsonl")):
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        found += [event for event in map(json.loads, lines) if event["event"] == kind]
    return found
