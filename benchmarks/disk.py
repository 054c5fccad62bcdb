"""`python -m benchmarks disk`: bytes to disk through the whole pipeline, beside a raw direct write of as many.

The trainers stand still. The two ways alternate in one run, because disks drift.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

from surefoot.bench.jobs import trainers, workplace

_WITHIN_S = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskBench:
    """What to measure."""

    state_bytes: int = 1_000_000_000
    """Of all ranks together: parameters and AdamW's two moments."""
    ranks: int = 2
    tensors: int = 64
    """Tensors of a rank's state."""
    rounds: int = 5


@dataclass(frozen=True, slots=True)
class DiskResult:
    """Medians over the rounds."""

    bytes: int
    raw_s: float
    """Direct write into reserved space and fsync, one file and one thread a rank."""
    surefoot_s: float
    """From sealed in memory to committed: hash, write, hash of what was written, acknowledgements, manifest."""
    raw_gb_per_s: float
    surefoot_gb_per_s: float
    ratio: float
    """Median of the rounds' raw time over Surefoot's."""
    direct: bool
    """False: this file system knows no direct writes, and raw went through the page cache."""


def measure(bench: DiskBench) -> DiskResult:
    """Write both ways, alternating.

    Raises:
        SurefootError: a worker failed.
    """
    settings = {
        "tensors": bench.tensors,
        "rank_bytes": bench.state_bytes // bench.ranks,
        "rounds": bench.rounds,
    }
    with workplace() as place, trainers("benchmarks.disk_worker", bench.ranks, settings, place) as started:
        ranks = started.figures(_WITHIN_S)
    size_bytes = sum(rank["bytes"] for rank in ranks)
    rounds = range(bench.rounds)
    raw_s = [max(rank["raw_s"][i] for rank in ranks) for i in rounds]
    surefoot_s = [max(rank["surefoot_s"][i] for rank in ranks) for i in rounds]
    return DiskResult(
        size_bytes,
        round(statistics.median(raw_s), 4),
        round(statistics.median(surefoot_s), 4),
        round(size_bytes / statistics.median(raw_s) / 1e9, 3),
        round(size_bytes / statistics.median(surefoot_s) / 1e9, 3),
        round(statistics.median(raw / ours for raw, ours in zip(raw_s, surefoot_s, strict=True)), 3),
        all(rank["direct"] for rank in ranks),
    )


def to_json(result: DiskResult) -> dict[str, object]:
    return asdict(result)
