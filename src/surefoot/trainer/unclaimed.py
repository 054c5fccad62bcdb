"""Unclaimed: tensors that ranks kept each for itself, of ranks that are no more."""

from __future__ import annotations

from surefoot.core.plan import Plan
from surefoot.core.presence import spans

_NAMED = 5


def unclaimed(plan: Plan, world_size: int) -> str | None:
    """What to tell about a checkpoint's tensors that no rank takes, because there are fewer ranks now.

    Equal or not, whole or part of something that only the script knows: each rank's own are taken by the rank of that
    number. A script whose ranks each keep a part would go on without the others' parts.
    """
    gone = range(world_size, plan.world_size)
    names = sorted({name for rank in gone for name in plan.own(rank)})
    if not names:
        return None
    more = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
    return (
        f"{', '.join(names[:_NAMED])}{more}: each of {plan.world_size} ranks kept its own, and nobody takes those of "
        f"rank(s) {spans(gone)}"
    )
