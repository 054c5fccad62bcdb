"""Defines a notice source, which learns of evictions before they happen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Notice:
    """An announced eviction of this machine."""

    source: str
    """The source of the notice, for the log."""
    grace_s: float | None
    """Seconds from now until the machine may vanish; None if the source does not know."""


class NoticeSource(Protocol):
    """One way to learn of evictions. Runs in the agent."""

    async def wait(self) -> Notice:
        """Return when an eviction is announced; within 50 ms where the source allows. Never returns otherwise."""
