"""Commit: a pure function of the plan and the acknowledgements.

Any agent that sees one acknowledgement per rank, all of the same boundary, generation and plan, can write the manifest;
the first wins. So the process that took the checkpoint need not live to see it committed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from surefoot.core.layout import BoundaryId
from surefoot.core.manifest import Generation, Manifest, Shard, Trigger

_WEIGHT: dict[Trigger, int] = {"agent": 0, "periodic": 1, "final": 2, "manual": 3, "emergency": 4}


def complete_set(acks: Iterable[Shard], at: BoundaryId) -> tuple[Shard, ...] | None:
    """One acknowledged shard per rank, all of one plan, if there is such a set. Any of a rank's attempts will do.

    The result does not depend on the order of `acks`. Acknowledgements of one plan that do not agree on the world size
    make no set: one of them is wrong, and a set that is too small would be a torn checkpoint.
    """
    by_plan: dict[str, list[Shard]] = {}
    for ack in acks:
        if ack.id.at == at:
            by_plan.setdefault(ack.plan, []).append(ack)
    for plan in sorted(by_plan):
        world_size = _agreed_world_size(by_plan[plan])
        shards: dict[int, Shard] = {}
        for ack in sorted(by_plan[plan], key=lambda shard: (shard.id.attempt, shard.xxh3_128, shard.size_bytes)):
            shards.setdefault(ack.id.rank, ack)
        if len(shards) == world_size and sorted(shards) == list(range(len(shards))):
            return tuple(shards[rank] for rank in sorted(shards))
    return None


def _agreed_world_size(acks: Sequence[Shard]) -> int | None:
    claims = [ack.record.get("world_size") for ack in acks]
    return claims[0] if all(type(claim) is int and claim == claims[0] for claim in claims) else None


def make_manifest(shards: Sequence[Shard], generation: Generation, now: float) -> Manifest:
    """The manifest of a complete set. Trigger, tag and metrics are those that the ranks' records carry."""
    records = [shard.record for shard in shards]
    known = [trigger for trigger in _WEIGHT if any(record.get("trigger") == trigger for record in records)]
    trigger: Trigger = max(known, key=lambda t: _WEIGHT[t]) if known else "agent"
    metrics: dict[str, object] = {}
    for record in records:
        given = record.get("metrics")
        if isinstance(given, dict):
            metrics = {**given, **metrics}
    return Manifest(
        at=shards[0].id.at,
        plan=shards[0].plan,
        world_size=len(shards),
        trigger=trigger,
        tag=next((record["tag"] for record in records if isinstance(record.get("tag"), str)), None),
        metrics=metrics,
        launch=generation.launch,
        parent=generation.parent,
        created=now,
        shards=tuple(shards),
    )


def commit_order(members: Sequence[str], leaving: Collection[str]) -> list[str]:
    """The order in which agents try to commit a step: those that stay first, then those that leave.

    Only an economy: any of them may commit at any time, and the first wins. Later ones wait for their turn, so that
    not every node reads every acknowledgement.
    """
    return sorted(members, key=lambda member: member in leaving)
