"""Emergency on many nodes: who commits, which step is staged late, and which one the time left is spent on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from surefoot.core.layout import StepId


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


@dataclass(frozen=True, slots=True)
class Rest:
    """What a node still has to upload of a step that is older than the newest."""

    name: str
    """Of the delivery: the same on all nodes."""
    at: StepId
    left_bytes: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one node knows when an eviction's newest step is whole."""

    newest_bytes: int
    """What it still has to upload of that step."""
    bytes_per_s: float
    """The best that its link was measured at; 0 before anything was."""
    left_s: float | None
    """Until all must be uploaded; None if it has not heard of the notice yet."""
    rests: tuple[Rest, ...] = ()
    committed: StepId | None = None
    """Newest step that it knows to be durable."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """The newest step is too large for the time that is left."""

    node: str
    """Where it needs the longest."""
    size_bytes: int
    """What that node has to upload of it."""
    bytes_per_s: float
    needed_s: float
    left_s: float
    first: Rest | None
    """What is finished before it, with the bytes that all nodes together still have to upload; None: nothing fits."""


def unfit(forecasts: Mapping[str, Forecast], members: Collection[str]) -> Unfit | None:
    """Whether an eviction's newest step is too large for the time left, and what is finished first if it is.

    A step is committed only if every node's part of it is, so the newest one is too large if it is so anywhere, and an
    older one comes in its place only if its rest fits everywhere. Speeds are the best that were measured, so what is
    too large at them is too large; whether the older one really fits is a hope, and costs nothing that could be had.

    Returns None if the newest step fits, or if that cannot be told: a member is missing, has measured no speed yet, or
    nobody knows the deadline.
    """
    known = [one.left_s for one in forecasts.values() if one.left_s is not None]
    if not known or any(member not in forecasts or forecasts[member].bytes_per_s <= 0 for member in members):
        return None
    left_s = max(0.0, min(known))
    needed_s = {member: forecasts[member].newest_bytes / forecasts[member].bytes_per_s for member in members}
    node = max(sorted(members), key=lambda member: needed_s[member])
    if needed_s[node] <= left_s:
        return None
    slowest = forecasts[node]
    first = _newest_that_fits([forecasts[member] for member in members], left_s)
    return Unfit(node, slowest.newest_bytes, slowest.bytes_per_s, needed_s[node], left_s, first)


def _newest_that_fits(forecasts: Sequence[Forecast], left_s: float) -> Rest | None:
    fitting = []
    for name, at in {(rest.name, rest.at) for one in forecasts for rest in one.rests}:
        left = [_left_bytes(one, name, at) for one in forecasts]
        sizes = [size for size in left if size is not None]
        paces = [one.bytes_per_s for one in forecasts]
        if len(sizes) == len(left) and all(a / b <= left_s for a, b in zip(sizes, paces, strict=True)):
            fitting.append(Rest(name, at, sum(sizes)))
    return max(fitting, key=lambda rest: (rest.at, rest.name), default=None)


def _left_bytes(forecast: Forecast, name: str, at: StepId) -> int | None:
    """None: this node has no such delivery, so it is not going to bring its part."""
    if forecast.committed is not None and forecast.committed >= at:
        return 0
    return next((rest.left_bytes for rest in forecast.rests if rest.name == name), None)
