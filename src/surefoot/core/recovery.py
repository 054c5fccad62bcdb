"""Recovery: what a starting generation restores, decided from facts alone, and where each part of it is read.

`decide` is asked again with more facts until it names an end: a manifest that it wants is read, a source that it chose
is tried on all nodes, and what failed is a fact of the next question.

A step in memory is whole if every rank's image, all of one plan, is in some node's memory. Where two copies of one
rank's image have different hashes one of them is wrong, and nothing says which: such a step is not whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from surefoot.core.documents import Fields
from surefoot.core.layout import BoundaryId
from surefoot.core.lineage import Cuts, counts
from surefoot.core.manifest import Generation, Manifest
from surefoot.errors import AgentError, CorruptError, RestoreError, SurefootError

Place = Literal["ram", "peer", "disk copy", "disk", "object", "peer disk"]
"""This node's memory, another's; this node's drives; the run's place, a directory or a store; another node's drives."""
_NEAREST_FIRST: tuple[Place, ...] = ("ram", "peer", "disk copy", "disk", "object", "peer disk")


@dataclass(frozen=True, slots=True)
class Copy:
    """One rank's hashed image in the memory of a node."""

    at: BoundaryId
    plan: str
    world_size: int
    rank: int
    xxh3_128: str
    size_bytes: int
    node: str

    def to_json(self) -> dict[str, Any]:
        return {
            **self.at.to_json(),
            "plan": self.plan,
            "world_size": self.world_size,
            "rank": self.rank,
            "xxh3_128": self.xxh3_128,
            "bytes": self.size_bytes,
            "node": self.node,
        }

    @classmethod
    def from_json(cls, data: Any) -> Copy:
        fields = Fields(data, "copy")
        return cls(
            BoundaryId.of(fields),
            fields.text("plan"),
            fields.integer("world_size", 1),
            fields.integer("rank"),
            fields.text("xxh3_128"),
            fields.integer("bytes"),
            fields.text("node"),
        )


@dataclass(frozen=True, slots=True)
class Source:
    """A step that is whole: in memory, or as a checkpoint in the run's place."""

    at: BoundaryId
    place: Place
    plan: str
    committed: bool
    copies: tuple[tuple[Copy, ...], ...] = ()
    """In memory, by rank: at least one each, all of one hash."""
    given_up: bool = False
    """Retention gave the checkpoint up; its bytes may still be there."""

    @property
    def holders(self) -> tuple[Copy, ...]:
        """By rank, the copy that is read."""
        return tuple(of_rank[0] for of_rank in self.copies)

    def read_from(self, *, drives: bool, others: bool) -> list[Place]:
        """Where its bytes may be, nearest first.

        Args:
            drives: this node keeps copies of shards on drives of its own.
            others: there are other nodes.
        """
        if self.copies:
            places = {"ram", *(["peer"] if others else [])}
        else:
            places = {"ram", self.place, *(["disk copy"] if drives else []), *(["peer disk"] if others else [])}
        return [place for place in _NEAREST_FIRST if place in places]

    def to_json(self) -> dict[str, Any]:
        """What another node needs to load it."""
        return {
            **self.at.to_json(),
            "place": self.place,
            "plan": self.plan,
            "committed": self.committed,
            "copies": [copy.to_json() for copy in self.holders],
        }

    @classmethod
    def from_json(cls, data: Any) -> Source:
        fields = Fields(data, "source")
        copies = tuple((Copy.from_json(one),) for one in fields.items("copies"))
        place = next((place for place in _NEAREST_FIRST if place == fields.text("place")), None)
        if place is None or (place == "ram") != bool(copies):
            raise CorruptError(f"source: {fields.text('place')!r} with {len(copies)} copies")
        return cls(BoundaryId.of(fields), place, fields.text("plan"), fields.flag("committed"), copies)


def wholes(copies: Iterable[Copy], chain: Cuts) -> list[Source]:
    """The steps that count and are whole in memory, best first. The order in which copies are named decides nothing."""
    found: dict[tuple[BoundaryId, str], dict[int, set[Copy]]] = {}
    for copy in copies:
        found.setdefault((copy.at, copy.plan), {}).setdefault(copy.rank, set()).add(copy)
    whole = [
        Source(at, "ram", plan, committed=False, copies=tuple(_sorted(by_rank[rank]) for rank in range(len(by_rank))))
        for (at, plan), by_rank in found.items()
        if _is_whole(by_rank)
    ]
    return ranking(whole, chain)


