"""Makes every decision between an eviction notice and its end, from facts and a clock value.

Each node calls `decide` again and again. Its order may need one more decision, from the reports of all nodes:
`late_target` names the step that is staged late, `newest_to_ship` the step that all nodes ship from memory, `unfit`
whether an older upload is finished before an eviction's newest step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from surefoot.core.layout import BoundaryId
from surefoot.core.recovery import Source

_ASSUMED_BYTES_PER_S = 100e6
"""Assumed before anything was measured."""
_SHIP_FACTOR = 1.5
"""The last upload may have been a quick one."""
_MARGIN_S = 2.0
"""Left before the deadline for the commit and for the trainers to leave; at most a quarter of the window."""
_COPIED_BYTES_PER_S = 1e9
"""Assumed of staging a step late, with `_LATE_SPARE_S` beside it."""
_LATE_SPARE_S = 1.0
_LATE_SHARE = 8
"""Least part of the window that is left for staging late: where no boundary comes, every rank may be slow."""
_UPLOADS_REMEMBERED = 8
"""Older measurements may be of a link that has changed."""
_HELD_SHARE = 0.1
"""The bandwidth cap may hold an upload back for this part of its time, or the upload does not measure the link."""


# ---------------------------------------------------------------------- what one node does next


@dataclass(frozen=True, slots=True)
class Facts:
    """What one node knows. Steps count from 1; 0 stands for none."""

    noticed_s: float
    deadline_s: float
    finished: int = 0
    """Newest step that all ranks of this node have finished, whether they live or not."""
    durable: int = 0
    trainers: bool = True
    """Some trainer of this node lives."""
    foremost: int = 0
    """Newest step that any living rank of this node has finished."""
    sealed: int = 0
    """Newest step that every living rank of this node has in memory."""
    sealed_on_all: int = 0
    """The same for the ranks of all nodes."""
    held: bool = False
    """This node's ranks were ordered to wait before their next optimizer call."""
    late_step: int | None = None
    """The step that every rank was then ordered to stage."""
    late_ships: bool = False
    """It is being shipped."""
    shipping: bool = False
    """Any step is."""
    nothing_left: bool = False
    """All nodes' memory was looked through, and has no whole step that is not durable."""
    apart: bool = False
    """This agent replaces another, and has not met the other nodes yet: it must not decide for them."""
    image_bytes: int = 0
    """Of this node's ranks together."""
    bytes_per_s: float = 0.0
    """At which the last step became durable; 0 before there is one."""

    @property
    def safe(self) -> bool:
        return self.durable >= self.finished


@dataclass(frozen=True, slots=True)
class Wait:
    """Trainers stop at the boundary that they agree on (`core/agreement.py`), and their agents ship its step."""


@dataclass(frozen=True, slots=True)
class StageLate:
    """Hold all ranks, count where they are, and have them stage the step that `late_target` names."""


@dataclass(frozen=True, slots=True)
class ShipNewest:
    """Have all nodes ship the newest whole step in memory, as `newest_to_ship` names it."""


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing more can, or need, be done."""

    safe: bool
    why: str


Order = Wait | StageLate | ShipNewest | Done


def margin_s(noticed_s: float, deadline_s: float) -> float:
    """What is kept of the window for what comes after the uploads."""
    return min(_MARGIN_S, max(0.0, deadline_s - noticed_s) / 4)


def decide(facts: Facts, now_s: float) -> Order:
    """What this node does next."""
    end_s = facts.deadline_s - margin_s(facts.noticed_s, facts.deadline_s)
    if now_s >= (end_s if facts.safe else facts.deadline_s):
        return Done(facts.safe, "the deadline has come")
    if facts.safe:
        # Trainers that are still here may finish a further step, and stop at its boundary.
        return Wait() if facts.trainers else Done(True, "the newest finished step is durable")
    if not facts.trainers:
        spent = facts.nothing_left and not facts.shipping
        return Done(False, "no memory holds a newer whole step") if spent else ShipNewest()
    last_s = end_s - _SHIP_FACTOR * facts.image_bytes / (facts.bytes_per_s or _ASSUMED_BYTES_PER_S)
    if not facts.held and not facts.apart and facts.sealed < facts.foremost and now_s >= last_s - _late_s(facts):
        return StageLate()
    # No rank passes a step that was staged late: it goes as soon as all have it. Else a boundary may come until last_s.
    late_waits = facts.late_step is not None and facts.sealed_on_all >= facts.late_step and not facts.late_ships
    return ShipNewest() if late_waits or now_s >= last_s else Wait()


def _late_s(facts: Facts) -> float:
    spare_s = max(_LATE_SPARE_S, (facts.deadline_s - facts.noticed_s) / _LATE_SHARE)
    return facts.image_bytes / _COPIED_BYTES_PER_S + spare_s


# ---------------------------------------------------------------------- which step is staged late


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
    optimizer call away; none can be beyond it. While a member is uncounted there is no answer: it may be the foremost.
    """
    if not members or any(not counted.get(member) for member in members):
        return None
    return max(max(count.finished, count.entered) for member in members for count in counted[member])


