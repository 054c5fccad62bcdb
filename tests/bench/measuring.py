"""Measurements as developers start them: from the root of the repository."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """`python -m benchmarks` with these options."""
    command = [sys.executable, "-m", "benchmarks", *options]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=900, check=False)


def answer(*options: str) -> dict[str, Any]:
    """The one JSON object that it prints."""
    done = run(*options, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def is_quotient(ratio: float, above: float, below: float, digits: int) -> bool:
    """Whether `ratio`, of three digits, may be the quotient of two numbers that were rounded to `digits` afterwards."""
    half = 0.5 * 10.0**-digits
    most = (above + half) / (below - half) if below > half else math.inf
    return (above - half) / (below + half) - 0.0005 <= ratio <= most + 0.0005
