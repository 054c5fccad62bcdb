"""FSDP2 training scripts. `sharded_scenes.py NAME OPTIONS`, with the options as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import surefoot

sys.path.append(str(Path(__file__).parents[2] / "trainer"))

import fsdp_scenes


def train(to: str, total: int, evict_at: int | None = None) -> None:
    """A sharded model, the same batches on each rank; at the end a line with the hash of every bit of this rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = fsdp_scenes.net("fsdp")
    optimizer = fsdp_scenes.OPTIMIZERS["adamw"](model)
    with surefoot.Run(to, model=model, optimizer=optimizer) as run:
        for step in run.steps(total):
            fsdp_scenes.train(model, optimizer, range(step, step + 1), alike=True)
            if step == evict_at:
                os.kill(os.getpid(), 15)
                while not run.evicting:
                    pass
    text = repr(fsdp_scenes.local_bits(model, optimizer)).encode()
    os.write(1, (json.dumps([dist.get_rank(), run.step, hashlib.sha256(text).hexdigest()]) + "\n").encode())
    dist.destroy_process_group()


def alone(to: str) -> None:
    """The truth: the first three steps by one plain process."""
    fsdp_scenes.alone("adamw", to)


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
