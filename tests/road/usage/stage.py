"""One test's run and its launches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from warm import Job, Warm, processes_with, until

SCENES = Path(__file__).with_name("scenes.py")


class Stage:
    """One test's run: its directory, its private shared memory, and its launches."""

    def __init__(self, warm: Warm, place: Path, memory: Path) -> None:
        self.place = place
        self.memory = memory
        self.run = place / "run"
        self._warm = warm
        self._launches = 0

    def start(
        self, scene: str, *, ranks: int = 1, env: dict[str, str] | None = None, scenes: Path = SCENES, **options: Any
    ) -> Job:
        """Start a scene; `to` is this test's run unless said otherwise."""
        self._launches += 1
        options = {"to": str(self.run), **options}
        output = self.place / f"output{self._launches}"
        output.touch()
        env = {"SUREFOOT_SHM": str(self.memory), **(env or {})}
        return self._warm.start(scenes, [scene, json.dumps(options)], output, env, ranks=ranks)

    def play(self, scene: str, *, ranks: int = 1, code: int = 0, **options: Any) -> str:
        """Run a scene to its end, which must be with `code`; returns what it printed."""
        job = self.start(scene, ranks=ranks, **options)
        ended = job.wait()
        assert ended == code, f"ended with {ended}, not {code}:\n{job.output}"
        return job.output

    def until_quiet(self) -> None:
        """Wait until no process of this test is left."""
        until(lambda: not list(processes_with(str(self.memory))), "the end of every process of this test")

    def events(self) -> list[dict[str, Any]]:
        """Everything the run's event files say so far, in order of time."""
        lines = [line for path in self.run.glob("events/*") for line in path.read_text().splitlines()]
        return sorted((json.loads(line) for line in lines), key=lambda event: event["t"])
