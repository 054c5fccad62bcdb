"""One rank of `python -m benchmarks disk`: saves and waits, and writes as many bytes by itself."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import surefoot
from surefoot.bench.worker import Training, begin, leave
from surefoot.core.image import round_up

_NEVER_DUE_S = 1e9
_NO_STAGING = 1 << 40
_SETTLING = 2
_DIRECT_PIECE_BYTES = 8 * 1024 * 1024


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
        # The first one changes: work that one leaves to the device must not always fall to the other.
        for ours in (number % 2 == 0, number % 2 == 1):
            dist.barrier()
            if ours:
                surefoot_s.append(_save_s(run))
                continue
            start_s = time.perf_counter()
            direct &= _write_direct(raw, data)
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


def _write_direct(path: Path, data: memoryview) -> bool:
    """Write page-aligned `data` past the page cache into reserved space, and sync it. The file stays.

    Returns:
        False if this file system knows no direct writes: then it was written through the page cache.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(fd, 0, len(data))
        direct = _set_direct(fd)
        offset = 0
        while offset < len(data):
            offset += os.pwrite(fd, data[offset : offset + _DIRECT_PIECE_BYTES], offset)
        os.fsync(fd)
    finally:
        os.close(fd)
    return direct


def _set_direct(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    todo = begin()
    leave(todo, measure(todo), last=True)
