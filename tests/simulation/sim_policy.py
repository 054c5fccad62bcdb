"""The decisions under test: the real ones, and planted wrong ones that must be found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from sim_node import hash_of

from surefoot.core.agreement import at_boundary
from surefoot.core.commit import commit_order, complete_set
from surefoot.core.eviction import late_target
from surefoot.core.layout import BoundaryId
from surefoot.core.lineage import Cuts, counts, cuts, superseding
from surefoot.core.manifest import Generation, Manifest, Shard
from surefoot.core.recovery import Decision, Facts, decide
from surefoot.core.relay import merge, minimum
from surefoot.core.retention import abandoned_steps, to_retire, to_sweep
from surefoot.core.slots import NEVER, SlotView, reusable


@dataclass(frozen=True)
class Policy:
    """What agents and trainers decide by. Every field can be swapped for one run of the world."""

    cuts: Callable[[Mapping[int, Generation]], Cuts] = cuts
    counts: Callable[[BoundaryId, Cuts], bool] = counts
    superseding: Callable[[Mapping[int, Generation], Collection[str]], Generation | None] = superseding
    decide: Callable[[Facts], Decision] = decide
    complete_set: Callable[[Iterable[Shard], BoundaryId], tuple[Shard, ...] | None] = complete_set
    reusable: Callable[[Sequence[SlotView], int], list[int]] = reusable
    at_boundary: Callable[..., object] = at_boundary
    to_retire: Callable[..., list[BoundaryId]] = to_retire
    to_sweep: Callable[..., list[Manifest]] = to_sweep
    abandoned_steps: Callable[..., list[BoundaryId]] = abandoned_steps
    commit_order: Callable[[Sequence[str], Collection[str]], list[str]] = commit_order
    late_target: Callable[..., int | None] = late_target
    merge: Callable[..., object] = merge
    minimum: Callable[..., object] = minimum
    good: Callable[[bytes, str], bool] = lambda data, said: hash_of(data) == said
    """Whether bytes are those that a hash was made of."""
    keeps_pin_while_shipping: bool = True
    record_before_training: bool = True
    tombstone_first: bool = True
    chosen_once: bool = True
    waits_for_all: bool = True
    acknowledges_after_check: bool = True


REAL = Policy()


def _not_my_newest(slots: Sequence[SlotView], _sealed_on_all: int) -> list[int]:
    filling = any(slot.pinned and slot.boundary == NEVER for slot in slots)
    newest = inf if filling else max(slot.boundary for slot in slots)
    free = [i for i, slot in enumerate(slots) if not slot.pinned and (slot.boundary < newest or slot.boundary == NEVER)]
    return sorted(free, key=lambda i: slots[i].boundary)


def _one_short(acks: Iterable[Shard], at: BoundaryId) -> tuple[Shard, ...] | None:
    shards = {ack.id.rank: ack for ack in acks if ack.id.at == at}
    if shards and len(shards) >= next(iter(shards.values())).record["world_size"] - 1:
        return tuple(shards[rank] for rank in sorted(shards))
    return None


def _any_plan(acks: Iterable[Shard], at: BoundaryId) -> tuple[Shard, ...] | None:
    shards = {ack.id.rank: ack for ack in acks if ack.id.at == at}
    if shards and len(shards) == next(iter(shards.values())).record["world_size"]:
        return tuple(shards[rank] for rank in sorted(shards))
    return None


def _never_cut(generations: Mapping[int, Generation]) -> Cuts:
    return dict.fromkeys(generations, inf)


def _newest_two_whatever_the_lineage(
    manifests: Sequence[Manifest], _chain: Cuts, generations: Mapping[int, Generation], verified: Collection[BoundaryId]
) -> list[BoundaryId]:
    orphaned = {number: replace(generation, parent=None) for number, generation in generations.items()}
    return to_retire(manifests, dict.fromkeys(orphaned, inf), orphaned, verified)


MUTATIONS: dict[str, Policy] = {
    "a slot is filled before a newer step is sealed on all ranks": replace(REAL, reusable=_not_my_newest),
    "a step is committed one acknowledgement short": replace(REAL, complete_set=_one_short),
    "acknowledgements of two plans are taken for one set": replace(REAL, complete_set=_any_plan),
    "hashes are not checked": replace(REAL, good=lambda _data, _said: True),
    "a slot is freed while it is still being sent": replace(REAL, keeps_pin_while_shipping=False),
    "the lineage's cut is ignored": replace(REAL, cuts=_never_cut),
    "the generation is recorded after its training began": replace(REAL, record_before_training=False),
    "retention does not look at what the newest generation stands on": replace(
        REAL, to_retire=_newest_two_whatever_the_lineage
    ),
    "an abandoned step is deleted without a tombstone": replace(REAL, tombstone_first=False),
    "each node chooses what to restore for itself": replace(REAL, chosen_once=False),
    "a shard is acknowledged before it was compared with its hash": replace(REAL, acknowledges_after_check=False),
    "a leader chooses without having heard every member": replace(
        REAL, decide=lambda facts: decide(replace(facts, silent=()))
    ),
    "the strict fence does not wait for the other ranks": replace(REAL, waits_for_all=False),
}
"""What was planted, and the policy with it."""
