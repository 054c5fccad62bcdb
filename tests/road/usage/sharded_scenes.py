"""FSDP2 training scripts. `sharded_scenes.py NAME OPTIONS`, with the options as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import surefoot

sys.path.append(str(Path(__file__).parents[2] / "trainer"))

import fsdp_scenes


def train(to: str, total: int, evict_at: int | None = None) -> None:
    """A sharded model, the same batches on each rank; at the end a line with the hash of every bit of this rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = fsdp_scenes.net("fsdp")
    optimizer = fsdp_scenes.OPTIMIZERS["adamw"](model)
    with surefoot.Run(to, model=model, optimizer=optimizer) as run:
        for step in run.steps(total):
            fsdp_scenes.train(model, optimizer, range(step, step + 1), alike=True)
            if step == evict_at:
                os.kill(os.getpid(), 15)
                while not run.evicting:
                    pass
    text = repr(fsdp_scenes.local_bits(model, optimizer)).encode()
    os.write(1, (json.dumps([dist.get_rank(), run.step, hashlib.sha256(text).hexdigest()]) + "\n").encode())
    dist.destroy_process_group()


def adapt(to: str, total: int, seed: int = 1) -> None:
    """A sharded model of which one layer never changes; at the end a line with the hash of every bit of this rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(2049, 4401), torch.nn.ReLU(), torch.nn.Linear(4401, 3))
    model[0].requires_grad_(False)
    fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with surefoot.Run(to, model=model, optimizer=optimizer) as run:
        for step in run.steps(total):
            batch = torch.randn(4, 2049, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    hashing = hashlib.sha256()
    for tensor in [*model.parameters(), *moments]:
        hashing.update(tensor.to_local().detach().numpy() if isinstance(tensor, DTensor) else tensor.numpy())
    os.write(1, (json.dumps([dist.get_rank(), run.step, hashing.hexdigest()]) + "\n").encode())
    dist.destroy_process_group()


def alone(to: str) -> None:
    """The truth: the first three steps by one plain process."""
    fsdp_scenes.alone("adamw", to)


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
