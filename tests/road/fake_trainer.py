"""A trainer without torch: speaks the real protocol to a real agent and fills real slots with bytes that tell whose
they are. Does what a test says, one command after the other, and checks every byte that it is given to start from.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import secrets
import select
import socket
from collections.abc import Callable
from typing import Any

from surefoot.core.documents import compact
from surefoot.core.layout import BoundaryId
from surefoot.core.plan import Leaf, Plan, Report
from surefoot.core.slots import NEVER, SlotView, reusable
from surefoot.exits import EVICTED, SUPERSEDED
from surefoot.host.clock import boot_ns
from surefoot.ipc import wire
from surefoot.ipc.board import Board, NodeWord, Phase, RankWord
from surefoot.ipc.segment import Segment, open_segment

SHARED = "shared"
OWN = "own"
STRUCTURE = json.dumps({name: {"$tensor": name} for name in (SHARED, OWN)})
TICK_S = 0.02


def content(boundary: int, generation: int, leaf: str, rank: int, size_bytes: int) -> bytes:
    """The bytes of a leaf: different for every boundary, generation, leaf and, for a rank's own, rank."""
    whose = f"{boundary}/{generation}/{leaf}" + (f"/{rank}" if leaf == OWN else "")
    return hashlib.shake_256(whose.encode()).digest(size_bytes)


class LostError(Exception):
    """The agent is gone."""


