"""The plain loop: `torch.save` by rank 0 every so many steps, and once more on SIGTERM.

    torchrun --nproc-per-node 2 -- examples/torch_save_on_sigterm.py --to DIR

Start it again after an eviction, and it goes on from the newest file. `hand_written_with_surefoot.py` is the same
training with Surefoot. What this does not cover:

* Training stands still while rank 0 writes.
* Ranks do not agree on the step at which they leave: one that leaves earlier tears the others out of their collective,
  and if rank 0 is among these, nothing is saved.
* A process that dies without a word costs everything since the last periodic save.
* Random states are not saved: dropout goes on differently after a resume.
* Nothing checks what is read, and nobody deletes old checkpoints.
"""

from __future__ import annotations

import argparse
import os
import signal
from itertools import count, islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

options = argparse.ArgumentParser()
options.add_argument("--to", type=Path, required=True, help="directory for the checkpoints")
options.add_argument("--steps", type=int, default=2000)
options.add_argument("--save-every", type=int, default=500)
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

# In the handler itself the optimizer may be half-way through its step: it only leaves word.
noticed: list[int] = []
signal.signal(signal.SIGTERM, lambda number, _frame: noticed.append(number))


def save(step: int) -> None:
    if rank != 0:
        return
    part = given.to / f"step_{step}.pt.part"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
    # A file with its final name is whole.
    os.replace(part, given.to / f"step_{step}.pt")


start = 0
newest = max(given.to.glob("step_*.pt"), key=lambda path: int(path.stem.removeprefix("step_")), default=None)
if newest is not None:
    found = torch.load(newest, weights_only=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    start = found["step"]
    if rank == 0:
        print(f"resumed from step {start}", flush=True)


def batches():
    """From step `start` on: those before it in its epoch are fetched and thrown away."""
    first, skip = divmod(start, len(loader))
    for epoch in count(first):
        sampler.set_epoch(epoch)
        yield from islice(loader, skip if epoch == first else 0, None)


for step, (inputs, wanted) in zip(range(start, given.steps), batches(), strict=False):
    loss = nn.functional.mse_loss(model(inputs), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and (step + 1) % 100 == 0:
        print(f"step {step + 1}: loss {loss.item()!r}", flush=True)
    leaving = bool(noticed)
    if leaving or (step + 1) % given.save_every == 0:
        save(step + 1)
    if leaving:
        break
