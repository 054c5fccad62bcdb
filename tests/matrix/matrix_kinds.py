"""Ten kinds of training, each a model with all that belongs to it; every public attribute of a kind is kept."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from matrix_modes import Plain
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

INPUTS = 8
WIDE = 512
"""Its middle layer alone is a MiB of parameters."""
NARROW = 24
FREEZE_AT = 6
INFINITE_AT = (2, 3, 8, 13, 14, 19, 26)
"""Steps at which a gradient overflows."""


class Kind(Protocol):
    def __init__(self, mode: Plain) -> None: ...

    def train(self, step: int, x: Tensor, y: Tensor) -> list[Tensor]:
        """One step; returns its losses, and whatever else must come out the same."""


def net(width: int, norm: type[nn.Module] = nn.Identity) -> nn.Sequential:
    """Randomness in two places; the wide layer is the fourth."""
    return nn.Sequential(
        nn.Linear(INPUTS, width),
        norm(width),
        nn.Dropout(0.2),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.Linear(width, 1),
    )


def _update(optimizer: Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


class WithAdamW:
    """Large, so that it is copied behind the next step; a schedule."""

    def __init__(self, mode: Plain) -> None:
        self.model = mode.wrap(net(WIDE))
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3, amsgrad=True)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=30)

    def train(self, step: int, x: Tensor, y: Tensor) -> list[Tensor]:
        loss = mse_loss(self.model(x), y)
        _update(self.optimizer, loss)
        self.scheduler.step()
        return [loss]


class Fused:
    """Large, and changed in a way that moves no version counter."""

    def __init__(self, mode: Plain) -> None:
        self.model = mode.wrap(net(WIDE))
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def train(self, step: int, x: Tensor, y: Tensor) -> list[Tensor]:
        loss = mse_loss(self.model(x), y)
        _update(self.optimizer, loss)
        return [loss]


class WithSgd:
    """Momentum, and a schedule made of a lambda."""

    def __init__(self, mode: Plain) -> None:
        self.model = mode.wrap(net(NARROW))
        self.optimizer = SGD(self.model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 20))

    def train(self, step: int, x: Tensor, y: Tensor) -> list[Tensor]:
        loss = mse_loss(self.model(x), y)
        _update(self.optimizer, loss)
        self.scheduler.step()
        return [loss]


class TwoOptimizers:
    """One of them steps only every other time, and meanwhile nothing says when its parameters change."""

    def __init__(self, mode: Plain) -> None:
        self.model = mode.wrap(net(WIDE))
        *body, weight, bias = self.model.parameters()
        self.body_optimizer = AdamW(body, lr=1e-3)
        self.head_optimizer = SGD([weight, bias], lr=0.01, momentum=0.9)

    def train(self, step: int, x: Tensor, y: Tensor) -> list[Tensor]:
        loss = mse_loss(self.model(x), y)
        self.head_optimizer.zero_grad()
        _update(self.body_optimizer, loss)
        if step % 2:
            self.head_optimizer.step()
        return [loss]


class Accumulation:
    """Two micro-batches a step."""

    def __init__(self, mode: Plain) -> None:
        self._mode = mode
        self.model = mode.wrap(net(NARROW))
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3)

    def train(self, step: int, x: Tensor, y: Tensor) -> list[Tensor]:
        self.optimizer.zero_grad()
        half = len(x) // 2
        with self._mode.unsynchronised(self.model):
            first = mse_loss(self.model(x[:half]), y[:half])
            first.backward()  # type: ignore[no-untyped-call]
        second = mse_loss(self.model(x[half:]), y[half:])
        second.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return [first, second]


class Scaler:
    """Gradients that overflow at some steps: the optimizer does not step then, and the scale goes down."""

    def __init__(self, mode: Plain) -> None:
        self.model = mode.wrap(net(WIDE))
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)

    def train(self, step: int, x: Tensor, y: Tensor) -> list[Tensor]:
        loss = mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        factor = float("inf") if step in INFINITE_AT else 1.0
        (self.scaler.scale(loss) * factor).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return [loss, torch.tensor(self.scaler.get_scale())]


class Ema:
    """An average of the weights, which has a loss of its own."""

    def __init__(self, mode: Plain) -> None:
        whole = net(NARROW)
        # FSDP2's modules cannot be copied, so the copy is made first.
        self.average = AveragedModel(whole, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        self.average.module = mode.shard(self.average.module)
        self.average.eval()
        self.model = mode.wrap(whole)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2)

    def train(self, step: int, x: Tensor, y: Tensor) -> list[Tensor]:
        loss = mse_loss(self.model(x), y)
        _update(self.optimizer, loss)
        self.average.update_parameters(self.model)
        with torch.no_grad():
            return [loss, mse_loss(self.average(x), y)]


class BatchNorm:
    """Statistics that no optimizer changes, and each rank's own; they have a loss of their own."""

    def __init__(self, mode: Plain) -> None:
        self.model = mode.wrap(net(NARROW, nn.BatchNorm1d))
        self.optimizer = SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def train(self, step: int, x: Tensor, y: Tensor) -> list[Tensor]:
        loss = mse_loss(self.model(x), y)
        _update(self.optimizer, loss)
        self.model.eval()
        with torch.no_grad():
            by_statistics = mse_loss(self.model(x), y)
        self.model.train()
        return [loss, by_statistics]


class FrozenMidRun:
    """The wide layer stops to be trained, while its optimizer goes on."""

    def __init__(self, mode: Plain) -> None:
        whole = net(WIDE)
        self._wide = whole[3]
        self.model = mode.wrap(whole, freezes=True)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3)

    def train(self, step: int, x: Tensor, y: Tensor) -> list[Tensor]:
        self._wide.requires_grad_(step < FREEZE_AT)
        loss = mse_loss(self.model(x), y)
        _update(self.optimizer, loss)
        return [loss]


class InBackward:
    """An optimizer for each parameter, which steps in the middle of the backward pass."""

    def __init__(self, mode: Plain) -> None:
        self.model = mode.wrap(net(NARROW))
        optimizer_of = {parameter: AdamW([parameter], lr=1e-3) for parameter in self.model.parameters()}
        mode.step_in_backward(self.model, optimizer_of)
        self.optimizers = list(optimizer_of.values())

    def train(self, step: int, x: Tensor, y: Tensor) -> list[Tensor]:
        # DDP hands out the gradients once more, after its hook.
        self.model.zero_grad()
        loss = mse_loss(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return [loss]


KINDS: dict[str, type[Kind]] = {
    "adamw": WithAdamW,
    "fused": Fused,
    "sgd": WithSgd,
    "two_optimizers": TwoOptimizers,
    "accumulation": Accumulation,
    "scaler": Scaler,
    "ema": Ema,
    "batchnorm": BatchNorm,
    "frozen_mid_run": FrozenMidRun,
    "in_backward": InBackward,
}


def kept(kinds: dict[str, Kind]) -> dict[str, Any]:
    """All that is to be registered, by name."""
    return {
        f"{name}_{attribute}": value
        for name, kind in kinds.items()
        for attribute, value in vars(kind).items()
        if not attribute.startswith("_")
    }
