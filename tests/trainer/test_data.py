"""Where a loader goes on: every sample that an undisturbed run sees, once, in its order, with its random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from surefoot.errors import ConfigError
from surefoot.trainer.data.position import Position
from surefoot.trainer.state import rng


class _Augmented(Dataset[tuple[int, float]]):
    """Draws from all three generators for each sample; what a worker draws is not compared."""

    def __init__(self, size: int = 23, in_main: bool = True) -> None:
        self._size = size
        self._in_main = in_main
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[int, float]:
        drawn = torch.rand(1).item() + random.random() + float(np.random.rand())
        return index, drawn if self._in_main else 0.0


class _Stream(IterableDataset[tuple[int, float]]):
    """An order of its own, drawn when it begins."""

    def __init__(self, size: int = 23) -> None:
        self._size = size

    def __iter__(self) -> Iterator[tuple[int, float]]:
        for index in torch.randperm(self._size).tolist():
            yield index, random.random()


class _Resumable:
    """A loader that keeps its own state, as data libraries' loaders do: where it is, and its order."""

    def __init__(self) -> None:
        self._order: list[int] = []
        self._at = 0
        self.loads = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, float]]:
        if self._at >= len(self._order):
            self._order, self._at = torch.randperm(9).tolist(), 0
        while self._at < len(self._order):
            self._at += 1
            yield torch.tensor([self._order[self._at - 1]]), 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        self._order, self._at = state["order"], state["at"]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def _weighted(generator: torch.Generator | None = None) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + i for i in range(23)], 17, generator=generator)


def _chunked() -> RandomSampler:
    """Draws from its generator again after every 32 samples."""
    return RandomSampler(range(23), replacement=True, num_samples=80, generator=_generator())


class _Bare:
    """A batch sampler that is no torch class, with Python's and NumPy's generators in it."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(23))
        random.shuffle(order)
        extra = np.random.randint(23, size=23).tolist()
        for start in range(0, 23, 4):
            yield [*order[start : start + 3], extra[start]]


def _distributed(rank: int = 1) -> DistributedSampler[Any]:
    return DistributedSampler(range(23), num_replicas=2, rank=rank, seed=3)  # type: ignore[arg-type]


_data = _Augmented()
_LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(_data, 4, shuffle=True),
    "drop_last": lambda: DataLoader(_data, 4, shuffle=True, drop_last=True),
    "own_generator": lambda: DataLoader(_data, 4, shuffle=True, generator=_generator()),
    "sampler_generator": lambda: DataLoader(_data, 4, sampler=RandomSampler(_data, generator=_generator())),
    "chunked": lambda: DataLoader(_data, 4, sampler=_chunked()),
    "weighted": lambda: DataLoader(_data, 3, sampler=_weighted()),
    "weighted_generator": lambda: DataLoader(_data, 3, sampler=_weighted(_generator())),
    "distributed": lambda: DataLoader(_data, 3, sampler=_distributed()),
    "batch_sampler": lambda: DataLoader(_data, batch_sampler=BatchSampler(RandomSampler(_data), 5, True)),
    "batch_sampler_generator": lambda: DataLoader(
        _data, batch_sampler=BatchSampler(RandomSampler(_data, generator=_generator()), 5, False)
    ),
    "batches_distributed": lambda: DataLoader(_data, batch_sampler=BatchSampler(_distributed(), 5, False)),
    "bare": lambda: DataLoader(_data, batch_sampler=_Bare()),  # type: ignore[arg-type]
    "one_by_one": lambda: DataLoader(_data, batch_size=None, shuffle=True),
    "sequential": lambda: DataLoader(_data, 4, sampler=SequentialSampler(_data)),
    "iterable": lambda: DataLoader(_Stream(), 4),
    "resumable": _Resumable,
    "list": lambda: [(torch.tensor([i]), 0.0) for i in range(7)],
}
_QUIET = _Augmented(in_main=False)
_WITH_WORKERS: dict[str, Callable[[], Any]] = {
    "workers": lambda: DataLoader(_QUIET, 4, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(_QUIET, 4, shuffle=True, num_workers=2, persistent_workers=True),
    "persistent_generator": lambda: DataLoader(
        _QUIET, 4, shuffle=True, num_workers=1, persistent_workers=True, generator=_generator()
    ),
    "chunked_workers": lambda: DataLoader(_QUIET, 4, sampler=_chunked(), num_workers=2),
}


class _Trainer:
    """What a run does with a position: restore, take batches, finish steps, save."""

    def __init__(self, make: Callable[[], Any], saved: tuple[Any, Any] | None) -> None:
        # Whatever a script draws while it sets up must not matter to a resumed run.
        torch.manual_seed(99 if saved is None else random.randrange(1 << 30))
        random.seed(99 if saved is None else None)
        np.random.seed(99 if saved is None else None)
        self.loader = make()
        self.warnings: list[str] = []
        self.position = Position("loader", self.loader, self.warnings.append)
        if saved is not None:
            self.position.load(saved[0])
            rng.restore(saved[1])

    def train(self, steps: int) -> list[Any]:
        seen = []
        batches = self.position.batches()
        for _ in range(steps):
            ids, drawn = next(batches)
            step_draws = (torch.rand(1).item(), random.random(), float(np.random.rand()))
            seen.append((torch.as_tensor(ids).tolist(), torch.as_tensor(drawn).tolist(), step_draws))
            self.position.step_done()
        self.saved = (self.position.state(), rng.capture())
        # The next batch is fetched, and its step is never finished.
        next(batches)
        return seen


def _resumed_at(make: Callable[[], Any], stops: list[int], total: int) -> list[Any]:
    seen: list[Any] = []
    saved = None
    for stop in [*stops, total]:
        trainer = _Trainer(make, saved)
        seen += trainer.train(stop - len(seen))
        saved = trainer.saved
    return seen


@pytest.mark.holds("second-resume-in-epoch")
@pytest.mark.parametrize("kind", _LOADERS)
def test_resumes_inside_and_across_epochs(kind: str) -> None:
    """Three stops in one epoch, at the very end of one, and just after it: samples, augmentation and step's draws."""
    make = _LOADERS[kind]
    straight = _Trainer(make, None).train(22)
    for stops in ([1], [2, 3, 4, 13], [5, 6, 7, 8], [12, 18]):
        assert _resumed_at(make, stops, 22) == straight, stops


