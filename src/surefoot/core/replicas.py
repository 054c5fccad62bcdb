"""Replicas: a second copy, in another machine's memory, of an image that is made of what other ranks have as well.

Replicas are equal, so a rank of another machine can put the same bytes into its own slots: nothing travels. What a rank
has for itself alone (its random states, a tensor of its own) is small, and is told to that machine. Together they are
the image again, and the image's own hash says whether they are. Which rank keeps whose replica is part of the plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

from surefoot.core.image import round_up
from surefoot.core.plan import Item, Plan, Report
from surefoot.core.ranges import Range, merged

MAX_OWN_BYTES = 1024 * 1024
"""An own part larger than this is not sent to another machine at every step: the rank then has no replica."""

_Block = tuple[str, tuple[int, ...], tuple[int, ...]]


def with_replicas(plan: Plan, reports: Sequence[Report], machines: Sequence[Hashable]) -> Plan:
    """The plan with a replica for every image that can have one; largest first, to the rank with the fewest bytes so
    far.

    Args:
        plan: made of these reports.
        reports: in rank order.
        machines: by rank, where it runs: what is lost together.
    """
    if len(set(machines)) < 2:
        return plan
    holders = _holders(reports)
    kept = [[item for item in plan.kept_by(rank) if not item.frozen] for rank in range(plan.world_size)]
    # One more, so that a rank that keeps an image without any tensor has more to keep than before.
    sizes = [1 + sum(item.box.size_bytes for item in items) for items in kept]
    holding = _Holders(machines)
    replicas = []
    for rank in sorted(range(plan.world_size), key=lambda rank: (-sizes[rank], rank)):
        items = kept[rank]
        if sum(item.box.size_bytes for item in items if item.spread == "local") > MAX_OWN_BYTES:
            continue
        able = _able(items, holders)
        holder = holding.take(rank, able, sizes[rank]) if able is None or len(able) > 1 else None
        if holder is not None:
            replicas.append((rank, holder))
    return replace(plan, replicas=tuple(sorted(replicas)))


def areas(plan: Plan, holder: int) -> dict[int, int]:
    """Where the replicas that a rank keeps begin in its slot, counted from the end of its own image's last page."""
    starts, end = {}, 0
    for rank in plan.replicas_kept_by(holder):
        starts[rank] = end
        end += round_up(plan.image(rank).size_bytes)
    return starts


def areas_bytes(plan: Plan, holder: int) -> int:
    """Room for the replicas that a rank keeps, in each of its slots."""
    return sum(round_up(plan.image(rank).size_bytes) for rank in plan.replicas_kept_by(holder))


def own_ranges(plan: Plan, rank: int) -> list[Range]:
    """Where in a rank's image lies what no other rank has."""
    own = {item.box.name for item in plan.kept_by(rank) if item.spread == "local" and not item.frozen}
    places = plan.image(rank).places
    return merged((start, start + box.size_bytes) for box, start in places if box.name in own and box.size_bytes)


class _Holders:
    """Ranks that can keep replicas, those with the fewest bytes first."""

    def __init__(self, machines: Sequence[Hashable]) -> None:
        self._machines = machines
        self._load = [0] * len(machines)
        # Each rank's entry with its load of now is valid; older ones are passed over.
        self._queue = [(0, rank) for rank in range(len(machines))]

    def take(self, rank: int, able: Collection[int] | None, size_bytes: int) -> int | None:
        """A rank of another machine than `rank`'s; of those in `able`, if it is given."""
        if able is not None:
            far = [one for one in able if self._machines[one] != self._machines[rank]]
            holder = min(far, key=lambda one: (self._load[one], one), default=None)
        else:
            holder = self._lightest_elsewhere(rank)
        if holder is not None:
            self._load[holder] += size_bytes
            heapq.heappush(self._queue, (self._load[holder], holder))
        return holder

    def _lightest_elsewhere(self, rank: int) -> int | None:
        near = []
        try:
            for load, one in self._valid():
                if self._machines[one] != self._machines[rank]:
                    return one
                near.append((load, one))
            return None
        finally:
            for entry in near:
                heapq.heappush(self._queue, entry)

    def _valid(self) -> Iterator[tuple[int, int]]:
        while self._queue:
            load, one = heapq.heappop(self._queue)
            if load == self._load[one]:
                yield load, one


def _holders(reports: Sequence[Report]) -> dict[_Block, set[int]]:
    """The ranks that have each block of a sharded leaf."""
    holders: dict[_Block, set[int]] = {}
    for rank, report in enumerate(reports):
        for leaf in report.leaves:
            if leaf.spread == "sharded":
                holders.setdefault((leaf.name, leaf.offset, leaf.shape), set()).add(rank)
    return holders


def _able(items: Sequence[Item], holders: Mapping[_Block, set[int]]) -> set[int] | None:
    """The ranks that have all that a rank keeps for others too; None: every rank has."""
    able: set[int] | None = None
    for item in items:
        if item.spread == "sharded":
            of_item = holders[item.leaf, item.box.offset, item.box.shape]
            able = set(of_item) if able is None else able & of_item
            if len(able) == 1:
                break
    return able
