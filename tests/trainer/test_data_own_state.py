"""Loaders, and iterable data sets, that know their place themselves; and those that do not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from through_a_slot import register, stage
from torch.utils.data import DataLoader, IterableDataset

from surefoot.errors import UnsupportedStateError
from surefoot.trainer.data.position import Position
from surefoot.trainer.state import rng
from surefoot.trainer.state.registry import Registry


class StatefulLoader(DataLoader[Any]):
    """The protocol of data libraries' stateful loaders, as far as it matters here.

    Its state counts batches that were *yielded*, whatever the workers have fetched ahead, and holds the state of the
    generator that the epoch's order was drawn from, as a tensor. A state taken after an epoch's last batch yields
    nothing more: the next epoch begins with the iteration after.
    """

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(range(size), shuffle=True, **options)  # type: ignore[arg-type]
        self._yielded = 0
        self._order: torch.Tensor = torch.get_rng_state()
        self._next: dict[str, Any] | None = None
        self.loads = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skip = 0
        if self._next is not None:
            skip = self._next["yielded"]
            torch.set_rng_state(self._next["order"])
            self._next = None
        self._order, self._yielded = torch.get_rng_state(), skip
        batches = super().__iter__()
        # Batches that were yielded before are fetched again and dropped, which moves no position.
        passed = list(itertools.islice(batches, skip))
        assert len(passed) == skip
        return self._counted(batches)

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._yielded += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self._yielded, "order": self._order, "snapshot": {"workers": {}, "none": None}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        self._next = state


class Stream(IterableDataset[int]):
    """An order of its own, kept in its state with the place in it."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.at = 0
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[int]:
        if not self.order:
            self.order = random.sample(range(50), 17)
        while self.at < len(self.order):
            self.at += 1
            yield self.order[self.at - 1]
        self.order, self.at = [], 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = list(state["order"]), state["at"]

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Forgetful(IterableDataset[int]):
    """A stream without a state."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(17).tolist()


def _seed(saved: Any) -> None:
    torch.manual_seed(7 if saved is None else random.randrange(1 << 30))
    random.seed(7 if saved is None else None)
    np.random.seed(7 if saved is None else None)


def _run(make: Callable[[], Any], stops: list[int], total: int, told: list[str] | None = None) -> list[Any]:
    """Ids, epochs and the state of every generator after each step of a run that is stopped and started anew."""
    seen: list[Any] = []
    saved: Any = None
    for stop in [*stops, total]:
        _seed(saved)
        position = Position("loader", make(), [].append if told is None else told.append)
        if saved is not None:
            position.load(saved[0])
            rng.restore(saved[1])
        batches = position.batches()
        while len(seen) < stop:
            ids = next(batches).tolist()
            torch.rand(1)
            random.random()
            position.step_done()
            saved = (position.state(), rng.capture())
            seen.append((position.epoch, ids, saved[1]))
        # The next batch is fetched, and its step is never finished.
        next(batches)
    return seen


_MAKERS: dict[str, Callable[[], Any]] = {
    "loader": lambda: StatefulLoader(17, batch_size=4),
    "loader_workers": lambda: StatefulLoader(17, batch_size=4, num_workers=2, prefetch_factor=3),
    "data_set": lambda: DataLoader(Stream(), 4),
}


@pytest.mark.holds("second-resume-in-epoch", "prefetched-batches")
@pytest.mark.parametrize("kind", _MAKERS)
def test_what_was_yielded_counts_and_not_what_was_fetched(kind: str) -> None:
    """Three stops in one epoch, at its last batch, and in the next: ids, epochs and every generator's state."""
    straight = _run(_MAKERS[kind], [], 12)
    assert straight[-1][0] == 2
    assert len({str(ids) for _epoch, ids, _rng in straight}) == 12
    for stops in ([1, 2, 3], [5, 6, 7], [4, 10]) if kind != "loader_workers" else ([1, 2, 5, 8],):
        assert _run(_MAKERS[kind], stops, 12) == straight, stops


