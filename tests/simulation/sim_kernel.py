"""The simulation's kernel: one queue of events, one thread, no real time.

A task is a generator that yields effects and is resumed with their results. Between any two effects its process may
be killed or stopped, also between a request's arrival at the store and its answer: a request under way is carried out
whatever becomes of its sender. All chance comes from the seed and the task's name, so that leaving one fault out of a
schedule leaves the rest of the world's dice as they are.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot.errors import TierError

Steps = Generator[Any, Any, Any]


class Violation(AssertionError):  # noqa: N818 - it is what a test finds, and reads as such
    """An invariant does not hold."""


@dataclass(slots=True)
class Sleep:
    """Let time go by, by the node's own clock."""

    seconds: float


@dataclass(slots=True)
class Local:
    """One change of what the node's own memory holds: undone by nothing, not done if the process dies before it."""

    label: str
    do: Callable[[], Any]
    seconds: float = 0.002


@dataclass(slots=True)
class Request:
    """A request to the store or to another node. Carried out even if its sender dies while it is under way."""

    label: str
    do: Callable[[], Any]
    seconds: float = 0.02


@dataclass(slots=True)
class Batch:
    """Several requests at once; the answer is the list of theirs. One that fails is answered by its error."""

    requests: Sequence[Request]


@dataclass(slots=True)
class Until:
    """Wait until something holds; True if it does, False when the time is up. Looked at when the place is touched."""

    place: Hashable
    holds: Callable[[], bool]
    within_s: float | None = None


@dataclass(eq=False)
class Process:
    """Something that can be killed and stopped."""

    kind: str
    name: str
    node: int
    alive: bool = True
    stopped: bool = False
    parked: list[Callable[[], None]] = field(default_factory=list)
    places: set[Hashable] = field(default_factory=set)
    on_death: Callable[[], None] | None = None


@dataclass(eq=False)
class Task:
    process: Process
    steps: Steps
    rng: random.Random


@dataclass(eq=False)
class _Waiter:
    task: Task
    until: Until


Hook = Callable[[Process, str, str], None]


