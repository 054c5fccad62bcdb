"""Emergency on many nodes: who commits, and which step is staged late."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Count:
    """Where one held rank is. Read after the order to stay was given."""

    finished: int
    """Newest step that it has finished."""
    entered: int
    """Newest step whose optimizer it may have begun."""


def late_target(counted: Mapping[str, Sequence[Count]], members: Collection[str]) -> int | None:
    """The step that all ranks are to have in memory; None as long as a member has not been counted.

    Hold first, count after: a rank that was counted below the target has given its gradients to it and is one
    optimizer call away; none can be beyond it. With a member uncounted nothing can be said: it may be the foremost.
    """
    if not members or any(not counted.get(member) for member in members):
        return None
    return max(max(count.finished, count.entered) for member in members for count in counted[member])


def commit_order(members: Sequence[str], leaving: Collection[str]) -> list[str]:
    """The order in which agents try to commit a step: those that stay first, then those that leave.

    Only an economy: any of them may commit at any time, and the first wins. Later ones wait for their turn, so that
    not every node reads every acknowledgement.
    """
    return sorted(members, key=lambda member: member in leaving)
