"""One run of the LoRA-shaped job: its launches, its log, its events, its files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from warm import Job, Warm

SCRIPT = Path(__file__).with_name("lora_job.py")
TOTAL = 24
"""Steps of the run that nothing disturbs."""
WITHIN_S = 120.0
"""Bound on every wait: far more than any of them needs."""

Process = subprocess.Popen[bytes] | Job


class Lora:
    """A run in a directory, with shared memory of its own."""

    def __init__(self, place: Path, warm: Warm) -> None:
        self.place = place
        self.run = place / "run"
        self.memory = Path(tempfile.mkdtemp(prefix="sff-", dir="/dev/shm"))
        self.log = place / "log"
        self.script = SCRIPT
        self.within_s = WITHIN_S
        self._warm = warm
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, ranks: int = 1, **options: Any) -> Job:
        """Start the job, forked from a process that has torch imported."""
        args = [json.dumps({"to": str(self.run), "log": str(self.log), **options})]
        env = {**os.environ, **self._env}
        return self._warm.start(self.script, args, self.place / "output", env, ranks=ranks)

    def launch(self, *launcher: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start the job by python and what `launcher` says."""
        options = {"to": str(self.run), "log": str(self.log), **options}
        if "to" in options and options["to"] is None:
            del options["to"]
        with (self.place / "output").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *launcher, str(self.script), json.dumps(options)],
                env={**os.environ, **self._env},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def play(self, *, code: int = 0, ranks: int = 1, **options: Any) -> None:
        """Run the job to its end, which must be with `code`."""
        ended = self.start(ranks, **options).wait()
        assert ended == code, f"ended with {ended}, not {code}:\n{self.output}"
        self.until_quiet()

    def kill(self, process: Process) -> None:
        """SIGKILL to a trainer; its agent sees it, and goes by itself."""
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        self.until_quiet()

    def until_quiet(self) -> None:
        self.until(lambda: not list(self._users()), "the end of every process")

    def until(self, condition: Callable[[], Any], what: str) -> None:
        end_s = time.monotonic() + self.within_s
        while not condition():
            assert time.monotonic() < end_s, f"waited in vain for {what}:\n{self.output}"
            time.sleep(0.02)

    @property
    def output(self) -> str:
        return (self.place / "output").read_text()

    def lines(self) -> list[dict[str, Any]]:
        """What the script logged so far."""
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def steps(self, rank: int = 0) -> dict[int, tuple[str, str]]:
        """Loss and digest of the trained weights by step; a step that was trained twice must give the same."""
        found: dict[int, tuple[str, str]] = {}
        for line in self.lines():
            if "step" in line and line["rank"] == rank:
                result = (line["loss"], line["trained"])
                assert found.setdefault(line["step"], result) == result, f"step {line['step']} came out differently"
        return found

    def starts(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "begins" in line]

    def commits(self) -> list[int]:
        return sorted(int(path.name[:8]) for path in self.run.glob("commits/*.json"))

    def frozen(self) -> list[Path]:
        return sorted(self.run.glob("frozen/*.safetensors"))

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind, from the machine's own files: they are there at once."""
        lines = [line for path in self.place.glob("state/**/*.jsonl") for line in path.read_text().splitlines()]
        found = [json.loads(line) for line in lines]
        return sorted((event for event in found if event["event"] == kind), key=lambda event: event["t"])

    @property
    def _env(self) -> dict[str, str]:
        state = str(self.place / "state")
        return {"SUREFOOT_SHM": str(self.memory), "XDG_STATE_HOME": state, "OMP_NUM_THREADS": "1"}

    def close(self) -> None:
        self._warm.kill_all()
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait(WITHIN_S)
        end_s = time.monotonic() + 30.0
        while list(self._users()) and time.monotonic() < end_s:
            time.sleep(0.05)
        for pid in list(self._users()):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.memory)

    def _users(self) -> Iterator[int]:
        """Processes that were started with this run's shared memory, alive; not those that were forked."""
        wanted = f"SUREFOOT_SHM={self.memory}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    mine = wanted in (entry / "environ").read_bytes().split(b"\0")
                    alive = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
                except OSError:
                    continue
                if mine and alive:
                    yield int(entry.name)


def flip(path: Path, place: int) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x40]))
