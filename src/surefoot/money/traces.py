"""Readers of traces: how many preemptible nodes ran, and when they were lost.

Four layouts are told apart by their first line:

    2021-12-11, 11:11:30, 55          date, time, running nodes          (Bamboo, Google Cloud)
    2040000,remove,node19             milliseconds, add or remove, node  (Bamboo, AWS)
    2040000,31                        milliseconds, running nodes        (Parcae)
    [60000, "remove", {"nodes": […]}] one JSON array a line              (Parcae)

A file that breaks its layout is refused with one line that names the file, the line and the remedy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path

from surefoot.errors import ConfigError

BACKWARD_TOLERATED_S = 300.0
"""Samples of overlapping probes step back by a minute or so; file order is the order of observation."""
MAX_GAP_S = 6 * 3600.0
"""A longer hole between two rows says nothing about what happened in it."""

SHIPPED = {
    "bamboo-a100": ("bamboo-a100x1-east1b.txt", "A100, Google Cloud us-east1-b, December 2021, target 64 nodes"),
    "bamboo-v100": ("bamboo-v100x1-east1c.txt", "V100, Google Cloud us-east1-c, December 2021, target 80 nodes"),
    "bamboo-p3": ("bamboo-p3-trace.csv", "V100, AWS p3, peak 32 nodes"),
    "bamboo-g4dn": ("bamboo-g4dn-trace.csv", "T4, AWS g4dn, peak 24 nodes"),
    "parcae-p3": ("parcae-p3.csv", "V100, AWS p3: the same run as bamboo-p3, counts only"),
    "parcae-hh": ("parcae-trace_hh_55_65.txt", "one hour: many nodes, many preemptions"),
    "parcae-hl": ("parcae-trace_hl_15_25.txt", "one hour: many nodes, few preemptions"),
    "parcae-lh": ("parcae-trace_lh_80_90.txt", "one hour: few nodes, many preemptions"),
    "parcae-ll": ("parcae-trace_ll_10_11.txt", "one hour: few nodes, few preemptions"),
}
"""Traces in the package, MIT licence. None has H100: the newest GPU in a public trace is the A100."""

_SAMPLE = re.compile(r"^(\d{4}-\d{2}-\d{2})\s*,\s*(\d{2}:\d{2}:\d{2})\s*,\s*(-?\d+)$")
_CHANGE = re.compile(r"^(-?\d+)\s*,\s*(add|remove)\s*,\s*(\S+)$")
_COUNT = re.compile(r"^(-?\d+)\s*,\s*(-?\d+)$")


@dataclass(frozen=True, slots=True)
class Loss:
    """Nodes that vanished between two observations."""

    time_s: float
    lost: int
    running_before: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Running nodes over time. ``counts[i]`` holds from ``times_s[i]`` to the next; times start at 0 and grow."""

    name: str
    times_s: tuple[float, ...]
    counts: tuple[int, ...]
    losses: tuple[Loss, ...]
    note: str = ""

    @property
    def length_s(self) -> float:
        return self.times_s[-1] - self.times_s[0]

    @property
    def peak(self) -> int:
        return max(self.counts)

    @property
    def node_seconds(self) -> float:
        spans = zip(self.times_s, self.times_s[1:], self.counts, strict=False)
        return sum(count * (end - start) for start, end, count in spans)

    @property
    def lost_nodes(self) -> int:
        return sum(loss.lost for loss in self.losses)

    @property
    def node_mtbf_s(self) -> float:
        """Seconds that a node ran, on average, for each loss."""
        return self.node_seconds / self.lost_nodes if self.lost_nodes else float("inf")


def load_trace(name: str) -> Trace:
    """A shipped trace by its name (`SHIPPED`), or a file. `ConfigError` when it cannot be used."""
    if name in SHIPPED:
        file, note = SHIPPED[name]
        text = (resources.files("surefoot.money") / "data" / file).read_text()
        return parse_trace(text, name, note)
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"no trace {name!r}: give a file, or one of {', '.join(SHIPPED)}")
    return parse_trace(path.read_text(errors="replace"), name)


def parse_trace(text: str, name: str, note: str = "") -> Trace:
    """The trace in ``text``. `ConfigError` with file and line when a row cannot be used."""
    rows = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if len(rows) < 2:
        raise ConfigError(f"{name}: {len(rows)} rows are no trace")
    observed = _layout(rows[0][1], name)(rows, name)
    return _build(observed, name, note)


@dataclass(frozen=True, slots=True)
class _Observed:
    line: int
    time_s: float
    running: int
    lost: int


_Rows = Sequence[tuple[int, str]]


def _layout(first: str, name: str) -> Callable[[_Rows, str], list[_Observed]]:
    if first.startswith("["):
        return _json_rows
    for pattern, reader in ((_SAMPLE, _sample_rows), (_CHANGE, _change_rows), (_COUNT, _count_rows)):
        if pattern.match(first):
            return reader
    raise ConfigError(
        f"{name}:1: wrong columns: {first[:60]!r}; expected 'date, time, running', 'ms,add|remove,node', "
        "'ms,running' or a JSON array"
    )


