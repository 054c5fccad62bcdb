"""A job in one layout or another. `reshard_road_scenes.py NAME OPTIONS`, with the options as JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import surefoot

sys.path.append(str(Path(__file__).parents[2] / "trainer"))

import reshard_scenes


class Job(nn.Module):
    """Lengths that nothing divides, a layer with fewer rows than ranks, and one of several MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(1021, 1031)
        self.small = nn.Linear(1031, 5)
        self.one = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.one(torch.relu(self.small(torch.relu(self.large(x)))))
        return y


def _in_layout(layout: str) -> nn.Module:
    model = Job()
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout != "plain":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")) if layout == "hsdp" else None
        fully_shard(model, mesh=mesh)
    return model


def run(to: str, layout: str, total: int, dump: str, disk: str = "", parts: str = "all", hang: bool = False) -> None:
    """Train what is left of `total` steps, the last but one saved and waited for. What each step begins with, and the
    end, goes to a file `dump` with the number of steps finished; what the launch began with, to `dump.begun`. With
    `hang`, stay in the last step for ever."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    elif layout == "fsdp":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(1)
    model = _in_layout(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    objects = {"model": model} if parts == "model" else {"model": model, "optimizer": optimizer}
    with surefoot.Run(to, disk=[disk] if disk else [], interval_s=3600, **objects) as kept:
        _dump(model, optimizer, f"{dump}.begun")
        for step in kept.steps(total):
            _dump(model, optimizer, f"{dump}.{step}")
            if hang and step == total - 1:
                _say("hangs")
                threading.Event().wait()
            batch = torch.randn(3, 1021, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if step == total - 2:
                kept.save(wait=True)
    _dump(model, optimizer, f"{dump}.{kept.step}")


def _say(word: str) -> None:
    """A line by one write, so that two ranks' lines do not mix."""
    os.write(1, f"{word} {os.environ.get('RANK', '0')}\n".encode())


def _dump(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    found = reshard_scenes.full(model, optimizer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_file(found, path)


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
