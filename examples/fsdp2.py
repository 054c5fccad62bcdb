"""A model sharded by FSDP2 over the ranks of one machine: each rank keeps its own shards, all of one step.

    surefoot run --to DIR --nproc 2 examples/fsdp2.py

On a machine with GPUs: one rank a GPU, over NCCL; else on the CPU, over gloo.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import surefoot

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=200)
options.add_argument("--width", type=int, default=256)
options.add_argument("--layers", type=int, default=3)
given = options.parse_args()

if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
else:
    device = torch.device("cpu")
    dist.init_process_group("gloo")
rank = dist.get_rank()


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(given.width, given.width), nn.GELU(), nn.Dropout(0.1))


torch.manual_seed(0)
blocks = [block() for _ in range(given.layers)]
model = nn.Sequential(nn.Linear(16, given.width), *blocks, nn.Linear(given.width, 1)).to(device)
for inner in blocks:
    fully_shard(inner)
fully_shard(model)
# Made after the sharding: it trains the shards.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
points = torch.randn(640, 16)
data = TensorDataset(points, points.sin().sum(1, keepdim=True))
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
# Each rank drops out its own.
torch.manual_seed(1 + rank)

with surefoot.Run(model=model, optimizer=optimizer, loader=loader) as run:
    for step, (inputs, wanted) in run.batches(loader, total=given.steps):
        loss = nn.functional.mse_loss(model(inputs.to(device)), wanted.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item()!r}", flush=True)

dist.destroy_process_group()
