"""Recovery: which image a starting generation takes, and from where."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from surefoot.core.layout import StepId
from surefoot.core.lineage import Cuts, counts

Place = Literal["ram", "disk", "object"]
_NEARNESS: dict[Place, int] = {"ram": 0, "disk": 1, "object": 2}


@dataclass(frozen=True, slots=True)
class Source:
    """A whole image set at one place: every rank of one plan is there."""

    at: StepId
    place: Place
    plan: str
    committed: bool


@dataclass(frozen=True, slots=True)
class Dropped:
    """A source that cannot be used, and why: said in the log, and the reason when nothing is left."""

    source: Source
    why: str


def ranking(sources: Iterable[Source], chain: Cuts, dropped: Collection[Source] = ()) -> list[Source]:
    """Sources that count, best first: newest step, then newest generation, then nearest place.

    Equals are ordered too (committed first, then by plan), so that the listing's order decides nothing.
    """
    usable = [source for source in sources if counts(source.at, chain) and source not in dropped]
    return sorted(usable, key=lambda s: (-s.at.step, -s.at.generation, _NEARNESS[s.place], not s.committed, s.plan))
