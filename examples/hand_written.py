"""The pattern that people write by hand: a SIGTERM flag, a MAX all-reduce at each step, `DefaultStager`, `async_save`.

    torchrun --nproc-per-node 2 -- examples/hand_written.py --to DIR

Start it again after an eviction, and it goes on from the newest complete checkpoint. `hand_written_with_surefoot.py`
is the same training with Surefoot. What this does not cover:

* A process that dies without a word costs everything since the last periodic save.
* A Python signal handler runs between bytecodes: a rank that waits in a collective hears of the eviction late, and a
  rank in a long evaluation hears of it when it is over.
* Nothing checks what is read: a flipped bit in a checkpoint is loaded.
* To get to its place in the data it fetches and throws away; with workers, what they fetched ahead is not exact.
* Nobody deletes old checkpoints, nor those that a kill left incomplete.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
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

# ---- the flag: only the machine that is reclaimed gets the signal, but all ranks have to save at the same step
noticed = torch.zeros(1, dtype=torch.int32)
signal.signal(signal.SIGTERM, lambda _number, _frame: noticed.fill_(1))


def evicted_anywhere() -> bool:
    flag = noticed.clone()
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


# ---- saving: a group of its own, since background collectives must not meet those of the training
group = dist.new_group(backend="gloo")
# Without CUDA there are no pinned memory and no non-blocking copies.
stager = DefaultStager(
    StagingOptions(use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False)
)
staged = saved = None


def state(step: int) -> dict:
    weights, moments = get_state_dict(model, optimizer)
    # What has the same name on all ranks is saved once: each rank's random state needs a name of its own.
    return {"model": weights, "optimizer": moments, "step": step, f"rng_{rank}": torch.get_rng_state()}


def save(step: int) -> None:
    global staged, saved
    # The stager has one buffer: the last save must be out of it.
    wait_for(saved)
    answer = async_save(state(step), checkpoint_id=given.to / f"step_{step}", process_group=group, async_stager=stager)
    staged, saved = answer.staging_completion, answer.upload_completion


def wait_for(future) -> None:
    if future is not None:
        future.result()


# ---- resuming: a checkpoint is complete once its .metadata is there
complete = [path.parent for path in given.to.glob("step_*/.metadata")]
start, rng = 0, torch.get_rng_state()
if complete:
    newest = max(complete, key=lambda path: int(path.name.removeprefix("step_")))
    found = state(0)
    load(found, checkpoint_id=newest, process_group=group)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    start, rng = found["step"], found[f"rng_{rank}"]
    if rank == 0:
        print(f"resumed from step {start}", flush=True)


def batches():
    """From step `start` on. Random states come back after what is thrown away, and before an epoch's own draw."""
    epoch, skip = divmod(start, len(loader))
    sampler.set_epoch(epoch)
    if not skip:
        torch.set_rng_state(rng)
    iterator = iter(loader)
    for _ in range(skip):
        next(iterator)
    if skip:
        torch.set_rng_state(rng)
    yield from iterator
    while True:
        epoch += 1
        sampler.set_epoch(epoch)
        yield from loader


# ---- the loop
for step, (inputs, wanted) in zip(range(start, given.steps), batches(), strict=False):
    loss = nn.functional.mse_loss(model(inputs), wanted)
    optimizer.zero_grad()
    loss.backward()
    # Before the optimizer changes what is being copied.
    wait_for(staged)
    optimizer.step()
    if rank == 0 and (step + 1) % 100 == 0:
        print(f"step {step + 1}: loss {loss.item()!r}", flush=True)
    leaving = evicted_anywhere()
    if leaving or (step + 1) % given.save_every == 0:
        save(step + 1)
    if leaving:
        break

wait_for(saved)
stager.close()
dist.destroy_process_group()
