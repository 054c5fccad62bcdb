"""Tests of the promise that a checkpoint is whole and verified, or does not exist."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import evidence
import pytest
from machines import Machine, Nursery

pytest.register_assert_rewrite("one_save")


@pytest.fixture(scope="session")
def lived_run(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks on a directory, with copies beside it: generation 1 saved steps 1 to 3, 2 went on to 5.

    Every step has a tag, so that retention leaves them all.
    """
    directory = tmp_path_factory.mktemp("lived")
    with Machine(nursery, directory, str(directory / "run"), "past", disks=(str(directory / "copies"),)) as past:
        past.begin(2)
        for step in (1, 2, 3):
            past.saved(step, tag=f"t{step}")
        assert past.finish(3) == 0
        assert past.begin(2) == 3
        for step in (4, 5):
            past.saved(step, tag=f"t{step}")
        past.wait_for_event("copied", step=5)
        assert past.finish(5) == 0
    found = evidence.checkpoints(evidence.of_directory(directory / "run"))
    assert sorted(found) == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]
    return directory


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2.5 MB. Needs the right to mount; where that is missing there is none to be had."""
    directory = tmp_path / "small"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", str(directory)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no right to mount a small file system")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)
