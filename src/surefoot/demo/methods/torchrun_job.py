"""A job under plain torchrun: it has no board, so how far it is and who trains is read from its log."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from surefoot.host.clock import boot_s
from surefoot.scenario.job import Job, Node

TRAINING = "training"
_STARTING = "starting"
_NAME = re.compile(r"-attempt(\d+)-rank(\d+)-pid(\d+)\.jsonl$")
_LOOK_EVERY_S = 0.004
_TAIL_BYTES = 65536


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's file of the newest attempt."""

    path: Path
    attempt: int
    rank: int
    pid: int


class TorchrunJob(Job):
    """The job of a script that writes the log itself.

    Args:
        node: its command starts torchrun.
        lines: directory of the script's log.
        num_ranks: trainers.
    """

    def __init__(self, node: Node, lines: Path, num_ranks: int) -> None:
        super().__init__(node)
        self._lines = lines
        self._num_ranks = num_ranks
        self._looked_s = 0.0
        self._parts: dict[int, _Part] = {}
        self._finished = 0

    def was_evicted(self, code: int) -> bool:
        """torchrun has no code for an eviction: whatever it ended with, it is not finished."""
        return code != 0

    def finished(self) -> int:
        self._look()
        return self._finished

    def trainer_phase(self, rank: int) -> str:
        return TRAINING if self.trainer_pid(rank) is not None else _STARTING

    def agent_phase(self) -> str:
        return "none"

    def trainer_pid(self, rank: int) -> int | None:
        """The trainer of a rank, once it has opened its log."""
        self._look()
        part = self._parts.get(rank)
        return self._alive(part.pid) if part is not None else None

    def agent_pid(self) -> int | None:
        return None

    def signs_of_life(self) -> tuple[int, ...]:
        self._look()
        sizes = [part.path.stat().st_size for part in self._parts.values()]
        return (self.starts, *(part.pid for part in self._parts.values()), *sizes)

    def _look(self) -> None:
        """Read the newest attempt's log, not at every question: looking must not take training's time."""
        now_s = boot_s()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        parts = [_part(path) for path in self._lines.glob("*.jsonl")]
        newest = max((part.attempt for part in parts), default=0)
        self._parts = {part.rank: part for part in parts if part.attempt == newest}
        done = [_steps_done(part.path) for part in self._parts.values()]
        self._finished = min(done) if len(done) == self._num_ranks else 0
        self.furthest = max(self.furthest, self._finished)


def _part(path: Path) -> _Part:
    found = _NAME.search(path.name)
    assert found is not None, path
    return _Part(path, *(int(number) for number in found.groups()))


def _steps_done(path: Path) -> int:
    """Steps finished, from the last whole line."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        whole = file.read().split(b"\n")[:-1]
    return int(json.loads(whole[-1])["step"]) + 1 if whole else 0
