"""Tracks a trainer's position in a data loader: epochs begun and batches *consumed*, not batches fetched ahead.

A loader that keeps a state of its own, or whose iterable data set does, is put back by that state. A plain DataLoader
over a map-style data set is put back by its sampler: the random state at the epoch's start is restored, the sampler
begins after the batches that were consumed without fetching anything, and the first fetch is the next batch. That is
exact for a sampler that draws from the global generators when it begins, or from a generator of its own at any time, as
torch's samplers do. The user gets a warning of a sampler that draws from the global generators at each item, between
the draws of the training. Anything else that can be iterated is put back by drawing batches and dropping them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from surefoot.errors import ConfigError
from surefoot.trainer.data.loader_state import decode_state, encode_state, has_state, owner_of
from surefoot.trainer.data.sampler_state import SamplerState
from surefoot.trainer.data.shield import Shielded, born_shielded, shield
from surefoot.trainer.data.skipping import Skipping, install, starting_at
from surefoot.trainer.state import rng

__all__ = ["Position", "Shielded", "shield"]

_COMPARED = 8
"""Batches before the position whose samples are compared after a restart: enough to recognise an order."""


class Position:
    """One loader's position. `consumed` moves when a step is finished, not when its batch is fetched."""

    def __init__(self, name: str, loader: Any, warn: Callable[[str], None]) -> None:
        self._name = name
        self._loader = loader
        self._warn = warn
        self._owner = owner_of(loader)
        self._skipping = None if self._owner is not None else install(loader)
        self._samplers = SamplerState(name, loader)
        self._num_workers = getattr(loader, "num_workers", 0)
        self._in_order = bool(getattr(loader, "in_order", True)) or not self._num_workers
        self._to_judge = self._samplers.is_own_make
        """The sampler is the script's own, and its draws were not observed yet."""
        if self._skipping is not None:
            self._skipping.leave_to(self)
        shield(loader)
        self.epoch = 0
        self.consumed = 0
        self._start: Any = None
        """Random state when this epoch's order was drawn."""
        self._own: Any = None
        """The owner's state as of the last finished step."""
        self._over = False
        """The data set's iteration ended with the last finished step's batch: its state may be that of the next
        epoch."""
        self._iterator: Any = None
        """This epoch's iterator, if no worker runs ahead. An iterator with workers must be freed as soon as it is out
        of use (see `Skipping`)."""
        self._own_generators: list[Any] | None = None
        """The samplers' generators as of the last finished step, where no worker runs ahead."""
        self._ahead: deque[int] = deque()
        """Marks of the batches on their way, oldest first."""
        self._seen: deque[int] = deque(maxlen=_COMPARED)
        """Marks of the last batches consumed in this epoch."""
        self._skip = 0
        self._resumed: dict[str, Any] | None = None
        self._outside = False
        self._warned = False

    def iterated_outside(self) -> None:
        """The script may iterate the loader by itself, until `batches` is called: its own state counts at any time."""
        self._outside = self._owner is not None

    @property
    def known_epoch(self) -> int | None:
        """The epoch as of the last finished step; None while the script iterates the loader by itself."""
        if self._outside:
            return None
        return self.epoch if self._resumed is None else int(self._resumed["epoch"])

    def state(self) -> dict[str, Any]:
        """Position as of the last finished step, encoded."""
        if self._outside:
            with rng.undisturbed():
                own = encode_state(self._owner, self._name)
            return {"epoch": self.epoch, "consumed": self.consumed, "start": None, "own": own}
        if self._resumed is not None:
            return self._resumed
        state = {"epoch": self.epoch, "consumed": self.consumed, "start": self._start}
        if self._own is not None:
            state["own"] = self._own
        if self._over:
            state["over"] = True
        if self._own_generators is not None:
            state["generators"] = self._own_generators
        if self._seen:
            state["seen"] = {"marks": list(self._seen), "ranks": self._ranks()}
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Take the position at which to go on; it takes effect when iteration begins."""
        self._resumed = state
        if self._outside and "own" in state:
            with rng.undisturbed():
                self._owner.load_state_dict(decode_state(state["own"]))

    def batches(self) -> Iterator[Any]:
        """Batches for ever, epoch after epoch. A second call goes on where the last finished step left the first."""
        self._outside = False
        is_resumed = self._resumed is not None
        iterator = self._resume() if is_resumed else self._begin()
        self._warn_once()
        try:
            while True:
                fetched = False
                for batch in iterator:
                    fetched = True
                    yield batch
                if not (fetched or self.consumed or is_resumed):
                    raise ConfigError(f"{self._name}: the loader yields no batch")
                if fetched or self.consumed:
                    self.epoch += 1
                self.consumed = 0
                self._over = False
                self._seen.clear()
                is_resumed = False
                iterator = self._begin()
        finally:
            self._resumed = self.state()

    def step_done(self) -> None:
        self.consumed += 1
        if self._owner is not None:
            self._own = encode_state(self._owner, self._name)
            # A short last batch is made by reading to the end.
            self._over = bool(getattr(getattr(self._iterator, "_dataset_fetcher", None), "ended", False))
        elif not self._num_workers:
            self._own_generators = self._samplers.capture_generators() or None
        if self._ahead:
            self._seen.append(self._ahead.popleft())

    # ------------------------------------------------------------------ beginning an epoch

    def _begin(self) -> Iterator[Any]:
        self._set_epoch()
        if self._skipping is None:
            self._start = self._capture()
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        with born_shielded():
            iterator: Iterator[Any] = iter(self._loader)
        self._iterator = None if self._num_workers else iterator
        return iterator

    def draw(self, sampler: Any) -> Iterator[Any]:
        """An epoch's order, drawn with the random state that it was first drawn with.

        Not the state before the loader's iterator was made: that draws a seed of its own, unless its workers persist.
        """
        skip, self._skip = self._skip, 0
        self._ahead.clear()
        if skip:
            return self._draw_again(sampler, skip)
        self._start = self._capture()
        items = iter(sampler)
        # The first item is taken now, so that the sampler makes all draws that precede it.
        return itertools.chain(list(itertools.islice(items, 1)), self._judged(items), items)

    def drawn(self, item: Any) -> None:
        """Note an item of an order, which is about to be fetched."""
        if self._in_order:
            self._ahead.append(_mark(item))

    def _judged(self, items: Iterator[Any]) -> Iterator[Any]:
        """The next item, if the sampler was not judged yet; warns if taking it draws from the global generators."""
        if self._to_judge:
            self._to_judge = False
            before = rng.capture()
            yield from self._warned_if_drawn(list(itertools.islice(items, 1)), before)

    def _warned_if_drawn(self, items: list[Any], before: Any) -> list[Any]:
        if rng.capture() != before:
            self._warn(
                f"{self._name}: its sampler draws from the global random generators at each item, between the draws "
                "of the training, so a resumed run gets another order; let it draw everything when its iteration "
                "begins, or from a torch.Generator that is an attribute of it"
            )
        return items

    def _ranks(self) -> list[int]:
        here = [dist.get_rank(), dist.get_world_size()] if dist.is_available() and dist.is_initialized() else [0, 1]
        return [*here, *self._samplers.shares()]

    def _set_epoch(self) -> None:
        parts = [self._loader, *self._samplers.samplers, getattr(self._loader, "dataset", None)]
        done: set[Any] = set()
        for part in parts:
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch) and set_epoch not in done:
                # A wrapper hands out the method of the object that it wraps.
                done.add(set_epoch)
                set_epoch(self.epoch)

    def _capture(self) -> dict[str, Any]:
        return {"rng": rng.capture(), **self._samplers.capture()}

    def _restore(self) -> None:
        rng.restore(self._start["rng"])
        self._samplers.restore(self._start)

    # ------------------------------------------------------------------ going on inside an epoch

    def _resume(self) -> Iterator[Any]:
        state, self._resumed = self._resumed, None
        assert state is not None
        self.epoch, self.consumed, self._start = state["epoch"], state["consumed"], state["start"]
        self._own, self._own_generators = state.get("own"), state.get("generators")
        seen = state.get("seen", {"marks": [], "ranks": []})
        # Another number of ranks has other shares of the same batches.
        self._seen = deque(seen["marks"] if seen["ranks"] == self._ranks() else [], maxlen=_COMPARED)
        self._over = state.get("over", False)
        if self._owner is not None and self._own is not None:
            return self._from_own_state()
        if self._start is None:
            return self._begin()
        # The random states are restored last, so that the next fetch draws the numbers that it would have drawn.
        with rng.undisturbed():
            self._set_epoch()
            iterator = self._skipped(self._skipping) if self._skipping is not None else self._dropped()
            if self._own_generators is not None and not self._num_workers:
                self._samplers.restore_generators(self._own_generators)
        return iterator

    def _from_own_state(self) -> Iterator[Any]:
        with rng.undisturbed():
            self._owner.load_state_dict(decode_state(self._own))
            if not self._over:
                if self.consumed and self.consumed == _length(self._loader):
                    # At the end of an epoch such an owner may go on with the next one by itself.
                    self.epoch, self.consumed = self.epoch + 1, 0
                self._set_epoch()
                return self._iterate()
        # A new epoch draws its numbers again.
        self.epoch, self.consumed, self._over = self.epoch + 1, 0, False
        return self._begin()

    def _skipped(self, skipping: Skipping) -> Iterator[Any]:
        self._skip = self.consumed
        iterator = self._iterate()
        skipping.prime()
        return iterator

    def _draw_again(self, sampler: Any, skip: int) -> Iterator[Any]:
        with rng.undisturbed():
            self._restore()
            compared = min(skip, len(self._seen))
            items = starting_at(sampler, skip - compared)
            again = [_mark(item) for item in itertools.islice(items, compared)]
        if again != list(self._seen)[len(self._seen) - compared :]:
            self._warn(
                f"{self._name}: the batches before batch {skip} of epoch {self.epoch} are not those that the run was "
                "trained on: the data set, the batch size or the sampler's order is not what it was, so samples "
                "repeat or are left out; let a sampler's order follow from set_epoch(epoch) or from a torch.Generator "
                "that is an attribute of it, or use surefoot.data.GlobalBatchSampler"
            )
        return items

    def _dropped(self) -> Iterator[Any]:
        self._restore()
        iterator = self._iterate()
        for _ in itertools.islice(iterator, self.consumed):
            pass
        return iterator

    # ------------------------------------------------------------------ what cannot be exact

    def _warn_once(self) -> None:
        """Warn once of the part of this loader's position that cannot be checkpointed, and name the remedy."""
        if self._warned:
            return
        self._warned = True
        if not self._in_order:
            self._warn(
                f"{self._name}: with in_order=False a count of steps does not determine which batches were used, so a "
                "resumed run may repeat some and leave out others; use in_order=True"
            )
        if self._owner is None and self._skipping is None and not isinstance(self._loader, list | tuple):
            self._warn(f"{self._name}: {self._why_read()}; {self._remedy()}")

    def _why_read(self) -> str:
        if not isinstance(self._loader, DataLoader):
            why = "it is not a DataLoader and has no state of its own"
        elif has_state(self._loader.dataset):
            why = "its data set keeps its state in worker processes, out of reach"
        else:
            why = "its data set is iterable and has no state"
        if self.consumed:
            return f"{why}, so it went to batch {self.consumed} of the epoch by reading from the epoch's start"
        return f"{why}, so a resumed run finds its place by reading the epoch from its start"

    def _remedy(self) -> str:
        if not isinstance(self._loader, DataLoader):
            return "give it state_dict() and load_state_dict()"
        assert isinstance(self._loader.dataset, IterableDataset)
        own = "" if has_state(self._loader.dataset) else "give the data set state_dict() and load_state_dict() and "
        return f"{own}use num_workers=0, or take torchdata's StatefulDataLoader, or a map-style data set"


def _mark(item: Any) -> int:
    """A number by which a batch's samples are recognised."""
    return crc32(repr(item).encode())


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