class Trainer:
    """One rank."""

    def __init__(self) -> None:
        self._incarnation = secrets.randbits(62) | 1
        self._path = ""
        self._sock: socket.socket | None = None
        self._rank = 0
        self._world_size = 1
        self._local_rank = 0
        self._local_world_size = 1
        self._round: dict[str, Any] = {}
        self._sizes = {SHARED: 6000, OWN: 9000}
        self._number = 0
        self._answers: dict[int, tuple[dict[str, Any], list[int]]] = {}
        self._images: list[tuple[dict[str, Any], list[int]]] = []
        self._board: Board | None = None
        self._generation = 0
        self._segment: Segment | None = None
        self._plan: Plan | None = None
        self._boundaries: list[int] = []
        self._pins: dict[int, int] = {}
        self._newest: dict[str, Any] | None = None

    # ------------------------------------------------------------------ commands

    def open(
        self, socket: str, rank: int, world_size: int, own_bytes: int | None = None, nodes: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Say hello, load what the agent hands over, and say so.

        `nodes`: if there are several, `round`: its name, `first`: the first rank here, `here`: how many there are here.
        """
        self._rank, self._world_size, self._path = rank, world_size, socket
        self._local_rank = rank - (nodes["first"] if nodes is not None else 0)
        self._local_world_size = nodes["here"] if nodes is not None else world_size
        self._round = {"round": nodes["round"], "meet": "127.0.0.1"} if nodes is not None else {}
        if own_bytes is not None:
            self._sizes[OWN] = own_bytes
        self._sock = wire.connect(self._path, 10.0)
        answer, _fds = self._ask(self._hello(reconnect=False))
        if answer.get("error") or answer.get("refused"):
            return answer
        self._generation = int(answer["generation"])
        self._board = Board.open(answer["board"])
        self._set(RankWord.INCARNATION, self._incarnation)
        self._set(RankWord.PID, os.getpid())
        self._set(RankWord.SEALED, 0)
        self._set(RankWord.SEALED_GENERATION, self._generation)
        start = answer["start"]
        wrong = self._check(start) if start is not None else []
        loaded, _fds = self._ask({"op": "loaded", "error": f"wrong bytes: {wrong}" if wrong else None})
        self._set(RankWord.FINISHED, (start["boundary"] if start is not None else 0) + 1)
        self._set(RankWord.STEP, (start["step"] if start is not None else 0) + 1)
        self._set(RankWord.PHASE, Phase.TRAINING)
        return {
            "generation": self._generation,
            "step": start and start["step"],
            "boundary": start and start["boundary"],
            "epoch": start and start["epoch"],
            "place": start and start["place"],
            "of": start and [start["record"]["step"], start["record"]["generation"], start["record"]["world_size"]],
            "wrong": wrong,
            "error": loaded.get("error"),
        }

    def save(
        self,
        step: int,
        trigger: str | None = "manual",
        tag: str | None = None,
        wait: bool = True,
        boundary: int | None = None,
        epoch: int | None = None,
    ) -> Any:
        """Come to a boundary, seal it, and wait until it is committed or given up. Its number is mostly the step's."""
        if self._segment is None:
            self._make_plan()
        segment = self._segment
        assert segment is not None
        slot = self._free_slot(segment)
        segment.begin(slot)
        at = BoundaryId(step if boundary is None else boundary, self._generation, step, epoch)
        self._fill(segment, slot, at.boundary)
        seq = segment.seal(slot, at, self._record(at, trigger, tag), durable=trigger is not None, staged_ns=boot_ns())
        self._boundaries[slot] = at.boundary
        if trigger is not None:
            self._pins[slot] = seq
        self._set(RankWord.STEP, step + 1)
        self._set(RankWord.SEALED, at.boundary + 1)
        self._set(RankWord.FINISHED, at.boundary + 1)
        self._newest = {"op": "sealed", "plan": segment.plan_hash, "slot": slot, "seq": seq, **at.to_json()}
        self._newest |= {"trigger": trigger, "tag": tag}
        self._send(self._newest)
        if not wait or trigger is None:
            return {"slot": slot}
        return self.wait(step, at.boundary)

    def wait(self, step: int, boundary: int | None = None) -> Any:
        """Wait until a boundary is committed or given up."""
        return self._ask({"op": "wait", **self._at(step, boundary)})[0]

    def ensure(self, step: int, boundary: int | None = None) -> Any:
        return self._ask({"op": "ensure", **self._at(step, boundary)})[0]

    def _at(self, step: int, boundary: int | None) -> dict[str, Any]:
        return BoundaryId(step if boundary is None else boundary, self._generation, step).to_json()

    def bye(self, step: int, finished: bool) -> Any:
        return self._ask({"op": "bye", "step": step, "finished": finished, "wait_safe": False})[0]

    def reconnect(self) -> Any:
        """Greet the agent that replaces a lost one, as the watcher of a real trainer does."""
        self._sock = wire.connect(self._path, 10.0)
        fds = [self._segment.fd] if self._segment is not None else []
        wire.send(self._sock, self._hello(reconnect=True), fds)
        if self._newest is not None:
            self._send(self._newest)
        return {}

    def words(self) -> Any:
        """What the board says of this node."""
        assert self._board is not None
        return {word.name: self._board.node(word) for word in NodeWord}

    def pins(self) -> Any:
        """Slots that somebody reads, or is to read."""
        return sorted(self._pins)

    # ------------------------------------------------------------------ staging

    def _make_plan(self) -> None:
        leaves = (
            Leaf(SHARED, "uint8", (self._sizes[SHARED],), "replicated"),
            Leaf(OWN, "uint8", (self._sizes[OWN],), "local"),
        )
        report = Report(leaves, STRUCTURE).to_json()
        about = self._at(1, None)
        answer, fds = self._ask({"op": "report", "report": report, "record_bytes": 2000, "slots": 3, **about})
        if answer.get("error"):
            raise ValueError(answer["error"])
        segment = open_segment(fds[0], None)
        self._segment, self._plan = segment, segment.plan()
        self._boundaries = [NEVER] * segment.num_slots
        self._pins = {slot: segment.seq(slot) for slot in answer["pinned"]}

    def _free_slot(self, segment: Segment) -> int:
        assert self._board is not None
        while True:
            views = [SlotView(boundary, slot in self._pins) for slot, boundary in enumerate(self._boundaries)]
            free = reusable(views, self._board.sealed_on_all(self._generation, self._local_world_size))
            if free:
                return free[0]
            self._pump(TICK_S)

    def _fill(self, segment: Segment, slot: int, boundary: int) -> None:
        assert self._plan is not None
        leaves = {item.box.name: item.leaf for item in self._plan.items if item.rank == self._rank}
        image = segment.image(slot)
        for box, start in self._plan.image(self._rank).places:
            data = content(boundary, self._generation, leaves[box.name], self._rank, box.size_bytes)
            image[start : start + len(data)] = data

    def _record(self, at: BoundaryId, trigger: str | None, tag: str | None) -> bytes:
        return compact(
            {
                **at.to_json(),
                "rank": self._rank,
                "world_size": self._world_size,
                "trigger": trigger,
                "tag": tag,
                "metrics": {},
                "values": {"lucky": 1000 * (at.step or 0) + self._rank},
            }
        )

    def _check(self, start: dict[str, Any]) -> list[str]:
        """What differs between the images and what their record says was sealed."""
        plan = Plan.from_body(start["plan"])
        record, of_rank = start["record"], int(start["of_rank"])
        images = {body["rank"]: (fds[0], body["offset"], body["size"]) for body, fds in self._images}
        labels = ("boundary", "step", "epoch")
        wrong = [
            f"{name} {start[name]} has the record of {record[name]}" for name in labels if record[name] != start[name]
        ]
        if record["values"]["lucky"] != 1000 * record["step"] + of_rank:
            wrong.append("values")
        for leaf, item in plan.sources(of_rank).items():
            data = _part_of(plan, item.rank, item.box.name, images[item.rank])
            if data != content(record["boundary"], record["generation"], leaf, of_rank, item.box.size_bytes):
                wrong.append(leaf)
        for fd, _offset, _size in images.values():
            os.close(fd)
        self._images.clear()
        return wrong

    # ------------------------------------------------------------------ the connection

    def _hello(self, *, reconnect: bool) -> dict[str, Any]:
        return {
            "role": "trainer",
            "rank": self._rank,
            "world_size": self._world_size,
            "local_rank": self._local_rank,
            "local_world_size": self._local_world_size,
            "incarnation": self._incarnation,
            "reconnect": reconnect,
            **self._round,
        }

    def _ask(self, body: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        self._number += 1
        number = self._number
        self._send({**body, "id": number})
        while number not in self._answers:
            self._pump(TICK_S)
        return self._answers.pop(number)

    def _send(self, body: dict[str, Any]) -> None:
        try:
            if self._sock is None:
                raise LostError
            wire.send(self._sock, body)
        except OSError as error:
            self.lose()
            raise LostError from error

    def _pump(self, within_s: float) -> None:
        """Take what the agent says within that time, and obey its stop word."""
        if self._sock is None:
            raise LostError
        if select.select([self._sock], [], [], within_s)[0]:
            self.take()
        self.obey()

    def take(self) -> None:
        """One frame of the agent's."""
        assert self._sock is not None
        try:
            frame = wire.receive(self._sock)
        except OSError:
            frame = None
        if frame is None:
            self.lose()
            raise LostError
        body, fds = frame
        if body.get("op") == "image":
            self._images.append((body, fds))
        elif body.get("op") == "pin":
            self._grant(body)
        elif body.get("op") == "unpin":
            if self._pins.get(body["slot"]) == body["seq"]:
                del self._pins[body["slot"]]
        else:
            self._answers[body["id"]] = (body, fds)

    def _grant(self, body: dict[str, Any]) -> None:
        segment = self._segment
        ok = segment is not None and segment.plan_hash == body["plan"] and segment.seq(body["slot"]) == body["seq"]
        if ok:
            self._pins[body["slot"]] = body["seq"]
        self._send({"op": "granted", "slot": body["slot"], "seq": body["seq"], "ok": ok})

    def obey(self) -> None:
        board = self._board
        if board is not None and board.rank(self._local_rank, RankWord.STOP) == self._incarnation:
            superseded = board.node(NodeWord.SUPERSEDED)
            os._exit(SUPERSEDED if superseded else EVICTED if board.node(NodeWord.NOTICE) else 1)

    def lose(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock = None

    @property
    def sock(self) -> socket.socket | None:
        return self._sock

    def _set(self, word: RankWord, value: int) -> None:
        assert self._board is not None
        self._board.set_rank(self._local_rank, word, value)


def _part_of(plan: Plan, rank: int, name: str, image: tuple[int, int, int]) -> bytes:
    fd, offset, size_bytes = image
    ((box, start),) = [(box, start) for box, start in plan.image(rank).places if box.name == name]
    with mmap.mmap(fd, offset + size_bytes, prot=mmap.PROT_READ) as mapping:
        return mapping[offset + start : offset + start + box.size_bytes]


def main(commands: socket.socket) -> int:
    """Obey until told to leave, or until whoever commands is gone."""
    trainer = Trainer()
    does: dict[str, Callable[..., Any]] = {
        "open": trainer.open,
        "save": trainer.save,
        "wait": trainer.wait,
        "ensure": trainer.ensure,
        "bye": trainer.bye,
        "reconnect": trainer.reconnect,
        "words": trainer.words,
        "pins": trainer.pins,
    }
    while True:
        ready, _, _ = select.select([s for s in (commands, trainer.sock) if s is not None], [], [], TICK_S)
        trainer.obey()
        try:
            if trainer.sock in ready:
                trainer.take()
            if commands not in ready:
                continue
            order = json.loads(commands.recv(1 << 16) or b'{"do": "exit", "code": 0}')
            if order["do"] == "exit":
                return int(order["code"])
            answer = does[order.pop("do")](**order)
        except LostError:
            if commands not in ready:
                continue
            answer = {"lost": True}
        commands.send(json.dumps(answer).encode())
