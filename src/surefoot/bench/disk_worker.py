"""One rank of `surefoot bench disk`: saves and waits, and writes as many bytes by itself."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import surefoot
from surefoot.bench import floors
from surefoot.bench.synthetic import Training
from surefoot.bench.worker import begin, leave
from surefoot.core.image import round_up

_NEVER_DUE_S = 1e9
_NO_STAGING = 1 << 40
_SETTLING = 2


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """One rank's figures; times in seconds."""
    training = Training(settings["tensors"], settings["rank_bytes"])
    place = Path(settings["place"])
    run = surefoot.Run(
        place / "run", interval_s=_NEVER_DUE_S, stage=_NO_STAGING, model=training.model, optimizer=training.optimizer
    )
    run.restore()
    data = _shared(training)
    raw = place / f"raw-{dist.get_rank()}"
    for _ in range(_SETTLING):
        _save_s(run)
    raw_s, surefoot_s, direct = [], [], True
    for number in range(settings["rounds"]):
        # Who comes first changes: what one leaves to the device to do must not always fall to the other.
        for ours in (number % 2 == 0, number % 2 == 1):
            dist.barrier()
            if ours:
                surefoot_s.append(_save_s(run))
                continue
            start_s = time.perf_counter()
            direct &= floors.write_direct(raw, data)
            dist.barrier()
            raw_s.append(time.perf_counter() - start_s)
            raw.unlink()
    run.close()
    return {"bytes": training.state_bytes, "raw_s": raw_s, "surefoot_s": surefoot_s, "direct": direct}


def _save_s(run: surefoot.Run) -> float:
    """Save, and stand still until it is committed: seconds since the first rank's image was sealed."""
    run.save(wait=True)
    run.step_done()
    age_s = run.durable_age_s
    assert age_s is not None
    return age_s


def _shared(training: Training) -> memoryview:
    """As many bytes as the state has, in shared memory as the images are, and no more alike than they."""
    fd = os.memfd_create("bench")
    size_bytes = round_up(training.state_bytes)
    os.posix_fallocate(fd, 0, size_bytes)
    mapping = mmap.mmap(fd, size_bytes)
    os.close(fd)
    target = torch.frombuffer(mapping, dtype=torch.uint8)
    offset = 0
    for tensor in training.tensors().values():
        target[offset : offset + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
        offset += tensor.nbytes
    return memoryview(mapping)


if __name__ == "__main__":
    todo = begin()
    leave(todo, measure(todo), last=True)
