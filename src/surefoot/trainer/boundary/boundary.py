"""A boundary: the state is whole, all ranks do the same, and it is taken. Each step ends at one."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from surefoot.core.agreement import BoundaryPlan, Vector, at_boundary
from surefoot.core.cadence import stage_every
from surefoot.core.documents import compact
from surefoot.core.layout import BoundaryId
from surefoot.errors import ConfigError, CorruptError
from surefoot.host.clock import boot_ns, boot_s
from surefoot.ipc.board import NodeWord, Phase, RankWord
from surefoot.ipc.segment import open_segment
from surefoot.ipc.wire import Body
from surefoot.trainer.boundary.agreement import Agreement
from surefoot.trainer.boundary.alone import Alone
from surefoot.trainer.boundary.page import Page
from surefoot.trainer.client import AgentClient
from surefoot.trainer.stage.slots import Stager
from surefoot.trainer.stage.take import Order, Taker
from surefoot.trainer.state import rng
from surefoot.trainer.state.flatten import Flat, uncollected
from surefoot.trainer.state.registry import Registry
from surefoot.trainer.state.report import report_of

_SLOT_LOOK_S = 0.0005
_SAMPLE_EVERY_S = 1.0
_MEASURED = 5
"""Number of copies and steps whose median sets the cadence: one slow copy is not a reason to leave steps out."""


@dataclass(frozen=True, slots=True)
class Save:
    """A save that the script asked for."""

    tag: str | None
    wait: bool
    metrics: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Staging:
    """The options by which steps are staged."""

    every: int | None = None
    """Every so many steps; None: each step, unless copying one takes longer than a step."""
    overlap: bool = True
    """Copy behind the next step the leaves for which that is possible."""
    strict: bool | None = None
    """No rank goes beyond a step before all have staged it. None: if no leaf lies on an accelerator."""

    def __post_init__(self) -> None:
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise ConfigError(f"stage is {self.every!r}: give a number of steps, 1 or more")
        if type(self.overlap) is not bool:
            raise ConfigError(f"overlap is {self.overlap!r}: give True or False")
        if self.strict is not None and type(self.strict) is not bool:
            raise ConfigError(f"strict is {self.strict!r}: give True or False, or leave it out")


class Boundary:
    """One trainer's boundaries in one generation."""

    def __init__(
        self,
        client: AgentClient,
        page: Page,
        registry: Registry,
        agreement: Agreement,
        generation: int,
        staging: Staging,
    ) -> None:
        self._client = client
        self._page = page
        self._registry = registry
        self._agreement = agreement
        self._generation = generation
        self._staging = staging
        self._taker = Taker(page, generation, overlap=staging.overlap, strict=staging.strict, warn=self._warn)
        self._stager: Stager | None = None
        self._exchanging = threading.Lock()
        self._early: list[Body] = []
        """The agent's pins of slots under a plan that was not, or not yet, this trainer's."""
        self._signature: tuple[Any, ...] | None = None
        self._drift = False
        self._newest = -1
        self._newest_message: Body | None = None
        self._durable_served = 0
        self._step_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=_MEASURED)
        self._copies_s: deque[float] = deque(maxlen=_MEASURED)
        self._every = staging.every or 1
        self._sampled_s = 0.0
        self._last_s = boot_s()

    def cross(self, boundary: int, step: int, saves: list[Save], *, last: bool) -> bool:
        """The state is whole: take it, as all ranks agreed. True if they agreed to stop here.

        Args:
            boundary: its number, one more than that of the boundary before it.
            step: optimizer steps finished.
            saves: what was asked for since the boundary before it.
            last: the run ends here.
        """
        at = BoundaryId(boundary, self._generation, step, self._registry.epoch())
        now_s = boot_s()
        self._step_s = now_s - self._last_s
        self._steps_s.append(self._step_s)
        self._page.set(RankWord.STEP, step + 1)
        self._page.set(RankWord.FINISHED, boundary + 1)
        self._taker.settle()
        self._registry.check_habits()
        self._taker.watch(self._registry.optimizers())
        if saves or last:
            self._registry.frozen.before_save(kept=last or any(save.tag is not None for save in saves))
        flat = self._registry.flatten()
        self._drift = self._stager is not None and flat.signature() != self._signature
        agreed = self._agreement.settle(self._vector)
        todo = at_boundary(agreed, boundary, planned=self._stager is not None, wanted=bool(saves), last=last)
        if todo.skipped:
            self._client.event("skipped", **at.names, why="an upload still holds the slot")
        self._take(at, flat, todo, saves, last=last)
        self._agreement.post(self._vector())
        self._sample(step, boot_s() - now_s + self._taker.take_waited_s())
        self._last_s = boot_s()
        if saves and todo.stage:
            self._wait_for(saves, at)
        return todo.stop

    def finish(self) -> None:
        """Return when the last step taken is sealed."""
        self._taker.finish()

    def close(self) -> None:
        """Unhook the optimizers. A step in flight is sealed first."""
        self._taker.close()

    @property
    def in_flight(self) -> bool:
        """True while a step is copied behind the training."""
        return self._taker.in_flight

    # ------------------------------------------------------------------ called by the watcher thread

    @property
    def segment_fd(self) -> int | None:
        """The segment's descriptor, for an agent that does not know it."""
        stager = self._stager
        return stager.segment.fd if stager is not None and stager.segment.fd >= 0 else None

    def pushed(self, body: Body) -> None:
        """Pin or unpin a slot, as the agent asks."""
        with self._exchanging:
            stager = self._stager
            if stager is not None and stager.plan.hash == body.get("plan"):
                ok = _obey(stager, body)
            else:
                # This trainer does not fill the slots of that segment, so nothing reuses them. But it may be about to:
                # the training thread may have the agent's answer with that plan, and not use it yet.
                ok = True
                self._early.append(body)
        if body.get("op") == "pin":
            self._client.tell({"op": "granted", "slot": body["slot"], "seq": body["seq"], "ok": ok})

    def stage_late(self) -> None:
        """Start a step that was not due, if the agent has ordered it."""
        self._taker.stage_late()

    def news(self) -> list[Body]:
        """The messages that an agent which replaces another needs."""
        stager, newest = self._stager, self._newest_message
        waiting = stager.tell_again() if stager is not None else []
        return waiting if newest is None or newest in waiting else [*waiting, newest]

    # ------------------------------------------------------------------ taking a step

    def _vector(self) -> Vector:
        stager = self._stager
        return Vector(
            notice=self._page.noticed,
            replan=self._drift,
            durable=self._page.board.node(NodeWord.DURABLE_WANTED) > self._durable_served,
            free_slots=stager.free_slots(self._sealed_soon()) if stager is not None else 1,
            stage_every=self._every,
        )

    def _sealed_soon(self) -> int:
        """The newest step known to be sealed on all ranks by the next boundary: the strict fence sees to that step."""
        return self._newest if self._taker.strict else self._page.sealed_on_all(self._generation)

    def _take(self, at: BoundaryId, flat: Flat, todo: BoundaryPlan, saves: list[Save], *, last: bool) -> None:
        must = todo.stage and (todo.stop or last or bool(saves))
        record = self._record(at, flat, todo, saves, last)
        drift = self._any_drift(at, record) if must else False
        if todo.replan or drift:
            with uncollected():
                self._plan(at, flat, len(record))
            # Once more: under the new plan this rank's frozen file is another.
            record = self._record(at, flat, todo, saves, last)
        stager = self._stager
        assert stager is not None
        if self._drift or len(record) > stager.segment.geometry.record_capacity:
            # Only this rank knows of the change: all plan again at the next boundary, and this step has no whole image.
            self._drift = True
            self._page.set(RankWord.PASSED, at.boundary + 1)
            if todo.stage:
                why = "the structure changed; planning again at the next step"
                self._client.event("skipped", **at.names, why=why)
            return
        slot = self._slot(stager, must) if todo.stage else stager.take(self._page.sealed_on_all(self._generation))
        if slot is None:
            return
        order = self._order(stager, slot, at, record, _trigger(todo, saves, last) if todo.stage else None, saves)
        if todo.stage:
            self._page.phase(Phase.FILLING)
            self._newest = at.boundary
            self._choose_cadence()
        at_once = todo.stop or last or any(save.wait for save in saves)
        self._taker.take(order, stager.pairs(slot, flat.tensors), due=todo.stage, at_once=at_once)

    def _choose_cadence(self) -> None:
        if self._staging.every is None and len(self._copies_s) == _MEASURED:
            copy_s, step_s = median(self._copies_s), median(self._steps_s)
            self._every = stage_every(copy_s, step_s) if copy_s > step_s else 1

    def _order(
        self, stager: Stager, slot: int, at: BoundaryId, record: bytes, trigger: str | None, saves: list[Save]
    ) -> Order:
        """The order that closes the slot, from the thread in which the copies end."""
        staged_ns, started_s = boot_ns(), boot_s()
        if trigger is not None:
            self._durable_served = self._page.board.node(NodeWord.DURABLE_WANTED)
        tag = next((save.tag for save in saves if save.tag is not None), None)
        about = {"op": "sealed", **at.to_json(), "trigger": trigger, "tag": tag}

        def seal() -> None:
            message = stager.seal(slot, at, record, staged_ns=staged_ns, message=about)
            self._page.set(RankWord.SEALED_STEP, (at.step or 0) + 1)
            self._page.set(RankWord.SEALED, at.boundary + 1)
            self._page.set(RankWord.PASSED, at.boundary + 1)
            self._page.phase(Phase.SEALED)
            self._copies_s.append(boot_s() - started_s)
            self._newest_message = message
            self._client.tell(message)

        def drop(leaf: str | None) -> None:
            stager.give_back(slot)
            if leaf is not None:
                self._page.set(RankWord.PASSED, at.boundary + 1)
                self._tell_dropped(at, leaf)

        return Order(at.boundary, slot, seal, trigger is not None, drop)

    def _warn(self, what: str) -> None:
        self._client.event("warning", what=what)

    def _tell_dropped(self, at: BoundaryId, leaf: str) -> None:
        why = f"{leaf} changed while it was copied, outside of its optimizer's step"
        self._client.tell({"op": "dropped", **at.to_json(), "why": why})
        self._warn(f"{at.label} is not staged: {why}; from here on it is copied before the next step begins")

    def _slot(self, stager: Stager, must: bool) -> int:
        """A slot to fill. Waits, as the strict fence demands, until every rank has sealed the earlier steps."""
        asked = False
        while True:
            slot = stager.take(self._page.sealed_on_all(self._generation))
            if slot is not None:
                return slot
            if must and not asked and stager.free_slots(self._newest) == 0:
                asked = True
                self._client.tell({"op": "need_slot"})
            time.sleep(_SLOT_LOOK_S)

    def _any_drift(self, at: BoundaryId, record: bytes) -> bool:
        """True if any rank has to plan again before an image that must be whole.

        Raises:
            UsageError: other ranks do not take this image at all.
        """
        stager = self._stager
        drift = stager is None or self._drift or len(record) > stager.segment.geometry.record_capacity
        if self._page.ranks.world_size == 1:
            return drift
        answer, _fds = self._client.request(
            {"op": "check", **at.to_json(), "drift": drift}, give_up=Alone(self._page, at).why
        )
        return bool(answer["replan"])

    def _plan(self, at: BoundaryId, flat: Flat, record_bytes: int) -> None:
        """Report the registered state to the agent, and get the plan and a segment for it."""
        several = self._page.ranks.world_size > 1
        report = report_of(flat, several=several, digest=self._registry.digest).to_json()
        slots = self._taker.wants_slots(named.tensor for named in flat.tensors)
        answer, fds = self._client.request(
            {
                "op": "report",
                "report": report,
                "record_bytes": record_bytes,
                "slots": slots,
                **at.to_json(),
            }
        )
        old = self._stager
        segment = open_segment(fds[0], None, populate=True)
        plan = segment.plan()
        if plan.hash != answer["plan"]:
            raise CorruptError("the agent handed over a segment of another plan")
        stager = Stager(segment, plan, self._page.ranks.rank, answer["pinned"], flat.tensors)
        with self._exchanging:
            self._stager = stager
            for body in self._early:
                if body.get("plan") == plan.hash:
                    _obey(stager, body)
            self._early.clear()
        self._taker.plan(stager.names, stager.memory)
        self._registry.frozen.planned(plan, self._page.ranks.rank)
        self._signature = flat.signature()
        self._drift = False
        if old is not None:
            self._taker.finish()
            old.segment.close()

    def _record(self, at: BoundaryId, flat: Flat, todo: BoundaryPlan, saves: list[Save], last: bool) -> bytes:
        metrics: dict[str, Any] = {}
        for save in saves:
            metrics.update(save.metrics)
        return compact(
            {
                **at.to_json(),
                "rank": self._page.ranks.rank,
                "world_size": self._page.ranks.world_size,
                "trigger": _trigger(todo, saves, last),
                "tag": next((save.tag for save in saves if save.tag is not None), None),
                "metrics": metrics,
                "values": flat.values,
                "positions": self._registry.positions(),
                "rng": rng.capture(),
                "frozen": self._registry.frozen.named(wait=todo.stage and (todo.stop or last or bool(saves))),
            }
        )

    def _wait_for(self, saves: list[Save], at: BoundaryId) -> None:
        if any(save.wait for save in saves):
            answer, _fds = self._client.request({"op": "wait", **at.to_json()}, None)
            del answer

    def _sample(self, step: int, stall_s: float) -> None:
        now_s = boot_s()
        if now_s - self._sampled_s >= _SAMPLE_EVERY_S:
            self._sampled_s = now_s
            self._client.event("step", rank=self._page.ranks.rank, step=step, step_s=round(self._step_s, 6))
            self._client.event("stall", rank=self._page.ranks.rank, step=step, stall_s=round(stall_s, 6))


def _obey(stager: Stager, body: Body) -> bool:
    """Pin a slot, or unpin it. False if it moved on."""
    if body.get("op") == "pin":
        return stager.pin(body["slot"], body["seq"])
    if body.get("op") == "unpin":
        stager.unpin(body["slot"], body["seq"])
    return True


def _trigger(todo: BoundaryPlan, saves: list[Save], last: bool) -> str | None:
    if todo.stop:
        return "emergency"
    if last:
        return "final"
    if saves:
        return "manual"
    return "periodic" if todo.durable else None
