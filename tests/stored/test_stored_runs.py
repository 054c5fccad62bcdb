"""Runs that released versions stored, beside this file (see train.py): each is resumed, or refused in one sentence."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

HERE = Path(__file__).parent
WITHIN_S = 120
REFUSED = (
    "run.json: written in format 1, and this surefoot reads and writes format 2: go on with the version of surefoot "
    "that wrote it, or start a new run at another place"
)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="sf-test-", dir="/dev/shm") as memory:
        yield {**os.environ, "SUREFOOT_SHM": memory, "XDG_STATE_HOME": str(tmp_path / "state")}


def stored(number: int, place: Path) -> Path:
    return Path(shutil.copytree(HERE / f"format{number}", place / "run"))


def train(run: Path, total: int, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "train.py"), str(run), str(total)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=WITHIN_S, check=False)


@pytest.mark.holds("other-library-version")
def test_a_stored_run_of_this_format_is_resumed(tmp_path: Path, env: dict[str, str]) -> None:
    """It starts after its last step with the stored weights, byte for byte, and trains on."""
    run = stored(2, tmp_path)
    (shard,) = run.glob("steps/00000005-g0001/*.safetensors")
    with safe_open(shard, "numpy") as tensors:
        weights = b"".join(tensors.get_tensor(name).tobytes() for name in ("model.weight", "model.bias"))
    resumed = train(run, 5, env)
    assert resumed.stdout.split("\n")[:2] == ["starts after step 5", hashlib.sha256(weights).hexdigest()], (
        resumed.stderr
    )
    on = train(run, 7, env)
    assert on.stdout.startswith("starts after step 5\n"), on.stderr
    assert [path.name for path in run.glob("commits/00000007-*")] == ["00000007-g0003.json"]


@pytest.mark.holds("other-library-version")
def test_a_stored_run_of_another_format_is_refused(tmp_path: Path, env: dict[str, str]) -> None:
    """One sentence says which formats meet and what to do, to the script and to each command; nothing is written."""
    run = stored(1, tmp_path)
    before = sorted(path for path in run.rglob("*"))
    refused = train(run, 7, env)
    assert refused.returncode != 0
    assert refused.stderr.count(REFUSED) == 1, refused.stderr
    for command in ("ls", "show", "verify"):
        told = subprocess.run(
            [sys.executable, "-m", "surefoot.cli.main", command, str(run)],
            env=env,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert told.returncode != 0
        assert (told.stdout + told.stderr).count(REFUSED) == 1, told
    assert sorted(path for path in run.rglob("*")) == before
