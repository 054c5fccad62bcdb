"""`surefoot bench save`: what a save costs the training, Surefoot's beside what people use today.

Every figure of one table comes from one run on one machine; absolute times of different runs are not comparable.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from surefoot.errors import SurefootError

METHODS = (
    "torch.save",
    "dcp.save",
    "dcp.async_save/thread",
    "dcp.async_save/thread+shared",
    "dcp.async_save/process",
    "surefoot",
)
SETTINGS = ("hidden", "back_to_back")
_WORKER_WITHIN_S = 900.0
_FLOOR_BYTES = 256 * 1024 * 1024
_FLOOR_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveBench:
    """What to measure."""

    state_bytes: int = 1_000_000_000
    """Of all ranks together: parameters and AdamW's two moments."""
    ranks: int = 2
    tensors: tuple[int, ...] = (64, 2000)
    """Tensors of a rank's state."""
    saves: int = 5
    methods: tuple[str, ...] = METHODS
    settings: tuple[str, ...] = SETTINGS


@dataclass(frozen=True, slots=True)
class Row:
    """One method in one setting. Times in seconds; a save's stall is the largest of the ranks'."""

    method: str
    setting: str
    tensors: int
    stall_first_s: float
    stall_p50_s: float
    stall_p95_s: float
    durable_s: float
    """Median time from the save to its last byte on the device."""
    flush_slowdown: float
    """Median step while bytes flow, over the undisturbed median step."""
    peak_extra_bytes: int
    """Largest growth of the ranks' memory, private and shared, added up."""


@dataclass(frozen=True, slots=True)
class Floor:
    """What the machine itself can do, one thread."""

    memcpy_gb_per_s: float
    write_fsync_gb_per_s: float


def measure(bench: SaveBench, on_row: Callable[[Row], None]) -> tuple[list[Row], Floor]:
    """Measure every combination, one after the other.

    Raises:
        SurefootError: a worker failed; the message ends with what it printed.
    """
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as scratch:
        floor = _floor(Path(scratch))
        for tensors in bench.tensors:
            for setting in bench.settings:
                for method in bench.methods:
                    row = _row(bench, method, setting, tensors, Path(scratch))
                    rows.append(row)
                    on_row(row)
    return rows, floor


def to_json(rows: Iterable[Row], floor: Floor) -> dict[str, object]:
    return {"results": [asdict(row) for row in rows], "floor": asdict(floor)}


def _row(bench: SaveBench, method: str, setting: str, tensors: int, scratch: Path) -> Row:
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        settings = {
            "method": method,
            "setting": setting,
            "tensors": tensors,
            "rank_bytes": bench.state_bytes // bench.ranks,
            "saves": bench.saves,
            "place": place,
        }
        ranks = [json.loads(line) for line in _run_workers(bench.ranks, settings)]
    stalls = [max(rank["stalls_s"][save] for rank in ranks) for save in range(bench.saves)]
    later = sorted(stalls[1:] or stalls)
    return Row(
        method,
        setting,
        tensors,
        round(stalls[0], 5),
        round(statistics.median(later), 5),
        round(later[min(len(later) - 1, int(0.95 * len(later)))], 5),
        round(statistics.median(max(rank["durable_s"][save] for rank in ranks) for save in range(bench.saves)), 4),
        round(max(rank["slowdown"] for rank in ranks), 3),
        sum(rank["extra_bytes"] for rank in ranks),
    )


def _run_workers(ranks: int, settings: dict[str, object]) -> Sequence[str]:
    """One line of JSON from each rank."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "-m",
        "surefoot.bench.save_worker",
        json.dumps(settings),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_WORKER_WITHIN_S, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"stalls_s"')]
    if done.returncode or len(lines) != ranks:
        raise SurefootError(f"{settings['method']} failed with {done.returncode}: {done.stderr[-2000:]}")
    return lines


def _floor(scratch: Path) -> Floor:
    source = mmap.mmap(-1, _FLOOR_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    target = mmap.mmap(-1, _FLOOR_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    from_view, to_view = memoryview(source), memoryview(target)
    copies, writes = [], []
    for _ in range(_FLOOR_ROUNDS):
        start_s = time.perf_counter()
        to_view[:] = from_view
        copies.append(time.perf_counter() - start_s)
        writes.append(_write(scratch / "floor", from_view))
    gigabytes = _FLOOR_BYTES / 1e9
    return Floor(round(gigabytes / min(copies), 2), round(gigabytes / statistics.median(writes), 3))


def _write(path: Path, data: memoryview) -> float:
    start_s = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())
    took_s = time.perf_counter() - start_s
    path.unlink()
    return took_s
