"""One rank of `surefoot bench save`.

All ranks step together: a small all-reduce stands at each step's end, as that of gradients does, and carries what has
to be agreed on. What slows one rank therefore slows all.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from surefoot.bench.methods import Method, make_method
from surefoot.bench.watch import Cores, Watch
from surefoot.bench.worker import Training, begin, leave

_QUIET_FIRST = 8
_QUIET_BETWEEN = 4
_SETTLING = 10
"""Steps after a method was set up that are not undisturbed yet."""
_COPIES_PER_STEP = 3.0
"""In the hidden setting: length of forward and backward, in copies of the state."""
_SHORT_STEP_S = 0.02
_DURABLE_WITHIN_S = 600.0


@dataclass(frozen=True, slots=True)
class Save:
    """One save as one rank saw it."""

    sealing_s: list[float]
    """Steps from the save until it was sealed, the one that ended with the save among them."""
    flushing_s: list[float]
    """Steps from then on until it was durable."""
    durable_s: float


class Loop:
    """Steps of all ranks in lockstep."""

    def __init__(self, training: Training, method: Method, cores: Cores, watch: Watch) -> None:
        self._training = training
        self._method = method
        self._cores = cores
        self._watch = watch

    def steps(self, count: int) -> list[float]:
        return [self._step(None)[0] for _ in range(count)]

    def save(self, number: int) -> Save:
        """Save at the end of a step, and go on until the save is durable everywhere."""
        start_s = time.perf_counter()
        took_s, sealed, durable = self._step(number)
        sealing_s = [took_s]
        flushing_s: list[float] = []
        while not durable:
            was_sealed = sealed
            took_s, sealed, durable = self._step(None)
            (flushing_s if was_sealed else sealing_s).append(took_s)
            if time.perf_counter() - start_s > _DURABLE_WITHIN_S:
                raise TimeoutError(f"save {number} was not durable within {_DURABLE_WITHIN_S:.0f} s")
        saved_s = start_s + sealing_s[0]
        durable_at_s = self._watch.durable_at_s
        assert durable_at_s is not None
        return Save(sealing_s, flushing_s, max(0.0, durable_at_s - saved_s))

    def _step(self, number: int | None) -> tuple[float, bool, bool]:
        """One step: its time, and whether the last save is sealed, and durable, on every rank."""
        start_s = time.perf_counter()
        with self._cores.computing():
            self._training.forward_backward()
            self._method.before_optimizer()
            self._training.optimizer.step()
        self._method.boundary(number)
        if number is not None:
            self._watch.wait_for(self._method.durable)
        sealed = self._method.sealed()
        flags = torch.tensor([sealed, sealed and self._watch.durable_at_s is not None], dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MIN)
        return time.perf_counter() - start_s, bool(flags[0]), bool(flags[1])


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """One rank's figures; times in seconds."""
    rank = dist.get_rank()
    hidden = settings["setting"] == "hidden"
    training = Training(settings["tensors"], settings["rank_bytes"])
    dist.barrier()
    copy_s = torch.tensor(training.copy_s())
    dist.all_reduce(copy_s, dist.ReduceOp.MAX)
    training.calibrate(_COPIES_PER_STEP * float(copy_s) if hidden else _SHORT_STEP_S)
    cores = Cores(pin=hidden)
    watch = Watch(cores)
    watch.start()
    method = make_method(settings["method"], training, Path(settings["place"]), rank)
    loop = Loop(training, method, cores, watch)
    figures = _measure(loop, settings["saves"], between=_QUIET_BETWEEN if hidden else 0)
    method.close()
    return {**figures, "extra_bytes": watch.close()}


def _measure(loop: Loop, saves: int, *, between: int) -> dict[str, Any]:
    settling_s = loop.steps(_SETTLING)
    quiet_s = [loop.steps(_QUIET_FIRST)]
    done: list[Save] = []
    for number in range(saves):
        done.append(loop.save(number))
        quiet_s.append(loop.steps(between))
    quiet_s[-1] += loop.steps(_QUIET_FIRST - between)
    medians_s = [_undisturbed_s(quiet_s, number, between) for number in range(saves)]
    slowed = [step_s / quiet for save, quiet in zip(done, medians_s, strict=True) for step_s in _flushing(save)]
    return {
        "stalls_s": [
            sum(save.sealing_s) - len(save.sealing_s) * quiet for save, quiet in zip(done, medians_s, strict=True)
        ],
        "durable_s": [save.durable_s for save in done],
        "slowdown": statistics.median(slowed) if slowed else 1.0,
        "setup_s": sum(settling_s) - len(settling_s) * statistics.median(quiet_s[0]),
        "step_s": statistics.median(medians_s),
    }


def _undisturbed_s(quiet_s: list[list[float]], save: int, between: int) -> float:
    """Median undisturbed step around a save: the machine's own speed drifts. Without steps in between, of all."""
    around = (
        quiet_s[save][-_QUIET_FIRST:] + quiet_s[save + 1] if between else [step for part in quiet_s for step in part]
    )
    return statistics.median(around)


def _flushing(save: Save) -> list[float]:
    """Steps while bytes flow; if they were through before a whole step was, those that the copy hid behind."""
    return save.flushing_s or save.sealing_s[1:]


if __name__ == "__main__":
    todo = begin()
    leave(todo, measure(todo), last=True)
