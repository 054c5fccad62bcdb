"""Finds the steps that the events report as committed: the only trace of a manifest that somebody deleted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from surefoot.core.layout import StepId
from surefoot.errors import CorruptError


def committed_steps(data: bytes) -> set[StepId]:
    """Steps that a part of the events reports as committed, in the generation that its writer was in.

    Raises:
        CorruptError: a line is not an event.
    """
    steps = set()
    for number, line in enumerate(data.splitlines(), start=1):
        event = _event(line, number)
        step, generation = event.get("step"), event.get("generation")
        if event["event"] == "committed" and type(step) is int and type(generation) is int:
            steps.add(StepId(step, generation))
    return steps


def missing_commits(told: Iterable[StepId], taken: Iterable[StepId], attempted: Iterable[StepId]) -> list[StepId]:
    """Commits that the events report and that are not there.

    An event bears its writer's generation, which may be newer than the image's. So a commit of that step in any
    generation answers it, and if there is none, the step's shards say which generation is meant.
    """
    steps = {at.step for at in taken}
    shards = {at.step: at for at in sorted(attempted)}
    missing = (shards.get(at.step, at) for at in told if at.step not in steps)
    return sorted({at for at in missing if at.generation > 0})


def _event(line: bytes, number: int) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise CorruptError(f"line {number} is not an event: {error}") from error
    if type(event) is not dict or type(event.get("event")) is not str:
        raise CorruptError(f"line {number} is not an event")
    return event
