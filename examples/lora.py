"""Adapters on a frozen base: the base is saved once, in a file of its own, and every step only what is trained.

    surefoot run --to DIR examples/lora.py

Nothing has to be said for that: frozen is what does not require a gradient and is in no optimizer. A base of less than
16 MiB is not worth a file of its own, and is saved like the rest.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=200)
options.add_argument("--width", type=int, default=1024)
options.add_argument("--layers", type=int, default=5)
options.add_argument("--rank", type=int, default=4, help="of the adapters")
given = options.parse_args()


class Adapted(nn.Module):
    """A frozen layer with a narrow detour that is trained; at first the detour adds nothing."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, given.rank, bias=False)
        self.up = nn.Linear(given.rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(nn.functional.dropout(self.down(x), 0.1, self.training)))


torch.manual_seed(0)
# Stands for a model that somebody else has trained: a script loads it at each start, as it always does.
base = [nn.Linear(given.width, given.width) for _ in range(given.layers)]
model = nn.Sequential(*map(Adapted, base))
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
points = torch.randn(256, given.width)
loader = DataLoader(TensorDataset(points, points.roll(1, dims=1).sign()), batch_size=8, shuffle=True)

with surefoot.Run(model=model, optimizer=optimizer, loader=loader) as run:
    for step, (inputs, wanted) in run.batches(loader, total=given.steps):
        loss = nn.functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item()!r}", flush=True)
