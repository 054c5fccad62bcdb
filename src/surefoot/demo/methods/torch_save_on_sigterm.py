"""The demo's task with the plain loop: `torch.save` by rank 0 every so many steps, and once more on SIGTERM.

    torchrun --nproc-per-node 2 -m -- surefoot.demo.methods.torch_save_on_sigterm --log DIR --to DIR

It saves model, optimizer, schedule and step into a file that it renames when it is whole, and goes to its place in the
data by fetching and throwing away. `surefoot.demo.train_text` is the same training with Surefoot. What this does
not cover:

* Training stands still while rank 0 writes.
* Ranks do not agree on the step at which they leave: one that leaves earlier tears the others out of their collective,
  and if rank 0 is among these, nothing is saved.
* A process that dies without a word costs everything since the last periodic save.
* Random states are not saved: dropout and augmentation go on differently after a resume.
* `torch.load` reads a pickle, and nothing checks what is read.
* Nobody deletes old checkpoints.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from surefoot.demo.methods.options import Given, batches_from, next_attempt, parse
from surefoot.demo.text_task import LogWriter, Task


class Notice:
    """SIGTERM on this rank."""

    def __init__(self) -> None:
        self.here = False
        signal.signal(signal.SIGTERM, self._set)

    def _set(self, _number: int, _frame: FrameType | None) -> None:
        self.here = True


def train(given: Given) -> None:
    notice, task = Notice(), Task(given.steps, given.seed)
    start = load(given.to, task)
    lines = LogWriter(given.log, given.name, next_attempt(given.log, given.name))
    batches = batches_from(task, start, None)
    for step in range(start, given.steps):
        batch = next(batches)
        loss = task.gradients(batch)
        task.update()
        lines.write(step, batch, loss)
        if notice.here or (step + 1) % given.save_every == 0:
            save(given.to, task, step + 1)
        if notice.here:
            break


def save(place: Path, task: Task, step: int) -> None:
    if dist.get_rank() != 0:
        return
    state = {
        "model": task.model.state_dict(),
        "optimizer": task.optimizer.state_dict(),
        "scheduler": task.scheduler.state_dict(),
        "step": step,
    }
    part = place / f"step_{step}.pt.part"
    torch.save(state, part)
    os.replace(part, place / f"step_{step}.pt")


def load(place: Path, task: Task) -> int:
    """Load the newest. Returns the step to go on with."""
    newest = max(place.glob("step_*.pt"), key=_step_of, default=None)
    if newest is None:
        return 0
    state = torch.load(newest, weights_only=True)
    task.model.load_state_dict(state["model"])
    task.optimizer.load_state_dict(state["optimizer"])
    task.scheduler.load_state_dict(state["scheduler"])
    return int(state["step"])


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(parse(__doc__))
    # No process group is destroyed: a rank that left on SIGTERM may have left others behind.


if __name__ == "__main__":
    main()
