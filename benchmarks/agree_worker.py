"""One rank of `python -m benchmarks agree`.

Each step ends with an all-reduce as of gradients, which the ranks leave together; then comes what is measured.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.agree import FORMS, NOTHING
from surefoot.bench.worker import begin, leave
from surefoot.core.agreement import Vector
from surefoot.ipc.board import Board
from surefoot.trainer.boundary.agreement import Agreement, GlooAgreement
from surefoot.trainer.boundary.board_agreement import BoardAgreement
from surefoot.trainer.boundary.environment import Ranks
from surefoot.trainer.boundary.page import Page

_GRADIENT_ELEMENTS = 4096
_SIZE = 192
_SETTLING = 20
_GENERATION = 1


class _Form(Protocol):
    """What a boundary does so that all ranks act alike."""

    def boundary(self) -> bool:
        """Whether all are to stop."""

    def pause(self) -> None:
        """Leave nothing under way: another form has its turn."""


def _page(memory: Path) -> Page:
    """This rank's page of a board of their own, open on all ranks when any has it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    path = memory / "board"
    if rank == 0:
        Board.create(path, world_size)
    dist.barrier()
    page = Page(Board.open(path), Ranks(rank, world_size, rank, world_size), 1)
    page.open(_GENERATION, os.getpid())
    dist.barrier()
    return page


class _Nothing:
    def boundary(self) -> bool:
        return False

    def pause(self) -> None:
        return


class _Agreement:
    """The boundary's own: settle what the last one posted, post for the next."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._mine = Vector(free_slots=2)

    def boundary(self) -> bool:
        agreed = self._agreement.settle(self._vector)
        self._agreement.post(self._mine)
        return agreed.notice

    def pause(self) -> None:
        self._agreement.settle(self._vector)

    def _vector(self) -> Vector:
        return self._mine


class _Blocking:
    """The usual one: does any rank want to stop?"""

    def boundary(self) -> bool:
        stop = torch.zeros(1, dtype=torch.int32)
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        return bool(stop.item())

    def pause(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class _Turn:
    """Some steps of one form, in their order."""

    steps_s: list[float]
    inside_s: list[float]
    """Of each step, what was spent in the boundary."""


class _Steps:
    """Steps of all ranks in lockstep."""

    def __init__(self, step_s: float) -> None:
        self._matrix = torch.rand(_SIZE, _SIZE)
        self._gradients = torch.zeros(_GRADIENT_ELEMENTS)
        self._products = 1
        self._calibrate(step_s)

    def turn(self, form: _Form, steps: int) -> _Turn:
        """The first step is not counted: it is the one that finds nothing settled."""
        steps_s, inside_s = zip(*(self._step(form) for _ in range(1 + steps)), strict=True)
        form.pause()
        return _Turn(list(steps_s[1:]), list(inside_s[1:]))

    def _step(self, form: _Form) -> tuple[float, float]:
        start_s = time.perf_counter()
        self._compute()
        dist.all_reduce(self._gradients)
        boundary_s = time.perf_counter()
        stop = form.boundary()
        end_s = time.perf_counter()
        assert not stop
        return end_s - start_s, end_s - boundary_s

    def _compute(self) -> None:
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix)

    def _calibrate(self, step_s: float) -> None:
        took_s = []
        for _ in range(_SETTLING):
            start_s = time.perf_counter()
            self._compute()
            took_s.append(time.perf_counter() - start_s)
        wanted = torch.tensor([max(1, round(step_s / min(took_s)))])
        # The same work on every rank: what differs is what others leave of the machine.
        dist.all_reduce(wanted, dist.ReduceOp.MIN)
        self._products = int(wanted)


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """One rank's times in seconds, by form: each step's in the boundary, each turn's growth of the whole step."""
    steps = _Steps(settings["step_s"])
    nothing = _Nothing()
    forms: dict[str, _Form] = {
        "agreement": _Agreement(BoardAgreement(_page(Path(settings["memory"])), _GENERATION)),
        "across_machines": _Agreement(GlooAgreement()),
        "blocking": _Blocking(),
        NOTHING: nothing,
    }
    names = [*FORMS, NOTHING]
    steps.turn(nothing, _SETTLING)
    before = steps.turn(nothing, settings["steps"])
    inside_s: dict[str, list[float]] = {name: [] for name in names}
    longer_s: dict[str, list[float]] = {name: [] for name in names}
    for number in range(settings["rounds"]):
        # Who comes first changes: none has the better place.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            turn = steps.turn(forms[name], settings["steps"])
            after = steps.turn(nothing, settings["steps"])
            inside_s[name] += turn.inside_s
            undisturbed_s = statistics.median(before.steps_s + after.steps_s)
            longer_s[name].append(statistics.median(turn.steps_s) - undisturbed_s)
            before = after
    return {"inside_s": inside_s, "longer_s": longer_s}


if __name__ == "__main__":
    todo = begin()
    leave(todo, measure(todo), last=True)
