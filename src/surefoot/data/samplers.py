"""Samplers of global batches: what a step sees depends on seed, epoch and step, and not on the number of ranks.

An epoch is an order of all samples, cut into global batches. Every rank takes its share of each, and the shares of a
global batch make it up whatever the number of ranks. So a count of batches is a place in the epoch for all ranks alike,
and a run that is resumed by another number of ranks goes on at the next global batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from typing import Literal, get_args

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

from surefoot.data.order import Numbers, order
from surefoot.errors import ConfigError

Last = Literal["short", "drop", "pad"]
"""What becomes of an epoch's last samples where they are fewer than a global batch."""

_AT_ONCE = 4096
"""Samples that are computed in one go: enough to make the cost of each small."""


class GlobalBatchSampler(Sampler[list[int]]):
    """One rank's share of each global batch, for ``DataLoader(data, batch_sampler=...)``.

    Of a global batch of k samples, rank r of W takes places k*r//W to k*(r+1)//W: shares differ by one sample at most.

    Args:
        data: the data set, or its length.
        global_batch_size: samples a step, over all ranks.
        seed: of the order; 0 to 2**64 - 1.
        shuffle: False for the data set's own order.
        last: an epoch's last samples, where they are fewer than a global batch, make a `short` batch, so that every
            sample is seen once an epoch; or are left out (`drop`; other ones in each epoch, if shuffled); or are filled
            up with the epoch's first ones (`pad`).
        rank, world_size: of this process; by default those of the process group, else of the launcher's variables
            RANK and WORLD_SIZE, else one process alone.

    Raises:
        ConfigError: numbers that do not go together; a batch with fewer samples than ranks.
    """

    def __init__(
        self,
        data: Sized | int,
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        last: Last = "short",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        here = _place_among_ranks()
        self.size = data if isinstance(data, int) else len(data)
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.last = last
        self.rank = here[0] if rank is None else rank
        self.world_size = here[1] if world_size is None else world_size
        self.epoch = 0
        self._check()

    def __len__(self) -> int:
        """Batches an epoch, the same on every rank."""
        full, rest = divmod(self.size, self.global_batch_size)
        return full + (rest > 0 and self.last != "drop")

    def __iter__(self) -> Iterator[list[int]]:
        return self.iter_from(0)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that is iterated next. `run.batches` does this; a loop of one's own has to."""
        self.epoch = epoch

    def iter_from(self, start: int) -> Iterator[list[int]]:
        """The epoch's batches from number `start` on; those before it cost nothing."""
        epoch, stop = self.epoch, len(self)
        step = max(1, _AT_ONCE * self.world_size // self.global_batch_size)
        for first in range(start, stop, step):
            shares = [self._share(batch) for batch in range(first, min(first + step, stop))]
            samples = self._samples(epoch, np.concatenate(shares)).tolist()
            for share in shares:
                yield samples[: len(share)]
                del samples[: len(share)]

    def global_batch(self, epoch: int, batch: int) -> list[int]:
        """The samples of all ranks in one step, in order of rank."""
        if not 0 <= batch < len(self):
            raise ConfigError(f"batch {batch}: an epoch has batches 0 to {len(self) - 1}")
        start, count = self._extent(batch)
        return [int(sample) for sample in self._samples(epoch, np.arange(start, start + count, dtype=np.uint64))]

    def _extent(self, batch: int) -> tuple[int, int]:
        """First place and number of samples of a global batch."""
        start = batch * self.global_batch_size
        rest = self.size - start if self.last == "short" else self.global_batch_size
        return start, min(self.global_batch_size, rest)

    def _share(self, batch: int) -> Numbers:
        start, count = self._extent(batch)
        first, stop = (start + count * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return np.arange(first, stop, dtype=np.uint64)

    def _samples(self, epoch: int, places: Numbers) -> Numbers:
        # Places beyond the end are those that fill up the last batch.
        places = places % np.uint64(self.size)
        return order(self.size, self.seed, epoch, places) if self.shuffle else places

    def _check(self) -> None:
        if self.last not in get_args(Last):
            raise ConfigError(f"last={self.last!r}: choose one of {', '.join(get_args(Last))}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} of {self.world_size}: ranks are counted from 0")
        if self.size < 1:
            raise ConfigError("the data set is empty")
        if not len(self):
            raise ConfigError(
                f"{self.size} samples make no global batch of {self.global_batch_size}: give more samples, smaller "
                "batches, or last='pad'"
            )
        order(self.size, self.seed, 0, np.zeros(0, dtype=np.uint64))
        self._check_shares()

    def _check_shares(self) -> None:
        # A rank without a sample would miss the step's collectives, and the others would wait for it.
        if self.global_batch_size < self.world_size:
            raise ConfigError(f"a global batch of {self.global_batch_size} for {self.world_size} ranks: give each one")
        least = self._extent(len(self) - 1)[1]
        if least < self.world_size:
            raise ConfigError(
                f"the epoch's last batch has {least} sample(s) for {self.world_size} ranks: use last='drop' or "
                "last='pad', or another batch size"
            )


class GlobalSampler(Sampler[int]):
    """The same samples one by one, where a sampler is asked for and not a batch sampler.

    ``DataLoader(data, batch_size=sampler.batch_size, sampler=sampler)``. The global batch must be a multiple of the
    number of ranks, because a DataLoader cuts all but the last batch to one size.

    Args and raises: as `GlobalBatchSampler`.
    """

    def __init__(
        self,
        data: Sized | int,
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        last: Last = "short",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.batches = GlobalBatchSampler(
            data, global_batch_size, seed=seed, shuffle=shuffle, last=last, rank=rank, world_size=world_size
        )
        self.batch_size, rest = divmod(global_batch_size, self.batches.world_size)
        """Samples of one rank in a step."""
        if rest:
            raise ConfigError(
                f"a global batch of {global_batch_size} is not a multiple of {self.batches.world_size} ranks: use "
                "GlobalBatchSampler, whose shares may differ by one"
            )

    def __len__(self) -> int:
        """This rank's samples an epoch."""
        *_, last = self.batches.iter_from(len(self.batches) - 1)
        return (len(self.batches) - 1) * self.batch_size + len(last)

    def __iter__(self) -> Iterator[int]:
        return self.iter_from(0)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that is iterated next. `run.batches` does this; a loop of one's own has to."""
        self.batches.set_epoch(epoch)

    def iter_from(self, start: int) -> Iterator[int]:
        """The rank's samples of the epoch from number `start` on; those before it cost nothing."""
        batch, skipped = divmod(start, self.batch_size)
        for samples in self.batches.iter_from(batch):
            yield from samples[skipped:]
            skipped = 0


def _place_among_ranks() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