class Kernel:
    """Time, tasks and effects."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.effects = 0
        self.hook: Hook = lambda _process, _label, _side: None
        self.fails: Callable[[Process, str], str | None] = lambda _process, _label: None
        """Whether a request fails: "lost" before it is carried out, "unheard" after."""
        self.rate: Callable[[int], float] = lambda _node: 1.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._waiters: dict[Hashable, list[_Waiter]] = defaultdict(list)
        self._touched: set[Hashable] = set()
        self._spawned = 0

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (self.now + seconds, self._serial, do))

    def run(self, end_s: float, done: Callable[[], bool]) -> bool:
        """Run until `done`, or until the time is up. True if done."""
        while self._queue and not done():
            at_s, _serial, do = heapq.heappop(self._queue)
            if at_s > end_s:
                break
            self.now = max(self.now, at_s)
            do()
        return done()

    def spawn(self, process: Process, name: str, steps: Steps) -> None:
        self._spawned += 1
        task = Task(process, steps, random.Random(f"{self.seed}/{process.name}/{name}"))
        self.after(0.0, lambda: self._go_on(task, None))

    # ------------------------------------------------------------------ processes

    def kill(self, process: Process) -> None:
        if process.alive:
            process.alive = False
            process.parked.clear()
            if process.on_death is not None:
                process.on_death()

    def stop(self, process: Process) -> None:
        process.stopped = True

    def wake(self, process: Process) -> None:
        if not process.stopped:
            return
        process.stopped = False
        parked, process.parked = process.parked, []
        for do in parked:
            self.after(0.001, do)
        for place in process.places:
            self.touch(place)

    def touch(self, place: Hashable) -> None:
        """Something at a place changed: whoever waits there looks again."""
        if place not in self._touched and self._waiters.get(place):
            self._touched.add(place)
            self.after(0.001, lambda: self._look(place))

    # ------------------------------------------------------------------ effects

    def _look(self, place: Hashable) -> None:
        self._touched.discard(place)
        still = []
        for waiter in self._waiters.pop(place, []):
            process = waiter.task.process
            if not process.alive:
                continue
            if process.stopped:
                process.places.add(place)
                still.append(waiter)
            elif waiter.until.holds():
                self._resume(waiter.task, 0.0, True)
            else:
                still.append(waiter)
        if still:
            self._waiters[place] = still + self._waiters.get(place, [])

    def _resume(self, task: Task, seconds: float, value: Any) -> None:
        self.after(seconds, lambda: self._go_on(task, value))

    def _go_on(self, task: Task, value: Any) -> None:
        process = task.process
        if not process.alive:
            return
        if process.stopped:
            process.parked.append(lambda: self._go_on(task, value))
            return
        try:
            effect = task.steps.throw(value) if isinstance(value, TierError) else task.steps.send(value)
        except StopIteration:
            return
        self._issue(task, effect)

    def _issue(self, task: Task, effect: Any) -> None:
        process = task.process
        label = getattr(effect, "label", "")
        if label:
            self.effects += 1
            self.hook(process, label, "before")
            if not process.alive:
                return
            if process.stopped:
                process.parked.append(lambda: self._perform(task, effect))
                return
        self._perform(task, effect)

    def _perform(self, task: Task, effect: Any) -> None:
        if isinstance(effect, Sleep):
            self._resume(task, effect.seconds / self.rate(task.process.node), None)
        elif isinstance(effect, Until):
            self._wait(task, effect)
        elif isinstance(effect, Local):
            self.after(effect.seconds * task.rng.uniform(0.5, 1.5), lambda: self._do_locally(task, effect))
        elif isinstance(effect, Request):
            self._send(task, effect, lambda answer: self._go_on(task, answer))
        else:
            self._send_all(task, effect)

    def _wait(self, task: Task, until: Until) -> None:
        if until.holds():
            self._resume(task, 0.0005, True)
            return
        waiter = _Waiter(task, until)
        self._waiters[until.place].append(waiter)
        if until.within_s is not None:
            self.after(until.within_s / self.rate(task.process.node), lambda: self._time_up(waiter))

    def _time_up(self, waiter: _Waiter) -> None:
        waiting = self._waiters.get(waiter.until.place, [])
        if waiter in waiting:
            waiting.remove(waiter)
            self._go_on(waiter.task, False)

    def _do_locally(self, task: Task, effect: Local) -> None:
        process = task.process
        if not process.alive:
            return
        if process.stopped:
            process.parked.append(lambda: self._do_locally(task, effect))
            return
        value = effect.do()
        self.hook(process, effect.label, "after")
        self._go_on(task, value)

    def _send(self, task: Task, request: Request, answered: Callable[[Any], None]) -> None:
        there_s, back_s = (request.seconds * task.rng.uniform(0.2, 1.0) for _ in range(2))

        def arrive() -> None:
            fate = self.fails(task.process, request.label)
            answer: Any = TierError("no answer")
            if fate != "lost":
                try:
                    answer = request.do()
                except TierError as error:
                    answer = error
            if fate == "unheard":
                answer = TierError("no answer")
            self.hook(task.process, request.label, "after")
            self.after(back_s, lambda: answered(answer))

        self.after(there_s, arrive)

    def _send_all(self, task: Task, batch: Batch) -> None:
        answers: list[Any] = [None] * len(batch.requests)
        left = len(answers)
        if not left:
            self._resume(task, 0.0, answers)

        def one(number: int, answer: Any) -> None:
            nonlocal left
            answers[number] = answer
            left -= 1
            if not left:
                self._go_on(task, answers)

        for number, request in enumerate(batch.requests):
            self.effects += 1
            self._send(task, request, lambda answer, number=number: one(number, answer))  # type: ignore[misc]
