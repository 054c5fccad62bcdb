"""The demo's task with the pattern of careful hand-written loops: a SIGTERM flag that all ranks agree on by a MAX
all-reduce at each step, `DefaultStager`, `async_save`, the newest complete checkpoint at the start.

    torchrun --nproc-per-node 2 -m -- surefoot.demo.methods.hand_written --log DIR --to DIR

It saves model, optimizer, schedule, step and each rank's random state, and goes to its place in the data by fetching
and throwing away. `surefoot.demo.train_text` is the same training with Surefoot. What this does not cover:

* A process that dies without a word costs everything since the last periodic save.
* A Python signal handler runs between bytecodes: a rank that waits in a collective learns of the eviction late, and a
  rank in a long evaluation when it is over.
* Nothing checks what is read: a flipped bit in a checkpoint is loaded.
* Batches that workers fetched ahead have drawn from random states that are not saved.
* Nobody deletes old checkpoints, nor those that a kill left incomplete.
"""

from __future__ import annotations

import signal
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from surefoot.demo.methods.options import Given, batches_from, next_attempt, parse
from surefoot.demo.text_task import LogWriter, Task


class Notice:
    """SIGTERM on any rank, known to all of them at the same step."""

    def __init__(self) -> None:
        self._flag = 0
        signal.signal(signal.SIGTERM, self._set)

    def _set(self, _number: int, _frame: FrameType | None) -> None:
        self._flag = 1

    def anywhere(self) -> bool:
        flag = torch.tensor(self._flag)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


class Checkpoints:
    """One directory a step; complete once DCP has written its `.metadata`."""

    def __init__(self, place: Path) -> None:
        self._place = place
        # Of its own: background collectives must not meet the training's.
        self._group = dist.new_group(backend="gloo")
        # Without CUDA there are no pinned memory and no non-blocking copies.
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)
        self._staged: Future[Any] | None = None
        self._saved: Future[Any] | None = None

    def save(self, task: Task, step: int) -> None:
        # The stager has one buffer: the last save must be out of it.
        self.wait()
        answer = state_dict_saver.async_save(
            _state(task, step),
            checkpoint_id=self._place / f"step_{step}",
            process_group=self._group,
            async_stager=self._stager,
        )
        assert isinstance(answer, state_dict_saver.AsyncSaveResponse)
        self._staged, self._saved = answer.staging_completion, answer.upload_completion

    def wait_for_staging(self) -> None:
        """Before the optimizer changes what is being copied."""
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def wait(self) -> None:
        if self._saved is not None:
            self._saved.result()
            self._saved = None

    def load(self, task: Task) -> tuple[int, torch.Tensor | None]:
        """Load the newest complete one. Returns the step to go on with, and this rank's random state."""
        complete = [path.parent for path in self._place.glob("step_*/.metadata")]
        if not complete:
            return 0, None
        state = _state(task, 0)
        state_dict_loader.load(state, checkpoint_id=max(complete, key=_step_of), process_group=self._group)
        set_state_dict(task.model, task.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        task.scheduler.load_state_dict(state["scheduler"])
        return state["step"], state[_rng_key()]

    def close(self) -> None:
        self.wait()
        self._stager.close()


def train(given: Given) -> None:
    notice, checkpoints, task = Notice(), Checkpoints(given.to), Task(given.steps, given.seed)
    start, rng = checkpoints.load(task)
    lines = LogWriter(given.log, given.name, next_attempt(given.log, given.name))
    batches = batches_from(task, start, rng)
    for step in range(start, given.steps):
        batch = next(batches)
        loss = task.gradients(batch)
        checkpoints.wait_for_staging()
        task.update()
        lines.write(step, batch, loss)
        evicted = notice.anywhere()
        if evicted or (step + 1) % given.save_every == 0:
            checkpoints.save(task, step + 1)
        if evicted:
            break
    checkpoints.close()


def _state(task: Task, step: int) -> dict[str, Any]:
    model, optimizer = get_state_dict(task.model, task.optimizer)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": task.scheduler.state_dict(),
        "step": step,
        _rng_key(): torch.get_rng_state(),
    }


def _rng_key() -> str:
    # What has the same name on all ranks is saved once.
    return f"rng_{dist.get_rank()}"


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(parse(__doc__))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
