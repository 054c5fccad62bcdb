"""Collects the problems of a run's objects: a fault in reading becomes a problem instead of a stop."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from surefoot.errors import CorruptError, ObjectMissingError, TierError
from surefoot.tiers.base import Entry, Tier

T = TypeVar("T")


@dataclass(frozen=True, order=True, slots=True)
class Problem:
    """One object and what is wrong with it."""

    object: str
    """Its key, or the prefix that could not be listed."""
    what: str
    fault: bool = False
    """The tier failed: nothing is known of the object, least of all that it is absent."""


class Findings:
    """Gathers problems, each once, in the order found."""

    def __init__(self) -> None:
        self._found: dict[Problem, None] = {}

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(self._found)

    def add(self, key: str, what: str, *, fault: bool = False) -> None:
        self._found[Problem(key, what, fault)] = None

    async def attempt(self, key: str, reading: Awaitable[T]) -> T | None:
        """What `reading` gives; None if it fails for a reason that is now among the problems."""
        try:
            return await reading
        except ObjectMissingError:
            self.add(key, "is missing")
        except CorruptError as error:
            self.add(key, str(error).removeprefix(f"{key}: "))
        except TierError as error:
            self.add(key, f"cannot be read: {error}", fault=True)
        return None

    async def listing(self, tier: Tier, prefix: str) -> list[Entry]:
        """The objects under a prefix; nothing, and a problem, if the tier does not answer."""
        try:
            return await tier.list(prefix)
        except TierError as error:
            self.add(prefix, f"cannot be listed: {error}", fault=True)
            return []