def _sample_rows(rows: _Rows, name: str) -> list[_Observed]:
    observed: list[_Observed] = []
    for line, row in rows:
        match = _SAMPLE.match(row)
        if match is None:
            raise ConfigError(f"{name}:{line}: wrong columns: {row[:60]!r}; expected 'date, time, running'")
        time_s = _timestamp_s(f"{match[1]} {match[2]}", name, line)
        observed.append(_after(observed, line, time_s, int(match[3])))
    return observed


def _count_rows(rows: _Rows, name: str) -> list[_Observed]:
    observed: list[_Observed] = []
    for line, row in rows:
        match = _COUNT.match(row)
        if match is None:
            raise ConfigError(f"{name}:{line}: wrong columns: {row[:60]!r}; expected 'ms,running'")
        observed.append(_after(observed, line, int(match[1]) / 1000.0, int(match[2])))
    return observed


def _after(observed: Sequence[_Observed], line: int, time_s: float, running: int) -> _Observed:
    lost = max(0, observed[-1].running - running) if observed else 0
    return _Observed(line, time_s, running, lost)


def _change_rows(rows: _Rows, name: str) -> list[_Observed]:
    changes = []
    for line, row in rows:
        match = _CHANGE.match(row)
        if match is None:
            raise ConfigError(f"{name}:{line}: wrong columns: {row[:60]!r}; expected 'ms,add|remove,node'")
        changes.append((line, int(match[1]) / 1000.0, match[2], [match[3]]))
    return _apply_changes(changes, name)


def _json_rows(rows: _Rows, name: str) -> list[_Observed]:
    changes = []
    for line, row in rows:
        try:
            time_ms, action, detail = json.loads(row)
            nodes = [str(node) for node in detail["nodes"]]
            changes.append((line, float(time_ms) / 1000.0, str(action), nodes))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{name}:{line}: wrong columns: expected [ms, action, {{'nodes': […]}}]") from error
    # "migration" moves work between running nodes and "no-op" is a tick: neither changes how many run.
    return _apply_changes(changes, name)


def _apply_changes(changes: Iterable[tuple[int, float, str, list[str]]], name: str) -> list[_Observed]:
    running: set[str] = set()
    observed = []
    for line, time_s, action, nodes in changes:
        lost = 0
        if action == "add":
            running.update(nodes)
        elif action == "remove":
            unknown = [node for node in nodes if node not in running]
            if unknown:
                raise ConfigError(f"{name}:{line}: {unknown[0]} is removed but was never added")
            running.difference_update(nodes)
            lost = len(nodes)
        observed.append(_Observed(line, time_s, len(running), lost))
    return observed


def _timestamp_s(text: str, name: str, line: int) -> float:
    try:
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S").timestamp()
    except ValueError as error:
        raise ConfigError(f"{name}:{line}: {text!r} is no date and time") from error


def _build(observed: Sequence[_Observed], name: str, note: str) -> Trace:
    times: list[float] = []
    counts: list[int] = []
    losses: list[Loss] = []
    start_s = observed[0].time_s
    _check_start(observed[0], name)
    for row in observed:
        time_s = _checked_time_s(row, start_s, times[-1] if times else 0.0, name)
        if row.lost:
            _add_loss(losses, Loss(time_s, row.lost, row.running + row.lost))
        if times and time_s == times[-1]:
            counts[-1] = row.running
        else:
            times.append(time_s)
            counts.append(row.running)
    if len(times) < 2:
        raise ConfigError(f"{name}: all rows have the same time")
    return Trace(name, tuple(times), tuple(counts), tuple(losses), note)


def _check_start(row: _Observed, name: str) -> None:
    if row.time_s < 0:
        raise ConfigError(f"{name}:{row.line}: negative time {row.time_s:g} s")


def _checked_time_s(row: _Observed, start_s: float, newest_s: float, name: str) -> float:
    """Seconds since the trace's start, never before the newest. `ConfigError` for what no repair makes honest."""
    time_s = row.time_s - start_s
    if row.running < 0:
        raise ConfigError(f"{name}:{row.line}: {row.running} running nodes")
    if row.time_s < 0 or time_s < newest_s - BACKWARD_TOLERATED_S:
        raise ConfigError(f"{name}:{row.line}: time goes back by {newest_s - time_s:g} s; sort the rows by time")
    if time_s > newest_s + MAX_GAP_S:
        gap_h = (time_s - newest_s) / 3600
        raise ConfigError(f"{name}:{row.line}: gap of {gap_h:.1f} h; cut the trace there, longest is 6 h")
    return max(time_s, newest_s)


def _add_loss(losses: list[Loss], loss: Loss) -> None:
    """Losses at one time are one event."""
    if losses and losses[-1].time_s == loss.time_s:
        last = losses[-1]
        losses[-1] = Loss(last.time_s, last.lost + loss.lost, last.running_before)
    else:
        losses.append(loss)
