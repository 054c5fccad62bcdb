"""Copies: what several nodes and tiers hold of a step, and whether together that is a whole image set.

A step is whole if every rank's image, all of one plan, has at least one good copy somewhere: in a node's memory, on a
node's drive, or on a tier that all nodes reach. Where a rank's copies say different things, one of them lies; only a
manifest can say which.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from surefoot.core.layout import StepId
from surefoot.core.lineage import Cuts, counts
from surefoot.core.manifest import Manifest
from surefoot.core.recovery import Place

SHARED = ""
"""The node of a copy that every node reaches."""
_NEARNESS: dict[Place, int] = {"ram": 0, "disk": 1, "object": 2}


@dataclass(frozen=True, slots=True)
class Copy:
    """One rank's hashed image at one place."""

    at: StepId
    plan: str
    world_size: int
    rank: int
    xxh3_128: str
    size_bytes: int
    place: Place
    node: str = SHARED
    """Whose memory or drive it is."""
    path: str = ""
    """Its key, if it lies on a tier."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A step of which every rank's image can be had."""

    at: StepId
    plan: str
    committed: bool
    copies: tuple[tuple[Copy, ...], ...]
    """By rank: at least one copy each, all of one hash."""

    @property
    def only_in_memory(self) -> bool:
        """True if some rank's image is nowhere else."""
        return any(all(copy.place == "ram" for copy in of_rank) for of_rank in self.copies)


def copies_of(manifest: Manifest, place: Place) -> list[Copy]:
    """The copies that a manifest names, on the tier where it stands."""
    return [
        Copy(
            manifest.at,
            manifest.plan,
            manifest.world_size,
            shard.id.rank,
            shard.xxh3_128,
            shard.size_bytes,
            place,
            SHARED,
            shard.key,
        )
        for shard in manifest.shards
    ]


def wholes(
    copies: Iterable[Copy], manifests: Iterable[Manifest], chain: Cuts, bad: Collection[Copy] = ()
) -> list[Whole]:
    """The steps that count and can be had, best first: newest step, newest generation, committed, then by plan.

    The order in which copies are named decides nothing. A dropped copy is dropped for all: whoever is told the same
    copies, manifests and bad ones comes to the same list.

    Args:
        copies: what nodes and tiers hold, each hashed where it lies.
        manifests: the checkpoints that stand. What they say of a rank's image is the measure for copies of it.
        chain: the lineage.
        bad: copies that failed to load or to verify on any rank.
    """
    proven = {(manifest.at, manifest.plan): manifest for manifest in manifests}
    refused = frozenset(bad)
    found: dict[tuple[StepId, str], dict[int, set[Copy]]] = {}
    for copy in copies:
        if copy not in refused and counts(copy.at, chain):
            found.setdefault((copy.at, copy.plan), {}).setdefault(copy.rank, set()).add(copy)
    whole = [
        Whole(at, plan, (at, plan) in proven, of_all)
        for (at, plan), by_rank in found.items()
        if (of_all := _one_hash_each(by_rank, proven.get((at, plan)))) is not None
    ]
    return sorted(whole, key=lambda w: (-w.at.step, -w.at.generation, not w.committed, w.plan))


def nearest(of_rank: Iterable[Copy], node: str) -> list[Copy]:
    """The copies of one rank's image in the order in which `node` tries them: its own first, memory before disk."""
    return sorted(of_rank, key=lambda c: (c.node != node, _NEARNESS[c.place], c.node, c.path))


def at_risk(copies: Iterable[Copy], leaving: Collection[str]) -> dict[int, int]:
    """By rank, the bytes that would go with the leaving nodes: no node that stays and no shared tier has them.

    Args:
        copies: of one step and plan.
        leaving: nodes whose end was announced. If all of them leave, what peers hold is no help.
    """
    sizes: dict[int, int] = {}
    safe: set[int] = set()
    for copy in copies:
        sizes[copy.rank] = copy.size_bytes
        if copy.node not in leaving:
            safe.add(copy.rank)
    return {rank: size for rank, size in sorted(sizes.items()) if rank not in safe}


def newest_that_fits(sizes: Mapping[StepId, int], bytes_per_s: float, left_s: float) -> StepId | None:
    """The newest step whose bytes at risk can be sent in the time that is left; None if none can.

    Args:
        sizes: for each whole step, the bytes that are at risk on the node with most of them.
        bytes_per_s: measured speed of one node's way out.
        left_s: seconds until the deadline, less what commit and exit take.
    """
    fitting = [at for at, size_bytes in sizes.items() if size_bytes <= bytes_per_s * left_s]
    return max(fitting, default=None)


def _one_hash_each(
    by_rank: Mapping[int, Collection[Copy]], proof: Manifest | None
) -> tuple[tuple[Copy, ...], ...] | None:
    first = next(iter(next(iter(by_rank.values()))))
    world_size = proof.world_size if proof is not None else first.world_size
    # A manifest says how many ranks there are; without one, a rank too many is a lie somewhere.
    if len(by_rank) < world_size or (proof is None and len(by_rank) > world_size):
        return None
    if any(rank not in by_rank for rank in range(world_size)):
        return None
    chosen = [_agreeing(by_rank[rank], world_size, proof) for rank in range(world_size)]
    return tuple(chosen) if all(chosen) else None


def _agreeing(copies: Collection[Copy], world_size: int, proof: Manifest | None) -> tuple[Copy, ...]:
    if proof is not None:
        said = proof.shards[next(iter(copies)).rank].xxh3_128
        good: Sequence[Copy] = [copy for copy in copies if copy.xxh3_128 == said]
    else:
        good = list(copies) if len({copy.xxh3_128 for copy in copies}) == 1 else []
    if any(copy.world_size != world_size for copy in good):
        return ()
    return tuple(sorted(good, key=lambda c: (_NEARNESS[c.place], c.node, c.path)))
