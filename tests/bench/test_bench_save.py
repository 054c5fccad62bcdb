"""The measurement, small: it runs every method for real and prints what it promises."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from surefoot.bench.save import METHODS, percentile
from surefoot.bench.save_worker import _undisturbed_s

_SUREFOOT = Path(sys.executable).parent / "surefoot"
_FIELDS = {
    "method",
    "setting",
    "tensors",
    "stall_first_s",
    "stall_p50_s",
    "stall_p95_s",
    "durable_s",
    "flush_slowdown",
    "peak_extra_bytes",
}


def _bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [_SUREFOOT, "bench", "save", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def _check(row: dict[str, Any]) -> None:
    assert set(row) == _FIELDS
    assert all(math.isfinite(value) for name, value in row.items() if name not in ("method", "setting"))
    # One save: first, median and 95th percentile are that one's.
    assert row["stall_first_s"] == row["stall_p50_s"] == row["stall_p95_s"]
    assert row["flush_slowdown"] > 0
    assert row["peak_extra_bytes"] > 0


@pytest.mark.parametrize(
    "methods",
    [("dcp.async_save/thread+shared", "surefoot"), pytest.param(METHODS, marks=pytest.mark.campaign)],
    ids=["two", "all"],
)
def test_every_method_is_measured(methods: tuple[str, ...]) -> None:
    """One row a method, finite numbers everywhere, and the floor of the machine; nothing else on stdout."""
    small = ["--state-mb=4", "--ranks=2", "--tensors=12", "--saves=1", "--settings=hidden"]
    done = _bench(*small, f"--methods={','.join(methods)}", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [row["method"] for row in answer["results"]] == list(methods)
    for row in answer["results"]:
        _check(row)
        assert row["durable_s"] > 0
        assert (row["tensors"], row["setting"]) == (12, "hidden")
    assert set(answer["floor"]) == {"memcpy_gb_per_s", "write_fsync_gb_per_s"}
    assert all(0 < value < math.inf for value in answer["floor"].values())


@pytest.mark.campaign
def test_people_see_the_noise_beside(tmp_path: Path) -> None:
    """The table has a row of steps without a save, measured like one."""
    done = _bench(
        "--state-mb=2", "--ranks=1", "--tensors=8", "--saves=2", "--settings=back_to_back", "--methods=surefoot"
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "back_to_back" in line]
    assert [row[0] for row in rows] == ["surefoot", "(no"]


def test_an_unknown_method_is_refused() -> None:
    """One sentence that names the known ones."""
    done = _bench("--methods=magic")
    assert done.returncode == 2
    assert "'magic' is not one of torch.save" in done.stderr


@pytest.mark.parametrize(("share", "expected"), [(0.5, 3.0), (0.95, 9.0), (0.0, 1.0), (1.0, 9.0)])
def test_a_percentile_is_one_of_the_values(share: float, expected: float) -> None:
    """Nearest rank: with few values the 95th percentile is the largest, never something in between."""
    assert percentile([9.0, 1.0, 3.0, 2.0, 8.0], share) == expected


def test_undisturbed_is_what_the_steps_around_a_save_were() -> None:
    """The machine's speed drifts: each save is held against its own neighbours."""
    quiet = [[1.0] * 8, [1.0, 1.0, 2.0, 2.0], [4.0] * 8]
    assert _undisturbed_s(quiet, 0, 4) == 1.0
    assert _undisturbed_s(quiet, 1, 4) == 4.0
    assert _undisturbed_s([[1.0, 2.0], [], [3.0]], 1, 0) == 2.0
