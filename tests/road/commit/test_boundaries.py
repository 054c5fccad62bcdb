"""A boundary that is not a step: it is saved, restored and shown beside the steps, and its number never comes again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import evidence
import pytest
from machines import MakeMachine

from surefoot.core.layout import BoundaryId

SCRIPT = Path(__file__).with_name("boundary_job.py")
WITHIN_S = 120


def surefoot(*arguments: object) -> str:
    command = [sys.executable, "-m", "surefoot.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=True).stdout


def labels(run: Path) -> dict[str, list[int | None]]:
    """Step and epoch of each checkpoint, by its full name."""
    rows = json.loads(surefoot("ls", run, "--json"))
    return {str(BoundaryId(row["boundary"], row["generation"])): [row["step"], row["epoch"]] for row in rows}


@pytest.mark.holds("boundary-identity")
def test_boundaries_are_told_apart_where_steps_are_not(machine: MakeMachine, tmp_path: Path) -> None:
    """Two boundaries of one step are two checkpoints. From memory and from the run's place training goes on after the
    newest, at the next number, and what was written stays as it was."""
    run = tmp_path / "run"
    first = machine(run)
    first.begin(2)
    for number, at in enumerate(({"step": 1}, {"step": 1, "epoch": 0}, {"step": 2, "epoch": 1}), 1):
        first.saved(boundary=number, tag=f"t{number}", **at)
    kept = evidence.of_directory(run)
    first.save(boundary=4, step=2, epoch=1, trigger=None)
    first.kill()
    first.start(2)
    assert came_to(first.open()) == [([], 4, 2, 1)] * 2
    first.saved(boundary=5, step=2, epoch=1, tag="t5")
    first.kill()
    second = machine(run)
    second.start(2)
    assert came_to(second.open()) == [([], 5, 2, 1)] * 2
    second.saved(boundary=6, step=3, epoch=1, tag="t6")
    found = labels(run)
    # The agent may have shipped it when the trainers were gone.
    assert found.pop("00000004-g0001", [2, 1]) == [2, 1]
    assert found == {
        "00000006-g0003": [3, 1],
        "00000005-g0002": [2, 1],
        "00000003-g0001": [2, 1],
        "00000002-g0001": [1, 0],
        "00000001-g0001": [1, None],
    }
    now = evidence.of_directory(run)
    written_once = [key for key in kept if key.startswith(("commits/", "steps/"))]
    assert len(written_once) == 3 + 3 * 4
    assert [key for key in written_once if now[key] != kept[key]] == []


def came_to(opened: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    assert all("wrong" in each for each in opened), opened
    return [tuple(each[name] for name in ("wrong", "boundary", "step", "epoch")) for each in opened]


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="sf-test-", dir="/dev/shm") as memory:
        yield {**os.environ, "SUREFOOT_SHM": memory, "XDG_STATE_HOME": str(tmp_path / "state")}


def job(env: dict[str, str], *arguments: object) -> list[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=WITHIN_S).stdout.splitlines()


@pytest.mark.holds("boundary-identity")
def test_a_real_trainer_goes_on_at_a_boundary_that_is_not_a_step(tmp_path: Path, env: dict[str, str]) -> None:
    """Killed after an epoch's own work was committed: it is there, at the user's step, and the count goes on."""
    run = tmp_path / "run"
    assert job(env, run, "dies") == ["starts 0 0.0 0.0"]
    assert labels(run) == {"00000003-g0001": [2, 1], "00000002-g0001": [2, 0], "00000001-g0001": [1, 0]}
    assert "step 2 (boundary 3), epoch 1" in surefoot("show", run, "2")
    assert "step 2, epoch 0" in surefoot("show", run, "00000002-g0001")
    (row,) = [line for line in surefoot("ls", run).splitlines() if "boundary" in line]
    assert (row.split()[:2], row.endswith("boundary 3, tag best")) == (["2", "1"], True)
    assert surefoot("verify", run, "2").startswith("ok: 1 checkpoint,")
    assert job(env, run) == ["starts 2 10.0 10.0", "ends 4 20.0 10.0 4"]
    assert labels(run)["00000005-g0002"] == [4, 1]
    assert "  step 2 (boundary 3) of 1  " in surefoot("show", run)
    assert surefoot("verify", run).startswith("ok: ")
