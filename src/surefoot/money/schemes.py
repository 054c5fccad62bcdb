"""Checkpoint schemes as data, and what each costs on a job."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import resources
from math import inf
from pathlib import Path
from typing import Any

from surefoot.core.cadence import Cadence, stage_every
from surefoot.errors import ConfigError
from surefoot.money.closed_form import best_interval_s
from surefoot.money.hazards import Hazard
from surefoot.money.job import Job, Timing, feasible_interval_s
from surefoot.money.survival import group_survival
from surefoot.money.units import parse_duration_s

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "save": ("blocking", "background"),
    "pipes": ("one", "every-node"),
    "memory": ("none", "own", "peers"),
    "emergency": ("none", "bucket", "peers"),
    "on_loss": ("wait", "shrink"),
}
_DURATIONS = ("stall", "lag", "load", "restart", "rejoin", "replacement")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """One entry of a scheme file; the fields are explained at the head of ``data/schemes.toml``."""

    name: str
    title: str
    save: str = "background"
    pipes: str = "every-node"
    interval_s: float | None = None
    """None: tuned."""
    memory: str = "none"
    group: int = 1
    emergency: str = "none"
    on_loss: str = "wait"
    standby: int = 0
    overrides_s: Mapping[str, float]
    """Measured durations in place of derived ones."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"scheme {self.name}: {name} is {getattr(self, name)!r}; use one of {', '.join(allowed)}"
                )
        if self.standby < 0 or self.group < 1:
            raise ConfigError(f"scheme {self.name}: standby {self.standby}, group {self.group}: not possible")


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What saving, moving and restarting take on this job's nodes: measured where possible."""

    copy_s: float
    """Training stands still for the copy to memory; 0 when it hides behind forward and backward."""
    bucket_bytes_per_s: float
    """One node's bandwidth to the bucket."""
    peer_bytes_per_s: float
    """One node's bandwidth to other nodes' memory."""
    restart_s: float
    """From a loss to the first new step with the state in memory."""
    cold_restart_s: float = 0.0
    """The same with new processes everywhere, without waiting for a node and loading."""
    rejoin_s: float = 0.0
    """Standstill when a replacement joins."""
    replacement_s: float = 360.0
    """From a node's loss to its replacement."""
    notice_s: float = 1.0
    """From the provider's notice to all nodes knowing it: poll and spread."""
    commit_s: float = 1.0
    """From the last byte's arrival to the commit."""
    max_bytes_per_hour: float = inf
    """Byte budget of durable saves (`surefoot.core.cadence.Cadence`)."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            least_open = entry.name.endswith("bytes_per_s")
            if not (value > 0 if least_open else value >= 0):
                raise ConfigError(f"{entry.name} is {value}: give {'more than 0' if least_open else '0 or more'}")


def shipped_schemes() -> list[Scheme]:
    text = (resources.files("surefoot.money") / "data" / "schemes.toml").read_text()
    return parse_schemes(text, "schemes.toml")


def load_schemes(path: Path) -> list[Scheme]:
    """The shipped schemes with those of ``path`` added; same name replaces. `ConfigError` for a bad file."""
    if not path.is_file():
        raise ConfigError(f"no scheme file {path}")
    merged = {scheme.name: scheme for scheme in shipped_schemes()}
    merged |= {scheme.name: scheme for scheme in parse_schemes(path.read_text(), str(path))}
    return list(merged.values())


def parse_schemes(text: str, name: str) -> list[Scheme]:
    """Schemes of a TOML text. `ConfigError` naming file and entry when one cannot be used."""
    try:
        entries = tomllib.loads(text).get("scheme", [])
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{name}: no [[scheme]] in it")
    return [_scheme(entry, name) for entry in entries]


def timing_of(scheme: Scheme, job: Job, costs: Costs, hazard: Hazard, announced: float, window_s: float) -> Timing:
    """What ``scheme`` costs on ``job``. The interval is the asked one, or the least that uploads allow, or tuned."""
    wanted_s = scheme.interval_s if scheme.interval_s is not None else 1.0
    timing = replace(_without_interval(scheme, job, costs, window_s), interval_s=wanted_s)
    cadence = Cadence(max_bytes_per_hour=costs.max_bytes_per_hour if costs.max_bytes_per_hour > 0 else inf)
    least_s = feasible_interval_s(wanted_s, timing.stall_s, timing.lag_s, job.state_bytes, cadence)
    if scheme.interval_s is not None:
        return replace(timing, interval_s=least_s)
    return replace(timing, interval_s=best_interval_s(job, timing, hazard, announced, max(least_s, job.step_s)))


def emergency_s(scheme: Scheme, job: Job, costs: Costs) -> float:
    """From the provider's notice until the newest finished step is safe without the leaving node.

    The image is there already (memory holds the newest step), so nothing waits for the end of the step in flight.
    With replicas at each step, only what the last step changed has yet to leave: one image, as without.
    """
    if scheme.emergency == "none" or scheme.memory == "none":
        return inf
    rate = costs.peer_bytes_per_s if scheme.emergency == "peers" else costs.bucket_bytes_per_s
    return costs.notice_s + job.bytes_per_node / rate + costs.commit_s


def bucket_s(scheme: Scheme, job: Job, costs: Costs) -> float:
    """Seconds in which the whole state passes to or from the bucket."""
    pipes = 1 if scheme.pipes == "one" else job.nodes
    return job.state_bytes / (costs.bucket_bytes_per_s * pipes)


def ship_s(job: Job, costs: Costs, group: int) -> float:
    """Seconds in which each node's image reaches its peers."""
    return job.bytes_per_node * (group - 1) / costs.peer_bytes_per_s


