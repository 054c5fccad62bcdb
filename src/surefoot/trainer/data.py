"""Where the trainer stands in a data loader: epochs begun and batches *consumed*, whatever was fetched ahead.

A plain DataLoader over a map-style data set is put back by its sampler: the random state at the epoch's start is
restored, the sampler is run over what was consumed without fetching anything, and the first fetch is the next batch.
That is exact for a sampler that draws from the global generators when it begins, or from a generator of its own at any
time, as torch's do; not for one that draws from the global ones at each item, between the draws of the training.
Anything else that can be iterated is put back by drawing and dropping, or by its own `load_state_dict`.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from surefoot.core.values import decode, encode
from surefoot.errors import ConfigError
from surefoot.trainer import rng
from surefoot.trainer.numpy_values import EXTRAS


class Shielded:
    """A worker_init_fn that makes a worker deaf to SIGTERM: it is meant for the job, and the trainer decides.

    torch gives its workers a handler of their own, so that being started with SIGTERM ignored is not enough. The
    trainer's own SIGTERM still ends a worker: that is how Python ends those that are left when a program is over.
    """

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self._inner = inner
        self._trainer_pid = os.getpid()

    def __call__(self, worker: int) -> None:
        # Blocked in every thread, so that it stays for the one that waits for it and can see who sent it.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_obey, args=(self._trainer_pid,), name="surefoot-shield", daemon=True).start()
        if self._inner is not None:
            self._inner(worker)


def _obey(trainer_pid: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != trainer_pid:
        pass
    os._exit(0)


class _Skipping:
    """A sampler that can be told to pass over its first items. Transparent otherwise."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.drawing: Callable[[], AbstractContextManager[int]] = _passing_over_nothing
        """Entered around what the inner sampler draws before its first item; says how many items to pass over."""
        self._begun: _Lazy | None = None

    def __iter__(self) -> Iterator[Any]:
        # A DataLoader with workers asks twice, and uses only the second one.
        self._begun = _Lazy(self)
        return self._begun

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def begin(self) -> Iterator[Any]:
        """Items of the inner sampler, with all drawn that it draws before its first one."""
        with self.drawing() as skip:
            items = iter(self._inner)
            passed = sum(1 for _ in itertools.islice(items, skip))
            ahead = list(itertools.islice(items, 1)) if passed == skip else []
        return itertools.chain(ahead, items)

    def prime(self) -> None:
        """Begin now, and not when the first item is asked for."""
        if self._begun is not None:
            self._begun.prime()


class _Lazy:
    """A sampler's iterator that begins when first used: a DataLoader draws its own seed before that."""

    def __init__(self, sampler: _Skipping) -> None:
        self._sampler = sampler
        self._items: Iterator[Any] | None = None

    def __iter__(self) -> _Lazy:
        return self

    def __next__(self) -> Any:
        self.prime()
        assert self._items is not None
        return next(self._items)

    def prime(self) -> None:
        if self._items is None:
            self._items = self._sampler.begin()


@contextmanager
def _passing_over_nothing() -> Iterator[int]:
    yield 0


