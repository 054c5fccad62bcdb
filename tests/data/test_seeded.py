"""Randomness seeded by sample: the same with any number of workers, and none of the training's."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from surefoot.data import seeded
from surefoot.errors import ConfigError


class _Noisy(Dataset[Any]):
    """Draws from all three global generators, an own one made of them, and fails at sample 99."""

    classes = ("a", "b")

    def __init__(self, size: int = 12) -> None:
        self.size = size
        self.heard: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        own = np.random.default_rng(random.getrandbits(64))
        drawn = [random.random(), float(np.random.rand()), torch.rand(1).item(), float(own.random())]
        if index == 99:
            raise LookupError("no such sample")
        return torch.tensor([float(index), *drawn], dtype=torch.float64)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[0] for _ in indices]

    def set_epoch(self, epoch: int) -> None:
        self.heard.append(epoch)


def _epochs(loader: DataLoader[Any], data: Any, epochs: int = 2) -> list[list[list[float]]]:
    seen = []
    for epoch in range(epochs):
        data.set_epoch(epoch)
        seen.append([sample for batch in loader for sample in batch.tolist()])
    return seen


def test_the_same_with_any_number_of_workers() -> None:
    """No worker, one, and two that persist, in an order of any kind: each sample draws the same in the same epoch."""
    data = seeded(_Noisy(), 4)
    straight = _epochs(DataLoader(data, 5), data)
    assert straight == _epochs(DataLoader(data, 3, num_workers=1), data)
    assert straight == _epochs(DataLoader(data, 2, num_workers=2, persistent_workers=True, prefetch_factor=1), data)
    shuffled = _epochs(DataLoader(data, 5, shuffle=True), data)
    assert shuffled != straight
    assert [sorted(epoch) for epoch in shuffled] == straight


def test_samples_epochs_and_seeds_differ() -> None:
    """No two draws of 12 samples, 2 epochs and 2 seeds are the same."""
    sets = [seeded(_Noisy(), seed) for seed in (4, 5)]
    drawn = [
        [number for sample in epoch for number in sample[1:]]
        for data in sets
        for epoch in _epochs(DataLoader(data, 5), data)
    ]
    assert len({number for numbers in drawn for number in numbers}) == 12 * 4 * 2 * 2


def test_the_training_s_generators_are_left_alone() -> None:
    """Reading a sample, also one that fails, moves none of the global generators."""
    data = seeded(_Noisy())
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    data[3]
    with pytest.raises(LookupError):
        data[99]
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_what_else_the_data_set_has() -> None:
    """Length, attributes and set_epoch are the inner one's; its reading of whole batches is not; it can be copied."""
    inner = _Noisy()
    data = seeded(inner)
    data.set_epoch(3)
    assert (len(data), data.classes, inner.heard) == (12, ("a", "b"), [3])
    assert not hasattr(data, "__getitems__")
    copied = pickle.loads(pickle.dumps(data))
    assert copied[5].tolist() == data[5].tolist()
    with pytest.raises(AttributeError, match="colour"):
        data.colour  # noqa: B018


def test_kinds_of_index() -> None:
    """Numbers of any type are the same index; text and tuples are indices too; others are refused."""

    class Any_(Dataset[float]):  # noqa: N801
        def __getitem__(self, index: Any) -> float:
            return random.random()

    data = seeded(Any_())
    assert data[3] == data[np.int64(3)] == data[torch.tensor(3)] != data[4]
    assert len({data["3"], data[3], data["a"], data["b"], data["a", 1], data["a", 2], data[("a",), 1]}) == 7
    with pytest.raises(ConfigError, match=r"sample 1\.5: its indices have to be numbers"):
        data[1.5]


def test_the_seed_is_as_it_ever_was() -> None:
    """A release must not change it: the generators promise their streams, and this is where they begin."""
    data = seeded(Subset(_Noisy(), [7]), 2**70)
    data.set_epoch(5)
    key = blake2b(b"1180591620717411303424 5 0", digest_size=24).digest()
    python = random.Random(int.from_bytes(key[:8], "little"))
    python.getrandbits(64)
    numpy = np.random.RandomState(np.frombuffer(key[8:16], dtype="<u4"))
    own = torch.Generator().manual_seed(int.from_bytes(key[16:], "little", signed=True))
    assert data[0].tolist()[:4] == [7.0, python.random(), numpy.rand(), torch.rand(1, generator=own).item()]


def test_without_an_index() -> None:
    """An iterable data set has no index to seed by."""

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1

    with pytest.raises(ConfigError, match=r"seeded\(Stream\): it has no index"):
        seeded(Stream())
