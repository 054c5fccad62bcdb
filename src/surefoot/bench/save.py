"""`surefoot bench save`: what a save costs the training, Surefoot's beside what people use today.

Every figure of one table comes from one run on one machine; absolute times of different runs are not comparable.
"""

from __future__ import annotations

import math
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from surefoot.bench.jobs import trainers, workplace

METHODS = (
    "torch.save",
    "dcp.save",
    "dcp.async_save/thread",
    "dcp.async_save/thread+shared",
    "dcp.async_save/process",
    "surefoot",
)
NOTHING = "nothing"
"""Steps without a save, measured like one. The stall that it shows is the measurement's noise."""
REFERENCES = ("memcpy", NOTHING)
"""They keep nothing."""
SETTINGS = ("hidden", "back_to_back")
_WITHIN_S = 7200.0
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
    saves: int = 10
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
    """Over all saves, the first included, as is the next."""
    stall_p95_s: float
    durable_s: float
    """Median time from the save to its last byte on the device."""
    flush_slowdown: float
    """Median step while bytes flow, over the undisturbed median step; 1 if training stands until they are through."""
    peak_extra_bytes: int
    """Largest growth of memory since before the method was set up: the ranks', private and shared, and their
    children's private memory, added up."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Printed beside a row; not part of it."""

    setup_s: float
    """By how much the first steps took longer than undisturbed ones, before the first save."""
    step_s: float
    """The undisturbed median step."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The machine's own speed, one thread."""

    memcpy_gb_per_s: float
    write_fsync_gb_per_s: float


def measure(bench: SaveBench, on_row: Callable[[Row, Beside], None]) -> tuple[list[Row], Floor]:
    """Measure every combination, one after the other.

    Raises:
        SurefootError: a worker failed; the message ends with what it printed.
    """
    rows: list[Row] = []
    with workplace() as place:
        floor = _floor(place.files)
    for tensors in bench.tensors:
        for setting in bench.settings:
            for method in bench.methods:
                row, beside = _row(bench, method, setting, tensors)
                rows.append(row)
                on_row(row, beside)
    return rows, floor


def to_json(rows: Iterable[Row], floor: Floor) -> dict[str, object]:
    return {"results": [asdict(row) for row in rows], "floor": asdict(floor)}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _row(bench: SaveBench, method: str, setting: str, tensors: int) -> tuple[Row, Beside]:
    settings = {
        "method": method,
        "setting": setting,
        "tensors": tensors,
        "rank_bytes": bench.state_bytes // bench.ranks,
        "saves": bench.saves,
    }
    with workplace() as place, trainers("surefoot.bench.save_worker", bench.ranks, settings, place) as started:
        ranks = started.figures(_WITHIN_S)
    stalls = [max(rank["stalls_s"][save] for rank in ranks) for save in range(bench.saves)]
    row = Row(
        method,
        setting,
        tensors,
        round(stalls[0], 5),
        round(statistics.median(stalls), 5),
        round(percentile(stalls, 0.95), 5),
        round(statistics.median(max(rank["durable_s"][save] for rank in ranks) for save in range(bench.saves)), 4),
        round(max(rank["slowdown"] for rank in ranks), 3),
        sum(rank["extra_bytes"] for rank in ranks),
    )
    return row, Beside(max(rank["setup_s"] for rank in ranks), max(rank["step_s"] for rank in ranks))


def _floor(scratch: Path) -> Floor:
    source, target = memoryview(_memory(_FLOOR_BYTES)), memoryview(_memory(_FLOOR_BYTES))
    copies_s, writes_s = [], []
    for _ in range(_FLOOR_ROUNDS):
        start_s = time.perf_counter()
        target[:] = source
        copies_s.append(time.perf_counter() - start_s)
        writes_s.append(_write_fsync_s(scratch / "floor", source))
    gigabytes = _FLOOR_BYTES / 1e9
    return Floor(round(gigabytes / min(copies_s), 2), round(gigabytes / statistics.median(writes_s), 3))


def _memory(size_bytes: int) -> mmap.mmap:
    """Private memory whose pages are there."""
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)


def _write_fsync_s(path: Path, data: memoryview) -> float:
    """Seconds of one write through the page cache, with fsync. The file is removed."""
    start_s = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        left = data
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    took_s = time.perf_counter() - start_s
    path.unlink()
    return took_s
