"""The measurement, small: it runs every method for real and prints what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.bench.save import METHODS

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
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.parametrize(
    "methods",
    [("dcp.async_save/thread", "surefoot"), pytest.param(METHODS, marks=pytest.mark.campaign)],
    ids=["two", "all"],
)
def test_every_method_is_measured(methods: tuple[str, ...]) -> None:
    """One row a method, numbers everywhere, and the floor of the machine; nothing else on stdout."""
    small = ["--state-mb=6", "--ranks=1", "--tensors=12", "--saves=2", "--settings=back_to_back"]
    done = _bench(*small, f"--methods={','.join(methods)}", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [row["method"] for row in answer["results"]] == list(methods)
    for row in answer["results"]:
        assert set(row) == _FIELDS
        assert row["durable_s"] > 0
        assert row["tensors"] == 12
    assert set(answer["floor"]) == {"memcpy_gb_per_s", "write_fsync_gb_per_s"}
    assert all(value > 0 for value in answer["floor"].values())


def test_an_unknown_method_is_refused() -> None:
    """One sentence that names the known ones."""
    done = _bench("--methods=magic")
    assert done.returncode == 2
    assert "'magic' is not one of torch.save" in done.stderr
