"""Training scripts whose state and losses are written down, for worlds of several nodes. `node_matrix_scenes.py NAME
OPTIONS`, with the options as JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

import surefoot

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
NODE = Path(os.environ["SUREFOOT_SHM"]).name
GLOBAL_ROWS = 12
"""Of one step, whatever the world: each rank trains on as many as the others."""


def run(
    to: str,
    layout: str,
    total: int,
    dump: str,
    save: tuple[int, ...] = (),
    hang: bool = False,
    seed: int = 100,
    drives: str = "",
    env: Mapping[str, str] | None = None,
) -> None:
    """Train what is left of `total` steps. What each step begins with, and the end, goes to a file `dump-STEP-rank` of
    each rank; where the launch began, and each step's loss, to its output.

    Args:
        to: the run.
        layout: `ddp`, `fsdp` or `hsdp` (parts over two ranks, copies over the rest).
        total: steps.
        dump: beginning of the files' names.
        save: numbers of steps finished at which to save, and to wait for it.
        seed: of the ranks' own generators, one after the other.
        hang: after `total` steps stay in the next one for ever.
        drives: a directory in which each node has a drive of its own.
        env: settings of the store.
    """
    os.environ.update(env or {})
    torch.set_num_threads(1)
    _join()
    torch.manual_seed(1)
    model = _in_layout(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    scheduler = StepLR(optimizer, 2, 0.7)
    torch.manual_seed(seed + RANK)
    disk = [f"{drives}/{NODE}"] if drives else []
    with surefoot.Run(to, disk=disk, interval_s=3600, model=model, optimizer=optimizer, scheduler=scheduler) as kept:
        _say("begins", kept.step)
        for step in kept.steps(total + hang):
            _dump(model, optimizer, f"{dump}-{step}-{RANK}")
            if hang and step == total:
                _say("hangs")
                threading.Event().wait()
            if step + 1 in save:
                kept.save(wait=True)
            loss = _train(model, optimizer, step)
            scheduler.step()
            _say("loss", step, loss.item().hex(), optimizer.param_groups[0]["lr"].hex())
    _dump(model, optimizer, f"{dump}-{kept.step}-{RANK}")
    if dist.is_initialized():
        dist.destroy_process_group()


def _join() -> None:
    if WORLD > 1:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _in_layout(layout: str) -> nn.Module:
    """Lengths that nothing divides, and layers with fewer rows than ranks."""
    model = nn.Sequential(
        nn.Linear(7, 131), nn.Dropout(0.1), nn.Tanh(), nn.Linear(131, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 1)
    )
    if layout == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("a", "b")) if layout == "hsdp" else None
    fully_shard(model, mesh=mesh)
    return model


def _train(model: nn.Module, optimizer: Optimizer, step: int) -> torch.Tensor:
    """One step on this rank's rows; its dropout draws from this rank's own generator."""
    rows = torch.randn(GLOBAL_ROWS, 7, generator=torch.Generator().manual_seed(step))
    mine = rows[RANK::WORLD]
    loss = mse_loss(model(mine), mine.sin().sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def _dump(model: nn.Module, optimizer: Optimizer, path: str) -> None:
    """Every tensor of model and optimizer, whole, gathered by torch."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    found = {f"model.{name}": value for name, value in inner.state_dict().items()}
    for name, parameter in inner.named_parameters():
        found |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    save_file({name: _whole(value) for name, value in found.items()}, path)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().contiguous()


def _say(*words: Any) -> None:
    """A line by one write, so that two ranks' lines do not mix."""
    os.write(1, (json.dumps([words[0], RANK, *words[1:]]) + "\n").encode())


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
