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
from surefoot.bench.worker import Training

_SUREFOOT = Path(sys.executable).parent / "surefoot"
_FIELDS = [
    "method",
    "setting",
    "tensors",
    "stall_first_s",
    "stall_p50_s",
    "stall_p95_s",
    "durable_s",
    "flush_slowdown",
    "peak_extra_bytes",
]
_KEEPS_A_COPY = ("dcp.async_save/thread+shared", "memcpy", "surefoot")


def _bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [_SUREFOOT, "bench", "save", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def _state_bytes() -> int:
    """Of two ranks, 4 MB together."""
    return 2 * Training(12, 2_000_000).state_bytes


def _check(row: dict[str, Any]) -> None:
    assert list(row) == _FIELDS
    assert all(math.isfinite(value) for name, value in row.items() if name not in ("method", "setting"))
    # One save: first, median and 95th percentile are that one's.
    assert row["stall_first_s"] == row["stall_p50_s"] == row["stall_p95_s"]
    assert row["flush_slowdown"] > 0
    # A copy of the state is as large as the state.
    assert row["peak_extra_bytes"] >= (_state_bytes() if row["method"] in _KEEPS_A_COPY else 0)
    # Where training stood still until the last byte was written, or none is written, nothing is left to wait for.
    assert (row["durable_s"] > 0) == (row["method"] == "surefoot" or "async" in row["method"])


@pytest.mark.holds("saves-slow-training")
@pytest.mark.parametrize(
    "methods",
    [pytest.param(_KEEPS_A_COPY, marks=pytest.mark.soak), pytest.param(METHODS, marks=pytest.mark.campaign)],
    ids=["three", "all"],
)
def test_every_method_is_measured(methods: tuple[str, ...]) -> None:
    """One row per method, numbers that can be, and the floor of the machine; nothing else on stdout."""
    small = ["--state-mb=4", "--ranks=2", "--tensors=12", "--saves=1", "--settings=hidden"]
    done = _bench(*small, f"--methods={','.join(methods)}", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [row["method"] for row in answer["results"]] == list(methods)
    for row in answer["results"]:
        _check(row)
        assert (row["tensors"], row["setting"]) == (12, "hidden")
    assert set(answer["floor"]) == {"memcpy_gb_per_s", "write_fsync_gb_per_s"}
    assert all(0 < value < math.inf for value in answer["floor"].values())


@pytest.mark.campaign
def test_people_see_the_noise_beside(tmp_path: Path) -> None:
    """The table has a row of steps without a save, measured like one: after those that were asked for, or where it was
    asked for itself."""
    for methods, shown in (("surefoot", ["surefoot", "(no"]), ("nothing,surefoot", ["(no", "surefoot"])):
        small = ("--state-mb=2", "--ranks=1", "--tensors=8", "--saves=2", "--settings=back_to_back")
        done = _bench(*small, f"--methods={methods}")
        assert done.returncode == 0, done.stderr
        rows = [line.split() for line in done.stdout.splitlines() if "back_to_back" in line]
        assert [row[0] for row in rows] == shown


def test_an_unknown_method_is_refused() -> None:
    """One sentence that names the known ones."""
    done = _bench("--methods=magic")
    assert done.returncode == 2
    assert done.stderr == f"surefoot: 'magic' is not one of {', '.join(METHODS)}, memcpy, nothing\n"


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
