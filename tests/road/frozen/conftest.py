"""Runs of the LoRA-shaped job, and one that nothing disturbed to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from lora import TOTAL, Lora
from warm import Warm


@pytest.fixture
def lora(warm: Warm, tmp_path: Path) -> Iterator[Lora]:
    with ExitStack() as stack:
        job = Lora(tmp_path, warm)
        stack.callback(job.close)
        yield job


@pytest.fixture(scope="session")
def undisturbed(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Lora:
    """A run from beginning to end."""
    job = Lora(tmp_path_factory.mktemp("undisturbed"), warm)
    try:
        job.play(total=TOTAL)
    finally:
        job.close()
    return job


@pytest.fixture
def killed(lora: Lora) -> Callable[..., Lora]:
    """A run that was killed after its frozen tensors and a later step had been saved."""

    def make(*disks: Path) -> Lora:
        process = lora.start(total=100_000, disk=[str(disk) for disk in disks])
        lora.until(lambda: lora.frozen() and any(step > 3 for step in lora.commits()), "a checkpoint")
        lora.until(lambda: all(list(disk.glob("frozen/*.safetensors")) for disk in disks), "the copies")
        lora.kill(process)
        return lora

    return make
