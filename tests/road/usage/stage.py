"""One test's run and its launches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from warm import Job, Warm, free_port, processes_with, until

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

    def start_nodes(
        self,
        scene: str,
        nodes: int,
        *,
        ranks: int = 1,
        scenes: Path = SCENES,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> list[Job]:
        """Start a scene on several nodes: launches of their own, with shared memory of their own."""
        port, jobs = free_port(), []
        for node in range(nodes):
            memory = self.memory / f"node{node}"
            memory.mkdir(exist_ok=True, mode=0o700)
            self._launches += 1
            output = self.place / f"output{self._launches}"
            output.touch()
            args = [scene, json.dumps({"to": str(self.run), **options})]
            first, its_env = node * ranks, {"SUREFOOT_SHM": str(memory), **(env or {})}
            jobs.append(
                self._warm.start(
                    scenes, args, output, its_env, ranks=ranks, world=nodes * ranks, first_rank=first, port=port
                )
            )
        return jobs

    def play_nodes(self, scene: str, nodes: int, *, code: int = 0, **options: Any) -> list[str]:
        """Run a scene on several nodes to its end, which must be with `code` on each; returns what each printed."""
        jobs = self.start_nodes(scene, nodes, **options)
        for job in jobs:
            assert job.wait() == code, "\n".join(job.output for job in jobs)
        return [job.output for job in jobs]

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
        lines = [line for path in self.run.glob("events/[!+]*") for line in path.read_text().splitlines()]
        return sorted((json.loads(line) for line in lines), key=lambda event: event["t"])

    def history(self) -> list[dict[str, Any]]:
        """Every event of this test's launches, which have ended: an agent writes its last ones after its trainers'
        end."""
        self.until_quiet()
        return self.events()
