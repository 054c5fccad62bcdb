"""Finds the steps that the events report as committed: the only trace of a manifest that somebody deleted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from surefoot.core.layout import BoundaryId
from surefoot.errors import CorruptError


def committed_steps(data: bytes) -> set[BoundaryId]:
    """Steps that a part of the events reports as committed, in the generation that its writer was in.

    Raises:
        CorruptError: a line is not an event.
    """
    steps = set()
    for number, line in enumerate(data.splitlines(), start=1):
        event = _event(line, number)
        boundary = event.get("boundary", event.get("step"))
        generation = event.get("generation")
        if event["event"] == "committed" and type(boundary) is int and type(generation) is int:
            steps.add(BoundaryId(boundary, generation))
    return steps


def missing_commits(
    told: Iterable[BoundaryId], taken: Iterable[BoundaryId], attempted: Iterable[BoundaryId]
) -> list[BoundaryId]:
    """Commits that the events report and that are not there.

    An event bears its writer's generation, which may be newer than the image's. So a commit of that step in any
    generation answers it, and if there is none, the step's shards say which generation is meant.
    """
    steps = {at.boundary for at in taken}
    shards = {at.boundary: at for at in sorted(attempted)}
    missing = (shards.get(at.boundary, at) for at in told if at.boundary not in steps)
    return sorted({at for at in missing if at.generation > 0})


def _event(line: bytes, number: int) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise CorruptError(f"line {number} is not an event: {error}") from error
    if type(event) is not dict or type(event.get("event")) is not str:
        raise CorruptError(f"line {number} is not an event")
    return event
