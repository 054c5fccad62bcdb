"""Takes a finished step into a slot, as much of it as possible behind the next step.

There are two classes of leaf. *Overlapped*: leaves that only a registered optimizer changes (its parameters, its
state), if its hook fired in the step just finished; the copier copies them while the next step computes, and that hook
fences them. *Boundary*: all other leaves; the training thread copies them at each boundary. A leaf that is not
understood counts as a boundary leaf, and a leaf that was seen to change while it was copied becomes one for good.

A step is *in flight* from its boundary until it is sealed or dropped. The fence (the optimizers' hook, and the next
boundary, since a scaler may skip the optimizer) waits for it. The *strict* fence also waits until every rank has
passed the step, so that memory holds the newest finished step of all ranks at any moment.

Late staging: a step that is not due gets its boundary leaves into a slot all the same. As overlapped leaves stand
still until the fence, the rest can be copied at any moment before it, by order of the agent, also while the training
thread sits in a collective or an evaluation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from surefoot.host.clock import boot_s
from surefoot.ipc.board import Phase, RankWord
from surefoot.trainer.boundary.page import Page
from surefoot.trainer.stage.copying import Copier, HostLane, Lane, Pair
from surefoot.trainer.stage.fence import Fences
from surefoot.trainer.stage.overlap import Overlap, Split
from surefoot.trainer.stage.streams import StreamLane, accelerators, register, unregister
from surefoot.trainer.stage.witness import Witness

_LOOK_S = 0.0005


@dataclass(frozen=True, slots=True)
class Order:
    """A boundary, the slot that was opened for it, and the calls that close that slot, from any thread."""

    boundary: int
    slot: int
    seal: Callable[[], None]
    leaves_memory: bool
    """True if the step is to be made durable."""
    drop: Callable[[str | None], None]
    """Called with the name of a leaf that changed while it was copied; None if the step was never due."""


class Flight:
    """One step on its way into its slot."""

    def __init__(self, order: Order, pairs: Sequence[Pair], lane: Lane, split: Split, witness: Witness | None) -> None:
        self.order = order
        self.pairs = pairs
        """Held until the copy is complete: memory that is freed earlier could be reused."""
        self.lane = lane
        self.split = split
        self.witness = witness
        """None if nothing is overlapped."""
        self.ordered = threading.Event()
        """Set once the copies are ordered before all later work of their lane."""
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def overlapped(self) -> list[Pair]:
        return [self.pairs[number] for number in self.split.overlapped]

    def finish(self) -> None:
        """Wait for the end, in the training thread.

        Raises:
            Exception: whatever the copy failed with.
        """
        self.lane.help()
        self.ended.wait()
        if self.error is not None:
            raise self.error


class Taker:
    """Takes the steps of one trainer."""

    def __init__(
        self,
        page: Page,
        generation: int,
        *,
        overlap: bool,
        strict: bool | None,
        warn: Callable[[str], None],
    ) -> None:
        self._page = page
        self._generation = generation
        self._may_overlap = overlap
        self._strict = strict
        self._warn = warn
        self._on_accelerator = False
        self._registered: torch.Tensor | None = None
        self._fences = Fences(self._fence)
        self._copier = Copier()
        self._overlap = Overlap((), set())
        self._changing: set[str] = set()
        self._fired: tuple[Optimizer, ...] = ()
        self._flights: list[Flight] = []
        self._ready: Flight | None = None
        """A step that was not due: its boundary leaves are in the slot."""
        self._gate = threading.Lock()
        """Held by the watcher to start a step that lies ready, and by the fence, after which none may start."""
        self.strict = True
        self.overlapped_bytes = 0
        """Overlapped bytes of the step taken last."""
        self._waited_s = 0.0
        self._tried: Split | None = None
        """The split that has been on trial since the last boundary."""

    # ------------------------------------------------------------------ the training thread

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Hook these optimizers, so that they announce each change."""
        self._fences.watch(optimizers)

    def plan(self, names: Sequence[str], memory: torch.Tensor) -> None:
        """Take a new plan: the names of a slot's leaves, in its order, and the memory in which the slots lie."""
        self._overlap = Overlap(names, self._changing)
        if self._registered is not None:
            unregister(self._registered)
        self._registered = memory if self._on_accelerator and register(memory, self._warn) else None

    def wants_slots(self, tensors: Iterable[torch.Tensor]) -> int:
        """How many slots this rank's fence needs, one of them for an upload."""
        self._on_accelerator = bool(accelerators(tensors))
        self.strict = self._strict if self._strict is not None else not self._on_accelerator
        return 3 if self.strict else 4

    def settle(self) -> None:
        """At a boundary: fence the step that the last boundary left in flight, if no optimizer did.

        Raises:
            Exception: whatever a copy failed with.
        """
        self._fired = self._fences.take_fired()
        self._judge()
        self._pass()
        # With an accelerator the program runs ahead of it; this bounds how far.
        ahead = 0 if all(flight.lane.host_must_wait for flight in self._flights) else 1
        while len(self._flights) > ahead:
            self._flights.pop(0).finish()

    def take(self, order: Order, pairs: Sequence[Pair], *, due: bool, at_once: bool) -> None:
        """Copy a finished step into its slot.

        Args:
            order: the step and its slot.
            pairs: every leaf's place in the slot, and its live tensor.
            due: False: lay the step ready for late staging, and do not seal it.
            at_once: return only when it is sealed.
        """
        split = self._overlap.split(pairs, self._fired if self._may_overlap else ())
        self._begin_trial(split)
        # A step that is to be shipped is copied at the boundary until every leaf has been seen to stand still.
        if at_once or (order.leaves_memory and not split.trial.passed):
            split = self._overlap.split(pairs, ())
        self.overlapped_bytes = split.size_bytes
        # Made before the boundary's copies are ordered, so that it reads the state as it is at this point.
        witness = split.witness(due=due)
        lane: Lane = StreamLane(split.devices) if split.devices else HostLane()
        flight = Flight(order, pairs, lane, split, witness)
        lane.boundary([pairs[number] for number in split.boundary])
        if not due:
            self._ready = flight
        elif split.overlapped or split.devices:
            self._start(flight)
        else:
            self._complete(flight)
            flight.finish()
        if due and at_once:
            self.finish()

    def finish(self) -> None:
        """Return when nothing is in flight any more.

        Raises:
            Exception: whatever a copy failed with.
        """
        while self._flights:
            self._flights.pop(0).finish()

    def take_waited_s(self) -> float:
        """How long the fences have held up the training since this was last asked."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    @property
    def in_flight(self) -> bool:
        return any(not flight.ended.is_set() for flight in list(self._flights))

    def close(self) -> None:
        self._fences.close()
        self._copier.close()
        if self._registered is not None:
            unregister(self._registered)
            self._registered = None

    # ------------------------------------------------------------------ the watcher thread

    def stage_late(self) -> None:
        """If the agent has ordered it, take the step that lies ready, unless the fence was passed or another step
        counts."""
        with self._gate:
            flight = self._ready
            if flight is not None and self._page.must_stage_late(flight.order.boundary):
                self._ready = None
                self._start(flight)

    # ------------------------------------------------------------------ the fence

    def _fence(self) -> None:
        """Fence an optimizer that is about to change the state."""
        started_s = boot_s()
        self._end_trial()
        self._pass()
        for flight in list(self._flights):
            if flight.lane.host_must_wait:
                self._flights.remove(flight)
                flight.finish()
            else:
                flight.ordered.wait()
                flight.lane.hold_optimizer()
        if self.strict:
            self.finish()
            self._wait_for_all()
        self._page.phase(Phase.TRAINING)
        self._waited_s += boot_s() - started_s

    def _pass(self) -> None:
        """Bar the start of a step that lies ready: its sources are about to change.

        ENTERED goes up BEFORE the order to stay is read, and the agent reads it AFTER it has given that order. So
        either the agent counts this rank as one that passed, or this rank sees the order and stays.
        """
        ready = self._ready
        if ready is None:
            return
        self._page.set(RankWord.ENTERED, ready.order.boundary + 2)
        # The lock is a full barrier on the machines in use.
        with self._gate:
            stays = self._page.must_stay(ready.order.boundary)
            if not stays:
                self._ready = None
        while stays:
            self.stage_late()
            time.sleep(_LOOK_S)
            stays = self._page.must_stay(ready.order.boundary)
        with self._gate:
            started = self._ready is not ready and ready in self._flights
            self._ready = None
        if not started:
            ready.order.drop(None)

    def _wait_for_all(self) -> None:
        """Wait until every rank has passed the step that this rank has passed: none may change its state before."""
        while self._page.passed_on_all(self._generation) < self._page.passed:
            time.sleep(_LOOK_S)

    # ------------------------------------------------------------------ the trial

    def _begin_trial(self, split: Split) -> None:
        if not split.trial.passed:
            self._tried = split
            split.trial.begin()

    def _end_trial(self) -> None:
        if self._tried is not None:
            self._tried.trial.end()

    def _judge(self) -> None:
        """At a boundary, which is a fence too: take in the result of the last look."""
        self._end_trial()
        split, self._tried = self._tried, None
        number = split.trial.moved() if split is not None else None
        if split is not None and number is not None:
            name, known = self._overlap.demote(split.overlapped[number])
            if not known:
                why = "changed after a step, before its optimizer's next one"
                self._warn(f"{name} {why}: from here on it is copied before the next step begins")

    # ------------------------------------------------------------------ copies

    def _start(self, flight: Flight) -> None:
        flight.lane.offer(flight.overlapped())
        self._flights.append(flight)
        self._copier.submit(lambda: self._complete(flight))

    def _complete(self, flight: Flight) -> None:
        """Copy the remaining leaves, check whether they stood still, and seal or drop the step."""
        try:
            flight.lane.behind(flight.overlapped(), flight.witness)
            flight.ordered.set()
            flight.lane.wait()
            moved = self._moved(flight)
            if moved is None:
                flight.order.seal()
            else:
                flight.order.drop(self._overlap.demote(moved)[0])
        except BaseException as error:  # noqa: BLE001 - raised in the training thread, by `Flight.finish`
            flight.error = error
        finally:
            flight.pairs = ()
            flight.ordered.set()
            flight.ended.set()

    def _moved(self, flight: Flight) -> int | None:
        """Number of a leaf that changed while it was copied."""
        if flight.witness is None:
            return None
        views = [view for view, _source in flight.overlapped()]
        number = flight.witness.moved(flight.split.arrived(flight.order.slot, views))
        return None if number is None else flight.split.overlapped[number]
