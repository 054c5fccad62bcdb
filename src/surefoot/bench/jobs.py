"""Starting the trainers of a measurement, and reading their figures.

Each measurement keeps everything in a directory of its own: the run, its events, and one file of figures per rank.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError
from surefoot.host.clock import boot_s
from surefoot.ipc.home import base_directory
from surefoot.scenario.processes import MARK_VARIABLE, kill_marked

_LOOK_EVERY_S = 0.02
_LOG_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Place:
    """Where one measurement keeps everything. See `workplace`."""

    files: Path
    """The run, its events and the ranks' figures; on the disk that is measured."""
    memory: Path
    """Shared memory of its runs."""
    mark: str
    """In the environment of all its processes."""


class Trainers:
    """All ranks of one worker module, each in a session of its own. See `trainers`."""

    def __init__(self, place: Path, name: str, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._place = place
        self._name = name
        self.processes = processes

    def figures(self, within_s: float) -> list[dict[str, Any]]:
        """Wait for a good end of all, and return what each rank left by `worker.leave`.

        Raises:
            SurefootError: one ended otherwise, or not in time; with the end of what it printed.
        """
        end_s = boot_s() + within_s
        while any(process.poll() is None for process in self.processes):
            self.check()
            if boot_s() > end_s:
                raise self.failed(0, f"did not end within {within_s:.0f} s")
            time.sleep(_LOOK_EVERY_S)
        self.check()
        return self.left()

    def left(self) -> list[dict[str, Any]]:
        """What each rank has left, also of ranks that live on."""
        paths = (figures_path(self._place, self._name, rank) for rank in range(len(self.processes)))
        return [json.loads(path.read_text(encoding="ascii")) for path in paths]

    def check(self) -> None:
        """Raise if a rank has failed."""
        for rank, process in enumerate(self.processes):
            if process.poll():
                raise self.failed(rank, f"ended with {process.returncode}")

    def kill(self) -> None:
        """SIGKILL all that still run, and wait for their end."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def failed(self, rank: int, what: str) -> SurefootError:
        """The error that rank makes, with the end of what it printed."""
        output = output_path(self._place, self._name, rank).read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        return SurefootError(f"rank {rank} of {self._name} {what}; its output ends:\n{output}")


@contextmanager
def trainers(
    module: str,
    ranks: int,
    settings: Mapping[str, Any],
    place: Place,
    environment: Mapping[str, str] | None = None,
    tag: str = "",
) -> Iterator[Trainers]:
    """Start `python -m <module>` on `ranks` ranks; what is left of them ends with the block.

    Args:
        module: the worker's, which begins with `worker.begin`.
        ranks: how many.
        settings: what `worker.begin` returns there.
        place: the measurement's.
        environment: further variables.
        tag: tells these trainers' files from others' of the same module and place.
    """
    # Settings of the user's own runs must not reach these.
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SUREFOOT_")}
    common = {
        **kept,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "XDG_STATE_HOME": str(place.files / "state"),
        "SUREFOOT_SHM": str(place.memory),
        MARK_VARIABLE: place.mark,
        # As under torchrun: the process that started the trainers is the launch, and outlives them.
        "TORCHELASTIC_RUN_ID": "bench",
        **(environment or {}),
    }
    name = f"{module}{tag}"
    text = json.dumps({**settings, "place": str(place.files), "name": name})
    processes: list[subprocess.Popen[bytes]] = []
    started = Trainers(place.files, name, processes)
    try:
        for rank in range(ranks):
            processes.append(_start(module, rank, text, output_path(place.files, name, rank), common))
        yield started
    finally:
        started.kill()


@contextmanager
def workplace() -> Iterator[Place]:
    """A place for one measurement. With the block go its files, its shared memory, and its agents, which outlive
    their trainers."""
    mark = f"bench-{secrets.token_hex(8)}"
    with (
        tempfile.TemporaryDirectory(prefix="surefoot-bench-") as files,
        tempfile.TemporaryDirectory(prefix="surefoot-bench-", dir=base_directory()) as memory,
    ):
        try:
            yield Place(Path(files), Path(memory), mark)
        finally:
            kill_marked(mark)


def _start(module: str, rank: int, text: str, output: Path, common: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with output.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, text],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def figures_path(place: Path, name: str, rank: int) -> Path:
    """Where a rank leaves its figures."""
    return place / f"{name}-{rank}.json"


def output_path(place: Path, name: str, rank: int) -> Path:
    """Where a rank's output goes."""
    return place / f"{name}-{rank}.out"
