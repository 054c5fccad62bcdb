"""`surefoot bench scale`, tiny: every decision is counted at every size that is not left out."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

_SUREFOOT = Path(sys.executable).parent / "surefoot"
_OF_RANKS = {
    "commit decision",
    "manifest",
    "manifest to its document",
    "manifest from its document",
    "listing to candidates",
    "recovery choice",
    "retention",
    "abandoned steps",
}
_OF_TENSORS = {"plan, replicated", "twins, replicated", "plan, sharded", "all ranks' images", "plan from its document"}


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [_SUREFOOT, "bench", "scale", "--rounds=1", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_every_figure_is_there_and_large_plans_are_left_out() -> None:
    """Two sizes each; of the four plans the one beyond the bound is not made."""
    done = _run("--ranks=2,6", "--tensors=3,5", "--largest-report=20", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    assert {(row["what"], row["ranks"]) for row in rows if not row["tensors"]} == {
        (what, ranks) for what in _OF_RANKS for ranks in (2, 6)
    }
    assert {(row["what"], row["ranks"], row["tensors"]) for row in rows if row["tensors"]} == {
        (what, *size) for what in _OF_TENSORS for size in ((2, 3), (2, 5), (6, 3))
    }
    assert all(math.isfinite(row["ms"]) and row["ms"] >= 0 for row in rows)
    assert any(row["ms"] > 0 for row in rows)


def test_a_wrong_count_names_its_option() -> None:
    """The message says which option is meant."""
    done = _run("--ranks=2,x")
    assert done.returncode != 0
    assert "--ranks" in done.stderr
