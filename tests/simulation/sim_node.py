"""Nodes: memory that outlives processes, the board, clocks; and the network between them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sim_kernel import Kernel, Process

from surefoot.core.documents import digest
from surefoot.core.layout import BoundaryId
from surefoot.core.relay import Progress
from surefoot.core.slots import NEVER

_NOTHING = BoundaryId(0, 0)
_NOWHERE = Progress(0)
PARTS = 2
"""Pieces in which an image is written and read: between them anything may happen."""


def image_part(plan: str, rank: int, at: BoundaryId, history: str, part: int) -> bytes:
    """One piece of one rank's image. It says what it is: a wrong one shows wherever it turns up."""
    return f"{plan}/{rank}/{at}/{history}/{part};".encode()


def image_bytes(plan: str, rank: int, at: BoundaryId, history: str) -> bytes:
    return b"".join(image_part(plan, rank, at, history, part) for part in range(PARTS))


def history_of(data: bytes) -> str:
    return data.split(b"/")[3].decode()


@dataclass(eq=False)
class Slot:
    """One image-sized place. `seq` is odd while it is filled; it is hashed if `hashed_seq` equals it."""

    seq: int = 0
    at: BoundaryId = _NOTHING
    parts: list[bytes] = field(default_factory=lambda: [b""] * PARTS)
    record: dict[str, Any] = field(default_factory=dict)
    hashed_seq: int = -1
    hash: str = ""
    voided_seq: int = -1
    pinned: bool = False
    readers: int = 0
    """Uploads that read it now. Known to the observer only."""

    @property
    def sealed(self) -> bool:
        return self.seq > 0 and self.seq % 2 == 0 and self.voided_seq != self.seq

    @property
    def hashed(self) -> bool:
        return self.sealed and self.hashed_seq == self.seq

    def data(self) -> bytes:
        return b"".join(self.parts)


@dataclass(eq=False)
class Segment:
    rank: int
    plan: str
    world_size: int
    slots: list[Slot]


@dataclass
class RankWords:
    """A trainer's words, void for any other incarnation."""

    generation: int = 0
    sealed: int = NEVER
    passed: int = NEVER
    finished: int = NEVER
    entered: int = NEVER
    hold: bool = False


@dataclass
class Words:
    """The board: outlives the processes of the node."""

    generation: int = 0
    begun_at: int = 0
    """The step that it started from. Agents read it from its record."""
    leaving_until_s: float | None = None
    wanted: int = 0
    committed: BoundaryId = _NOTHING
    given_up: BoundaryId = _NOTHING
    """Newest image that turned out bad when it was sent."""
    known: Progress = _NOWHERE
    """The minimum over all nodes, as relayed."""
    need_slot: bool = False
    noticed: bool = False
    late_target: int | None = None
    ranks: dict[int, RankWords] = field(default_factory=dict)


class Node:
    """One machine."""

    def __init__(self, index: int, launch: str, rate: float) -> None:
        self.index = index
        self.name = f"n{index}"
        self.launch = launch
        self.up = True
        self.rate = rate
        self.wall_offset_s = 0.0
        self.agent: Process | None = None
        self.brain: Any = None
        """The agent's state: gone with the agent."""
        self.trainers: dict[int, Process] = {}
        self.segments: list[Segment] = []
        self.board = Words()
        self.booted = 0

    def boot_s(self, now: float) -> float:
        return now * self.rate

    def wall_s(self, now: float) -> float:
        return 1e6 + now * self.rate + self.wall_offset_s

    def processes(self) -> Iterator[Process]:
        if self.agent is not None:
            yield self.agent
        yield from self.trainers.values()

    @property
    def stopped(self) -> bool:
        return any(process.alive and process.stopped for process in self.processes())

    def segment(self, rank: int, plan: str) -> Segment | None:
        return next((s for s in reversed(self.segments) if (s.rank, s.plan) == (rank, plan)), None)

    def sealed_slots(self) -> list[tuple[Segment, Slot]]:
        return [(segment, slot) for segment in self.segments for slot in segment.slots if slot.sealed]

    def progress(self, generation: int) -> Progress:
        """What all local ranks have reached in a generation."""
        words = list(self.board.ranks.values())
        if not words or any(word.generation != generation for word in words):
            return Progress(generation)
        return Progress(generation, min(w.sealed for w in words), min(w.passed for w in words))


class Network:
    """Messages between agents: lost, late and out of order; nothing passes a cut."""

    def __init__(self, kernel: Kernel, loss: float, delay_s: float) -> None:
        self._kernel = kernel
        self._rng = random.Random(f"{kernel.seed}/network")
        self.loss = loss
        self.delay_s = delay_s
        self.cut_off: set[int] = set()
        """Nodes that reach no other (but the store)."""

    def reaches(self, one: int, other: int) -> bool:
        return one == other or not (one in self.cut_off or other in self.cut_off)

    def send(self, source: Node, target: Node, message: dict[str, Any]) -> None:
        if source is target:
            self._kernel.after(0.0005, lambda: _upload(self._kernel, target, message))
            return
        if not self.reaches(source.index, target.index) or self._rng.random() < self.loss:
            return
        delay_s = self._rng.uniform(0.1, 1.0) * self.delay_s
        if self._rng.random() < 0.02:
            delay_s *= 20
        self._kernel.after(delay_s, lambda: _upload(self._kernel, target, message))


def _upload(kernel: Kernel, target: Node, message: dict[str, Any]) -> None:
    agent = target.agent
    if agent is None or not agent.alive:
        return
    if agent.stopped:
        agent.parked.append(lambda: _upload(kernel, target, message))
        return
    target.brain.heard(message)
    kernel.touch(target.index)


def hash_of(data: bytes) -> str:
    return digest(data)
