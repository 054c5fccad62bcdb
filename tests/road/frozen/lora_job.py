"""A training script of the LoRA kind: a large base that never changes, small adapters that are trained.

    python lora_job.py OPTIONS

OPTIONS are JSON: to, total, log, seed (of the base), and what a test wants beside: mib, disk, average, touch, thaw,
thawed, by_restart, held_at (saved there, and held until it is killed; the first start), ddp, tag (the
last step is saved with a tag), silent (average and touch write so that no version counter moves).
Writes one JSON line for its start and one for each step to the log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import surefoot

WIDTH = 1024
LAYER_MIB = 4


class Lora(nn.Module):
    """Frozen linear layers, each with a trained detour; a frozen table in half precision; a buffer that moves."""

    def __init__(self, num_layers: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))
        self.table = nn.Embedding(64, WIDTH, dtype=torch.bfloat16)
        self.register_buffer("calls", torch.zeros(()))
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
        torch.manual_seed(7)
        self.down = nn.ParameterList(torch.randn(WIDTH, 4) / WIDTH**0.5 for _ in range(num_layers))
        self.up = nn.ParameterList(torch.zeros(4, WIDTH) for _ in range(num_layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.table(tokens).float()
        for layer, down, up in zip(self.base, self.down, self.up, strict=True):
            x = x + torch.tanh(layer(x) + x @ down @ up)
        return x


def thaw(model: Lora, optimizer: torch.optim.Optimizer) -> None:
    """From here on a layer of the base is trained, too."""
    model.base[0].weight.requires_grad_(True)
    optimizer.add_param_group({"params": [model.base[0].weight]})


def digest(tensors: Any) -> str:
    whole = xxhash.xxh3_128()
    for tensor in tensors:
        whole.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    ranks = bool(options.get("ddp"))
    if ranks:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ranks else 0
    # A base that each start of the job makes differently, where a test wants that.
    seed = options.get("seed", 0) + options.get("by_restart", 0) * int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    inner = Lora(options.get("mib", 64) // LAYER_MIB, seed)
    frozen = [parameter for parameter in inner.parameters() if not parameter.requires_grad]
    trained = [parameter for parameter in inner.parameters() if parameter.requires_grad]
    model = DistributedDataParallel(inner) if ranks else inner
    objects: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(trained, lr=1e-2)}
    if options.get("thawed"):
        thaw(inner, objects["optimizer"])
    average = nn.Linear(2048, 2048, bias=False).requires_grad_(False) if options.get("average") else None
    if average is not None:
        nn.init.zeros_(average.weight)
        objects["average"] = average

    def written(weight: torch.Tensor) -> torch.Tensor:
        return weight.data if options.get("silent") else weight

    def mean() -> float | None:
        return None if average is None else float(average.weight[3, 3])

    def say(**line: Any) -> None:
        with Path(options["log"]).open("a") as log:
            log.write(json.dumps({"rank": rank, **line}) + "\n")

    grace_s = None if "SUREFOOT_AGENT" in os.environ else 60.0  # `surefoot run` decides it there
    with surefoot.Run(options.get("to"), disk=options.get("disk"), grace_s=grace_s, **objects) as run:
        say(
            pid=os.getpid(),
            begins=run.step,
            base=digest(frozen),
            average=mean(),
        )
        for step in run.steps(options["total"]):
            if run.generation == 1 and step == options.get("held_at"):
                signal.pause()
            if run.generation == 1 and step + 1 == options.get("held_at"):
                run.save("held", wait=True)
            tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(100 * step + rank))
            loss = model(tokens).square().mean()
            objects["optimizer"].zero_grad()
            loss.backward()
            objects["optimizer"].step()
            if average is not None:
                written(average.weight).add_(1)
            if step + 1 == options.get("touch"):
                written(inner.base[1].weight).mul_(2)
            if options.get("tag") and step + 1 == options["total"]:
                run.save("kept")
            if step + 1 == options.get("thaw"):
                thaw(inner, objects["optimizer"])
            say(step=step + 1, loss=loss.item().hex(), trained=digest(trained))
    say(ends=run.step, base=digest(frozen), average=mean())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
