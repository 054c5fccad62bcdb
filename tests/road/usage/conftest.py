"""A place and quick trainers for each test."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage import Stage
from warm import Warm, processes_with, until


@pytest.fixture
def stage(warm: Warm, tmp_path: Path) -> Iterator[Stage]:
    memory = Path(tempfile.mkdtemp(prefix="sft-", dir="/dev/shm"))
    try:
        yield Stage(warm, tmp_path, memory)
    finally:
        warm.kill_all()
        try:
            until(lambda: not list(processes_with(str(memory))), "the agents' end", 20.0)
        finally:
            for pid in processes_with(str(memory)):
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(memory)
