"""A training script of the QLoRA kind, as large as a test wants: packed weights that never change, adapters beside.

    python qlora_job.py OPTIONS

OPTIONS are JSON: to, total, log, seed, frozen_mib, trained_mib (with their optimizer's state).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

import surefoot

LAYER_BYTES = 256 << 20


class Qlora(nn.Module):
    """Packed layers, made of one random block each time rotated, and one large adapter."""

    def __init__(self, frozen_mib: int, trained_mib: int, seed: int) -> None:
        super().__init__()
        block = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        self.packed = nn.ParameterList()
        for number in range((frozen_mib << 20) // LAYER_BYTES):
            layer = torch.empty(LAYER_BYTES, dtype=torch.uint8)
            for start in range(0, LAYER_BYTES, len(block)):
                torch.bitwise_xor(block, (number + (start >> 20)) % 251, out=layer[start : start + len(block)])
            self.packed.append(nn.Parameter(layer, requires_grad=False))
        # Weight and the two averages of AdamW, four bytes each.
        self.adapter = nn.Parameter(torch.zeros((trained_mib << 20) // 12))

    def forward(self, number: int) -> torch.Tensor:
        weights = torch.stack([layer[number :: LAYER_BYTES // 4096][:4096].float() for layer in self.packed])
        target = weights.mean(0) / 128 - 1
        return (self.adapter.view(-1)[: 4096 * 256].view(256, 4096) - target).square().mean()


def digest(tensors: Any) -> str:
    whole = xxhash.xxh3_128()
    for tensor in tensors:
        whole.update(tensor.detach().numpy().data)
    return whole.hexdigest()


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    model = Qlora(options["frozen_mib"], options["trained_mib"], options.get("seed", 0))
    optimizer = torch.optim.AdamW([model.adapter], lr=1e-2)

    def say(**line: Any) -> None:
        with Path(options["log"]).open("a") as log:
            log.write(json.dumps({"rank": 0, **line}) + "\n")

    with surefoot.Run(options["to"], model=model, optimizer=optimizer) as run:
        say(begins=run.step, base=digest(model.packed))
        for step in run.steps(options["total"]):
            loss = model(step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            say(step=step + 1, loss=loss.item().hex(), trained=digest([model.adapter]))
    say(ends=run.step)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
