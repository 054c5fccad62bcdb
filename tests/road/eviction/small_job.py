"""The training script of the eviction tests: small, with data loader workers, and with places to get stuck in.

Arguments: steps, log file. A step whose number stands in STUCK_AT never ends by itself: it waits for the file GO.
With several ranks only the last one gets stuck, so that the others sit in a collective. At the step HOLD_AT the first
start waits for a notice, so that none comes too late.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import surefoot


def main() -> None:
    total, log = int(sys.argv[1]), Path(sys.argv[2])
    stuck_at = int(os.environ.get("STUCK_AT", "-1"))
    hold_at = int(os.environ.get("HOLD_AT", "-1"))
    workers = int(os.environ.get("LOADER_WORKERS", "0"))
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.manual_seed(3)
    torch.set_num_threads(1)
    width = int(os.environ.get("WIDTH", "64"))
    model: nn.Module = nn.Sequential(nn.Linear(64, width), nn.Dropout(0.2), nn.Linear(width, 1))
    if world_size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.arange(400, dtype=torch.float32))
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    stage = int(os.environ["STAGE"]) if "STAGE" in os.environ else None
    with surefoot.Run(model=model, optimizer=optimizer, loader=loader, stage=stage) as run, log.open("a") as out:
        for step, (ids,) in run.batches(loader, total):
            if step == stuck_at and rank == world_size - 1:
                Path(os.environ["STUCK_FILE"]).touch()
                while not Path(os.environ["GO"]).exists():
                    time.sleep(0.01)
            if step == hold_at and run.generation == 1:
                while not run.evicting:
                    time.sleep(0.001)
            loss = (model(ids[:, None].expand(-1, 64) / 400) - 1).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank:
                continue
            line = {"step": step, "samples": ids.tolist(), "loss": loss.detach().numpy().tobytes().hex()}
            out.write(json.dumps(line) + "\n")
            out.flush()
            time.sleep(float(os.environ.get("STEP_S", "0.01")))
    print("after the loop", flush=True)


if __name__ == "__main__":
    main()
