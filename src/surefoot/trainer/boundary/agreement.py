"""The trainers' agreement over a gloo group of its own (see core/agreement.py for what is agreed).

At each boundary `settle` returns the result of the previous boundary's vectors, and `post` sends this one's. A gloo
group is broken for good by its first time-out, so its time-out is long, and an error here is never raised: the user's
own collective raises first, or the agents act.
"""

from __future__ import annotations

import ctypes
import secrets
from array import array
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from surefoot.core.agreement import FIELDS, Vector

_TIMEOUT = timedelta(hours=24)
"""Longer than any group of the user's: a rank may evaluate alone for hours."""


class Agreement(Protocol):
    """The way in which all ranks decide alike at each boundary."""

    def settle(self, mine: Callable[[], Vector]) -> Vector:
        """The vector that all ranks agreed on for this boundary; `mine` makes this rank's own vector as of now."""

    def post(self, vector: Vector) -> None:
        """Send this rank's vector for the next boundary."""

    def leave(self) -> None:
        """Leave in good order: from here on no rank waits for this one."""

    def abandon(self) -> None:
        """Leave at once because of an error, without a message: the other ranks may be gone, and this one must not wait
        for them."""


class LoneAgreement:
    """One rank agrees with itself, at once."""

    def settle(self, mine: Callable[[], Vector]) -> Vector:
        return mine()

    def post(self, vector: Vector) -> None:
        del vector

    def leave(self) -> None:
        return

    def abandon(self) -> None:
        return


class GlooAgreement:
    """One asynchronous MAX all-reduce of a few integers per boundary.

    Every step of the user's waits for this, so one buffer is used for good, and the group is called directly. A new
    tensor and the checks of `dist.all_reduce` would take longer than all the rest together.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self._words = array("q", [0] * FIELDS)
        self._tensor = torch.frombuffer(self._words, dtype=torch.int64)
        """The same memory, in the form that the group takes."""
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._pending: dist.Work | None = None
        """The all-reduce under way, which owns the buffer until it was waited for."""
        self._over = False

    def draw(self) -> int:
        """A random number, the same on all ranks."""
        drawn = torch.tensor([secrets.randbits(62)], dtype=torch.int64)
        dist.broadcast(drawn, src=0, group=self._group)
        return int(drawn)

    def settle(self, mine: Callable[[], Vector]) -> Vector:
        if self._over:
            return mine()
        # Waited for, never polled: a rank that went on without the result would act on another step.
        agreed = self._wait()
        if agreed is None:
            return Vector(free_slots=1)
        if agreed.leaving:
            self._over = True
        return agreed

    def post(self, vector: Vector) -> None:
        if self._over:
            return
        self._words[:] = array("q", vector.encode())
        try:
            self._pending = self._group.allreduce([self._tensor], self._options)
        except RuntimeError:
            self._lost()

    def leave(self) -> None:
        self.settle(Vector)
        self.post(Vector(leaving=True))
        self._wait()
        self._over = True

    def abandon(self) -> None:
        if self._pending is not None:
            # A group that is freed joins its threads, and one of them waits for the other ranks as long as they live.
            # If a peer died while this process was stopped, it waits up to the group's time-out (gloo's send does not
            # notice such a death; torch 2.13). This process could not end until then. So this group is never freed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._over = True

    def _wait(self) -> Vector | None:
        if self._pending is None:
            return None
        work, self._pending = self._pending, None
        try:
            work.wait()
        except RuntimeError:
            self._lost()
            return None
        return Vector.decode(self._words)

    def _lost(self) -> None:
        # A peer is gone. The user's own collective reports that better, and the agents end this rank.
        self._over = True
        self._pending = None
