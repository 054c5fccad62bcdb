"""The training whose stored runs lie beside this file: RUN TOTAL.

A stored run is made by

    python tests/stored/train.py DIRECTORY 5

without its events and what was saved at its first step.

It prints the step after which it starts, and at the end the hash of the weights.
"""

from __future__ import annotations

import hashlib
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import surefoot

run_directory, total = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.arange(24.0).reshape(6, 4) / 24), batch_size=2, shuffle=True)
with surefoot.Run(run_directory, interval_s=600, model=model, optimizer=optimizer, loader=loader) as run:
    print("starts after step", run.step)
    for _step, (batch,) in run.batches(loader, total):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()
weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(hashlib.sha256(weights).hexdigest())
