"""A sampler that can begin at any item, and takes the place of a DataLoader's own sampler."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.utils.data import BatchSampler, DataLoader, IterableDataset


class Drawing(Protocol):
    """The part that begins a sampler and gets each item that it yields."""

    def draw(self, sampler: Any, /) -> Iterator[Any]:
        """The inner sampler's iterator, when its first item is asked for."""
        ...

    def drawn(self, item: Any, /) -> None:
        """Called with each item, which is about to be fetched."""
        ...


class Skipping:
    """A sampler whose beginning is left to a `Drawing`. It is transparent otherwise.

    It keeps no other object alive: if it did, the loader would be part of a reference cycle, and the garbage collector
    would free it. The collector ends the queues of the loader's workers before their iterator can make the workers end,
    which then waits in vain for five seconds per worker, in the midst of the code that the collector interrupted
    (torch 2.13, CPython 3.11).
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._drawing: Callable[[], Drawing | None] = _nobody
        self._begun: Callable[[], _Lazy | None] = _nobody

    def leave_to(self, drawing: Drawing) -> None:
        """Leave the beginning to `drawing`, as long as another object keeps it alive."""
        self._drawing = weakref.ref(drawing)

    def __iter__(self) -> Iterator[Any]:
        # A DataLoader with workers asks twice, and uses only the second one.
        lazy = _Lazy(self)
        self._begun = weakref.ref(lazy)
        return lazy

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if "inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.inner, name)

    def prime(self) -> None:
        """Begin now, and not when the first item is asked for."""
        lazy = self._begun()
        if lazy is not None:
            lazy.prime()

    def draw(self) -> Iterator[Any]:
        drawing = self._drawing()
        return iter(self.inner) if drawing is None else drawing.draw(self.inner)

    def drawn(self, item: Any) -> None:
        drawing = self._drawing()
        if drawing is not None:
            drawing.drawn(item)


class _Lazy:
    """A sampler's iterator that begins when first used: a DataLoader draws its own seed before that."""

    def __init__(self, sampler: Skipping) -> None:
        self._sampler = sampler
        self._items: Iterator[Any] | None = None

    def __iter__(self) -> _Lazy:
        return self

    def __next__(self) -> Any:
        self.prime()
        assert self._items is not None
        item = next(self._items)
        self._sampler.drawn(item)
        return item

    def prime(self) -> None:
        if self._items is None:
            self._items = self._sampler.draw()


class _From:
    """A sampler's items from a number on, as a sampler."""

    def __init__(self, inner: Any, start: int) -> None:
        self._inner = inner
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        return iter(self._inner.iter_from(self._start))


def starting_at(sampler: Any, start: int) -> Iterator[Any]:
    """The items of one pass from number `start` on; at no cost if the sampler has `iter_from`, else by passing over."""
    if callable(getattr(sampler, "iter_from", None)):
        return _From(sampler, start).__iter__()
    if type(sampler) is BatchSampler and callable(getattr(sampler.sampler, "iter_from", None)):
        inner: Any = _From(sampler.sampler, start * sampler.batch_size)
        return iter(BatchSampler(inner, sampler.batch_size, sampler.drop_last))
    items: Iterator[Any] = iter(sampler)
    for _ in itertools.islice(items, start):
        pass
    return items


def install(loader: Any) -> Skipping | None:
    """Put a skipping sampler into a map-style DataLoader; None if it has no sampler that could skip."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    current = getattr(loader, name)
    # It is a skipping sampler already if an earlier run in this process used this loader.
    skipping = current if isinstance(current, Skipping) else Skipping(current)
    # DataLoader forbids the assignment, because it would not reach an iterator that exists: there is none from here on.
    object.__setattr__(loader, name, skipping)
    loader._iterator = None
    return skipping


def _nobody() -> None:
    return None
