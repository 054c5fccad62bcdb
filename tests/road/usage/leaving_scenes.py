"""Two ranks, one of which ends its loop early. `leaving_scenes.py NAME OPTIONS`, with the options as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import surefoot

RANK = int(os.environ.get("RANK", "0"))


def say(*words: Any) -> None:
    os.write(1, (json.dumps(words) + "\n").encode())


def one_breaks(to: str, total: int, at: int, how: str) -> None:
    """No collective of the script's own binds the ranks: rank 1 leaves in the body of step `at`."""
    dist.init_process_group("gloo")
    torch.manual_seed(RANK)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with surefoot.Run(to, model=model, optimizer=optimizer, interval_s=3600) as run:
        say("begins", RANK, run.step)
        for step in run.steps(total):
            if (RANK, step) == (1, at):
                if how == "raise":
                    raise ArithmeticError("the loss is not finite")
                break
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            say("did", RANK, step)
    say("ends", RANK, run.step)


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
