"""A model that `DistributedDataParallel` keeps alike on all ranks: the `with` and the `for` are all there is to it.

    surefoot run --to DIR --nproc 2 examples/ddp.py

Start it again after an eviction (exit code 75), and it goes on after the last step that was finished.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import surefoot

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=200)
given = options.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
points = torch.randn(640, 16)
data = TensorDataset(points, points.sin().sum(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + rank)

with surefoot.Run(model=model, optimizer=optimizer, loader=loader) as run:
    for step, (inputs, wanted) in run.batches(loader, total=given.steps):
        loss = nn.functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item()!r}", flush=True)

dist.destroy_process_group()
