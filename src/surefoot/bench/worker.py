"""One rank of a measurement: how it begins and ends, and what it trains.

Parameters with AdamW's moments, and matrix work in place of forward and backward.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from surefoot.bench.jobs import figures_path

_PR_SET_PDEATHSIG = 1
_MATRIX = 384
_COLUMNS = 64
_CALIBRATION_ROUNDS = 4
_TENSORS_PER_PARAMETER = 4
"""The parameter, two moments and AdamW's counter of steps."""


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


class Parameters(torch.nn.Module):
    """Nothing but parameters, all of one size."""

    def __init__(self, count: int, rows: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(rows, _COLUMNS) * 0.01 for _ in range(count))


class Training:
    """One rank's state, and the work of its steps. The state exists whole from the beginning."""

    def __init__(self, tensors: int, rank_bytes: int) -> None:
        count = max(1, round(tensors / _TENSORS_PER_PARAMETER))
        rows = max(1, rank_bytes // 3 // count // (_COLUMNS * 4))
        self.model = Parameters(count, rows)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self._left = torch.randn(_MATRIX, _MATRIX)
        self._rounds = 1
        self.optimizer.step()

    @property
    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def calibrate(self, forward_backward_s: float) -> None:
        """Make forward and backward take at least so long, on a core of their own."""
        self.forward_backward()
        start_s = time.perf_counter()
        for _ in range(_CALIBRATION_ROUNDS):
            self._multiply()
        round_s = (time.perf_counter() - start_s) / _CALIBRATION_ROUNDS
        self._rounds = max(1, math.ceil(forward_backward_s / round_s))

    def forward_backward(self) -> None:
        """The matrix work. Touches neither parameters nor gradients: a step's gradients are the last one's."""
        for _ in range(self._rounds):
            self._multiply()

    def tensors(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """Every tensor of the state by a name of its own; they alias the live ones."""
        named = {f"{prefix}p{i}": parameter.detach() for i, parameter in enumerate(self.model.weights)}
        for i, parameter in enumerate(self.model.weights):
            for key, value in self.optimizer.state[parameter].items():
                named[f"{prefix}{key}{i}"] = value
        return named

    def copy_s(self) -> float:
        """Time that a copy of the whole state takes this thread, into memory that is there."""
        pairs = [(torch.empty_like(tensor), tensor) for tensor in self.tensors().values()]
        for target, source in pairs:
            target.copy_(source)
        start_s = time.perf_counter()
        for target, source in pairs:
            target.copy_(source)
        return time.perf_counter() - start_s

    def _multiply(self) -> None:
        (self._left @ self._left).sum().item()