@pytest.mark.holds("prefetched-batches")
@pytest.mark.parametrize("kind", _WITH_WORKERS)
def test_resumes_with_workers_that_run_ahead(kind: str) -> None:
    """What workers have fetched ahead is not consumed; persistent workers draw no new seed each epoch."""
    make = _WITH_WORKERS[kind]
    straight = _Trainer(make, None).train(16)
    for stops in ([2, 3, 6], [9, 14]):
        assert _resumed_at(make, stops, 16) == straight, stops


@pytest.mark.holds("early-iterator")
def test_an_iterator_made_before_does_not_matter() -> None:
    """A script that has looked at a batch before, workers and all, goes on where it should."""

    def looked_at() -> Any:
        loader = DataLoader(_QUIET, 4, shuffle=True, num_workers=1, persistent_workers=True)
        next(iter(loader))
        return loader

    straight = _Trainer(looked_at, None).train(9)
    assert _resumed_at(looked_at, [2, 7], 9) == straight


@pytest.mark.holds("other-permutation")
def test_orders_differ_between_epochs() -> None:
    """The comparison above would also hold for a loader that repeats itself: this one does not."""
    seen = _Trainer(_LOADERS["shuffled"], None).train(12)
    ids = [[one for batch in seen[start : start + 6] for one in batch[0]] for start in (0, 6)]
    assert sorted(ids[0]) == sorted(ids[1]) == list(range(23))
    assert ids[0] != ids[1]


def test_a_second_loop_goes_on_after_the_last_finished_step() -> None:
    """A loop that was left goes on at the batch whose step was not finished, as a resumed process would."""
    for kind in ("shuffled", "resumable", "iterable"):
        straight = [ids for ids, _drawn, _draws in _Trainer(_LOADERS[kind], None).train(11)]
        trainer = _Trainer(_LOADERS[kind], None)
        seen = []
        for steps in (2, 5, 4):
            batches = trainer.position.batches()
            for _ in range(steps):
                seen.append(torch.as_tensor(next(batches)[0]).tolist())
                [draw() for draw in (lambda: torch.rand(1), random.random, np.random.rand)]
                trainer.position.step_done()
            next(batches)
            batches.close()  # type: ignore[attr-defined]
        assert [ids for batch in seen[:6] for ids in batch] == [ids for batch in straight[:6] for ids in batch]


def test_a_position_that_is_not_used_is_handed_on() -> None:
    """A run that resumes and saves before it comes to this loader keeps the loader's place."""
    first = _Trainer(_LOADERS["shuffled"], None)
    first.train(3)
    second = Position("loader", _LOADERS["shuffled"](), print)
    second.load(first.saved[0])
    assert second.state() == first.saved[0]


@pytest.mark.holds("resume-reads-for-hours")
def test_going_there_by_reading_is_said() -> None:
    """A stream without a sampler or a state is read from its start again, and the log says so."""
    first = _Trainer(_LOADERS["iterable"], None)
    first.train(3)
    second = _Trainer(_LOADERS["iterable"], first.saved)
    second.train(1)
    assert len(second.warnings) == 1
    assert "batch 3" in second.warnings[0]


@pytest.mark.parametrize("empty", [list, lambda: DataLoader(_Augmented(0), 4), lambda: iter([])])
def test_an_empty_loader_is_an_error(empty: Callable[[], Any]) -> None:
    """It would be iterated for ever."""
    with pytest.raises(ConfigError, match=r"^loader: the loader yields no batch"):
        next(Position("loader", empty(), print).batches())


@pytest.mark.holds("other-permutation")
def test_set_epoch_reaches_every_part_once() -> None:
    """Loader, sampler, batch sampler, its sampler, and the data set hear of the epoch; none hears it twice."""

    class Sampler(SequentialSampler):
        def __init__(self, data: Any) -> None:
            super().__init__(data)
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    class Data(_Augmented):
        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    data = Data(6)
    for make in (
        lambda sampler: DataLoader(data, 3, sampler=sampler),
        lambda sampler: DataLoader(data, batch_sampler=BatchSampler(sampler, 3, False)),
        lambda sampler: DataLoader(data, batch_size=None, sampler=sampler),
    ):
        sampler, data.epochs = Sampler(data), []
        position = Position("loader", make(sampler), print)
        batches = position.batches()
        for _ in range(7):
            next(batches)
            position.step_done()
        expected = [0, 1] if len(position._loader) == 6 else [0, 1, 2, 3]
        assert sampler.epochs == expected
        assert data.epochs == expected
