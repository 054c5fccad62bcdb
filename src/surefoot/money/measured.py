"""What a run's own events say: interruptions, step time, stall, durable lag, restarts. Schema: `surefoot.events`.

The planner then forecasts with what was measured, not with what was assumed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from surefoot.errors import ConfigError
from surefoot.money.hazards import Replay, from_event_times

LOSSES = ("evicted", "node_lost")
TOGETHER_S = 60.0
"""Losses of several nodes within a minute are one event."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one event log; None where it does not say."""

    name: str
    length_s: float
    loss_times_s: tuple[float, ...]
    loss_sizes: tuple[int, ...]
    announced: float | None
    """Share of losses that a notice came before."""
    step_s: float | None
    stall_s: float | None
    durable_lag_s: float | None
    """Median seconds of a commit on the durable tier."""
    state_bytes: float | None
    restart_s: float | None
    """Median seconds of a resume, loading included."""

    def hazard(self, nodes: int) -> Replay:
        """Bootstrap of the log's losses. `ConfigError` when there is none."""
        return from_event_times(self.loss_times_s, self.loss_sizes, self.length_s, nodes, self.name)


def load_events(paths: Iterable[Path]) -> Measured:
    """Events of one run, from one or several files. `ConfigError` naming file and line for a line that is none."""
    events: list[dict[str, Any]] = []
    names = []
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"no event log {path}")
        names.append(path.name)
        events += _parse(path.read_text(errors="replace"), str(path))
    return measure(events, ", ".join(names))


def measure(events: Sequence[dict[str, Any]], name: str) -> Measured:
    """Figures of events in any order. `ConfigError` when they span no time."""
    ordered = sorted(events, key=lambda event: float(event["t"]))
    if len(ordered) < 2 or ordered[-1]["t"] <= ordered[0]["t"]:
        raise ConfigError(f"{name}: fewer than two events at different times: nothing to learn from")
    start_s = float(ordered[0]["t"])
    times, sizes, announced = _losses(ordered, start_s)
    return Measured(
        name=name,
        length_s=float(ordered[-1]["t"]) - start_s,
        loss_times_s=tuple(times),
        loss_sizes=tuple(sizes),
        announced=announced / len(times) if times else None,
        step_s=_median(ordered, "step", "step_s"),
        stall_s=_median(ordered, "stall", "stall_s", "seconds"),
        durable_lag_s=_median(ordered, "committed", "seconds"),
        state_bytes=_median(ordered, "committed", "bytes"),
        restart_s=_restarts(ordered),
    )


def _losses(events: Sequence[dict[str, Any]], start_s: float) -> tuple[list[float], list[int], int]:
    times: list[float] = []
    nodes: list[set[str]] = []
    announced = 0
    noticed: set[str] = set()
    for event in events:
        kind, node, at = event["event"], str(event.get("node", "")), float(event["t"]) - start_s
        if kind == "notice":
            noticed.add(node)
        elif kind in LOSSES:
            if times and at - times[-1] <= TOGETHER_S:
                nodes[-1].add(node)
                continue
            times.append(at)
            nodes.append({node})
            announced += node in noticed
            noticed.discard(node)
    return times, [len(group) for group in nodes], announced


def _restarts(events: Sequence[dict[str, Any]]) -> float | None:
    spent = [sum(e["phases"].values()) for e in events if e["event"] == "resumed" and e.get("from_step") is not None]
    return median(spent) if spent else None


def _median(events: Sequence[dict[str, Any]], kind: str, *keys: str) -> float | None:
    values = [
        float(e[key]) for e in events if e["event"] == kind for key in keys if isinstance(e.get(key), int | float)
    ]
    return median(values) if values else None


def _parse(text: str, name: str) -> list[dict[str, Any]]:
    events = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
            time_s = float(event["t"])
            kind = event["event"]
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{name}:{number}: no event: expected a JSON object with 't' and 'event'") from error
        if not isinstance(kind, str) or time_s < 0:
            raise ConfigError(f"{name}:{number}: negative time or no event name")
        events.append(event)
    return events
