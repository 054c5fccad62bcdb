"""A trainer: loads, trains, takes its steps, stops. Decides by the core's functions only."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sim_kernel import Local, Process, Sleep, Steps, Until
from sim_node import PARTS, Node, RankWords, Segment, Slot, history_of, image_part
from sim_store import Stored

from surefoot.core.agreement import BoundaryPlan, Vector
from surefoot.core.documents import digest
from surefoot.core.layout import BoundaryId
from surefoot.core.recovery import Copy, Source
from surefoot.core.slots import NEVER, SlotView
from surefoot.errors import TierError

if TYPE_CHECKING:
    from sim_world import Round, World


Turn = tuple[int, int]
"""Generation, and attempt to load what it starts from. A word about one turn says nothing of another."""


@dataclass(frozen=True, slots=True)
class Order:
    """What an agent hands to its trainers at a start."""

    turn: Turn
    source: Source | None
    go: bool
    """Every rank has loaded: train."""


class Group:
    """The collectives of one generation: a result comes when every rank has given its part, and all are connected."""

    def __init__(self, world: World, size: int) -> None:
        self._world = world
        self._size = size
        self._given: dict[tuple[str, int], dict[int, Any]] = defaultdict(dict)
        self._agreed: dict[tuple[str, int], Vector] = {}
        self._nodes: dict[int, int] = {}
        self.place = object()

    def give(self, name: str, step: int, rank: int, node: int, value: Any) -> None:
        self._nodes[rank] = node
        given = self._given[(name, step)]
        given[rank] = value
        if len(given) == self._size:
            self._world.kernel.touch(self.place)

    def whole(self, name: str, step: int) -> bool:
        if len(self._given[(name, step)]) < self._size:
            return False
        cut = self._world.network.cut_off
        return not cut or not any(n in cut for n in self._nodes.values()) or len(set(self._nodes.values())) == 1

    def agreed(self, name: str, step: int) -> Vector:
        if (name, step) not in self._agreed:
            encoded = [vector.encode() for vector in self._given[(name, step)].values()]
            self._agreed[(name, step)] = Vector.decode([max(column) for column in zip(*encoded, strict=True)])
        return self._agreed[(name, step)]

    def any(self, name: str, step: int) -> bool:
        return any(self._given[(name, step)].values())


@dataclass(eq=False)
class Trainer:
    """One rank of one round."""

    world: World
    node: Node
    process: Process
    rank: int
    round: Round
    generation: int = 0
    segment: Segment | None = None
    history: str = ""
    step: int = 0
    served: int = 0
    version: int = 0
    ahead: bool = False
    """It has planned already what all are to plan at the next boundary."""
    flying: bool = False
    ready: tuple[Segment, Slot, BoundaryId, str] | None = None
    """A step that was not due: its boundary leaves lie in an open slot, the rest can be had until the fence."""
    ended: str = ""
    """Why it ended: finished or evicted."""
    words: RankWords = field(default_factory=RankWords)

    def run(self) -> Steps:
        yield Sleep(self.world.setting.start_s)
        order = yield from self._load()
        self.generation = order.turn[0]
        start = order.source.at if order.source is not None else None
        self.step = start.boundary if start is not None else 0
        group = self.world.group(order.turn[0], self.round.size)
        yield Local("begin training", lambda: self._begin(start))
        self.world.kernel.spawn(self.process, "watch", self._watch())
        target = self.world.setting.steps
        while self.step < target:
            todo = yield from self._one_step(group, self.step + 1, last=self.step + 1 == target)
            if todo.stop:
                break
        yield Until(self.node.index, lambda: not self.flying)
        yield from self._leave(finished=self.step >= target)

    # ------------------------------------------------------------------ start

    def _load(self) -> Steps:
        """Obey the decision, attempt by attempt, until every rank has loaded."""
        turn: Turn = (0, 0)
        while True:
            order = yield from self._next_order(turn)
            if order.go:
                return order
            turn = order.turn
            yield from self._obey(order)

    def _next_order(self, turn: Turn) -> Steps:
        """The order after `turn`, or the word that `turn` is what all train from."""
        while True:
            yield Until(self.node.index, lambda: self._order_after(turn) is not None or self._goes(turn))
            order = self._order()
            if order is not None and (order.turn > turn or (order.go and order.turn == turn)):
                return order

    def _obey(self, order: Order) -> Steps:
        bad = yield from self._load_from(order.source)
        brain = self.node.brain
        yield Local("loaded", lambda: brain.loaded(self.rank, order.turn, bad))

    def _goes(self, turn: Turn) -> bool:
        order = self._order()
        return order is not None and order.go and order.turn == turn

    def _order(self) -> Order | None:
        brain = self.node.brain
        return brain.order if brain is not None and brain.round is self.round else None

    def _order_after(self, turn: Turn) -> Order | None:
        order = self._order()
        return order if order is not None and order.turn > turn else None

    def _load_from(self, source: Source | None) -> Steps:
        """Read this rank's share of an image set; returns the copies that were bad."""
        if source is None:
            self.history = ""
            return []
        bad = []
        for old in self._needed(len(source.copies)):
            copy = min(source.copies[old], key=self._nearness)
            try:
                data = yield self.world.read_copy(self.node, copy)
            except TierError:
                data = None
            if data is None or not self.world.policy.good(data, copy.xxh3_128):
                bad.append(copy)
                continue
            self.world.truth.read(copy, data)
            self.history = history_of(data)
        return bad

    def _nearness(self, copy: Copy) -> tuple[bool, bool, str]:
        return isinstance(copy, Stored), copy.node != self.node.name, copy.node

    def _needed(self, size: int) -> list[int]:
        """The old ranks whose blocks this rank's overlap."""
        first, last = self.rank * size // self.round.size, -(-(self.rank + 1) * size // self.round.size)
        return list(range(first, max(last, first + 1)))

    def _begin(self, start: BoundaryId | None) -> None:
        if self.world.policy.record_before_training:
            self.world.truth.loaded(self.generation, self.rank, self.history, start)
        self.words = self.node.board.ranks[self.rank] = RankWords(self.generation)
        self._take_segment()

    def _take_segment(self) -> None:
        plan = digest(f"plan {self.round.size} {self.version}".encode())
        self.segment = self.node.segment(self.rank, plan)
        if self.segment is None:
            slots = [Slot() for _ in range(self.world.setting.slots)]
            self.segment = Segment(self.rank, plan, self.round.size, slots)
            self.node.segments.append(self.segment)

    # ------------------------------------------------------------------ a step

    def _one_step(self, group: Group, step: int, *, last: bool) -> Steps:
        yield Local("gradients", lambda: group.give("gradients", step, self.rank, self.node.index, None))
        yield Until(group.place, lambda: group.whole("gradients", step))
        yield Sleep(self.world.setting.step_s * self.world.rng_of(self.process).uniform(0.8, 1.2))
        yield from self._fence()
        yield from self._pass()
        yield Local("optimizer", lambda: self._optimize(step))
        agreed = Vector(free_slots=1)
        if step - 1 in self.world.boundaries[(self.generation, self.rank)]:
            yield Until(group.place, lambda: group.whole("vector", step - 1))
            agreed = group.agreed("vector", step - 1)
        wanted = step in self.world.setting.saves
        todo = self.world.policy.at_boundary(agreed, step, planned=True, wanted=wanted, last=last)
        assert isinstance(todo, BoundaryPlan)
        yield from self._take(group, step, todo, must=todo.stop or wanted or last)
        vector = self._vector()
        yield Local("vector", lambda: group.give("vector", step, self.rank, self.node.index, vector))
        self.world.boundaries[(self.generation, self.rank)] = {step}
        if step == self.world.setting.evaluates_after and self.rank == 0:
            yield Sleep(60.0)
        return todo

    def _fence(self) -> Steps:
        yield Until(self.node.index, lambda: not self.flying)
        if self.world.policy.waits_for_all and self.world.setting.strict:
            yield Until(self.node.index, lambda: self._known_passed() >= self.words.passed)

    def _pass(self) -> Steps:
        """Say that the fence is passed, and only then look whether this rank is held: it stays, or was counted."""
        yield Local("say entered", lambda: setattr(self.words, "entered", self.step + 1))
        held = yield Local("look", lambda: self.words.hold)
        board = self.node.board
        if held:
            yield Until(self.node.index, lambda: board.late_target is not None and board.late_target > self.step)
        if self.ready is not None:
            yield Local("drop", self._drop_ready)
        yield Until(self.node.index, lambda: not self.flying)

    def _drop_ready(self) -> None:
        if self.ready is not None:
            slot, self.ready = self.ready[1], None
            slot.seq += 1
            slot.voided_seq = slot.seq

    def _lay_ready(self, step: int) -> Steps:
        """A step that is not due gets its boundary leaves into a slot all the same, if there is one."""
        free = self.world.policy.reusable(self._views(), self._known_sealed())
        if not free or self.segment is None:
            return
        segment, slot, at, history = (
            self.segment,
            self._slots()[free[0]],
            BoundaryId(step, self.generation),
            self.history,
        )
        yield Local("begin slot", lambda: self._open(slot))
        piece = image_part(segment.plan, self.rank, at, history, 0)
        yield Local("fill 0", lambda: slot.parts.__setitem__(0, piece))
        self.ready = (segment, slot, at, history)
        self.world.kernel.touch(self.node.index)

    def _watch(self) -> Steps:
        """The watcher thread: takes what lies ready, whatever the training thread is doing."""
        while True:
            yield Until(self.node.index, self._must_stage_late)
            if self._must_stage_late() and self.ready is not None:
                segment, slot, at, history = self.ready
                self.ready, self.flying = None, True
                yield from self._copy(segment, slot, at, history, "agent", counts=True)

    def _must_stage_late(self) -> bool:
        target = self.node.board.late_target
        return self.ready is not None and self.words.hold and target == self.ready[2].boundary

    def _known_passed(self) -> int:
        known = self.node.board.known
        return known.passed if known.generation == self.generation else NEVER

    def _known_sealed(self) -> int:
        known = self.node.board.known
        return known.sealed if known.generation == self.generation else NEVER

    def _optimize(self, step: int) -> None:
        self.history = digest(f"{self.history} {self.generation} {step}".encode())[:8]
        self.step = step
        self.words.finished = step
        setting = self.world.setting
        bound = setting.every if setting.strict and not self.world.uneven else None
        self.world.truth.trains(self.generation, self.rank, step, self.history, bound)

    def _vector(self) -> Vector:
        board = self.node.board
        newest = max(
            (s.at.boundary for s in self._slots() if s.sealed and s.at.generation == self.generation), default=NEVER
        )
        soon = max(newest, self.step) if self.world.setting.strict else self._known_sealed()
        return Vector(
            notice=board.noticed,
            replan=self.world.drifts(self.generation, self.step, self.rank),
            durable=board.wanted > self.served,
            free_slots=len(self.world.policy.reusable(self._views(), soon)),
            stage_every=self.world.setting.every,
        )

    def _slots(self) -> list[Slot]:
        assert self.segment is not None
        return self.segment.slots

    def _views(self) -> list[SlotView]:
        return [
            SlotView(slot.at.boundary if slot.sealed else NEVER, slot.pinned or slot.seq % 2 == 1)
            for slot in self._slots()
        ]

    def _take(self, group: Group, step: int, todo: BoundaryPlan, *, must: bool) -> Steps:
        drifts = self.world.drifts(self.generation, step, self.rank)
        if must:
            # Before an image that must be whole, all ask whether any has to plan again.
            yield Local("check", lambda: group.give("check", step, self.rank, self.node.index, drifts))
            yield Until(group.place, lambda: group.whole("check", step))
            drifts, todo = False, replace(todo, replan=todo.replan or group.any("check", step))
        if changes := int(todo.replan and not self.ahead) + int(drifts):
            self.version += changes
            self._take_segment()
        # A structure that is new on this rank only: its image is one of another plan, and no part of the others' step.
        self.ahead = drifts
        if drifts or todo.skipped:
            self.world.uneven = True
        if not todo.stage:
            yield from self._lay_ready(step)
            return
        slot = yield from self._slot(must)
        at, trigger = (
            BoundaryId(step, self.generation),
            _trigger(todo, self.step in self.world.setting.saves, step, self),
        )
        if trigger is not None:
            self.served = self.node.board.wanted
        yield Local("begin slot", lambda: self._open(slot))
        self.flying = True
        assert self.segment is not None
        copying = self._copy(self.segment, slot, at, self.history, trigger, counts=not drifts)
        self.world.kernel.spawn(self.process, f"copy {at}", copying)
        if todo.stop or must:
            yield Until(self.node.index, lambda: not self.flying)

    def _slot(self, must: bool) -> Steps:
        while True:
            free = self.world.policy.reusable(self._views(), self._known_sealed())
            if free:
                self.node.board.need_slot = False
                return self._slots()[free[0]]
            if must:
                self.node.board.need_slot = True
                self.world.kernel.touch(self.node.index)
            yield Until(
                self.node.index, lambda: bool(self.world.policy.reusable(self._views(), self._known_sealed())), 1.0
            )

    def _open(self, slot: Slot) -> None:
        assert self.segment is not None
        self.world.truth.begins_slot(self.segment, slot, self.generation)
        slot.seq += 1 + slot.seq % 2

    def _copy(
        self, segment: Segment, slot: Slot, at: BoundaryId, history: str, trigger: str | None, *, counts: bool
    ) -> Steps:
        """Bring a step into its slot, piece by piece, behind the next step."""
        for part in range(PARTS):
            piece = image_part(segment.plan, self.rank, at, history, part)

            def fill(part: int = part, piece: bytes = piece) -> None:
                slot.parts[part] = piece

            yield Local(f"fill {part}", fill, self.world.setting.copy_s)
        yield Local("seal", lambda: self._seal(segment, slot, at, trigger, counts=counts))
        self.flying = False
        self.world.kernel.touch(self.node.index)

    def _seal(self, segment: Segment, slot: Slot, at: BoundaryId, trigger: str | None, *, counts: bool) -> None:
        slot.at = at
        slot.record = {
            **at.to_json(), "rank": self.rank, "world_size": self.round.size,
            "trigger": trigger, "tag": None, "metrics": {},
        }  # fmt: skip
        slot.pinned = trigger is not None
        slot.seq += 1
        self.world.truth.seals(segment, slot)
        if self.words is self.node.board.ranks.get(self.rank):
            if counts:
                self.words.sealed = at.boundary
            self.words.passed = at.boundary
        self.world.kernel.touch(self.node.index)

    # ------------------------------------------------------------------ the end

    def _leave(self, *, finished: bool) -> Steps:
        board = self.node.board
        if finished:
            lost = BoundaryId(self.step, self.generation)
            yield Until(self.node.index, lambda: board.committed.boundary >= self.step or board.given_up == lost)
            if board.committed.boundary < self.step:
                # Its last step cannot be made durable: the script fails, and the launcher starts it again.
                self.world.kernel.kill(self.process)
                return
        else:
            until_s = board.leaving_until_s or 0.0
            left_s = max(0.1, until_s - self.world.kernel.now)
            yield Until(self.node.index, lambda: board.committed.boundary >= self.step, left_s)
        self.ended = "finished" if finished else "evicted"
        self.process.alive = False


def _trigger(todo: BoundaryPlan, wanted: bool, step: int, trainer: Trainer) -> str | None:
    if todo.stop:
        return "emergency"
    if step == trainer.world.setting.steps:
        return "final"
    if wanted:
        return "manual"
    return "periodic" if todo.durable else None
