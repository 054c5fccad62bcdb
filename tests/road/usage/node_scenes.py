"""Training scripts for several nodes. `node_scenes.py NAME OPTIONS`, with the options as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import surefoot

RANK = int(os.environ.get("RANK", "0"))


def model_of(kind: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """What is registered, and what is called."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.ReLU(), torch.nn.Linear(13, 5))
    if kind == "fsdp":
        fully_shard(model)
        return model, model
    return model, DistributedDataParallel(model)


def say(*words: Any) -> None:
    os.write(1, (json.dumps(words) + "\n").encode())


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all that is trained, as whole tensors: the same for every layout."""
    moments = [value for state in optimizer.state.values() for value in state.values()]
    hashing = hashlib.sha256()
    for tensor in [*model.parameters(), *moments]:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        hashing.update(whole.detach().contiguous().numpy())
    return hashing.hexdigest()


def train(
    to: str | None,
    total: int,
    kind: str,
    evict: list[int] | None = None,
    hang: list[int] | None = None,
    wait: bool = False,
    **settings: Any,
) -> None:
    """The same batch on every rank. At the end, and before the first step, a line with the hash of everything.

    Args:
        to: the run; None if the supervisor knows.
        total: steps.
        kind: `ddp` or `fsdp`.
        evict: rank and step: that rank is told so by its own signal in that step.
        hang: rank and step: that rank stands still there.
        wait: each step waits a little, so that something can be done to the job meanwhile.
        settings: of the run.
    """
    dist.init_process_group("gloo")
    model, called = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with surefoot.Run(to, model=model, optimizer=optimizer, **settings) as run:
        say("begins", RANK, run.step, digest(model, optimizer))
        for step in run.steps(total):
            if wait:
                time.sleep(0.02)
            if hang == [RANK, step]:
                say("hangs", RANK)
                threading.Event().wait()
            optimizer.zero_grad()
            batch = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
            called(batch).square().mean().backward()
            optimizer.step()
            if evict == [RANK, step]:
                os.kill(os.getpid(), signal.SIGTERM)
                while not run.evicting:
                    time.sleep(0.001)
    say("ends", RANK, run.step, digest(model, optimizer))
    dist.destroy_process_group()


if __name__ == "__main__":
    # What agents are started by.
    sys.executable = os.environ.get("SUREFOOT_TEST_PYTHON", sys.executable)
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
