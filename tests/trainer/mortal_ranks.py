"""Ranks of a gloo group that say what they see and can be killed, stopped and told to go on while they do."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from ranks import _context

from surefoot.core.agreement import Vector

PATIENCE_S = 120.0


class MortalRanks:
    """Each runs `scene(line, *arguments)`, where `line` is its end of a connection to the test."""

    def __init__(self, world_size: int, scene: Callable[..., None], *arguments: Any) -> None:
        self._directory = tempfile.TemporaryDirectory(dir="/dev/shm")
        self._lines: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_rank, args=(rank, world_size, self._directory.name, theirs, scene, arguments)
            )
            process.start()
            theirs.close()
            self._lines.append(ours)
            self.processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._directory.cleanup()

    def hear(self, rank: int) -> Any:
        """The next thing that a rank says."""
        assert self._lines[rank].poll(PATIENCE_S), f"rank {rank} says nothing"
        return self._lines[rank].recv()

    def speaks(self, rank: int, within_s: float) -> bool:
        """Whether a rank says anything by then."""
        return bool(self._lines[rank].poll(within_s))

    def say(self, rank: int, word: Any = "go on") -> None:
        self._lines[rank].send(word)

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)


def _rank(
    rank: int, world_size: int, directory: str, line: Connection, scene: Callable[..., None], arguments: Any
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    scene(line, *arguments)
    line.close()
    # Without taking the group down: some scenes end with it broken.
    os._exit(0)


def check_one_leaves(ranks: MortalRanks) -> None:
    """Of `agreement_of_mortals` when rank 1 leaves: rank 0 hears its last word once and goes on by itself; both end."""
    assert [ranks.hear(0), ranks.hear(1)] == [3, 3]
    heard = [ranks.hear(0) for _boundary in range(6)]
    assert heard[0] == Vector(notice=True, free_slots=2, stage_every=7)
    assert heard[1].leaving
    assert set(heard[2:]) == {Vector(stage_every=5, free_slots=2)}
    assert ranks.hear(0) == "left"
    assert wait([ranks.processes[1].sentinel], PATIENCE_S)
    assert ranks.processes[1].exitcode == 0
