"""Decides which members an observer takes for lost, by the observer's own clock alone.

Each node raises a counter and sends it. Only two facts count: that the counter *changed*, and when the observer
noticed. A time that a member names is never looked at, so no clock but the observer's can deceive it.

An observer that stood still itself (stopped process, suspended machine) received nothing because it did not listen. It
sees that by the gap between two of its own looks, and gives every member a fresh window.

Invariants: a member is lost only if the observer looked on for a whole window, without standing still, and its
counter did not change in it; a lost member is back only by a counter that changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from surefoot.errors import ConfigError

NO_BEAT = -1
"""Below every counter: shows that a process is there, before its first beat."""

State = Literal["awaited", "alive", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How long silence may last. All in seconds of the observer's clock."""

    beat_s: float = 0.5
    """Each node raises its counter, and looks at the others', at this interval."""
    lost_after_s: float = 3.0
    """A member whose counter did not change for longer is lost."""
    first_within_s: float = 60.0
    """The same for a member that has sent nothing yet: its agent may start later."""
    stood_still_s: float = 1.5
    """An observer whose looks are further apart stood still itself."""

    def __post_init__(self) -> None:
        if not 0 < self.beat_s < self.stood_still_s <= self.lost_after_s <= self.first_within_s:
            raise ConfigError(
                f"bounds of liveness must rise: beat_s {self.beat_s} < stood_still_s {self.stood_still_s} <= "
                f"lost_after_s {self.lost_after_s} <= first_within_s {self.first_within_s}"
            )


@dataclass(frozen=True, slots=True)
class Pulse:
    """The observer's knowledge of one member."""

    state: State
    since_s: float
    """When its counter was last seen to change, or when its window began."""
    life: str = ""
    """The process of that name whose counter this is: another one counts anew. Empty before the first message."""
    counter: int = NO_BEAT


@dataclass(frozen=True, slots=True)
class View:
    """One observer's knowledge of the others."""

    looked_at_s: float
    pulses: Mapping[str, Pulse] = field(default_factory=dict)

    def names(self, state: State) -> list[str]:
        return sorted(node for node, pulse in self.pulses.items() if pulse.state == state)


@dataclass(frozen=True, slots=True)
class Looked:
    """The outcome of a look."""

    view: View
    lost: tuple[str, ...]
    """Members that are lost from now on, sorted."""
    stood_still_s: float
    """How long the observer stood still before this look; 0 if it did not."""


def begin(members: Iterable[str], now_s: float) -> View:
    """The first view: every member is awaited."""
    return View(now_s, {node: Pulse("awaited", now_s) for node in members})


def without(view: View, node: str) -> View:
    """The view once it is known that `node` is gone for good."""
    return replace(view, pulses={name: pulse for name, pulse in view.pulses.items() if name != node})


def hear(view: View, node: str, life: str, counter: int, now_s: float) -> tuple[View, bool]:
    """The view after `node` sent its counter, and whether it is back from being lost.

    A counter that is not above the last one of the same process proves nothing, nor does one of a stranger.
    """
    pulse = view.pulses.get(node)
    if pulse is None or (life == pulse.life and counter <= pulse.counter):
        return view, False
    heard = Pulse("alive", now_s, life, counter)
    return replace(view, pulses={**view.pulses, node: heard}), pulse.state == "lost"


def look(view: View, bounds: Bounds, now_s: float) -> Looked:
    """Judge every member. Only the observer calls this, every `Bounds.beat_s`: the gap between looks has a meaning."""
    gap_s = now_s - view.looked_at_s
    if gap_s > bounds.stood_still_s:
        fresh = {node: _fresh(pulse, now_s) for node, pulse in view.pulses.items()}
        return Looked(View(now_s, fresh), (), gap_s)
    lost = tuple(sorted(node for node, pulse in view.pulses.items() if _overdue(pulse, bounds, now_s)))
    pulses = {node: replace(view.pulses[node], state="lost") for node in lost}
    return Looked(View(now_s, {**view.pulses, **pulses}), lost, 0.0)


def _fresh(pulse: Pulse, now_s: float) -> Pulse:
    # A lost member stays lost: an observer's standing still does not prove it alive.
    return pulse if pulse.state == "lost" else replace(pulse, since_s=now_s)


def _overdue(pulse: Pulse, bounds: Bounds, now_s: float) -> bool:
    window_s = bounds.first_within_s if pulse.state == "awaited" else bounds.lost_after_s
    return pulse.state != "lost" and now_s - pulse.since_s > window_s
