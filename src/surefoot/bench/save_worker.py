"""`python -m surefoot.bench.save_worker SETTINGS`: one rank of `surefoot bench save`.

A synthetic AdamW state is trained by matrix work without sleep, and saved by one method. The stall of a save is the
wall time of the steps from the save until the state may change again, minus as many undisturbed median steps.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import surefoot

_WARM_STEPS = 3
_QUIET_STEPS = 8
_MATRIX = 384
_SAMPLE_S = 0.02
_FLUSH_STEPS_AT_MOST = 400


class Training:
    """Parameters with AdamW's moments, and a step of matrix work that is longer than a copy of them."""

    def __init__(self, tensors: int, rank_bytes: int) -> None:
        count = max(1, tensors // 3)
        columns = 64
        rows = max(1, rank_bytes // 3 // count // (4 * columns))
        self.parameters = [torch.nn.Parameter(torch.randn(rows, columns) * 0.01) for _ in range(count)]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3)
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        self._left = torch.randn(_MATRIX, _MATRIX)
        self._rounds = 1
        self.optimizer.step()

    def calibrate(self, at_least_s: float) -> None:
        """Make forward and backward take at least so long."""
        start_s = time.perf_counter()
        self._compute(4)
        self._rounds = max(1, int(4 * at_least_s / (time.perf_counter() - start_s)))

    def step(self) -> None:
        self._compute(self._rounds)
        self.optimizer.step()

    def state(self, rank: int) -> dict[str, torch.Tensor]:
        """Named so that no rank's tensors are taken for another's copy."""
        named = {f"rank{rank}.p{i}": parameter.detach() for i, parameter in enumerate(self.parameters)}
        for i, parameter in enumerate(self.parameters):
            for key in ("exp_avg", "exp_avg_sq"):
                named[f"rank{rank}.{key}{i}"] = self.optimizer.state[parameter][key]
        return named

    def _compute(self, rounds: int) -> None:
        for _ in range(rounds):
            (self._left @ self._left).sum().item()


class Method(Protocol):
    """A way to save. `save` returns two questions: may the state change, and is it durable?"""

    def save(self, number: int) -> tuple[Callable[[], bool], Callable[[], bool]]: ...
    def step(self) -> None: ...
    def close(self) -> None: ...


class TorchSave:
    """Each rank's state by `torch.save`, with fsync, in the training thread."""

    def __init__(self, training: Training, place: Path, rank: int) -> None:
        self._training, self._place, self._rank = training, place, rank

    def save(self, number: int) -> tuple[Callable[[], bool], Callable[[], bool]]:
        with (self._place / f"{number}-{self._rank}.pt").open("wb") as file:
            torch.save(self._training.state(self._rank), file)
            file.flush()
            os.fsync(file.fileno())
        return _yes, _yes

    def step(self) -> None:
        self._training.step()

    def close(self) -> None:
        return


class Dcp:
    """PyTorch's distributed checkpoint, synchronous or asynchronous."""

    def __init__(self, training: Training, place: Path, rank: int, variant: str) -> None:
        self._training, self._place, self._rank, self._variant = training, place, rank, variant
        self._group = dist.new_group(backend="gloo")
        self._stager: DefaultStager | None = None
        if variant == "thread+shared":
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=True,
                    use_async_staging=True,
                    use_non_blocking_copy=False,
                )
            )

    def save(self, number: int) -> tuple[Callable[[], bool], Callable[[], bool]]:
        state = self._training.state(self._rank)
        target = str(self._place / str(number))
        if self._variant == "sync":
            dcp.save(state, checkpoint_id=target, process_group=self._group)
            return _yes, _yes
        process = self._variant == "process"
        kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        answer = dcp.async_save(
            state,
            checkpoint_id=target,
            process_group=self._group,
            async_checkpointer_type=kind,
            async_stager=self._stager,
        )
        if isinstance(answer, AsyncSaveResponse):
            return _done(answer.staging_completion), _done(answer.upload_completion)
        return _yes, _done(answer)

    def step(self) -> None:
        self._training.step()

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class Surefoot:
    """This project. A step is only staged when a save is asked for, so that saves are comparable."""

    def __init__(self, training: Training, place: Path) -> None:
        self._training = training
        self._run = surefoot.Run(
            place / "run", interval_s=1e9, stage=1 << 30, w=training.parameters, optimizer=training.optimizer
        )
        self._run.restore()

    def save(self, number: int) -> tuple[Callable[[], bool], Callable[[], bool]]:
        self._run.save(tag=f"save-{number}")
        wanted = self._run.step + 1
        return (lambda: self._run.step >= wanted), (lambda: (self._run.durable_step or 0) >= wanted)

    def step(self) -> None:
        self._training.step()
        self._run.step_done()

    def close(self) -> None:
        self._run.__exit__(None, None, None)


