"""The training script of the eviction tests: small, with data loader workers, and with places to get stuck in.

Arguments: steps, log file. A step whose number stands in STUCK_AT never ends by itself: it waits for the file GO.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot


def main() -> None:
    total, log = int(sys.argv[1]), Path(sys.argv[2])
    stuck_at = int(os.environ.get("STUCK_AT", "-1"))
    workers = int(os.environ.get("LOADER_WORKERS", "0"))
    torch.manual_seed(3)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.arange(400, dtype=torch.float32))
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    with surefoot.Run(model=model, optimizer=optimizer, loader=loader) as run, log.open("a") as out:
        for step, (ids,) in run.batches(loader, total):
            if step == stuck_at:
                Path(os.environ["STUCK_FILE"]).touch()
                while not Path(os.environ["GO"]).exists():
                    time.sleep(0.01)
            loss = (model(ids[:, None].expand(-1, 64) / 400) - 1).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            line = {"step": step, "samples": ids.tolist(), "loss": loss.detach().numpy().tobytes().hex()}
            out.write(json.dumps(line) + "\n")
            out.flush()
            time.sleep(float(os.environ.get("STEP_S", "0.01")))
    print("after the loop", flush=True)


if __name__ == "__main__":
    main()
