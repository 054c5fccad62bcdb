"""`python -m benchmarks link`: an announced eviction of a large state behind a link of known speed. Compute goes on."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.jobs import events, wait_until_there
from surefoot.bench.jobs import Place, trainers, workplace
from surefoot.errors import SurefootError
from surefoot.tiers.object_store import ObjectTier

READY = "ready"
"""Made by rank 0 when everything is measured that comes before the notice."""
_BUCKET = "bench"
_URI = f"s3://{_BUCKET}/run"
_CHUNK_BYTES = 8 << 20
_PROBE_BYTES = 256 << 20
_STALL_S = 60.0
_WITHIN_S = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkBench:
    """What to measure."""

    state_bytes: int = 2_000_000_000
    """Of all ranks together: parameters and AdamW's two moments."""
    ranks: int = 2
    tensors: int = 64
    """Tensors of a rank's state."""
    link_bytes_per_s: float = 200e6
    window_s: float = 30.0
    """From the notice to the end of the machine."""


@dataclass(frozen=True, slots=True)
class LinkResult:
    """One eviction."""

    bytes: int
    link_mb_per_s: float
    receiver_mb_per_s: float
    """What our uploads reach at the receiver without the link, measured before, with nothing beside."""
    window_s: float
    seconds: float
    """From the notice until the last finished step was committed."""
    reached_mb_per_s: float
    """While it was sent: hashing, upload and commit."""
    ok: bool
    """The newest step that all ranks had finished was committed inside the window."""
    compute_slowdown: float
    """Median unit of matrix work from the notice to the commit, over that before, when nothing was sent."""


def measure(bench: LinkBench) -> LinkResult:
    """Train, save once, evict.

    Raises:
        SurefootError: a worker failed, or nothing was committed at all.
    """
    with _receiver(0.0) as port:
        receiver_bytes_per_s = asyncio.run(_upload_rate(port, min(bench.state_bytes, _PROBE_BYTES)))
    settings = {
        "uri": _URI,
        "tensors": bench.tensors,
        "rank_bytes": bench.state_bytes // bench.ranks,
        "window_s": bench.window_s,
    }
    with workplace() as place, _receiver(bench.link_bytes_per_s) as port:
        with trainers("benchmarks.link_worker", bench.ranks, settings, place, _environment(port)) as started:
            wait_until_there(started, place.files / READY, _WITHIN_S)
            started.processes[0].send_signal(signal.SIGTERM)
            ranks = started.figures(_WITHIN_S)
        return _result(bench, receiver_bytes_per_s, ranks, place)


def to_json(result: LinkResult) -> dict[str, object]:
    return asdict(result)


def _result(bench: LinkBench, receiver_bytes_per_s: float, ranks: list[dict[str, Any]], place: Place) -> LinkResult:
    step = max(rank["step"] for rank in ranks)
    committed = [event for event in events(place.files, "committed") if event["step"] == step]
    if not committed:
        failures = [event["why"] for event in events(place.files, "save_failed")]
        raise SurefootError(
            f"step {step} was not committed at all: {'; '.join(failures) or 'the window was too short'}"
        )
    seen_s = [rank["seconds"] for rank in ranks if rank["seconds"] is not None]
    # Trainers may leave before the last poll of the board; the event was written at the same moment.
    seconds = max(seen_s) if seen_s else committed[0]["t"] - events(place.files, "notice")[0]["t"]
    return LinkResult(
        committed[0]["bytes"],
        round(bench.link_bytes_per_s / 1e6, 3),
        round(receiver_bytes_per_s / 1e6, 1),
        bench.window_s,
        round(seconds, 3),
        round(committed[0]["bytes"] / committed[0]["seconds"] / 1e6, 1),
        seconds <= bench.window_s,
        round(max(rank["slowdown"] for rank in ranks), 3),
    )


@contextmanager
def _receiver(bytes_per_s: float) -> Iterator[int]:
    """A receiver behind its link, for the time of the block; its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.receiver", str(bytes_per_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise SurefootError("the receiver did not start; what it printed says why")
        yield int(line)
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def _environment(port: int) -> Mapping[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": f"bench{secrets.token_hex(8)}",
        "AWS_SECRET_ACCESS_KEY": secrets.token_hex(20),
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }


async def _upload_rate(port: int, size_bytes: int) -> float:
    """Bytes per second of one upload by our own tier."""
    os.environ.update(_environment(port))
    tier = ObjectTier.open("s3", _BUCKET, "run", stall_s=_STALL_S)
    data = memoryview(b"x" * size_bytes)
    start_s = time.perf_counter()
    await tier.put_stream("probe", _chunks(data), size_bytes)
    took_s = time.perf_counter() - start_s
    await tier.close()
    return size_bytes / took_s


async def _chunks(data: memoryview) -> AsyncIterator[memoryview]:
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]
