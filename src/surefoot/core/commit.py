"""Commit: a pure function of the plan and the acknowledgements.

Any agent that sees one acknowledgement a rank, all of the same step, generation and plan, can write the manifest;
the first wins. So the process that took the checkpoint need not live to see it committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from surefoot.core.layout import StepId
from surefoot.core.manifest import Generation, Manifest, Shard, Trigger

_WEIGHT: dict[Trigger, int] = {"agent": 0, "periodic": 1, "final": 2, "manual": 3, "emergency": 4}


def complete_set(acks: Iterable[Shard], at: StepId) -> tuple[Shard, ...] | None:
    """One acknowledged shard a rank, of one plan, if there is such a set. Several attempts of a rank: any will do."""
    by_plan: dict[str, dict[int, Shard]] = {}
    for ack in sorted(acks, key=lambda shard: (shard.plan, shard.id.rank, shard.id.attempt)):
        if ack.id.at == at:
            by_plan.setdefault(ack.plan, {}).setdefault(ack.id.rank, ack)
    for shards in by_plan.values():
        world_sizes = {shard.record.get("world_size") for shard in shards.values()}
        if world_sizes == {len(shards)} and sorted(shards) == list(range(len(shards))):
            return tuple(shards[rank] for rank in sorted(shards))
    return None


def make_manifest(shards: Sequence[Shard], generation: Generation, now: float) -> Manifest:
    """The manifest of a complete set. Trigger, tag and metrics are those that the ranks' records carry."""
    records = [shard.record for shard in shards]
    triggers = [record.get("trigger") for record in records]
    known = [trigger for trigger in triggers if trigger in _WEIGHT]
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
