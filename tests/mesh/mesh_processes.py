"""Node agents as processes of their own, started, stopped, killed and listened to."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BOUND_S = 90.0
ACTOR = Path(__file__).with_name("mesh_actor.py")


class Actor:
    """One process. `wait_for` looks through what it reported, in order, and remembers all of it."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seen: list[list[Any]] = []
        self._lines: queue.Queue[list[Any] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def wait_for(self, *what: Any, after: int = 0) -> list[Any]:
        """The first report beginning with `what`, from report number `after` on."""
        looked = after
        while True:
            while looked < len(self.seen):
                if self.seen[looked][: len(what)] == list(what):
                    return self.seen[looked]
                looked += 1
            line = self._lines.get(timeout=BOUND_S)
            assert line is not None, f"the process ended without {what}; it reported {self.seen}"
            self.seen.append(line)

    def reports(self, *what: Any) -> list[list[Any]]:
        return [each for each in self.seen if each[: len(what)] == list(what)]

    def order(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self._thread.join()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)


class Actors:
    """Nodes of one round, rank i on the i-th."""

    def __init__(self, run: Path, world: int) -> None:
        self._run = run
        self._world = world
        self._all: list[Actor] = []

    def start(
        self,
        node: str,
        rank: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        instead: bool = False,
        within: Sequence[str] = (),
    ) -> Actor:
        """Start a node's agent; `within` are words before the command, such as those that enter a namespace."""
        words = [node, str(rank), str(self._world), str(self._run), host, str(port), *(["instead"] if instead else [])]
        actor = Actor([*within, sys.executable, str(ACTOR), *words])
        self._all.append(actor)
        return actor

    def close(self) -> None:
        for actor in self._all:
            actor.close()


@contextmanager
def actors(run: Path, world: int) -> Iterator[Actors]:
    all_of_them = Actors(run, world)
    try:
        yield all_of_them
    finally:
        all_of_them.close()
