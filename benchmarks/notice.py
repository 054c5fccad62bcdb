"""`python -m benchmarks notice`: how long a notice takes from one node's agent to those of all others, on this machine.

Many nodes in one process, and each node in a process of its own; plain, as between nodes of one machine, and over TLS.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.notice_worker import NOTICE, Node, enter
from surefoot.bench.save import percentile
from surefoot.errors import ConfigError
from surefoot.host.clock import boot_ns

_SETTLING = 3
"""Notices that are not counted: the first ones warm up."""
_WITHIN_S = 120.0
_OTHER_FILES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class NoticeBench:
    """What to measure."""

    nodes: int = 64
    """In one process."""
    processes: int = 8
    """Of one node each."""
    notices: int = 200


@dataclass(frozen=True, slots=True)
class NoticeRow:
    """Milliseconds from the call on one node until the last of the others has the notice."""

    nodes: int
    processes: int
    tls: bool
    p50_ms: float
    p99_ms: float


def measure(bench: NoticeBench) -> list[NoticeRow]:
    """All four: in one process and in several, plain and over TLS.

    Raises:
        ConfigError: so many nodes in one process need more open files than it may have.
    """
    rows = []
    _allow_files(bench.nodes * bench.nodes)
    for tls in (False, True):
        together_ms = asyncio.run(_in_one_process(bench, tls))
        rows.append(_row(bench.nodes, 1, tls, together_ms))
    for tls in (False, True):
        with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as run, _others(bench, tls, run):
            apart_ms = asyncio.run(_over_processes(bench, tls, run))
        rows.append(_row(bench.processes, bench.processes, tls, apart_ms))
    return rows


def _allow_files(connections: int) -> None:
    """Both ends of each connection are in one process."""
    needed = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(f"{needed} open files are needed and {hard} are allowed: give fewer --nodes")
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def to_json(rows: Iterable[NoticeRow]) -> dict[str, object]:
    return {"results": [asdict(row) for row in rows]}


def _row(nodes: int, processes: int, tls: bool, took_ms: list[float]) -> NoticeRow:
    return NoticeRow(nodes, processes, tls, round(statistics.median(took_ms), 3), round(percentile(took_ms, 0.99), 3))


async def _in_one_process(bench: NoticeBench, tls: bool) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as run:
        nodes = await asyncio.gather(*(enter(run, rank, bench.nodes, tls) for rank in range(bench.nodes)))
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(node.mesh.run()) for node in nodes]
        for node in nodes:
            node.join()
        for node in nodes:
            await node.mesh.wait_linked(_WITHIN_S)
        took_ms = [await _notice(nodes[number % len(nodes)], number) for number in range(_SETTLING + bench.notices)]
        for task in running:
            task.cancel()
    return took_ms[_SETTLING:]


async def _over_processes(bench: NoticeBench, tls: bool, run: str) -> list[float]:
    node = await enter(run, 0, bench.processes, tls)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(node.mesh.run())
        node.join()
        await node.mesh.wait_linked(_WITHIN_S)
        took_ms = [await _notice(node, number) for number in range(_SETTLING + bench.notices)]
        running.cancel()
    return took_ms[_SETTLING:]


async def _notice(node: Node, number: int) -> float:
    """Send it to all. Each answers with the time of its arrival, by the clock that all processes of a machine share."""
    node.begin(number)
    sent_ns = boot_ns()
    unheard = node.mesh.tell_all({"op": NOTICE, "number": number, "deadline_s": 30.0, "why": "the node is going away"})
    assert not unheard
    async with asyncio.timeout(_WITHIN_S):
        return (await node.heard_by_all() - sent_ns) / 1e6


@contextmanager
def _others(bench: NoticeBench, tls: bool, run: str) -> Iterator[None]:
    """The other nodes' processes; they end with their input."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(1, bench.processes):
            words = [str(Path(run)), str(rank), str(bench.processes), str(int(tls))]
            command = [sys.executable, "-m", "benchmarks.notice_worker", *words]
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()
