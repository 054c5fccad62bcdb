"""Outcomes: how deliveries ended, for whoever waits for a step, or asks for it late."""

from __future__ import annotations

import asyncio

from surefoot.core.layout import StepId

_KEPT = 32


class Outcomes:
    """By step: None if it was committed, or why it was not."""

    def __init__(self) -> None:
        self._known: dict[StepId, str | None] = {}
        self._waiters: dict[StepId, list[asyncio.Future[str | None]]] = {}

    def of(self, at: StepId) -> str | None:
        """How the last deliveries of a step ended that nobody is at work on any more."""
        return self._known.get(at, f"step {at.step} is not being saved")

    def wait(self, at: StepId) -> asyncio.Future[str | None]:
        """Resolves at the end of that step's delivery, which is under way."""
        future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(at, []).append(future)
        return future

    def resolve(self, at: StepId, outcome: str | None) -> None:
        self._known[at] = outcome
        for old in list(self._known)[:-_KEPT]:
            del self._known[old]
        for future in self._waiters.pop(at, []):
            if not future.done():
                future.set_result(outcome)
