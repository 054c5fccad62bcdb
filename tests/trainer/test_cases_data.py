"""Failures told of other systems: a resume that spends its time reading what was trained on already."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler

from surefoot.trainer.data.position import Position
from surefoot.trainer.state import rng


class Read(Dataset[int]):
    """Writes down which samples are read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def loader_of(kind: str, data: Read) -> DataLoader[int]:
    if kind == "shuffled":
        return DataLoader(data, 4, shuffle=True)
    if kind == "batches":
        return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, False))
    return DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=2, rank=1, seed=3))


@pytest.mark.holds("resume-reads-for-hours")
@pytest.mark.parametrize("kind", ["shuffled", "batches", "distributed"])
def test_a_resume_reads_nothing_that_was_trained_on(kind: str) -> None:
    """Deep in the first and in the second epoch: the first samples that are read are those of the next batch."""
    batches_an_epoch = len(loader_of(kind, Read()))
    for done in (batches_an_epoch - 9, batches_an_epoch + 80):
        torch.manual_seed(1)
        first = loader_of(kind, Read())
        position = Position("loader", first, print)
        batches = position.batches()
        for _ in range(done):
            next(batches)
            position.step_done()
        state, drawn = position.state(), rng.capture()
        expected = next(batches).tolist()

        data = Read()
        warnings: list[str] = []
        second = Position("loader", loader_of(kind, data), warnings.append)
        second.load(state)
        rng.restore(drawn)
        assert next(second.batches()).tolist() == expected
        assert data.read == expected
        assert warnings == []
