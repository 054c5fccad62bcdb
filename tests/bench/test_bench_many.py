"""The measurements about ranks and nodes together, tiny: every figure is there and finite; not how large it is."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

_SUREFOOT = Path(sys.executable).parent / "surefoot"


def _bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([_SUREFOOT, "bench", *options], capture_output=True, text=True, timeout=240, check=False)


def _results(*options: str) -> list[dict[str, Any]]:
    done = _bench(*options, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert set(answer) == {"results"}
    results: list[dict[str, Any]] = answer["results"]
    return results


def test_agreement_and_blocking_form_are_measured_side_by_side() -> None:
    """One row a form and number of ranks, each with finite figures, and nothing else."""
    results = _results("agree", "--ranks=2,3", "--rounds=2")
    assert [(row["form"], row["ranks"]) for row in results] == [
        ("agreement", 2),
        ("across_machines", 2),
        ("blocking", 2),
        ("agreement", 3),
        ("across_machines", 3),
        ("blocking", 3),
    ]
    for row in results:
        assert set(row) == {"form", "ranks", "p50_ms", "p95_ms"}
        assert math.isfinite(row["p50_ms"])
        assert row["p50_ms"] <= row["p95_ms"] < math.inf


def test_notices_are_measured() -> None:
    """In one process and in several, plain and over TLS: more than nothing, and p99 not below p50."""
    results = _results("notice", "--nodes=3", "--processes=2", "--notices=4")
    assert [(row["nodes"], row["processes"], row["tls"]) for row in results] == [
        (3, 1, False),
        (3, 1, True),
        (2, 2, False),
        (2, 2, True),
    ]
    for row in results:
        assert set(row) == {"nodes", "processes", "tls", "p50_ms", "p99_ms"}
        assert 0 < row["p50_ms"] <= row["p99_ms"] < math.inf


def test_one_rank_has_nobody_to_agree_with() -> None:
    """A number of ranks below two, or none, is refused with the option's name."""
    for ranks in ("1", "2,x", ""):
        done = _bench("agree", f"--ranks={ranks}")
        assert done.returncode != 0
        assert "--ranks" in done.stderr
