"""What the samplers of global batches yield: the same samples in each step, whatever the number of ranks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

from surefoot.data import GlobalBatchSampler, GlobalSampler, order
from surefoot.errors import ConfigError

_MASK = 2**64 - 1


def _places(start: int, stop: int) -> Any:
    return np.arange(start, stop, dtype=np.uint64)


def _slow_order(size: int, seed: int, epoch: int, place: int) -> int:
    """The same order once more, in whole numbers without a width and one sample at a time."""

    def mix(x: int) -> int:
        x &= _MASK
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    bits = max(1, (size - 1).bit_length())
    start = mix(mix(seed + golden) + epoch + golden)
    while True:
        low, high = place & (2 ** (bits // 2) - 1), place >> (bits // 2)
        for number in range(32 if bits <= 8 else 10):
            key = mix(start + (number + 1) * golden)
            if number % 2:
                low ^= mix(high + key) & (2 ** (bits // 2) - 1)
            else:
                high ^= mix(low + key) & (2 ** (bits - bits // 2) - 1)
        place = high << (bits // 2) | low
        if place < size:
            return place


def test_the_order_never_changes() -> None:
    """Pinned: a run that a later release resumes sees the samples that it would have seen."""
    assert order(23, 1, 2, _places(0, 23)).tolist() == [
        *(9, 13, 4, 8, 5, 7, 18, 11, 15, 16, 2, 20, 0, 17, 10, 6, 21, 14, 1, 3, 22, 12, 19)
    ]
    assert order(1000, _MASK, 7, _places(0, 8)).tolist() == [17, 471, 847, 104, 573, 581, 220, 781]
    assert order(10**12, 1, 2, _places(0, 2)).tolist() == [657959535419, 168208855551]


@pytest.mark.holds("batch-shrinks")
@given(size=st.integers(1, 700), seed=st.integers(0, _MASK), epoch=st.integers(0, _MASK))
@settings(max_examples=40, deadline=None)
def test_every_sample_once(size: int, seed: int, epoch: int) -> None:
    """An epoch's order is a permutation, and what it is said to be."""
    found = order(size, seed, epoch, _places(0, size)).tolist()
    assert sorted(found) == list(range(size))
    assert found[size // 2] == _slow_order(size, seed, epoch, size // 2)


@pytest.mark.parametrize("size", [3, 5, 8, 23])
def test_orders_are_even(size: int) -> None:
    """Over 3,000 epochs every sample is about as often at every place (chi-square at 1 in a million)."""
    counts = np.zeros((size, size))
    for epoch in range(3000):
        counts[np.arange(size), order(size, 7, epoch, _places(0, size)).astype(int)] += 1
    chi_square = ((counts - 3000 / size) ** 2 / (3000 / size)).sum()
    freedom = (size - 1) ** 2
    # Wilson and Hilferty's approximation of the distribution's tail.
    normal = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert abs(normal) < 4.75


def _shares(size: int, batch: int, ranks: int, epoch: int = 0, **options: Any) -> list[list[list[int]]]:
    samplers = [GlobalBatchSampler(size, batch, rank=rank, world_size=ranks, **options) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


@pytest.mark.holds("batch-shrinks")
@pytest.mark.parametrize("last", ["short", "drop", "pad"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_step_s_samples_do_not_depend_on_the_ranks(last: Any, shuffle: bool) -> None:
    """1, 2, 3, 4 and 5 ranks: the shares of each step make up the same list, at epochs 0 and 3."""
    for epoch in (0, 3):
        (alone,) = _shares(47, 10, 1, epoch, seed=5, last=last, shuffle=shuffle)
        whole = GlobalBatchSampler(47, 10, seed=5, last=last, shuffle=shuffle, rank=0, world_size=1)
        assert alone == [whole.global_batch(epoch, batch) for batch in range(len(whole))]
        for ranks in (2, 3, 4, 5):
            shares = _shares(47, 10, ranks, epoch, seed=5, last=last, shuffle=shuffle)
            assert [list(itertools.chain(*parts)) for parts in zip(*shares, strict=True)] == alone
            sizes = {len(share) for share in itertools.chain(*shares)}
            assert min(sizes) >= 1
            assert all(max(map(len, parts)) - min(map(len, parts)) <= 1 for parts in zip(*shares, strict=True))
        seen = list(itertools.chain(*alone))
        assert len(seen) == {"short": 47, "drop": 40, "pad": 50}[last]
        assert len(set(seen)) == min(47, len(seen))
        assert seen[47:] == (seen[:3] if last == "pad" else [])


def test_epochs_and_seeds_differ() -> None:
    """Another epoch or another seed, another order; the same ones, the same."""
    orders = {(seed, epoch): str(_shares(47, 10, 1, epoch, seed=seed)[0]) for seed in range(4) for epoch in range(4)}
    assert len(set(orders.values())) == 16
    assert orders[2, 3] == str(_shares(47, 10, 1, 3, seed=2)[0])


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_from_any_batch_on(ranks: int) -> None:
    """Begun at any batch or sample, the rest of the epoch comes; also beyond what is computed in one go."""
    for size, batch in ((47, 10), (30_000, 1000)):
        sampler = GlobalBatchSampler(size, batch, seed=1, rank=ranks - 1, world_size=ranks)
        sampler.set_epoch(2)
        whole = list(sampler)
        for start in range(len(whole) + 1):
            assert list(sampler.iter_from(start)) == whole[start:]
        single = GlobalSampler(size, batch, seed=1, rank=ranks - 1, world_size=ranks)
        single.set_epoch(2)
        flat = list(itertools.chain(*whole))
        assert list(BatchSampler(single, single.batch_size, False)) == whole
        assert len(single) == len(flat)
        for start in (0, 1, len(flat) // 2, len(flat) - 1, len(flat)):
            assert list(single.iter_from(start)) == flat[start:]


def test_a_place_far_out_is_found_at_once() -> None:
    """A hundred thousand million samples: the batch before the last comes without walking there or listing them."""
    sampler = GlobalBatchSampler(10**11, 1000, seed=1, rank=1, world_size=2)
    (samples, more) = sampler.iter_from(10**8 - 2)
    assert len(samples) == len(more) == 500
    assert samples == sampler.global_batch(0, 10**8 - 2)[500:]


def test_through_a_loader_with_workers() -> None:
    """The batches of a DataLoader with workers are the sampler's."""
    data = torch.arange(100, 147)
    sampler = GlobalBatchSampler(data, 10, seed=5, rank=1, world_size=3)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert [(batch - 100).tolist() for batch in loader] == _shares(47, 10, 3, epoch, seed=5)[1]


def test_ranks_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process group the launcher's variables say who this is; what is given goes first."""
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    sampler = GlobalBatchSampler(47, 8, last="drop")
    assert (sampler.rank, sampler.world_size) == (2, 4)
    given = GlobalBatchSampler(47, 8, rank=0, world_size=1)
    assert (given.rank, given.world_size) == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"data": 0}, "the data set is empty"),
        ({"data": 5, "last": "drop"}, "5 samples make no global batch of 10"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"rank": 0, "world_size": 11}, "a global batch of 10 for 11 ranks"),
        ({"data": 41, "rank": 0, "world_size": 2}, "the epoch's last batch has 1 sample.* use last='drop'"),
        ({"last": "none"}, "last='none': choose one of short, drop, pad"),
        ({"seed": -1}, "seed=-1: give a whole number"),
    ],
)
def test_what_does_not_go_together(arguments: dict[str, Any], says: str) -> None:
    """Refused when it is made, with what to do."""
    options = {"data": 47, "rank": 0, "world_size": 1, **arguments}
    with pytest.raises(ConfigError, match=says):
        GlobalBatchSampler(options.pop("data"), 10, **options)


def test_a_sampler_needs_equal_shares() -> None:
    """A DataLoader cuts batches of one size: unequal shares are refused, with what to use instead."""
    with pytest.raises(ConfigError, match=r"10 is not a multiple of 3 ranks: use GlobalBatchSampler"):
        GlobalSampler(47, 10, rank=0, world_size=3)
