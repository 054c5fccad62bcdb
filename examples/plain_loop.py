"""A plain loop: the `with` and the `for` are all there is to it.

    python examples/plain_loop.py --to DIR

Start it again after an eviction (exit code 75) or a crash, and it goes on after the last step that was finished.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot

options = argparse.ArgumentParser()
options.add_argument("--to", required=True, help="directory, or bucket prefix (s3://…), of the run")
options.add_argument("--steps", type=int, default=500)
options.add_argument("--width", type=int, default=64)
given = options.parse_args()

torch.manual_seed(0)
points = torch.randn(640, 16)
loader = DataLoader(TensorDataset(points, points.sin().sum(1, keepdim=True)), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(16, given.width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(given.width, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with surefoot.Run(given.to, model=model, optimizer=optimizer, loader=loader) as run:
    for step, (inputs, wanted) in run.batches(loader, total=given.steps):
        loss = nn.functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item()!r}", flush=True)
