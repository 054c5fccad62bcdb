"""Randomness seeded by sample: a data set's draws follow from seed, epoch and index, in any process and at any time.

A loader's workers start with seeds of their own and run ahead of the training, so what they draw (crops, noise) is
another thing after a restart. Seeded for each sample, it is the same with any number of workers and of ranks.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from surefoot.errors import ConfigError


class Seeded(Dataset[Any]):
    """A map-style data set around another; see `seeded`. Other attributes are the inner data set's."""

    def __init__(self, inner: Any, seed: int) -> None:
        self._inner = inner
        self._seed = seed
        # In shared memory: workers that persist hold a copy of the data set from the first epoch on.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: Any) -> Any:
        with _drawing_from(self._seed, int(self._epoch), index):
            return self._inner[index]

    # No `__getitems__`, not even the inner one's: a whole batch at once would draw from the first sample's seed.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_inner" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._inner, name)

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose randomness is drawn next. `run.batches` does this; a loop of one's own has to."""
        self._epoch.fill_(epoch)
        inner = getattr(self._inner, "set_epoch", None)
        if callable(inner):
            inner(epoch)


def seeded(data: Any, seed: int = 0) -> Seeded:
    """Wrap a map-style data set so that what it draws follows from seed, epoch and index.

    Python's `random`, NumPy's global generator and torch's default CPU generator are seeded before each sample, and
    put back after it: the training's own random numbers do not depend on the data set's any more. Generators that the
    data set made itself are not touched: make them in `__getitem__`, from a drawn number.

    Args:
        data: the outermost data set, so that its indices are those that the sampler draws. A `__getitems__` of its own
            is not used.
        seed: any whole number.

    Raises:
        ConfigError: an iterable data set, which has no index to seed by; on reading, an index that is neither a number
            nor made of numbers and text.
    """
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        raise ConfigError(
            f"seeded({type(data).__name__}): it has no index to seed by; in its __iter__, seed by a number of each "
            "sample's own"
        )
    return Seeded(data, operator.index(seed))


@contextmanager
def _drawing_from(seed: int, epoch: int, index: Any) -> Iterator[None]:
    key = blake2b(f"{seed} {epoch} {_canonical(index)}".encode(), digest_size=24).digest()
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(int.from_bytes(key[:8], "little"))
        np.random.seed(np.frombuffer(key[8:16], dtype="<u4"))
        # Not torch.manual_seed(), which seeds every device too: those belong to the training.
        torch.default_generator.manual_seed(int.from_bytes(key[16:], "little", signed=True))
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _canonical(index: Any) -> str:
    if isinstance(index, str):
        return repr(index)
    if isinstance(index, tuple | list):
        return f"({','.join(map(_canonical, index))})"
    try:
        return str(operator.index(index))
    except TypeError:
        raise ConfigError(
            f"seeded() was asked for sample {index!r}: its indices have to be numbers, text, or tuples of them"
        ) from None