def test_a_loop_that_is_entered_again_at_an_epoch_s_start() -> None:
    """Left with the new epoch's first batch in hand, the loop goes on with that very batch."""
    for make in (_MAKERS["loader"], _MAKERS["data_set"]):
        _seed(None)
        position = Position("loader", make(), print)
        seen = []
        for steps in (5, 3):
            batches = position.batches()
            for _ in range(steps):
                seen.append(next(batches).tolist())
                position.step_done()
            in_hand = next(batches).tolist()
            batches.close()  # type: ignore[attr-defined]
        ids = list(itertools.chain(*seen[:5]))
        assert len(set(ids)) == len(ids) == 17
        assert position.epoch == 1
        again = next(position.batches()).tolist()
        if make is _MAKERS["loader"]:
            # The stream has drawn a new order for the epoch, whose state was never taken.
            assert in_hand == again


def test_a_state_that_cannot_be_kept_is_refused() -> None:
    """By the loader's name and the path within its state."""

    class Odd(StatefulLoader):
        def state_dict(self) -> dict[str, Any]:
            return {"worker": {"handle": open}}

    position = Position("train", Odd(17, batch_size=4), print)
    next(position.batches())
    with pytest.raises(UnsupportedStateError, match=r"^train\.worker\.handle: "):
        position.step_done()


@pytest.mark.parametrize(
    ("make", "why", "remedy"),
    [
        (
            lambda: DataLoader(Forgetful(), 4),
            "its data set is iterable and has no state",
            "give the data set state_dict() and load_state_dict() and use num_workers=0, or take torchdata's",
        ),
        (
            lambda: DataLoader(Stream(), 4, num_workers=1),
            "its data set keeps its state in worker processes, out of reach",
            "; use num_workers=0, or take torchdata's StatefulDataLoader, or a map-style data set",
        ),
        (
            lambda: (torch.tensor([number]) for number in range(9)),
            "it is not a DataLoader and has no state of its own",
            "give it state_dict() and load_state_dict()",
        ),
    ],
)
def test_what_has_no_state_is_told_once(make: Callable[[], Any], why: str, remedy: str) -> None:
    """Once in a process, at its first batch, with the reason, what follows from it, and what to do."""
    told: list[str] = []
    straight = [ids for _epoch, ids, _rng in _run(make, [], 4, told)]
    (first,) = told
    assert first.startswith(f"loader: {why}, so a resumed run finds its place by reading the epoch from its start; ")
    assert remedy in first
    told.clear()
    resumed = [ids for _epoch, ids, _rng in _run(make, [3], 4, told)]
    assert told[0] == first
    (second,) = told[1:]
    assert second.startswith(f"loader: {why}, so it went to batch 3 of the epoch by reading from the epoch's start; ")
    if "Stream" not in str(type(getattr(make(), "dataset", None))):
        assert resumed == straight


def test_a_list_needs_no_words() -> None:
    """A list is exact and cheap: nothing to tell."""
    told: list[str] = []
    batches = [torch.tensor([number]) for number in range(5)]
    straight = _run(lambda: batches, [], 9, told)
    assert _run(lambda: batches, [2, 5, 7], 9, told) == straight
    assert told == []


@pytest.mark.parametrize("kind", ["loader", "data_set"])
def test_iterated_by_the_script_itself(kind: str) -> None:
    """A registered loader that knows its place is kept without run.batches, and taking its state draws nothing."""

    def run(stops: list[int]) -> list[Any]:
        seen: list[Any] = []
        saved: Any = None
        for stop in [*stops, 5]:
            _seed(saved)
            loader = _MAKERS[kind]()
            registry = Registry({"train": loader}, {}, print, print)
            registry.register()
            if saved is not None:
                position = registry.position_of(loader)
                position.load(saved[0]["train"])
                rng.restore(saved[1])
            for batch in itertools.islice(loader, stop - len(seen)):
                registry.check_habits()
                torch.rand(1)
                before = rng.capture()
                saved = (registry.positions(), rng.capture())
                assert saved[1] == before
                seen.append(batch.tolist())
        return seen

    straight = run([])
    assert run([1, 2, 4]) == straight


def test_a_registered_generator_is_put_back_in_place() -> None:
    """NumPy's, of either make, and torch's: the script's own variable goes on, not a copy of it."""

    def objects() -> dict[str, Any]:
        torch_made = torch.Generator().manual_seed(1)
        return {"gen": np.random.default_rng(1), "old": np.random.RandomState(1), "own": torch_made}

    def draw(made: dict[str, Any]) -> list[Any]:
        return [made["gen"].random(), made["old"].rand(), torch.rand(1, generator=made["own"]).item()]

    first = objects()
    draw(first)
    staged = stage(register(first))
    expected = draw(first)
    second = objects()
    staged.load_into(register(second))
    assert draw(second) == expected
