"""Where the trainer stands in a data loader: epochs begun and batches *consumed*, whatever was fetched ahead.

A plain DataLoader over a map-style data set is put back by its sampler: the random state at the epoch's start is
restored, the sampler is run over what was consumed without fetching anything, and the first fetch is the next batch.
Anything else that can be iterated is put back by drawing and dropping, or by its own `load_state_dict`.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from surefoot.core.values import decode, encode
from surefoot.errors import ConfigError
from surefoot.trainer import rng
from surefoot.trainer.numpy_values import EXTRAS


class Shielded:
    """A worker_init_fn that makes a worker deaf to SIGTERM: it is meant for the job, and the trainer decides.

    torch gives its workers a handler of their own, so that being started with SIGTERM ignored is not enough.
    """

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self._inner = inner

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._inner is not None:
            self._inner(worker)


class _Skipping:
    """A sampler that can be told to pass over its first items. Transparent otherwise."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.skip = 0
        self._begun: _Lazy | None = None

    def __iter__(self) -> Iterator[Any]:
        self._begun = _Lazy(self._inner, self.skip)
        self.skip = 0
        return self._begun

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def prime(self) -> None:
        """Let the sampler draw what it draws before its first item, now, and pass over what is to be skipped."""
        if self._begun is not None:
            self._begun.prime()


class _Lazy:
    """A sampler's iterator that begins when first used: a DataLoader draws its own seed before that."""

    def __init__(self, inner: Iterable[Any], skip: int) -> None:
        self._inner = inner
        self._skip = skip
        self._items: Iterator[Any] | None = None

    def __iter__(self) -> _Lazy:
        return self

    def __next__(self) -> Any:
        self.prime()
        assert self._items is not None
        return next(self._items)

    def prime(self) -> None:
        if self._items is None:
            items = iter(self._inner)
            passed = sum(1 for _ in itertools.islice(items, self._skip))
            # One item ahead, so that everything drawn before it is drawn by now.
            ahead = list(itertools.islice(items, 1)) if passed == self._skip else []
            self._items = itertools.chain(ahead, items)


class Position:
    """One loader's position. `consumed` moves when a step is finished, not when its batch is fetched."""

    def __init__(self, name: str, loader: Any, warn: Callable[[str], None]) -> None:
        self._name = name
        self._loader = loader
        self._warn = warn
        self._own_state = callable(getattr(loader, "load_state_dict", None))
        self._skipping = None if self._own_state else _install(loader)
        if isinstance(loader, DataLoader):
            loader.worker_init_fn = Shielded(loader.worker_init_fn)
        self.epoch = 0
        self.consumed = 0
        self._start: Any = None
        self._resumed: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Position as of the last finished step, encoded."""
        state = {"epoch": self.epoch, "consumed": self.consumed, "start": self._start}
        if self._own_state:
            state["own"] = encode(self._loader.state_dict(), self._name, extras=EXTRAS)
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Where to go on; takes effect when iteration begins."""
        self._resumed = state

    def batches(self) -> Iterator[Any]:
        """Batches for ever, epoch after epoch."""
        iterator = self._resume() if self._resumed is not None else self._begin()
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

    def step_done(self) -> None:
        self.consumed += 1

    def _begin(self) -> Iterator[Any]:
        self._set_epoch()
        self._start = {"rng": rng.capture(), "generators": self._generators()}
        return iter(self._loader)

    def _resume(self) -> Iterator[Any]:
        state = self._resumed
        assert state is not None
        self._resumed = None
        self.epoch, self.consumed, self._start = state["epoch"], state["consumed"], state["start"]
        if self._own_state:
            self._loader.load_state_dict(decode(state["own"], extras=EXTRAS))
            self._set_epoch()
            return iter(self._loader)
        if self._start is None:
            return self._begin()
        now = rng.capture()
        try:
            self._set_epoch()
            rng.restore(self._start["rng"])
            self._set_generators(self._start["generators"])
            return self._at_position()
        finally:
            # Restored last: the next fetch draws what it would have drawn.
            rng.restore(now)

    def _at_position(self) -> Iterator[Any]:
        if self._skipping is not None:
            self._skipping.skip = self.consumed
            iterator: Iterator[Any] = iter(self._loader)
            self._skipping.prime()
            return iterator
        if self.consumed:
            self._warn(
                f"{self._name}: going to batch {self.consumed} of the epoch by reading from its start, since the "
                "loader has no sampler and no state; give it a state_dict()/load_state_dict() to save that time"
            )
        iterator = iter(self._loader)
        for _ in itertools.islice(iterator, self.consumed):
            pass
        return iterator

    def _set_epoch(self) -> None:
        for part in (
            self._loader,
            getattr(self._loader, "sampler", None),
            getattr(self._loader, "batch_sampler", None),
        ):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self.epoch)

    def _generators(self) -> list[Any]:
        return [encode(generator.get_state().numpy().tobytes(), "generator") for generator in self._torch_generators()]

    def _set_generators(self, states: list[Any]) -> None:
        for generator, state in zip(self._torch_generators(), states, strict=False):
            generator.set_state(torch.frombuffer(bytearray(decode(state)), dtype=torch.uint8))

    def _torch_generators(self) -> list[torch.Generator]:
        """The loader's and its sampler's own generators, each once."""
        sampler = getattr(self._loader, "sampler", None)
        found = (getattr(self._loader, "generator", None), getattr(sampler, "generator", None))
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _install(loader: Any) -> _Skipping | None:
    """Put a skipping sampler into a map-style DataLoader; None where there is no sampler to skip with."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    current = getattr(loader, name)
    if isinstance(current, _Skipping):
        return current
    skipping = _Skipping(current)
    # DataLoader forbids the assignment, because it would not reach an iterator that exists: there is none yet.
    object.__setattr__(loader, name, skipping)
    loader._iterator = None
    return skipping
