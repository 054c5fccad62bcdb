"""What every rank of a measurement does first and last."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from surefoot.bench.jobs import figures_path

_PR_SET_PDEATHSIG = 1


def begin() -> dict[str, Any]:
    """Join the other ranks, and return the settings. This process ends with the one that started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    settings: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    meeting = f"file://{settings['place']}/{settings['name']}.meeting"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    return settings


def leave(settings: dict[str, Any], figures: dict[str, Any], *, last: bool = False) -> None:
    """Leave this rank's figures; if it is the last that this process does, part from the others."""
    path = figures_path(Path(settings["place"]), settings["name"], dist.get_rank())
    path.write_text(json.dumps(figures), encoding="ascii")
    if last:
        dist.barrier()
        dist.destroy_process_group()
