"""One rank of `python -m benchmarks restore`: waits, restores, measures, trains on, and is killed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

import surefoot
from benchmarks.restore import DONE, GO, WAITING
from surefoot.bench.worker import Training, begin, leave

_LOOK_EVERY_S = 0.001
_NEVER_DUE_S = 1e9
_COPIES = 3
_WITHIN_S = 1800.0
_DIGESTS = "digests-{round}-{rank}"


def main() -> None:
    settings = begin()
    number, rank, place = settings["round"], dist.get_rank(), Path(settings["place"])
    training = Training(settings["tensors"], settings["rank_bytes"])
    if number:
        # A process that starts again has parameters, and an optimizer that has not stepped.
        training.optimizer.state.clear()
    # Every step is staged: the last one must be in memory, and no further step follows.
    run = surefoot.Run(
        place / "run", interval_s=_NEVER_DUE_S, stage=1, model=training.model, optimizer=training.optimizer
    )
    (place / WAITING.format(round=number, rank=rank)).touch()
    _wait_for(place / GO.format(round=number))
    start_s = time.perf_counter()
    run.restore()
    restore_s = time.perf_counter() - start_s
    if number:
        expected = (place / _DIGESTS.format(round=number - 1, rank=rank)).read_text(encoding="ascii")
        if _digests(training) != expected:
            raise SystemExit("what was restored is not what was there")
    leave(settings, {"restore_s": restore_s, "bytes": training.state_bytes, **_copies(training)})
    _train(run, training)
    (place / _DIGESTS.format(round=number, rank=rank)).write_text(_digests(training), encoding="ascii")
    (place / DONE.format(round=number, rank=rank)).touch()
    while not settings["last"]:
        time.sleep(_WITHIN_S)


def _copies(training: Training) -> dict[str, float]:
    """Seconds that a copy of the same tensors takes, all ranks at once."""
    tensors = training.tensors()
    parameters = [parameter.detach() for parameter in training.model.parameters()]
    there = {parameter.data_ptr() for parameter in parameters}
    others = [tensor for tensor in tensors.values() if tensor.data_ptr() not in there]
    warm = [tensor.clone() for tensor in tensors.values()]

    def as_needed() -> list[torch.Tensor]:
        for target, source in zip(warm, parameters, strict=False):
            target.copy_(source)
        return [source.clone() for source in others]

    def into_old() -> None:
        for target, source in zip(warm, tensors.values(), strict=True):
            target.copy_(source)

    return {"memcpy_s": _median_s(as_needed), "memcpy_warm_s": _median_s(into_old)}


def _median_s(work: Callable[[], object]) -> float:
    times_s = []
    for _ in range(_COPIES):
        dist.barrier()
        start_s = time.perf_counter()
        kept = work()
        times_s.append(time.perf_counter() - start_s)
        del kept
    return statistics.median(times_s)


def _train(run: surefoot.Run, training: Training) -> None:
    """Until this start's first durable save is over, so that nothing is sent any more; then a step that only memory
    holds."""
    durable = torch.zeros((), dtype=torch.int32)
    begun = run.step
    while not durable:
        _step(run, training)
        durable.fill_((run.durable_step or 0) > begun)
        dist.all_reduce(durable, dist.ReduceOp.MIN)
    _step(run, training)
    session = run._session
    assert session is not None
    end_s = time.monotonic() + _WITHIN_S
    while session.board.sealed_on_all(run.generation, dist.get_world_size()) < run.step:
        if time.monotonic() > end_s:
            raise TimeoutError("the last step was not sealed")
        time.sleep(_LOOK_EVERY_S)
    dist.barrier()


def _step(run: surefoot.Run, training: Training) -> None:
    training.optimizer.step()
    run.step_done()


def _digests(training: Training) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(training.tensors().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _wait_for(path: Path) -> None:
    end_s = time.monotonic() + _WITHIN_S
    while not path.exists():
        if time.monotonic() > end_s:
            raise TimeoutError(f"no {path.name}")
        time.sleep(_LOOK_EVERY_S)


if __name__ == "__main__":
    main()