class Position:
    """One loader's position. `consumed` moves when a step is finished, not when its batch is fetched."""

    def __init__(self, name: str, loader: Any, warn: Callable[[str], None]) -> None:
        self._name = name
        self._loader = loader
        self._warn = warn
        self._own_state = callable(getattr(loader, "load_state_dict", None))
        self._skipping = None if self._own_state else _install(loader)
        if self._skipping is not None:
            self._skipping.drawing = self._drawing
        shield(loader)
        self.epoch = 0
        self.consumed = 0
        self._start: Any = None
        """Random state when this epoch's order was drawn."""
        self._own: Any = None
        """The loader's own state as of the last finished step."""
        self._skip = 0
        self._resumed: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Position as of the last finished step, encoded."""
        if self._resumed is not None:
            return self._resumed
        state = {"epoch": self.epoch, "consumed": self.consumed, "start": self._start}
        if self._own is not None:
            state["own"] = self._own
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Where to go on; takes effect when iteration begins."""
        self._resumed = state

    def batches(self) -> Iterator[Any]:
        """Batches for ever, epoch after epoch. A second call goes on where the last finished step left the first."""
        iterator = self._resume() if self._resumed is not None else self._begin()
        try:
            while True:
                fetched = False
                for batch in iterator:
                    fetched = True
                    yield batch
                if not fetched and self.consumed == 0:
                    raise ConfigError(f"{self._name}: the loader yields no batch")
                self.epoch += 1
                self.consumed = 0
                iterator = self._begin()
        finally:
            self._resumed = self.state()

    def step_done(self) -> None:
        self.consumed += 1
        if self._own_state:
            self._own = encode(self._loader.state_dict(), self._name, extras=EXTRAS)

    def _begin(self) -> Iterator[Any]:
        self._set_epoch()
        if self._skipping is None:
            self._start = self._capture()
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        # Workers that are started here never meet a SIGTERM unshielded: they inherit that it is blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            iterator: Iterator[Any] = iter(self._loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return iterator

    def _resume(self) -> Iterator[Any]:
        state = self._resumed
        assert state is not None
        self._resumed = None
        self.epoch, self.consumed, self._start = state["epoch"], state["consumed"], state["start"]
        self._own = state.get("own")
        if self._own_state and self._own is not None:
            self._loader.load_state_dict(decode(self._own, extras=EXTRAS))
            self._set_epoch()
            return self._iterate()
        if self._start is None:
            return self._begin()
        now = rng.capture()
        try:
            self._set_epoch()
            return self._skipped(self._skipping) if self._skipping is not None else self._dropped()
        finally:
            # Restored last: the next fetch draws what it would have drawn.
            rng.restore(now)

    def _skipped(self, skipping: _Skipping) -> Iterator[Any]:
        self._skip = self.consumed
        iterator = self._iterate()
        skipping.prime()
        return iterator

    @contextmanager
    def _drawing(self) -> Iterator[int]:
        """Around the drawing of an epoch's order: with the random state that it was first drawn with.

        Not the state before the loader's iterator was made: that draws a seed of its own, unless its workers persist.
        """
        skip, self._skip = self._skip, 0
        if not skip:
            self._start = self._capture()
            yield 0
            return
        now = rng.capture()
        self._restore(self._start)
        try:
            yield skip
        finally:
            rng.restore(now)

    def _dropped(self) -> Iterator[Any]:
        if self.consumed:
            self._warn(
                f"{self._name}: going to batch {self.consumed} of the epoch by reading from its start, since the "
                "loader has no sampler and no state; give it a state_dict()/load_state_dict() to save that time"
            )
        self._restore(self._start)
        iterator = self._iterate()
        for _ in itertools.islice(iterator, self.consumed):
            pass
        return iterator

    def _parts(self) -> list[Any]:
        """The loader and what it is made of, each once."""
        sampler, batch_sampler = (getattr(self._loader, name, None) for name in ("sampler", "batch_sampler"))
        inner = getattr(batch_sampler, "sampler", None)
        parts = (self._loader, sampler, batch_sampler, inner, getattr(self._loader, "dataset", None))
        return list({id(part): part for part in parts if part is not None}.values())

    def _set_epoch(self) -> None:
        done: set[Any] = set()
        for part in self._parts():
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch) and set_epoch not in done:
                # A wrapper hands out the method of what it wraps.
                done.add(set_epoch)
                set_epoch(self.epoch)

    def _capture(self) -> dict[str, Any]:
        generators = [encode(g.get_state().numpy().tobytes(), "generator") for g in self._torch_generators()]
        return {"rng": rng.capture(), "generators": generators}

    def _restore(self, start: dict[str, Any]) -> None:
        rng.restore(start["rng"])
        for generator, state in zip(self._torch_generators(), start["generators"], strict=False):
            generator.set_state(torch.frombuffer(bytearray(decode(state)), dtype=torch.uint8))

    def _torch_generators(self) -> list[torch.Generator]:
        """The loader's and its samplers' own generators, each once."""
        found = (getattr(part, "generator", None) for part in self._parts())
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def shield(loader: Any) -> None:
    """Make the workers that a DataLoader will start deaf to SIGTERM."""
    if isinstance(loader, DataLoader) and not isinstance(loader.worker_init_fn, Shielded):
        loader.worker_init_fn = Shielded(loader.worker_init_fn)


def _install(loader: Any) -> _Skipping | None:
    """Put a skipping sampler into a map-style DataLoader; None where there is no sampler to skip with."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    current = getattr(loader, name)
    if isinstance(current, _Skipping):
        # Of an earlier run in this process.
        loader._iterator = None
        return current
    skipping = _Skipping(current)
    # DataLoader forbids the assignment, because it would not reach an iterator that exists: there is none yet.
    object.__setattr__(loader, name, skipping)
    loader._iterator = None
    return skipping
