"""The table: every kind of sampler, with every kind of worker, stopped at every kind of place.

Compared step by step with a run that nobody disturbed: sample ids, and the states of all global generators, so that not
one draw more or less can hide.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from surefoot.data import GlobalBatchSampler, GlobalSampler
from surefoot.trainer.data.position import Position
from surefoot.trainer.state import rng

_SIZE = 17


class _Ids(Dataset[int]):
    def __len__(self) -> int:
        return _SIZE

    def __getitem__(self, index: int) -> int:
        return index


_DATA = _Ids()


def _own() -> torch.Generator:
    return torch.Generator().manual_seed(11)


class _Counting(Sampler[int]):
    """Seeds itself by a count of its own, which no set_epoch moves."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from torch.randperm(_SIZE, generator=torch.Generator().manual_seed(self.passes)).tolist()


class _NumPyOwn(Sampler[int]):
    """Draws from a NumPy and a Python generator of its own, at each item."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(4)
        self.other = random.Random(5)

    def __iter__(self) -> Iterator[int]:
        for _ in range(_SIZE):
            yield int(self.rng.integers(_SIZE // 2)) + self.other.randrange(_SIZE // 2)


class _WithState(Sampler[int]):
    """Keeps a state that says where it stands, as resumable samplers do, and moves it when it is asked for an item."""

    def __init__(self) -> None:
        self._state = {"drawn": torch.zeros(1, dtype=torch.int64)}

    def __iter__(self) -> Iterator[int]:
        for _ in range(_SIZE):
            self._state["drawn"] += 3
            yield int(self._state["drawn"]) % _SIZE

    def state_dict(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self._state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


class _BareBatches:
    """A batch sampler that is no torch class; unequal batches from the global generators, drawn when it begins."""

    def __iter__(self) -> Iterator[list[int]]:
        order = random.sample(range(_SIZE), _SIZE) + np.random.permutation(_SIZE).tolist()
        for start in range(0, len(order), 7):
            yield order[start : start + 5]


class _Epochs(Sampler[list[int]]):
    """A batch sampler that hears of epochs."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, _SIZE, 4):
            yield [(index * (self.epoch + 2)) % _SIZE for index in range(start, min(start + 4, _SIZE))]


def _distributed() -> DistributedSampler[Any]:
    return DistributedSampler(_DATA, num_replicas=2, rank=1, seed=3)


def _global(kind: Any = GlobalBatchSampler, **options: Any) -> Any:
    return kind(_DATA, 6, seed=9, rank=1, world_size=2, **options)


def _replaced() -> RandomSampler:
    """Draws from its generator again after every 32 samples."""
    return RandomSampler(_DATA, replacement=True, num_samples=70, generator=_own())


_KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"batch_size": 4, "shuffle": True},
    "drop_last": lambda: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "generator": lambda: {"batch_size": 4, "shuffle": True, "generator": _own()},
    "sampler_generator": lambda: {"batch_size": 4, "sampler": RandomSampler(_DATA, generator=_own())},
    "replacement": lambda: {"batch_size": 4, "sampler": RandomSampler(_DATA, replacement=True, num_samples=20)},
    "replacement_generator": lambda: {"batch_size": 14, "sampler": _replaced()},
    "num_samples": lambda: {"batch_size": 4, "sampler": RandomSampler(_DATA, num_samples=20)},
    "weighted": lambda: {"batch_size": 3, "sampler": WeightedRandomSampler([1.0 + i for i in range(_SIZE)], 13)},
    "subset": lambda: {"batch_size": 3, "sampler": SubsetRandomSampler(range(2, 16, 1))},
    "distributed": lambda: {"batch_size": 2, "sampler": _distributed()},
    "counting": lambda: {"batch_size": 4, "sampler": _Counting()},
    "numpy_own": lambda: {"batch_size": 4, "sampler": _NumPyOwn()},
    "with_state": lambda: {"batch_size": 4, "sampler": _WithState()},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(_DATA, generator=_own()), 4, False)},
    "batches_distributed": lambda: {"batch_sampler": BatchSampler(_distributed(), 2, True)},
    "batches_bare": lambda: {"batch_sampler": _BareBatches()},
    "batches_epochs": lambda: {"batch_sampler": _Epochs()},
    "unbatched": lambda: {"batch_size": None, "sampler": SubsetRandomSampler(range(5))},
    "unbatched_shuffle": lambda: {"batch_size": None, "shuffle": True},
    "global": lambda: {"batch_sampler": _global()},
    "global_drop": lambda: {"batch_sampler": _global(last="drop")},
    "global_pad": lambda: {"batch_sampler": _global(last="pad")},
    "global_single": lambda: {"batch_size": 3, "sampler": _global(GlobalSampler)},
}
_WORKERS: dict[str, dict[str, Any]] = {
    "one": {"num_workers": 1, "prefetch_factor": 4},
    "persistent": {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1},
}