def _without_interval(scheme: Scheme, job: Job, costs: Costs, window_s: float) -> Timing:
    moved_s = bucket_s(scheme, job, costs)
    blocking = scheme.save == "blocking"
    in_memory = scheme.memory != "none"
    ship = ship_s(job, costs, scheme.group) if scheme.memory == "peers" else 0.0
    every = stage_every(max(costs.copy_s, ship), job.step_s) if in_memory else 0
    survival = partial(group_survival, job.nodes, scheme.group) if scheme.memory == "peers" else None
    said = scheme.overrides_s
    return Timing(
        interval_s=1.0,
        stall_s=said.get("stall", moved_s if blocking else costs.copy_s),
        lag_s=said.get("lag", 0.0 if blocking else moved_s),
        load_s=said.get("load", moved_s),
        restart_s=said.get("restart", costs.restart_s if in_memory else costs.cold_restart_s),
        rejoin_s=said.get("rejoin", costs.rejoin_s),
        replacement_s=said.get("replacement", costs.replacement_s),
        shrink=scheme.on_loss == "shrink",
        standby=scheme.standby,
        hot_interval_s=every * job.step_s,
        hot_lag_s=costs.copy_s + ship,
        hot_announced=in_memory and emergency_s(scheme, job, costs) <= window_s,
        replica_survival=survival,
    )


def _scheme(entry: Any, file: str) -> Scheme:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ConfigError(f"{file}: a [[scheme]] without a name")
    where = f"{file}: scheme {entry['name']}"
    known = {"name", "title", "interval", "group", "standby", *_CHOICES, *_DURATIONS}
    unknown = sorted(set(entry) - known)
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")
    if "interval" not in entry:
        raise ConfigError(f"{where}: no interval; give a duration or 'tuned'")
    plain = {key: entry[key] for key in ("name", *_CHOICES) if key in entry}
    if not all(isinstance(value, str) for value in plain.values()):
        raise ConfigError(f"{where}: {', '.join(plain)} are texts")
    interval = entry["interval"]
    return Scheme(
        title=str(entry.get("title", entry["name"])),
        interval_s=None if interval == "tuned" else _duration(interval, f"{where}, interval"),
        group=_whole(entry.get("group", 2 if entry.get("memory") == "peers" else 1), f"{where}, group"),
        standby=_whole(entry.get("standby", 0), f"{where}, standby"),
        overrides_s={key: _duration(entry[key], f"{where}, {key}") for key in _DURATIONS if key in entry},
        **plain,
    )


def _duration(value: object, where: str) -> float:
    if not isinstance(value, str):
        raise ConfigError(f'{where}: {value!r} has no unit; write it like "18 s"')
    try:
        return parse_duration_s(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _whole(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{where}: {value!r} is no whole number")
    return value


def by_name(schemes: Sequence[Scheme], name: str) -> Scheme:
    """`ConfigError` naming what there is when there is none."""
    for scheme in schemes:
        if scheme.name == name:
            return scheme
    raise ConfigError(f"no scheme {name!r}; there are {', '.join(scheme.name for scheme in schemes)}")
