"""What the scripts beside this file are given, and what they share that has nothing to do with saving."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.demo.text_task import Batch, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """The command line."""

    steps: int
    seed: int
    log: Path
    name: str
    to: Path
    save_every: int


def parse(description: str | None) -> Given:
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--log", type=Path, required=True, help="directory for the lines")
    options.add_argument("--name", default="undisturbed", help="name of this run in the lines")
    options.add_argument("--to", type=Path, required=True, help="directory for the checkpoints")
    options.add_argument("--save-every", type=int, default=25, help="steps between periodic saves")
    return Given(**vars(options.parse_args()))


def next_attempt(log: Path, name: str) -> int:
    """A number larger than that of any earlier start, the same on all ranks."""
    number = torch.tensor(1 + sum(1 for _ in log.glob(f"{name}-attempt*-rank0-*")))
    dist.broadcast(number, src=0)
    return int(number)


def batches_from(task: Task, step: int, rng: Tensor | None) -> Iterator[Batch]:
    """Batches for ever, from that of `step` on. Those before it in its epoch are fetched and thrown away.

    A saved random state is put back after that, since what is thrown away has drawn from it too; at an epoch's start
    before, since the loader's iterator draws a seed of its own.
    """
    epoch, skip = divmod(step, len(task.loader))
    task.sampler.set_epoch(epoch)
    if rng is not None and not skip:
        torch.set_rng_state(rng)
    batches = iter(task.loader)
    for _ in range(skip):
        next(batches)
    if rng is not None and skip:
        torch.set_rng_state(rng)
    yield from batches
    for later in count(epoch + 1):
        task.sampler.set_epoch(later)
        yield from task.loader
