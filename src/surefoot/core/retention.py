"""Retention: which checkpoints are given up, and when their bytes may go.

Two moments. *Retire*: the manifest is rewritten with the time at which it was given up; from then on it is no
checkpoint. *Sweep*: an hour later its shards are deleted. A manifest's key stays taken for ever, so a process that
slept through all this cannot commit over deleted shards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from surefoot.core.layout import BoundaryId
from surefoot.core.lineage import Cuts, counts
from surefoot.core.manifest import Generation, Manifest

KEEP_NEWEST = 2
SWEEP_DELAY_S = 3600.0


def to_retire(
    manifests: Sequence[Manifest],
    chain: Cuts,
    generations: Mapping[int, Generation],
    verified: Collection[BoundaryId],
) -> list[BoundaryId]:
    """Checkpoints to give up now.

    Invariants: the newest two verified ones on the lineage stay, and so does everything newer; tagged ones stay; the
    parent of every generation stays until a later step on that lineage is verified. With no verified checkpoint
    nothing goes.
    """
    verified = frozenset(verified)
    live = [manifest for manifest in manifests if manifest.retired is None]
    # A set: one that is seen on two tiers is still one checkpoint.
    good = sorted({m.at for m in live if m.at in verified and counts(m.at, chain)}, reverse=True)
    if len(good) < KEEP_NEWEST:
        return []
    bound = good[KEEP_NEWEST - 1]
    pinned = _pinned_parents(chain, generations, good)
    return sorted(m.at for m in live if m.at < bound and m.tag is None and m.at not in pinned and m.at not in good[:2])


def to_sweep(manifests: Sequence[Manifest], now: float, delay_s: float = SWEEP_DELAY_S) -> list[Manifest]:
    """Retired checkpoints whose shards may be deleted."""
    return [m for m in manifests if m.retired is not None and now - m.retired >= delay_s]


def abandoned_steps(
    steps: Collection[BoundaryId], taken: Collection[BoundaryId], chain: Cuts, newest: int, bound: BoundaryId | None
) -> list[BoundaryId]:
    """Steps with objects but no manifest, that nobody may still commit: a tombstone goes to the manifest's key first.

    Only of older generations: in the newest one an upload may be under way. Only below the oldest kept checkpoint,
    or off the lineage: a complete set above it is still worth committing.
    """
    taken = frozenset(taken)
    return sorted(
        at
        for at in steps
        if at not in taken and at.generation < newest and (not counts(at, chain) or (bound is not None and at < bound))
    )


def _pinned_parents(chain: Cuts, generations: Mapping[int, Generation], good: Sequence[BoundaryId]) -> set[BoundaryId]:
    newest = max(chain)
    parent = generations[newest].parent
    if parent is None or any(at.generation == newest for at in good):
        return set()
    # The newest generation has no verified checkpoint yet: what it stands on is the newest commit at or below the
    # image that it started from.
    below = [at for at in good if at.boundary <= parent.boundary]
    return {max(below)} if below else set()
