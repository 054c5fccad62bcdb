"""Copies bytes of leaves into a slot, behind the training thread.

One thread of its own makes the copies, in order; each is one call into native code for a group of leaves, so that
neither Python's lock nor thousands of calls stand in the training's way. Leaves on an accelerator are copied by a
stream of its own (see `surefoot.trainer.stage.streams`); for those in ordinary memory the thread itself moves the
bytes.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from surefoot.host.priority import give_way
from surefoot.trainer.stage.witness import Witness
from surefoot.trainer.state.tensors import copy_all, is_plainly_copied

Pair = tuple[torch.Tensor, torch.Tensor]
"""Destination in the slot, and source."""

HOST = torch.device("cpu")
_GROUP_BYTES = 32 * 1024 * 1024
"""About how many bytes one call copies: few enough calls, each short enough to react soon."""


class Lane(Protocol):
    """The way in which the copies of one step run behind the training."""

    def boundary(self, pairs: Sequence[Pair]) -> None:
        """In the training thread: copy these as they are at this point of the program."""

    def offer(self, pairs: Sequence[Pair]) -> None:
        """In the training thread: take these, to copy them behind it."""

    def behind(self, pairs: Sequence[Pair], witness: Witness | None) -> None:
        """In the copier's thread: copy the offered leaves, and then have the witness compare its exact sums."""

    def help(self) -> None:
        """In the training thread, which has nothing else to do: copy the groups that no thread has begun to copy."""

    def wait(self) -> None:
        """In the copier's thread: wait until all bytes are in the slot."""

    def hold_optimizer(self) -> None:
        """In the training thread, before the optimizer changes the sources: order those changes after the copies."""

    @property
    def host_must_wait(self) -> bool:
        """True if the training thread itself has to wait for the copies, since nothing else keeps the order."""


class HostLane:
    """Sources in ordinary memory.

    The copier gives way to all other threads, so on a machine with more work than processors it may have copied little
    when the training thread has to wait for it; then that thread copies the rest itself.
    """

    host_must_wait = True

    def __init__(self) -> None:
        self._left: deque[list[Pair]] = deque()
        self._helping = threading.Lock()

    def boundary(self, pairs: Sequence[Pair]) -> None:
        copy_groups(pairs)

    def offer(self, pairs: Sequence[Pair]) -> None:
        self._left.extend(_groups(pairs))

    def behind(self, pairs: Sequence[Pair], witness: Witness | None) -> None:
        del pairs
        self._copy_what_is_left()
        # The training thread may still be copying the last group that it took, in `help`.
        with self._helping:
            if witness is not None:
                witness.compare(HOST)

    def help(self) -> None:
        with self._helping:
            self._copy_what_is_left()

    def _copy_what_is_left(self) -> None:
        while True:
            try:
                group = self._left.popleft()
            except IndexError:
                return
            copy_groups(group)

    def wait(self) -> None:
        return

    def hold_optimizer(self) -> None:
        return


def copy_groups(pairs: Iterable[Pair], *, non_blocking: bool = False) -> None:
    """Copy each source into its destination, many by one call."""
    plain: list[Pair] = []
    odd: list[Pair] = []
    for pair in pairs:
        (plain if is_plainly_copied(pair[1]) else odd).append(pair)
    with torch.no_grad():
        for group in _groups(plain):
            torch._foreach_copy_([to for to, _ in group], [source for _, source in group], non_blocking)
    copy_all(odd)


def _groups(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    group: list[Pair] = []
    size_bytes = 0
    for pair in pairs:
        group.append(pair)
        size_bytes += pair[1].numel() * pair[1].element_size()
        if size_bytes >= _GROUP_BYTES:
            yield group
            group, size_bytes = [], 0
    if group:
        yield group


class Copier:
    """The thread that copies. It works in the order of submission."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Queue work, which must not raise: nothing would report the error."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="surefoot-copier", daemon=True)
            self._thread.start()
        self._work.put(work)

    def close(self) -> None:
        """Return when all work that was submitted is done."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        give_way()
        while (work := self._work.get()) is not None:
            work()
