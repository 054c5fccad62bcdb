"""The order of an epoch: a bijection of the numbers below `size` that follows from a seed and the epoch's number.

No list of the whole order is made, by any rank: any part of it is computed where it is needed.

A Feistel network permutes the numbers of as many bits as `size` needs; a number that comes out beyond `size` goes in
again until one comes out below it ("cycle walking": Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
Its round function is the finalizer of SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number
Generators, 2014). All of it is arithmetic on whole numbers of 64 bits: no version of NumPy or torch and no platform
changes it. Invariant: nor may a release of Surefoot, or a run that it resumes would see samples twice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from surefoot.errors import ConfigError

_ROUNDS = 10
_SMALL_ROUNDS = 32
_SMALL_BITS = 8
"""Up to so many bits a round has few ways to go, and more rounds are needed until all orders are about as likely."""
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

Numbers = NDArray[np.uint64]


def order(size: int, seed: int, epoch: int, places: Numbers) -> Numbers:
    """Which sample stands at each of some places of an epoch's order.

    Args:
        size: number of samples.
        seed: below 2**64; another seed, another order.
        epoch: below 2**64; another epoch, another order.
        places: each below `size`.

    Raises:
        ConfigError: a number out of its range.
    """
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not 0 <= value <= _MASK:
            raise ConfigError(f"{name}={value}: give a whole number from 0 to 2**64 - 1")
    if places.size and int(places.max()) >= size:
        raise ConfigError(f"place {int(places.max())} of an order of {size} samples: places are counted from 0")
    bits = max(1, (size - 1).bit_length())
    keys = _keys(seed, epoch, _SMALL_ROUNDS if bits <= _SMALL_BITS else _ROUNDS)
    samples = _permuted(places, bits, keys)
    while (beyond := samples >= np.uint64(size)).any():
        samples[beyond] = _permuted(samples[beyond], bits, keys)
    return samples


def _permuted(numbers: Numbers, bits: int, keys: list[int]) -> Numbers:
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64(2 ** (bits // 2) - 1), np.uint64(2 ** (bits - bits // 2) - 1)
    low, high = numbers & low_mask, numbers >> low_bits
    for number, key in enumerate(keys):
        # Either half is changed by the value of the other one, so each round can be undone: that makes it a bijection.
        if number % 2:
            low = low ^ (_mixed(high + np.uint64(key)) & low_mask)
        else:
            high = high ^ (_mixed(low + np.uint64(key)) & high_mask)
    return (high << low_bits) | low


def _mixed(x: Numbers) -> Numbers:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def _keys(seed: int, epoch: int, rounds: int) -> list[int]:
    """One key a round, from a stream that starts at a mix of seed and epoch."""
    start = _mix(_mix(seed + _GOLDEN) + epoch + _GOLDEN)
    return [_mix(start + number * _GOLDEN) for number in range(1, rounds + 1)]


def _mix(x: int) -> int:
    x &= _MASK
    x = (x ^ (x >> 30)) * _FIRST & _MASK
    x = (x ^ (x >> 27)) * _SECOND & _MASK
    return x ^ (x >> 31)
