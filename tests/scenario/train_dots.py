"""A training script of a few numbers, with a generator that it registers only if told to.

The losses come from that generator, so a resumed run goes on bit-identical exactly if the generator was kept. While
something may befall it a step takes 10 ms; undisturbed, or once the file DOTS_FAST is there, it takes no time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

import surefoot

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, required=True)
options.add_argument("--seed", type=int, required=True)
options.add_argument("--log", type=Path, required=True)
options.add_argument("--name", required=True)
options.add_argument("--register", action="store_true")
given = options.parse_args()

fast = Path(os.environ["DOTS_FAST"]) if "DOTS_FAST" in os.environ else None
generator = torch.Generator().manual_seed(given.seed)
weight = torch.ones(1000)
kept = {"generator": generator} if given.register else {}
with surefoot.Run(weight=weight, **kept) as run:
    lines = (given.log / f"{given.name}-attempt{run.generation}.jsonl").open("w", buffering=1)
    for step in run.steps(given.steps):
        weight.mul_(0.99)
        loss = weight.sum() + torch.rand((), generator=generator)
        bits = loss.numpy().tobytes().hex()
        if given.name == "disturbed" and not (fast and fast.exists()):
            time.sleep(0.01)
        line = {"run": given.name, "attempt": run.generation, "rank": 0, "step": step, "samples": [step]}
        lines.write(json.dumps({**line, "loss_bits": bits, "t": time.time()}) + "\n")