# ---------------------------------------------------------------------- which step is shipped from memory


def newest_to_ship(newest: Source | None, durable: BoundaryId | None) -> Source | None:
    """The newest step of which all nodes' memory together has every rank's image, unless it is durable already."""
    return newest if newest is not None and (durable is None or newest.at > durable) else None


def shipped_elsewhere(step: Source, node_of: Callable[[int], str | None]) -> tuple[tuple[int, str], ...]:
    """Ranks whose own node does not have their image, and the node that ships it instead."""
    holders = {rank: [copy.node for copy in copies] for rank, copies in enumerate(step.copies)}
    return tuple((rank, nodes[0]) for rank, nodes in holders.items() if node_of(rank) not in nodes)


# ---------------------------------------------------------------------- which of two uploads is finished


class Link:
    """Measures this node's upload speed: the best of its last uploads.

    An eviction's uploads have the link to themselves, so one that other traffic disturbed does not count. Nor does one
    that the bandwidth cap held back: an eviction lifts the cap, and how fast the link is without it is not known.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_UPLOADS_REMEMBERED)

    def uploaded(self, size_bytes: int, took_s: float, held_s: float) -> None:
        """An upload ended well; the cap held it back for `held_s` of its time."""
        if size_bytes and took_s > 0 and held_s <= _HELD_SHARE * took_s:
            self._last.append(size_bytes / took_s)

    @property
    def bytes_per_s(self) -> float | None:
        """None before anything was measured."""
        return max(self._last, default=None)


@dataclass(frozen=True, slots=True)
class UploadReport:
    """A node's report when its part of an eviction's newest step is in memory."""

    newest_s: float | None
    """Its upload from here, at the best speed measured; None before anything was."""
    left_s: float | None
    """Until all must be uploaded; None if this node does not know of the notice yet."""
    older_s: Mapping[BoundaryId, float] = field(default_factory=dict)
    """The same for the rest of each older step under way here; 0 for the one that this node knows as durable."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """An eviction's newest step cannot be uploaded in the time that is left."""

    slowest: str
    """The node where it needs the longest."""
    needed_s: float
    left_s: float
    first: BoundaryId | None
    """What is finished before it; None if nothing else can be either."""


def unfit(reports: Mapping[str, UploadReport]) -> Unfit | None:
    """Whether the newest step is too large for the time left; None if it fits, or if that cannot be known.

    A step is committed only if every node's part of it is: the newest one is too large if it is so anywhere, and an
    older one goes first only if its rest fits everywhere. Speeds are the best that were measured, so a step that does
    not fit at them does not fit: nothing that fits is given up for what may not.

    Args:
        reports: of all nodes. Every node that has them comes to the same.
    """
    windows_s = [one.left_s for one in reports.values() if one.left_s is not None]
    needed_s = {node: one.newest_s for node, one in reports.items() if one.newest_s is not None}
    if not windows_s or len(needed_s) < len(reports):
        return None
    left_s = max(0.0, min(windows_s))
    slowest = max(sorted(needed_s), key=lambda node: needed_s[node])
    if needed_s[slowest] <= left_s:
        return None
    fitting = [{at for at, rest_s in one.older_s.items() if rest_s <= left_s} for one in reports.values()]
    return Unfit(slowest, needed_s[slowest], left_s, max(set.intersection(*fitting), default=None))
