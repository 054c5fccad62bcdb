"""Training scripts whose every draw and sample is written down. `exact_scenes.py NAME OPTIONS`."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import surefoot
from surefoot.data import GlobalBatchSampler, seeded

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
BATCH = 3
"""Rows of a batch."""


class Rows(Dataset[torch.Tensor]):
    """Draws for each sample from all global generators."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), float(np.random.rand()), torch.rand(1).item()])


class Restless:
    """Draws from all global generators whenever it is loaded."""

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, _state: dict[str, int]) -> None:
        [draw() for draw in (random.random, np.random.rand, lambda: torch.rand(1))]


def generators() -> str:
    """Where every global generator stands."""
    state = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[union-attr]
    return hashlib.sha256(repr(state).encode()).hexdigest()[:16]


class Net:
    """A network with dropout, and its training step."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, rows: torch.Tensor) -> str:
        """Returns the loss, every bit of it."""
        loss = (self.model(rows.float()) - rows.float().sum(1, keepdim=True)).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item().hex()


def each_its_own(to: str, total: int, log: str, stop: int | None = None) -> None:
    """Ranks that differ in everything: seeds, generators of their own, batch sizes, and so places in their data."""
    if WORLD > 1:
        dist.init_process_group("gloo")
    # A script that is started again may seed as it likes.
    seed = 10 * RANK + 1 if not Path(f"{log}{RANK}").exists() else random.randrange(1 << 30)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    net, gen, own = Net(), np.random.default_rng(RANK), torch.Generator().manual_seed(RANK)
    loader = DataLoader(Rows(), batch_size=2 + 3 * RANK, shuffle=True)
    with surefoot.Run(
        to, stage=1, model=net.model, optimizer=net.optimizer, gen=gen, own=own, restless=Restless(), loader=loader
    ) as run:
        print("entered", RANK, run.step, flush=True)
        for step, rows in run.batches(loader, total):
            before = generators()
            line = [RANK, step, rows[:, 0].tolist(), before, gen.random(), torch.rand(1, generator=own).item()]
            line += [net.step(rows), generators()]
            dist.barrier()  # no rank is a step behind when they are killed
            if step == stop:
                print("hanging", RANK, flush=True)
                threading.Event().wait()
            with Path(f"{log}{RANK}").open("a") as out:
                print(json.dumps(line), file=out)


def by_seed(to: str, total: int, log: str, workers: int, batch: int = 6) -> None:
    """Global batches, augmented by what workers draw; any number of ranks."""
    if WORLD > 1:
        dist.init_process_group("gloo")
    data = seeded(Rows(), 3)
    sampler = GlobalBatchSampler(data, batch, seed=5)
    loader: Any = DataLoader(data, batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
    with surefoot.Run(to, stage=1, w=torch.zeros(1), loader=loader) as run:
        for step, rows in run.batches(loader, total):
            with Path(f"{log}{step:03d}-{RANK}").open("w") as out:
                print(json.dumps(rows.tolist()), file=out)


def same_with_and_without(to: str, total: int, workers: int) -> None:
    """A bare loop, and the same one with Surefoot saving every step: losses and every generator, step by step."""

    def bare(net: Net, loader: DataLoader[torch.Tensor], note: Callable[[str], None]) -> None:
        step = 0
        while step < total:
            for rows in loader:
                note(net.step(rows))
                step += 1
                if step >= total:
                    break

    def saved(net: Net, loader: DataLoader[torch.Tensor], note: Callable[[str], None]) -> None:
        with surefoot.Run(to, stage=1, model=net.model, optimizer=net.optimizer, loader=loader) as run:
            for step, rows in run.batches(loader, total):
                note(net.step(rows))
                if step % 3 == 0:
                    run.save("named", wait=True)

    notes: list[list[str]] = []
    for loop in (bare, saved):
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
        net = Net()
        loader = DataLoader(Rows(), BATCH, shuffle=True, num_workers=workers)
        made: list[str] = []
        loop(net, loader, lambda loss, made=made: made.append(loss + generators()))  # type: ignore[misc]
        notes.append([*made, str([p.tolist() for p in net.model.parameters()])])
    print("same" if notes[0] == notes[1] else "differs", len(notes[0]), flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