class _Trainer:
    """What a run does with a position: restore, take batches, finish steps, save. It trains with dropout."""

    def __init__(self, make: Callable[[], Any], saved: tuple[Any, Any] | None) -> None:
        # Whatever a script draws while it sets up must not matter to a resumed run.
        torch.manual_seed(99 if saved is None else random.randrange(1 << 30))
        random.seed(99 if saved is None else None)
        np.random.seed(99 if saved is None else None)
        self.loader = make()
        self.dropout = nn.Dropout(0.5)
        self.warnings: list[str] = []
        self.position = Position("loader", self.loader, self.warnings.append)
        if saved is not None:
            self.position.load(saved[0])
            rng.restore(saved[1])
        self.saved = (self.position.state(), rng.capture())

    def train(self, steps: int) -> list[Any]:
        seen = []
        batches = self.position.batches()
        for _ in range(steps):
            ids = torch.as_tensor(next(batches)).tolist()
            dropped = self.dropout(torch.ones(8)).tolist()
            random.random()
            np.random.rand()
            self.position.step_done()
            self.saved = (self.position.state(), rng.capture())
            seen.append((self.position.epoch, ids, dropped, self.saved[1]))
        # The next batch is fetched, and its step is never finished.
        next(batches)
        return seen


def _run(make: Callable[[], Any], stops: list[int], total: int) -> list[Any]:
    seen: list[Any] = []
    saved = None
    for stop in [*stops, total]:
        trainer = _Trainer(make, saved)
        seen += trainer.train(stop - len(seen))
        assert trainer.warnings == []
        saved = trainer.saved
    return seen


def _stops(epoch: int) -> list[list[int]]:
    """Before the first step; three times in one epoch; at its last batch but one, and its last; after a change; and
    the same in the second epoch."""
    return [[0, 1], [1, 2, 3], [epoch - 1, epoch, epoch + 1], [epoch + 2, 2 * epoch - 1, 2 * epoch, 2 * epoch + 2]]


@pytest.mark.holds("other-permutation")
@pytest.mark.parametrize("kind", _KINDS)
def test_without_workers(kind: str) -> None:
    """Every stop of the list: ids, dropout and every generator's state are those of the undisturbed run."""

    def make() -> Any:
        return DataLoader(_DATA, **_KINDS[kind]())

    epoch = sum(1 for _ in make())
    total = 2 * epoch + 4
    straight = _run(make, [], total)
    assert straight[-1][0] >= 2
    for stops in _stops(epoch):
        assert _run(make, stops, total) == straight, stops


@pytest.mark.parametrize("workers", _WORKERS)
@pytest.mark.parametrize("kind", _KINDS)
def test_with_workers(kind: str, workers: str) -> None:
    """The same, stopped twice in the first epoch, at its end and in the second one, while workers run ahead."""

    def make() -> Any:
        return DataLoader(_DATA, **_KINDS[kind](), **_WORKERS[workers])

    epoch = sum(1 for _ in DataLoader(_DATA, **_KINDS[kind]()))
    total = epoch + 2
    straight = _run(make, [], total)
    assert straight[-1][0] >= 1
    assert _run(make, [1, 2, epoch], total) == straight


@pytest.mark.parametrize("workers", _WORKERS)
@pytest.mark.parametrize("kind", _KINDS)
def test_a_loader_that_nobody_uses_is_freed_at_once(kind: str, workers: str) -> None:
    """By its last reference. The garbage collector would stop its workers only after five seconds each."""
    loader = DataLoader(_DATA, **_KINDS[kind](), **_WORKERS[workers])
    position = Position("loader", loader, print)
    batches = position.batches()
    for _ in range(2):
        next(batches)
        position.step_done()
    gone = [weakref.ref(loader)]
    gone += [weakref.ref(each) for each in gc.get_objects() if type(each) is _MultiProcessingDataLoaderIter]
    gc.disable()
    try:
        del loader, position, batches
        assert len(gone) > 1
        assert [each() for each in gone] == [None] * len(gone)
    finally:
        gc.enable()


def test_a_generator_that_the_training_draws_from_too() -> None:
    """Shared between loader and training, without workers: it stands where it stood."""

    def run(stops: list[int]) -> list[Any]:
        seen: list[Any] = []
        saved: Any = None
        for stop in [*stops, 13]:
            shared = _own()
            position = Position("loader", DataLoader(_DATA, 4, shuffle=True, generator=shared), print)
            if saved is not None:
                position.load(saved[0])
                shared.set_state(saved[1])
            batches = position.batches()
            while len(seen) < stop:
                ids = next(batches).tolist()
                seen.append((ids, torch.rand(1, generator=shared).item()))
                position.step_done()
                saved = (position.state(), shared.get_state())
            next(batches)
        return seen

    straight = run([])
    for stops in ([1, 2, 3], [4, 5, 6], [9]):
        assert run(stops) == straight, stops


