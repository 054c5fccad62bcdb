"""What campaigns train: a small model, DDP or FSDP2, whose losses depend on everything that is kept.

campaign_script.py --steps N --kind ddp|fsdp --log DIR --name NAME [--to URI] [--grace S] [--interval S] [--disk DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import surefoot

_STEP_S, _SLOW_STEP_S = 0.01, 0.4
WIDTH = 64
SAMPLES = 96


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--kind", required=True)
    options.add_argument("--log", type=Path, required=True)
    options.add_argument("--name", required=True)
    options.add_argument("--to", required=True)
    options.add_argument("--epoch", type=float, required=True, help="seconds from the epoch to the machine's start")
    options.add_argument("--pace", type=Path, required=True, help="file with the step from which it goes slowly")
    options.add_argument("--padding-mb", type=float, default=0.0)
    options.add_argument("--settings", type=json.loads, default={})
    given = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(given)
    dist.destroy_process_group()


def train(given: argparse.Namespace) -> None:
    rank = dist.get_rank()
    model, called = _model(given.kind, given.padding_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    loader = _loader()
    with surefoot.Run(given.to, model=model, optimizer=optimizer, loader=loader, **given.settings) as run:
        name = f"{given.name}-attempt{run.generation}-rank{rank}-pid{os.getpid()}.jsonl"
        with (given.log / name).open("w", buffering=1) as log:
            for step, (samples, x) in run.batches(loader, total=given.steps):
                loss = _step(called, optimizer, x)
                # So that there is time in which something can happen.
                time.sleep(_SLOW_STEP_S if step >= _read(given.pace) else _STEP_S)
                log.write(_line(given, run.generation, rank, step, samples, loss) + "\n")


def _model(kind: str, padding_mb: float) -> tuple[nn.Module, nn.Module]:
    """What is kept, and what is called."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.Dropout(0.1), nn.ReLU(), nn.Linear(WIDTH, 1))
    if padding_mb:
        # Bytes to be moved, and nothing to be computed: AdamW keeps two numbers more for each.
        model.padding = nn.Embedding(round(padding_mb * 1e6 / 12 / WIDTH), WIDTH)
    if kind == "fsdp":
        fully_shard(model)
        return model, model
    # Else the order in which three ranks or more add gradients would change with a restart.
    return model, DistributedDataParallel(model, find_unused_parameters=True)


def _loader() -> DataLoader[Any]:
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(torch.arange(SAMPLES), x)
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=3)
    return DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def _read(pace: Path) -> int:
    return int(struct.unpack("q", pace.read_bytes())[0])


def _line(given: argparse.Namespace, attempt: int, rank: int, step: int, samples: Tensor, loss: Tensor) -> str:
    line = {"run": given.name, "attempt": attempt, "rank": rank, "step": step, "samples": samples.tolist()}
    # The clock of the day may be made wrong.
    t = given.epoch + time.clock_gettime(time.CLOCK_BOOTTIME)
    return json.dumps({**line, "loss_bits": loss.numpy().tobytes().hex(), "t": t})


if __name__ == "__main__":
    main()
