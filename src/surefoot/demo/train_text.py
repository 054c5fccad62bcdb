"""What `surefoot demo` runs: the demo's task with Surefoot, which is the `with surefoot.Run(…)` and the `for` below it.

surefoot run --to DIR --nproc 2 train_text.py --steps 200 --log DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

import surefoot
from surefoot.demo.text_task import LogWriter, Task


def train(steps: int, seed: int, log: Path, name: str) -> None:
    task = Task(steps, seed)
    with surefoot.Run(model=task.model, optimizer=task.optimizer, scheduler=task.scheduler, loader=task.loader) as run:
        lines = LogWriter(log, name, run.generation)
        for step, batch in run.batches(task.loader, total=steps):
            loss = task.gradients(batch)
            task.update()
            lines.write(step, batch, loss)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--log", type=Path, required=True, help="directory for the lines")
    options.add_argument("--name", default="undisturbed", help="name of this run in the lines")
    given = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(given.steps, given.seed, given.log, given.name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