class Peak:
    """Largest private and shared memory of this process, sampled."""

    def __init__(self) -> None:
        self._start_bytes = _memory_bytes()
        self._peak_bytes = self._start_bytes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def close(self) -> int:
        self._over.set()
        self._thread.join()
        return self._peak_bytes - self._start_bytes

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            self._peak_bytes = max(self._peak_bytes, _memory_bytes())


def make_method(name: str, training: Training, place: Path, rank: int) -> Method:
    if name == "torch.save":
        return TorchSave(training, place, rank)
    if name == "surefoot":
        return Surefoot(training, place)
    return Dcp(training, place, rank, "sync" if name == "dcp.save" else name.split("/")[1])


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """One rank's figures."""
    rank = dist.get_rank()
    torch.set_num_threads(1)
    training = Training(settings["tensors"], settings["rank_bytes"])
    hidden = settings["setting"] == "hidden"
    if hidden:
        # All ranks' computation on one core, as if it were on an accelerator: the other cores are the host's.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    training.calibrate(3 * _copy_s(training, rank) if hidden else 0.02)
    method = make_method(settings["method"], training, Path(settings["place"]), rank)
    for _ in range(_WARM_STEPS):
        method.step()
    quiet_s = statistics.median(_timed(method.step) for _ in range(_QUIET_STEPS))
    peak = Peak()
    stalls_s, durable_s, flushing_s = [], [], []
    for number in range(settings["saves"]):
        dist.barrier()
        stall_s, took_s, steps_s = _one_save(method, number, quiet_s)
        stalls_s.append(stall_s)
        durable_s.append(took_s)
        flushing_s += steps_s
        for _ in range(_WARM_STEPS if hidden else 0):
            method.step()
    extra_bytes = peak.close()
    method.close()
    slowdown = statistics.median(flushing_s) / quiet_s if flushing_s else 1.0
    return {"stalls_s": stalls_s, "durable_s": durable_s, "slowdown": slowdown, "extra_bytes": extra_bytes}


def _one_save(method: Method, number: int, quiet_s: float) -> tuple[float, float, list[float]]:
    start_s = time.perf_counter()
    sealed, durable = method.save(number)
    steps = 0
    while True:
        method.step()
        steps += 1
        if sealed():
            break
    stall_s = time.perf_counter() - start_s - steps * quiet_s
    flushing_s: list[float] = []
    while not durable() and len(flushing_s) < _FLUSH_STEPS_AT_MOST:
        flushing_s.append(_timed(method.step))
    while not durable():
        time.sleep(0.001)
    return stall_s, time.perf_counter() - start_s, flushing_s


def _copy_s(training: Training, rank: int) -> float:
    pairs = [(torch.empty_like(tensor), tensor) for tensor in training.state(rank).values()]
    for target, source in pairs:
        target.copy_(source)
    return _timed(lambda: [target.copy_(source) for target, source in pairs])


def _timed(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _yes() -> bool:
    return True


def _done(future: Future[Any]) -> Callable[[], bool]:
    def done() -> bool:
        if future.done():
            future.result()
        return future.done()

    return done


def _memory_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def main() -> None:
    dist.init_process_group("gloo")
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)  # noqa: T201 - what the caller reads
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
