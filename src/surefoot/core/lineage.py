"""Lineage: which boundaries count.

A check before a write cannot keep a paused process from writing late: no store offers a condition on two keys. So
the reader decides. Every generation names the image that it started from; walking back from the newest generation,
each one's images count only up to the boundary at which a later generation branched off. Late commits of a process that
slept through a restart are then harmless.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf

from surefoot.core.layout import BoundaryId
from surefoot.core.manifest import Generation
from surefoot.errors import CorruptError

Cuts = Mapping[int, float]
"""Generations on the chain, each with the newest of its boundaries that counts (infinity for the newest generation)."""


def cuts(generations: Mapping[int, Generation]) -> dict[int, float]:
    """Walk back from the newest generation.

    Invariant: cut(newest) = ∞ and cut(parent(h)) = min(cut(h), boundary that h started from).

    Raises:
        CorruptError: a generation on the chain has no record. Guessing would resurrect abandoned steps.
    """
    if not generations:
        return {}
    number: int | None = max(generations)
    cut = inf
    chain: dict[int, float] = {}
    while number is not None:
        if number not in generations:
            raise CorruptError(f"generation {number} is named as a parent, but its record is missing")
        chain[number] = cut
        parent = generations[number].parent
        if parent is not None:
            cut = min(cut, parent.boundary)
        number = parent.generation if parent is not None else None
    return chain


def counts(at: BoundaryId, chain: Cuts) -> bool:
    """True if this boundary is part of the history that the newest generation continues."""
    return at.generation in chain and at.boundary <= chain[at.generation]


def superseding(generations: Mapping[int, Generation], launches: Collection[str]) -> Generation | None:
    """The newest generation, if another job made it after one of this job's own: then this one has been replaced.

    A job that has made none yet is itself the newer one. A job that was replaced must not claim a further generation:
    two jobs would stop each other for ever.

    Args:
        generations: by number.
        launches: of the machines that are to train now. A job stays the same when machines join or leave it,
            since a generation names the launches of all its machines.
    """
    if not generations:
        return None
    newest = generations[max(generations)]
    mine = any(generation.is_of(launches) for generation in generations.values())
    return newest if mine and not newest.is_of(launches) else None
