"""A node's agent: hashes, ships, commits, relays, chooses, obeys. Decides by the core's functions only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sim_kernel import Local, Process, Sleep, Steps, Until
from sim_node import PARTS, Node, Segment, Slot, hash_of
from sim_records import Records
from sim_start import Starting
from sim_trainer import Order, Turn

from surefoot.core.eviction import Count
from surefoot.core.layout import BoundaryId, ShardId
from surefoot.core.manifest import Shard
from surefoot.core.recovery import Copy
from surefoot.core.relay import Progress
from surefoot.errors import SupersededError

if TYPE_CHECKING:
    from sim_world import Round, World

_URGENCY = {"emergency": 0, "agent": 1, "final": 2, "manual": 3, "periodic": 4}
_LATE_S = 6.0
"""Before a deadline: from here on no boundary is waited for."""
Message = dict[str, Any]


class Brain:
    """What one agent knows. Dies with it."""

    def __init__(self, world: World, node: Node, process: Process, round_: Round | None) -> None:
        self.world = world
        self.node = node
        self.process = process
        self.round = round_
        self.records = Records(world, node)
        self.order: Order | None = None
        self.known: dict[str, Progress] = {}
        self.answers: dict[str, list[Copy]] = {}
        self.asked = 0
        self.reports: dict[Turn, dict[str, list[Copy]]] = {}
        self.training: dict[Turn, set[str]] = {}
        self.notices: dict[str, float] = {}
        self.pending: dict[BoundaryId, float] = {}
        self.gone = False
        self.held: Round | None = None
        self.counted: dict[str, list[Count]] = {}
        self._loads: dict[Turn, dict[int, list[Copy]]] = {}
        self._shipped: set[tuple[int, int]] = set()
        """Slots whose image lies on the store, by identity and seq."""
        self._told: Progress | None = None
        self._least: tuple[Round, int, Progress] | None = None
        """The minimum over all, for a round and generation, until something new is heard."""
        self._turn: tuple[Round | None, int, float] | None = None
        self._number = 0

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        for name in ("hash", "ship", "commit", "relay", "beat", "release", "late"):
            self.spawn(name, getattr(self, f"_{name}")())
        if self.node.board.leaving_until_s is not None:
            self.notices[self.node.name] = self.node.board.leaving_until_s
        if self.round is not None and self.leads and self.node.board.generation:
            self.spawn("durable", self._durable())

    def spawn(self, name: str, steps: Steps) -> None:
        self._number += 1
        self.world.kernel.spawn(self.process, f"{name} {self._number}", steps)

    @property
    def leads(self) -> bool:
        return self.round is not None and self.round.members[0] is self.node

    def touch(self) -> None:
        self.world.kernel.touch(self.node.index)

    def assign(self, round_: Round) -> None:
        """The launcher forms a round of which this node is a member."""
        self.round, self.order = round_, None
        self.notices = {name: until_s for name, until_s in self.notices.items() if until_s > self.world.kernel.now}
        self.answers, self.reports, self.training, self._loads = {}, {}, {}, {}
        self.node.board.noticed = self.node.name in self.notices
        self.node.board.late_target = None
        if self.leads:
            self.spawn("begin", Starting(self, round_).begin())
        self.touch()

    def send(self, target: Node, **message: Any) -> None:
        self.world.network.send(self.node, target, message)

    def broadcast(self, to: Iterable[Node] | None = None, **message: Any) -> None:
        for member in to if to is not None else (self.round.members if self.round is not None else ()):
            self.send(member, **message)

    # ------------------------------------------------------------------ what is heard

    def heard(self, message: Message) -> None:
        """One message, at once and whole."""
        if not self.gone:
            getattr(self, f"_hear_{message['op']}")(message)

    def _hear_inventory_wanted(self, message: Message) -> None:
        if self._is_current(message):
            self.spawn("inventory", self._answer_inventory(message))

    def _hear_inventory(self, message: Message) -> None:
        if self._is_current(message) and message["asked"] == self.asked:
            self.answers.setdefault(message["sender"].name, message["copies"])

    def _hear_load(self, message: Message) -> None:
        newer = self.order is None or message["turn"] > self.order.turn
        if self._is_current(message) and newer:
            self.spawn("obey", self._obey(message))

    def _hear_loaded(self, message: Message) -> None:
        if self._is_current(message):
            self.reports.setdefault(message["turn"], {})[message["sender"].name] = message["bad"]

    def _hear_train(self, message: Message) -> None:
        if not self._is_current(message) or self.order is None or self.order.turn != message["turn"]:
            return
        if not self.order.go:
            self._enter(self.order)
            self.order = replace(self.order, go=True)
        self.send(message["sender"], op="trains", round=self.round, turn=message["turn"], sender=self.node)

    def _hear_trains(self, message: Message) -> None:
        if self._is_current(message):
            self.training.setdefault(message["turn"], set()).add(message["sender"].name)

    def _hear_progress(self, message: Message) -> None:
        name = message["sender"].name
        merged = self.world.policy.merge(self.known.get(name), message["progress"])
        assert isinstance(merged, Progress)
        if merged != self.known.get(name):
            self.known[name] = merged
            self._least = None

    def _hear_minimum(self, message: Message) -> None:
        known = self.world.policy.merge(self.node.board.known, message["progress"])
        assert isinstance(known, Progress)
        self.node.board.known = known
        self._note_commit(message["committed"])
        for name, until_s in message["notices"].items():
            self._notice(name, until_s)

    def _hear_acked(self, message: Message) -> None:
        if self._continues(message["at"]):
            self.pending.setdefault(message["at"], self.world.kernel.now)

    def _hear_committed(self, message: Message) -> None:
        self._note_commit(message["at"])

    def _hear_notice(self, message: Message) -> None:
        self._notice(message["name"], message["until_s"])

    def _is_current(self, message: Message) -> bool:
        return self.round is message["round"]

    # ------------------------------------------------------------------ notices

    def notice(self, until_s: float) -> None:
        """This node's end is announced."""
        self.node.board.leaving_until_s = until_s
        self._notice(self.node.name, until_s)

    def _notice(self, name: str, until_s: float) -> None:
        # A machine is gone at its deadline, and one of the same name is another.
        if name in self.notices or until_s <= self.world.kernel.now:
            return
        self.notices[name] = until_s
        board = self.node.board
        board.noticed = True
        board.leaving_until_s = max(until_s, board.leaving_until_s or 0.0) if name != self.node.name else until_s
        self.broadcast(op="notice", name=name, until_s=until_s)
        self.touch()

    def leaving(self) -> set[str]:
        return set(self.notices)

    # ------------------------------------------------------------------ late staging

    def _late(self) -> Steps:
        """No boundary comes in time: hold all ranks, count where they are, name the newest step that all can take."""
        while True:
            yield Until(self.node.index, lambda: self.leads and bool(self._ending()))
            until_s = min(self._ending(), default=0.0)
            if self.held is self.round or until_s - self.world.kernel.now > _LATE_S or self.order is None:
                yield Sleep(0.25)
                continue
            self.held, round_ = self.round, self.round
            assert round_ is not None
            self.counted = {}
            while len(self.counted) < len(round_.members) and self.round is round_ and self.world.kernel.now < until_s:
                missing = [member for member in round_.members if member.name not in self.counted]
                self.broadcast(missing, op="hold", round=round_, sender=self.node)
                yield Until(self.node.index, lambda: len(self.counted) == len(round_.members), 0.3)  # noqa: B023
            target = self.world.policy.late_target(self.counted, [member.name for member in round_.members])
            while target is not None and self.round is round_ and self.world.kernel.now < until_s:
                self.broadcast(op="late", round=round_, step=target)
                yield Sleep(0.3)

    def _ending(self) -> list[float]:
        """Deadlines of this round's members. Nodes that are no part of it may vanish as they like."""
        members = self.round.members if self.round is not None else []
        return [self.notices[member.name] for member in members if member.name in self.notices]

    def _hear_hold(self, message: Message) -> None:
        if self._is_current(message):
            self.spawn("hold", self._hold(message["sender"], message["round"]))

    def _hold(self, leader: Node, round_: Round) -> Steps:
        words = list(self.node.board.ranks.values())
        for word in words:
            yield Local("hold", lambda word=word: setattr(word, "hold", True))  # type: ignore[misc]
        counted = []
        for word in words:
            counted.append((yield Local("count", lambda word=word: Count(word.finished, word.entered))))  # type: ignore[misc]
        if self.round is round_ and len(counted) == len(round_.ranks_of(self.node)):
            self.send(leader, op="counted", round=round_, sender=self.node, counts=counted)

    def _hear_counted(self, message: Message) -> None:
        if self._is_current(message):
            self.counted[message["sender"].name] = message["counts"]

    def _hear_late(self, message: Message) -> None:
        if self._is_current(message) and self.node.board.late_target is None:
            self.node.board.late_target = message["step"]

    # ------------------------------------------------------------------ memory

    def unhashed(self) -> tuple[Segment, Slot] | None:
        return next(((g, s) for g in self.node.segments for s in g.slots if s.sealed and not s.hashed), None)

    def _hash(self) -> Steps:
        while True:
            yield Until(self.node.index, lambda: self.unhashed() is not None)
            found = self.unhashed()
            if found is None:
                continue
            _segment, slot = found
            seq, data = yield Local("read to hash", lambda slot=slot: (slot.seq, slot.data()))  # type: ignore[misc]
            hashed = hash_of(data)
            yield Local("hash", lambda s=slot, q=seq, h=hashed: self._set_hash(s, q, h))  # type: ignore[misc]

    def _set_hash(self, slot: Slot, seq: int, hashed: str) -> None:
        if slot.seq == seq and slot.sealed:
            slot.hash, slot.hashed_seq = hashed, seq
            self.touch()

    def inventory(self) -> list[Copy]:
        """What this node's memory holds, hashed."""
        return [
            Copy(slot.at, g.plan, g.world_size, g.rank, slot.hash, len(slot.data()), self.node.name)
            for g in self.node.segments
            for slot in g.slots
            if slot.hashed
        ]

    def _answer_inventory(self, wanted: Message) -> Steps:
        yield Until(self.node.index, lambda: self.unhashed() is None, 20.0)
        copies = self.inventory()
        told = {"op": "inventory", "round": wanted["round"], "asked": wanted["asked"], "copies": copies}
        yield Local("tell inventory", lambda: self.send(wanted["sender"], sender=self.node, **told))

    # ------------------------------------------------------------------ obeying

    def _obey(self, message: Message) -> Steps:
        """The record in the store is what is obeyed; the message only says that it is there."""
        record = yield from self.records.generation(message["turn"][0])
        if not self._is_current(message):
            return
        if (record is None or record.launch != self.node.launch) and self.world.policy.record_before_training:
            return
        source = message["source"]
        if not self.world.policy.chosen_once:
            found = yield from Starting(self, message["round"]).best_of(self.inventory())
            source = found if found is not None else source
        if self.order is None or self.order.turn < message["turn"]:
            yield Local("enter", lambda: self._take_order(Order(message["turn"], source, go=False)))

    def _take_order(self, order: Order) -> None:
        self.order = order
        self._loads.setdefault(order.turn, {})
        self.touch()

    def loaded(self, rank: int, turn: Turn, bad: list[Copy]) -> None:
        """A local trainer has loaded, or failed to load from some copies."""
        mine = self._loads.setdefault(turn, {})
        mine[rank] = bad
        if self.round is not None and len(mine) == len(self.round.ranks_of(self.node)):
            self.spawn("tell loaded", self._tell_loaded(turn, [copy for of in mine.values() for copy in of]))

    def _tell_loaded(self, turn: Turn, bad: list[Copy]) -> Steps:
        while self.round is not None and self.order is not None and self.order.turn == turn and not self.order.go:
            leader, round_ = self.round.members[0], self.round
            self.send(leader, op="loaded", round=round_, turn=turn, sender=self.node, bad=bad)
            yield Sleep(0.5)

    def _enter(self, order: Order) -> None:
        """A generation begins here: what it does not continue is history."""
        board = self.node.board
        board.generation, board.known = order.turn[0], Progress(order.turn[0])
        start = order.source.at if order.source is not None else BoundaryId(0, 0)
        board.begun_at = start.boundary
        committed = order.source is not None and order.source.committed
        if committed or board.committed > start:
            board.committed = start if committed else BoundaryId(0, 0)
        chosen = (
            {(copy.rank, copy.plan) for of in order.source.copies for copy in of} if order.source is not None else set()
        )
        for segment in self.node.segments:
            for slot in segment.slots:
                keep = (slot.at == start and (segment.rank, segment.plan) in chosen) or slot.pinned
                if slot.at.boundary > start.boundary and not slot.readers:
                    slot.pinned = keep = False
                if slot.seq and not keep:
                    if slot.sealed:
                        self.world.truth.voids(segment, slot, order.turn[0])
                    slot.voided_seq = slot.seq
                    slot.seq += slot.seq % 2
                    slot.voided_seq = slot.seq
        if start.boundary >= self.world.setting.steps and not committed:
            self._ship_what_is_left(start)
        self.pending = {at: since for at, since in self.pending.items() if at.boundary <= start.boundary}
        if self.leads:
            self.spawn("durable", self._durable())

    def _ship_what_is_left(self, at: BoundaryId) -> None:
        """Nothing is left to be trained, but the last step is in memory only: it is shipped as it lies there."""
        for _segment, slot in self.node.sealed_slots():
            if slot.at == at and not slot.pinned:
                slot.pinned, slot.record = True, {**slot.record, "trigger": "final"}

    # ------------------------------------------------------------------ shipping

    def _durable(self) -> Steps:
        """Wish for a durable save, one after the other."""
        generation = self.node.board.generation
        while self.node.board.generation == generation and self.leads:
            self.node.board.wanted += 1
            before = self.node.board.committed
            yield Until(self.node.index, lambda before=before: self.node.board.committed > before, 30.0)  # type: ignore[misc]
            yield Sleep(self.world.setting.save_gap_s)

    def _to_ship(self) -> tuple[Segment, Slot] | None:
        found = [
            (segment, slot)
            for segment in self.node.segments
            for slot in segment.slots
            if slot.pinned and slot.hashed and (id(slot), slot.seq) not in self._shipped
        ]
        if not found:
            return None
        return min(found, key=lambda f: (_URGENCY[f[1].record["trigger"]], -f[1].at.boundary))

    def _ship(self) -> Steps:
        while True:
            yield Until(self.node.index, lambda: self._to_ship() is not None and not self.gone)
            found = self._to_ship()
            if found is not None:
                segment, slot = found
                self._shipped.add((id(slot), slot.seq))
                slot.readers += 1
                done = yield from self._ship_one(segment, slot)
                slot.readers -= 1
                if not done:
                    slot.pinned = False
                    self.node.board.given_up = max(self.node.board.given_up, slot.at)
                self.touch()

    def _ship_one(self, segment: Segment, slot: Slot) -> Steps:
        """One rank's image to the store and acknowledged. False if it is not what it says."""
        if not self.world.policy.keeps_pin_while_shipping:
            slot.pinned = False
            self.touch()
        seq, at, hashed, record = slot.seq, slot.at, slot.hash, dict(slot.record)
        yield from self.records.put_plan(segment.plan)
        data = b""
        for part in range(PARTS):
            data += yield Local(f"read {part}", lambda part=part: slot.parts[part], self.world.setting.ship_s / PARTS)  # type: ignore[misc]
        attempt = f"{self.world.fresh():08x}"
        shard = Shard(ShardId(at, segment.rank, attempt), segment.plan, len(data), hashed, record)
        if not self.world.policy.acknowledges_after_check:
            yield from self.records.put(shard.ack, shard.ack_bytes())
        yield from self.records.put(shard.key, data)
        if not self.world.policy.good(data, hashed) or slot.seq != seq:
            yield from self.records.delete(shard.key)
            return False
        if self.world.policy.acknowledges_after_check:
            yield from self.records.put(shard.ack, shard.ack_bytes())
        self.pending.setdefault(at, self.world.kernel.now)
        if not self.leads and self.round is not None:
            self.send(self.round.members[0], op="acked", at=at)
        self.touch()
        return True

    def _release(self) -> Steps:
        """Let go of what is durable, or never will be; make room if a trainer must have some."""
        while True:
            yield Until(self.node.index, lambda: any(True for _ in self._released()))
            for slot in list(self._released()):
                yield Local("unpin", lambda slot=slot: self._unpin(slot))  # type: ignore[misc]

    def _released(self) -> Iterable[Slot]:
        board = self.node.board
        for segment in self.node.segments:
            for slot in segment.slots:
                if not slot.pinned or slot.readers or not slot.sealed:
                    continue
                if slot.at <= board.committed or (board.need_slot and slot.record["trigger"] == "periodic"):
                    yield slot

    def _unpin(self, slot: Slot) -> None:
        if not slot.readers:
            slot.pinned = False
            self.touch()

    # ------------------------------------------------------------------ committing

    def _commit(self) -> Steps:
        while True:
            yield Until(self.node.index, lambda: bool(self.pending), 5.0)
            for at, since in sorted(self.pending.items(), reverse=True):
                if at <= self.node.board.committed:
                    self.pending.pop(at, None)
                elif self.world.kernel.now - since >= self._turn_s():
                    yield from self._try_commit(at)
            yield Sleep(0.3)

    def _turn_s(self) -> float:
        """How long this agent lets others try first."""
        about = (self.round, len(self.notices))
        if self._turn is None or self._turn[:2] != about:
            members = [member.name for member in self.round.members] if self.round is not None else [self.node.name]
            order = self.world.policy.commit_order(members, self.leaving())
            turn_s = 0.4 * order.index(self.node.name) if self.node.name in order else 2.0
            self._turn = (*about, turn_s)
        return self._turn[2]

    def _try_commit(self, at: BoundaryId) -> Steps:
        try:
            manifest = yield from self.records.commit(at)
        except SupersededError:
            self.supersede()
            return
        if manifest is None:
            return
        self.pending.pop(at, None)
        if manifest.retired is None and manifest.at.generation == at.generation:
            self._note_commit(at)
            self.broadcast(op="committed", at=at)
            try:
                yield from self.records.keep(manifest)
            except SupersededError:
                self.supersede()

    def _note_commit(self, at: BoundaryId) -> None:
        """A step is durable; one that the current generation does not continue means nothing."""
        if at > self.node.board.committed and self._continues(at):
            self.node.board.committed = at
            self.touch()

    def _continues(self, at: BoundaryId) -> bool:
        # By what outlives this agent: one that replaces it has seen no order.
        board = self.node.board
        return at.generation == board.generation or at.boundary <= board.begun_at

    def supersede(self) -> None:
        """A newer launch owns the run: this one stops for good."""
        self.gone = True
        self.world.superseded(self.node)

    # ------------------------------------------------------------------ relaying

    def _relay(self) -> Steps:
        """Tell the leader how far this node is, and, as the leader, everybody how far all are."""
        while True:
            yield Until(self.node.index, self._has_news)
            yield Local("relay", self._tell)

    def _beat(self) -> Steps:
        while True:
            yield Sleep(2.0)
            self._tell()

    def _has_news(self) -> bool:
        if self.round is None:
            return False
        return self.node.progress(self.node.board.generation) != self._told or (
            self.leads and self._minimum() != self.node.board.known
        )

    def _minimum(self) -> Progress:
        assert self.round is not None
        generation = self.node.board.generation
        if self._least is None or self._least[:2] != (self.round, generation):
            names = [member.name for member in self.round.members]
            found = self.world.policy.minimum(self.known, names, generation)
            assert isinstance(found, Progress)
            self._least = (self.round, generation, found)
        return self._least[2]

    def _tell(self) -> None:
        if self.round is None or self.gone:
            return
        mine = self.node.progress(self.node.board.generation)
        self._told = mine
        if not self.leads:
            self.send(self.round.members[0], op="progress", sender=self.node, progress=mine)
            return
        self._hear_progress({"sender": self.node, "progress": mine})
        least = self._minimum()
        self.node.board.known = least
        self.broadcast(
            [member for member in self.round.members if member is not self.node],
            op="minimum", progress=least, committed=self.node.board.committed, notices=dict(self.notices),
        )  # fmt: skip
        self.touch()
