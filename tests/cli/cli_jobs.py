"""Real jobs for the tests of commands: started, watched by their log, and ended however a test likes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPT = str(Path(__file__).with_name("small_training.py"))
STEPS = 6
"""Steps of the run that finishes."""
WITHIN_S = 120.0
"""Bound on every wait: far more than any of them needs."""


@dataclass(frozen=True)
class Answer:
    """What a command did."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Finished:
    """A run of six steps in a directory, with copies on a local disk; step 3 is tagged."""

    run: Path
    disk: Path


@dataclass(frozen=True)
class Evicted:
    """What was seen of a run on the S3 server while it trained, and its end."""

    uri: str
    run_id: str
    status: Answer
    status_by_uri: Answer
    cleaned: Answer
    cleaned_by_id: Answer
    memory_after_clean: list[str]
    memory_before_clean: list[str]
    evicted: Answer
    code: int
    steps: int
    """Steps that the script finished."""
    gone: Answer
    """A second `evict`, when nobody was there any more."""


@dataclass(frozen=True)
class Killed:
    """The finished run, continued by plain python, and everything of it killed."""

    run: Path
    orphaned: Answer
    """`clean` while the trainer lived and the agent did not."""
    memory_then: list[str]
    memory: list[str]
    cleaned: Answer
    memory_after: list[str]


class Job:
    """One job with its own place for memory and state, so that no other job of this machine is met."""

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        directory.mkdir()
        self.directory = directory
        self.memory = Path(tempfile.mkdtemp(prefix="sf-test-", dir="/dev/shm"))
        self.env = {
            **os.environ,
            **env,
            "SUREFOOT_SHM": str(self.memory),
            "XDG_STATE_HOME": str(directory / "state"),
            "OMP_NUM_THREADS": "1",
        }
        self.log = directory / "steps.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str]) -> None:
        output = (self.directory / "output").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, *command], env=self.env, stdout=output, stderr=output, cwd=self.directory
        )
        output.close()

    def supervise(self, total: int, *options: str) -> None:
        self.start(["-m", "surefoot.cli.main", "run", *options, SCRIPT, str(total), str(self.log)])

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(WITHIN_S)

    def wait_for_steps(self, count: int) -> None:
        until(lambda: self.log.exists() and len(self.log.read_text().splitlines()) >= count, self.output)

    def command(self, *words: str) -> Answer:
        """A command in a process of its own, in this job's surroundings."""
        done = subprocess.run(
            [sys.executable, "-m", "surefoot.cli.main", *words],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    def output(self) -> str:
        return (self.directory / "output").read_text()

    def agent_pid(self) -> int:
        (lock,) = self.memory.glob("*.lock")
        return int(json.loads(lock.read_text())["pid"])

    def end(self) -> None:
        """Nothing of the job is left behind, whatever happened to it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(WITHIN_S)
        for lock in self.memory.glob("*.lock"):
            if lock.stat().st_size:
                # The agent ends what else there is of the job; only then may it go itself.
                pid = int(json.loads(lock.read_text())["pid"])
                until(lambda pid=pid: not _runs(pid), self.output)  # type: ignore[misc]
        shutil.rmtree(self.memory, ignore_errors=True)


def kill(pid: int) -> None:
    """SIGKILL, and wait until the process is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)
    until(lambda: not _runs(pid), lambda: f"process {pid} lives")


def until(condition: Callable[[], bool], complain: Callable[[], str]) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end_s, complain()
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
