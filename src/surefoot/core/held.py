"""Held: what nodes have in memory of a step, and the newest step that is whole in all their memory together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from surefoot.core.documents import Fields
from surefoot.core.layout import StepId


@dataclass(frozen=True, slots=True)
class HeldImages:
    """One node's hashed images of one step, of one plan."""

    at: StepId
    plan: str
    world_size: int
    ranks: tuple[int, ...]
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.at.step,
            "generation": self.at.generation,
            "plan": self.plan,
            "world_size": self.world_size,
            "ranks": list(self.ranks),
            "bytes": self.size_bytes,
        }

    @classmethod
    def from_json(cls, data: Any) -> HeldImages:
        """Read what another node told.

        Raises:
            CorruptError: a member is missing, or of another type.
        """
        fields = Fields(data, "held images")
        at = StepId(fields.integer("step"), fields.integer("generation", 1))
        world_size = fields.integer("world_size", 1)
        return cls(at, fields.text("plan"), world_size, fields.integers("ranks"), fields.integer("bytes"))


@dataclass(frozen=True, slots=True)
class WholeStep:
    """A step of which every rank's image is in some node's memory."""

    at: StepId
    plan: str


def whole_steps(held: Iterable[HeldImages]) -> list[WholeStep]:
    """Newest first. Nodes that do not agree on a plan's world size make nothing whole."""
    ranks: dict[tuple[StepId, str], set[int]] = {}
    sizes: dict[tuple[StepId, str], set[int]] = {}
    for one in held:
        ranks.setdefault((one.at, one.plan), set()).update(one.ranks)
        sizes.setdefault((one.at, one.plan), set()).add(one.world_size)
    whole = [
        WholeStep(*key)
        for key, found in ranks.items()
        if sizes[key] == {len(found)} and found == set(range(len(found)))
    ]
    return sorted(whole, key=lambda step: (-step.at.step, -step.at.generation, step.plan))


def newest_whole(held: Iterable[HeldImages], safe: StepId | None) -> WholeStep | None:
    """The newest whole step that is newer than what is durable already; None if there is none."""
    newest = next(iter(whole_steps(held)), None)
    return newest if newest is not None and (safe is None or newest.at > safe) else None
