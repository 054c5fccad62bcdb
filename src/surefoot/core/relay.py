"""Relay: how far all ranks of a generation are, as every node knows it.

Each node's agent sends the smallest step that its ranks have sealed and passed; a node's knowledge of the others may be
late, never early. So whatever waits for the minimum (the strict fence, the reuse of a slot) waits a little too long
when a message is lost, and never goes on too soon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from surefoot.core.slots import NEVER

LEFT = 1 << 62
"""Progress of a rank that leaves its loop: nobody waits for it any more."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What every rank of a node (or of a generation) has reached."""

    generation: int
    sealed: int = NEVER
    """Newest step of which all of them have sealed an image; `NEVER` if there is none, `LEFT` if they left."""
    passed: int = NEVER
    """Newest step that all of them have sealed or given up."""


def merge(known: Progress | None, heard: Progress) -> Progress:
    """The knowledge of a node after a message about it, whatever the order and number of messages.

    Within a generation progress only grows; a newer generation begins anew.
    """
    if known is None or heard.generation > known.generation:
        return heard
    if heard.generation < known.generation:
        return known
    return Progress(known.generation, max(known.sealed, heard.sealed), max(known.passed, heard.passed))


def minimum(known: Mapping[str, Progress], members: Iterable[str], generation: int) -> Progress:
    """How far all members are in `generation`. A member that has sent nothing in it has reached nothing."""
    words = [known.get(member) for member in members]
    if not words or any(word is None or word.generation != generation for word in words):
        return Progress(generation)
    return Progress(
        generation,
        min(word.sealed for word in words if word is not None),
        min(word.passed for word in words if word is not None),
    )