def ranking(sources: Iterable[Source], chain: Cuts) -> list[Source]:
    """Sources that count, best first: not given up, then newest step, newest generation, nearest place.

    Equals are ordered too (committed first, then by plan), so that the listing's order decides nothing.
    """
    return sorted((source for source in sources if counts(source.at, chain)), key=_key)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known when it is chosen what to restore."""

    generations: Mapping[int, Generation]
    chain: Cuts
    """Their lineage."""
    launches: Collection[str]
    """Of the machines that are to train now."""
    resume: str
    """auto, must or never."""
    uri: str
    """The run's place, for messages."""
    place: Place
    """The kind of the run's place."""
    copies: Sequence[Copy]
    """What all nodes have in memory."""
    silent: Collection[str]
    """Nodes that did not report what they have in memory."""
    commits: Collection[BoundaryId]
    """Steps whose manifest's key is taken; the run's place has answered in full."""
    manifests: Mapping[BoundaryId, Manifest | None]
    """Those that were read so far: None for a tombstone, and for one that cannot be used."""
    failed: Collection[Source]
    """What was tried and could not be loaded on every node."""
    refused: Mapping[str, str]
    """What proved bad, each with the reason, also in earlier starts."""


@dataclass(frozen=True, slots=True)
class Look:
    """Read this step's manifest, and ask again."""

    at: BoundaryId


@dataclass(frozen=True, slots=True)
class Restore:
    """Load this source on every node; ask again if it cannot be had."""

    source: Source


@dataclass(frozen=True, slots=True)
class Scratch:
    """Start at step 0: there is nothing, or nothing that is wanted."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Do not start."""

    why: str
    error: type[SurefootError] = RestoreError


Decision = Look | Restore | Scratch | Refuse


def decide(facts: Facts) -> Decision:
    """What to restore: the newest step that counts and was not tried in vain, from the nearest place that has it."""
    mine = any(generation.is_of(facts.launches) for generation in facts.generations.values())
    if facts.resume == "never" and not mine:
        # Only this launch's first start ignores what is there; its restarts go on.
        return Scratch()
    if facts.silent:
        # Taken for empty, they could hold the step that is cut off by this choice.
        return Refuse(f"node {', '.join(sorted(facts.silent))} does not report what it has in memory", AgentError)
    in_memory = wholes(facts.copies, facts.chain)
    stored = [_stored(manifest, facts.place) for manifest in facts.manifests.values() if manifest is not None]
    left = [source for source in ranking([*in_memory, *stored], facts.chain) if source not in facts.failed]
    unread = max((at for at in facts.commits if at not in facts.manifests and counts(at, facts.chain)), default=None)
    if unread is not None and (not left or left[0].given_up or left[0].at < unread):
        return Look(unread)
    if left:
        return Restore(left[0])
    # A parent that was committed is history, also if nothing of it is left to be listed.
    parents = [facts.generations[number].parent for number in facts.chain]
    had_history = bool(in_memory or stored or any(parent is not None and parent.committed for parent in parents))
    if facts.refused or had_history:
        reasons = "; ".join(f"{what}: {why}" for what, why in facts.refused.items()) or "no manifest is left"
        return Refuse(
            f"{facts.uri} has checkpoints, but none can be restored ({reasons}); "
            "repair one, or start over on purpose with --resume never"
        )
    if facts.resume == "must":
        return Refuse(f"{facts.uri} has no checkpoint, and --resume must was asked for")
    return Scratch()


def _key(source: Source) -> tuple[object, ...]:
    near = _NEAREST_FIRST.index(source.place)
    return source.given_up, -source.at.boundary, -source.at.generation, near, not source.committed, source.plan


def _stored(manifest: Manifest, place: Place) -> Source:
    return Source(manifest.at, place, manifest.plan, committed=True, given_up=manifest.retired is not None)


def _is_whole(by_rank: Mapping[int, Collection[Copy]]) -> bool:
    """Every rank is there, and no more of them; all agree on how many there are, and the copies of one on its hash."""
    if {copy.world_size for of_rank in by_rank.values() for copy in of_rank} != {len(by_rank)}:
        return False
    return set(by_rank) == set(range(len(by_rank))) and all(
        len({copy.xxh3_128 for copy in of_rank}) == 1 for of_rank in by_rank.values()
    )


def _sorted(copies: Iterable[Copy]) -> tuple[Copy, ...]:
    return tuple(sorted(copies, key=lambda copy: copy.node))
