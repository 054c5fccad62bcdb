"""One rank of `python -m benchmarks link`: it trains, is evicted, and computes on until its last step is safe."""

from __future__ import annotations

import os
import statistics
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import surefoot
from benchmarks.link import READY
from surefoot.bench.worker import Training, begin, leave
from surefoot.exits import Evicted
from surefoot.host.clock import boot_s
from surefoot.ipc.board import Board, NodeWord

_UNIT_S = 0.02
_UNITS_PER_STEP = 25
_QUIET_STEPS = 4
_LOOK_EVERY_S = 0.005
_NEVER_DUE_S = 1e9
_WITHIN_S = 900.0


class Compute:
    """Matrix work without a pause, by a thread of its own: what an accelerator does, on one core for all ranks."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._core = {min(os.sched_getaffinity(0))}
        self._over = threading.Event()
        self._done = threading.Condition()
        self._count = 0
        self.units: list[tuple[float, float]] = []
        """Of each unit its start, on the boot clock, and its seconds."""
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_for(self, count: int) -> None:
        """Wait until so many further units are through."""
        with self._done:
            wanted = self._count + count
            self._done.wait_for(lambda: self._count >= wanted)

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def median_s(self, from_s: float, to_s: float) -> float:
        """Median unit among those that began in a span of time."""
        return statistics.median([took_s for start_s, took_s in self.units if from_s <= start_s <= to_s] or [0.0])

    def _run(self) -> None:
        os.sched_setaffinity(0, self._core)
        torch.set_num_threads(1)
        while not self._over.is_set():
            start_s = boot_s()
            self._training.forward_backward()
            self.units.append((start_s, boot_s() - start_s))
            with self._done:
                self._count += 1
                self._done.notify_all()


class Commits:
    """Notes when a newer step stands committed on the board, which outlives its file."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._over = threading.Event()
        self.seen: dict[int, float] = {}
        """By committed step: when it was first seen, on the boot clock."""
        self._thread = threading.Thread(target=self._look, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            self.seen.setdefault(self._board.node(NodeWord.COMMITTED_STEP) - 1, boot_s())


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """One rank's figures; times in seconds."""
    training = Training(settings["tensors"], settings["rank_bytes"])
    training.calibrate(_UNIT_S)
    run = surefoot.Run(
        settings["uri"],
        interval_s=_NEVER_DUE_S,
        grace_s=settings["window_s"],
        model=training.model,
        optimizer=training.optimizer,
    )
    run.restore()
    session = run._session
    assert session is not None
    commits = Commits(session.board)
    compute = Compute(training)
    commits.start()
    compute.start()
    quiet_from_s = _train(run, training, compute, Path(settings["place"]) / READY)
    commits.close()
    compute.close()
    return _figures(session.board, settings["window_s"], quiet_from_s, run.step, commits, compute)


def _train(run: surefoot.Run, training: Training, compute: Compute, ready: Path) -> float:
    """Steps until the eviction; returns when the first durable save was over, and nothing was sent."""
    quiet_from_s, quiet = 0.0, 0
    end_s = boot_s() + _WITHIN_S
    try:
        while boot_s() < end_s:
            compute.wait_for(_UNITS_PER_STEP)
            training.optimizer.step()
            run.step_done()
            if run.durable_step is not None:
                quiet_from_s = quiet_from_s or boot_s()
                quiet += 1
            if quiet == _QUIET_STEPS and dist.get_rank() == 0:
                ready.touch()
    except Evicted:
        return quiet_from_s
    raise TimeoutError(f"no eviction within {_WITHIN_S:.0f} s")


def _figures(
    board: Board, window_s: float, quiet_from_s: float, step: int, commits: Commits, compute: Compute
) -> dict[str, Any]:
    noticed_s = board.node(NodeWord.DEADLINE_NS) / 1e9 - window_s
    committed_s = commits.seen.get(step)
    until_s = committed_s if committed_s is not None else boot_s()
    quiet_s = compute.median_s(quiet_from_s, noticed_s)
    return {
        "step": step,
        "seconds": None if committed_s is None else committed_s - noticed_s,
        "slowdown": compute.median_s(noticed_s, until_s) / quiet_s,
    }


if __name__ == "__main__":
    todo = begin()
    leave(todo, measure(todo), last=True)
