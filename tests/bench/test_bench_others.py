"""The other measurements, tiny: every figure is there, finite and of the right sign; not how large it is."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

_SUREFOOT = Path(sys.executable).parent / "surefoot"


def _bench(*options: str) -> dict[str, Any]:
    command = [_SUREFOOT, "bench", *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert all(math.isfinite(value) for value in answer.values())
    return answer


def test_a_restart_is_measured() -> None:
    """Its phases lie within the whole, the ratios are what they say, and the worker compared every byte that came
    back."""
    answer = _bench("restore", "--state-mb=4", "--ranks=1", "--tensors=8", "--rounds=1")
    assert set(answer) == {
        "bytes",
        "restore_s",
        "choose_s",
        "verify_s",
        "load_s",
        "memcpy_s",
        "memcpy_warm_s",
        "ratio",
        "ratio_whole",
        "ratio_warm",
    }
    assert 3_900_000 < answer["bytes"] <= 4_000_100
    assert 0 < answer["load_s"] <= answer["restore_s"]
    assert answer["memcpy_s"] > 0
    assert answer["memcpy_warm_s"] > 0
    assert 0 < answer["ratio_whole"] <= answer["ratio"]


def test_writes_to_disk_are_measured() -> None:
    """Rates follow from bytes and times."""
    answer = _bench("disk", "--state-mb=4", "--ranks=1", "--tensors=8", "--rounds=1")
    assert set(answer) == {"bytes", "raw_s", "surefoot_s", "raw_gb_per_s", "surefoot_gb_per_s", "ratio", "direct"}
    assert answer["raw_s"] > 0
    assert answer["surefoot_s"] > 0
    assert math.isclose(answer["surefoot_gb_per_s"], answer["bytes"] / answer["surefoot_s"] / 1e9, abs_tol=0.01)
    assert 0 < answer["ratio"] < math.inf


def test_an_eviction_behind_a_link_is_measured() -> None:
    """Committed inside a window that leaves room, and never faster than the link."""
    answer = _bench("link", "--state-mb=20", "--ranks=1", "--tensors=8", "--link-mb-per-s=10", "--window-s=120")
    assert set(answer) == {
        "bytes",
        "link_mb_per_s",
        "receiver_mb_per_s",
        "window_s",
        "seconds",
        "reached_mb_per_s",
        "ok",
        "compute_slowdown",
    }
    assert (answer["link_mb_per_s"], answer["window_s"], answer["ok"]) == (10.0, 120.0, True)
    assert answer["bytes"] >= 19_900_000
    # What the kernel's buffers took in has not come through the link.
    assert 0 < answer["reached_mb_per_s"] < 11.0
    assert answer["seconds"] > answer["bytes"] / 11e6
    assert answer["compute_slowdown"] > 0
