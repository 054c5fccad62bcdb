"""Describes events that happen to a job, as plain data. Drills, campaigns and benchmarks write and read the same form.

An event strikes when a process is in a phase, never at a time. The phase decides which process is watched: a trainer's
phase is that of `rank`, an agent's phase that of its node's agent.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, Self

from surefoot.errors import ConfigError

TRAINER_PHASES = ("starting", "restoring", "training", "filling", "sealed", "leaving")
AGENT_PHASES = ("idle", "flushing", "committing")


class Kind(StrEnum):
    """What can happen to a node."""

    EVICT = "evict"
    """SIGTERM to the supervisor, as a cloud's shutdown sends it; the same command is started again once it ended."""
    KILL_TRAINER = "kill_trainer"
    """SIGKILL to the trainer of `rank`."""
    KILL_GROUP = "kill_group"
    """SIGKILL to every trainer at one moment."""
    KILL_AGENT = "kill_agent"
    """SIGKILL to the node's agent."""
    KILL_SUPERVISOR = "kill_supervisor"
    """SIGKILL to the supervisor; the same command is started again at once."""
    KILL_ALL = "kill_all"
    """SIGKILL to every process of the node, and its memory wiped, as when a machine is lost; then started again."""
    KILL_JOB = "kill_job"
    """The same to every node at one moment."""
    ROT = "rot"
    """As `kill_job`, and the newest durable step is damaged before the next start."""
    PAUSE = "pause"
    """SIGSTOP to every process of the node, and SIGCONT after a while."""
    CUT = "cut"
    """The node's link is down for a while."""
    SLOW = "slow"
    """The node's link carries little for a while."""
    STORE_CUT = "store_cut"
    """Nobody reaches the store for a while."""
    STORE_SLOW = "store_slow"
    """The store's link carries little for a while."""
    STORE_HANG = "store_hang"
    """The store takes connections and requests and answers nothing for a while: SIGSTOP to its server, then SIGCONT."""
    FULL_DISK = "full_disk"
    """The disk on which the node keeps its copies is full for a while."""
    CLOCK = "clock"
    """The node's clock is wrong for a while."""


LASTING = (
    Kind.PAUSE,
    Kind.CUT,
    Kind.SLOW,
    Kind.STORE_CUT,
    Kind.STORE_SLOW,
    Kind.STORE_HANG,
    Kind.FULL_DISK,
    Kind.CLOCK,
)
"""Kinds that begin and end."""
MOST_LASTS_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One thing that happens, and when."""

    kind: Kind
    phase: str
    """Phase of the watched process in which it strikes."""
    step: int = 0
    """It may strike once this many steps are finished on every rank of the node."""
    latest: int | None = None
    """If given, `step` is yet to be drawn, between `step` and this."""
    rank: int | None = 0
    """Local rank that is watched, and killed by `kill_trainer`. None: yet to be drawn."""
    node: int | None = 0
    """Index of the node. None: yet to be drawn."""
    lasts_s: float = 0.0
    """How long that which lasts does."""

    def __post_init__(self) -> None:
        if self.phase not in TRAINER_PHASES + AGENT_PHASES:
            known = ", ".join(TRAINER_PHASES + AGENT_PHASES)
            raise ConfigError(f"phase is {self.phase!r}: give one of {known}")
        if self.step < 0 or (self.latest is not None and self.latest < self.step):
            raise ConfigError(f"step is {self.step}, latest {self.latest}: give 0 <= step <= latest")
        if (self.lasts_s > 0) != (self.kind in LASTING) or not 0 <= self.lasts_s <= MOST_LASTS_S:
            raise ConfigError(
                f"lasts_s of {self.kind} is {self.lasts_s}: "
                f"give at most {MOST_LASTS_S:g} to what lasts, and 0 to what does not"
            )

    @property
    def of_agent(self) -> bool:
        """True if the agent is watched, False if a trainer is."""
        return self.phase in AGENT_PHASES

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`.

        Raises:
            ConfigError: a field is unknown, missing or out of range.
        """
        unknown = set(data) - {field.name for field in fields(cls)}
        if unknown:
            raise ConfigError(f"an event has no field {', '.join(sorted(unknown))}")
        try:
            return cls(**{**data, "kind": Kind(data["kind"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not an event: {dict(data)}: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """An event that was carried out, as the board had it at that moment."""

    event: Event
    t: float
    """Seconds since the epoch."""
    at_step: int
    """Steps finished on every rank of the node."""
    struck_in: str
    """Phase of the watched process, which stood still meanwhile: that of its kill, or of its learning of the rest."""
    pids: tuple[int, ...]
    """Processes that got the signal."""
    durable: int | None = None
    """After a loss of memory: newest committed step that is sound, 0 if there was none."""
    exit_code: int | None = None
    """What the supervisor ended with; negative for a signal; None if it went on."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`.

        Raises:
            ConfigError: a field is unknown or missing, or the event is none.
        """
        try:
            return cls(**{**data, "event": Event.from_json(data["event"]), "pids": tuple(data["pids"])})
        except (KeyError, TypeError) as error:
            raise ConfigError(f"not a strike: {dict(data)}: {error}") from error


def draw(events: Sequence[Event], rng: random.Random, num_ranks: int, num_nodes: int = 1) -> list[Event]:
    """Settle what is yet to be drawn. The same generator state gives the same events.

    Args:
        events: as wanted.
        rng: draws.
        num_ranks: local ranks of each node.
        num_nodes: nodes.
    """
    return [_settle(event, rng, num_ranks, num_nodes) for event in events]


def _settle(event: Event, rng: random.Random, num_ranks: int, num_nodes: int) -> Event:
    step = event.step if event.latest is None else rng.randint(event.step, event.latest)
    rank = rng.randrange(num_ranks) if event.rank is None else event.rank
    node = rng.randrange(num_nodes) if event.node is None else event.node
    return replace(event, step=step, latest=None, rank=rank, node=node)