@pytest.mark.holds("early-iterator")
def test_an_order_that_is_not_what_it_was_is_said() -> None:
    """Another data set length, another batch size, another order: told once, with the way to mend it."""
    sampler = {"sampler": torch.randperm(_SIZE).tolist()}
    first = _Trainer(lambda: DataLoader(_DATA, 4, **sampler), None)
    first.train(3)
    same = _Trainer(lambda: DataLoader(_DATA, 4, **sampler), first.saved)
    same.train(1)
    assert same.warnings == []
    for options in (
        {"batch_size": 5, **sampler},
        {"batch_size": 4, "sampler": torch.randperm(_SIZE).tolist()},
        {"batch_size": 4, "sampler": range(_SIZE)},
    ):
        other = _Trainer(lambda options=options: DataLoader(_DATA, **options), first.saved)  # type: ignore[misc]
        other.train(1)
        (warning,) = other.warnings
        assert warning.startswith(
            "loader: the batches before batch 3 of epoch 0 are not those that the run was trained"
        )
        assert "set_epoch(epoch)" in warning


def test_a_sampler_that_draws_in_between_is_said() -> None:
    """A sampler that draws from a global generator at each item cannot be put back: told in the first epoch."""

    class Restless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            for _ in range(_SIZE):
                yield random.randrange(_SIZE)

    trainer = _Trainer(lambda: DataLoader(_DATA, 4, sampler=Restless()), None)
    trainer.train(9)
    (warning,) = trainer.warnings
    assert "draws from the global random generators at each item" in warning


def test_batches_out_of_order_are_said() -> None:
    """Without an order a count of batches is no position: told once, and nothing is compared."""
    loader: Callable[[], Any] = lambda: DataLoader(_DATA, 4, shuffle=True, num_workers=1, in_order=False)  # noqa: E731
    first = _Trainer(loader, None)
    first.train(2)
    second = _Trainer(loader, first.saved)
    second.train(1)
    for trainer in (first, second):
        (warning,) = trainer.warnings
        assert "in_order=False" in warning


@pytest.mark.holds("resume-reads-for-hours")
def test_going_there_costs_nothing_with_global_batches() -> None:
    """A place far out in a hundred thousand million samples is found at once, through either sampler."""

    class Far(_Ids):
        def __len__(self) -> int:
            return 10**11

    for options in (
        {"batch_sampler": GlobalBatchSampler(10**11, 1000, seed=1, rank=0, world_size=1)},
        {"batch_size": 1000, "sampler": GlobalSampler(10**11, 1000, seed=1, rank=0, world_size=1)},
    ):
        position = Position("loader", DataLoader(Far(), **options), print)  # type: ignore[arg-type]
        position.load({"epoch": 3, "consumed": 10**8 - 5, "start": {"rng": rng.capture(), "generators": []}})
        expected = GlobalBatchSampler(10**11, 1000, seed=1, rank=0, world_size=1).global_batch(3, 10**8 - 5)
        assert next(position.batches()).tolist() == expected


@pytest.mark.holds("samples-with-other-ranks")
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 3)])
def test_another_number_of_ranks_goes_on_with_the_next_samples(before: int, after: int) -> None:
    """Twice an epoch resumed by other ranks: every sample once, in the order of the undisturbed run, and no warning."""

    def loader(rank: int, ranks: int) -> Any:
        return DataLoader(
            _DATA, batch_sampler=GlobalBatchSampler(_DATA, 4, seed=2, last="drop", rank=rank, world_size=ranks)
        )

    def batches(ranks: int, states: list[Any], steps: int) -> tuple[list[list[int]], list[Any]]:
        told: list[str] = []
        positions = [Position("loader", loader(rank, ranks), told.append) for rank in range(ranks)]
        for rank, position in enumerate(positions):
            if states:
                # As a run does: a rank that was not there before is given another one's.
                position.load(states[rank if rank < len(states) else 0])
        seen = []
        iterators = [position.batches() for position in positions]
        for _ in range(steps):
            seen.append([sample for iterator in iterators for sample in next(iterator).tolist()])
            for position in positions:
                position.step_done()
        assert told == []
        return seen, [position.state() for position in positions]

    straight, _ = batches(1, [], 7)
    first, states = batches(before, [], 1)
    second, states = batches(after, states, 2)
    third, _ = batches(before, states, 4)
    assert first + second + third == straight
