"""Failures told of other systems, as `surefoot run` meets them: endless restarts, children left behind, deaf shells."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from warm import free_port, processes_with, until

JOB = Path(__file__).with_name("case_job.py")
TOTAL = 8


class Supervised:
    """One run under `surefoot run`, started as often as a test likes."""

    def __init__(self, place: Path, memory: Path) -> None:
        self.run = place / "run"
        self.log = place / "log"
        self.output = place / "output"
        self.memory = memory
        self._env = {**os.environ, "SUREFOOT_SHM": str(memory), "XDG_STATE_HOME": str(place / "state")}

    def command(self, deeds: dict[str, Any], *options: str) -> list[str]:
        surefoot = [sys.executable, "-m", "surefoot.cli.main", "run", "--to", str(self.run), *options]
        return [*surefoot, str(JOB), str(TOTAL), str(self.log), json.dumps(deeds)]

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as output:
            return subprocess.Popen(command, env=self._env, stdout=output, stderr=output, start_new_session=True)

    def play(self, deeds: dict[str, Any], *options: str) -> int:
        """Start, and wait for the end; nothing of it may be left."""
        code = self.start(self.command(deeds, *options)).wait(180)
        self.until_quiet()
        return code

    def until_quiet(self) -> None:
        until(lambda: not list(processes_with(str(self.memory))), "the end of every process of this test", 60.0)

    def noted(self, what: str) -> list[Any]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return [line[1:] for line in lines if line[0] == what]

    def newest(self) -> int:
        return max((int(path.name[:8]) for path in self.run.glob("commits/*.json")), default=0)


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    memory = Path(tempfile.mkdtemp(prefix="sft-", dir="/dev/shm"))
    try:
        yield Supervised(tmp_path, memory)
    finally:
        for pid in processes_with(str(memory)):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(memory)


@pytest.mark.holds("restarts-counted-apart", "bug-retried-for-ever")
def test_kills_cost_no_restart_and_a_bug_does(supervised: Supervised) -> None:
    """Killed twice after new steps, and then the same error at the same step: with one restart without a new step
    allowed it is started four times, each from its newest step, and ends with the script's own code."""
    assert supervised.play({"2": "kill", "4": "kill", "6": "raise"}, "--max-restarts", "1") == 1
    assert [step for step, _w in supervised.noted("start")] == [0, 2, 4, 6]
    assert all(w == [step, step] for step, w in supervised.noted("start"))
    assert "ValueError: a bad sample" in supervised.output.read_text()
    assert supervised.newest() == 6
    # What it had done is there for the mended script.
    assert supervised.play({}) == 0
    assert [step for (step,) in supervised.noted("step")] == list(range(TOTAL))


@pytest.mark.holds("bug-retried-for-ever")
def test_a_script_that_never_opens_the_run_is_not_started_for_ever(supervised: Supervised) -> None:
    """As often as restarts are allowed, and then its own code."""
    assert supervised.play({"open": "raise"}, "--max-restarts", "1") == 1
    assert len(supervised.noted("failed before it was opened")) == 2
    assert "ValueError: no such file" in supervised.output.read_text()


@pytest.mark.holds("children-live-on")
def test_children_of_a_killed_trainer_do_not_outlive_it(supervised: Supervised) -> None:
    """A child that holds a port and its parent's memory is ended with the trainer: the next one finds the port free,
    goes on, and nothing is left."""
    deeds = {"3": "child", "port": free_port()}
    assert supervised.play(deeds, "--max-restarts", "1") == 0
    assert [step for step, _w in supervised.noted("start")] == [0, 3]
    assert [step for (step,) in supervised.noted("step")] == list(range(TOTAL))


def _container(supervised: Supervised, script: str) -> subprocess.Popen[bytes]:
    """A shell as process 1 of a PID namespace of its own, as containers often have it; ends with what started it."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    kinds = ["--pid", "--mount", "--mount-proc", "--fork", "--kill-child"]
    return supervised.start(["unshare", *user, *kinds, "--", "/bin/sh", "-c", script])


def _first(container: subprocess.Popen[bytes]) -> int:
    """Process 1 of a container, as it is called outside."""
    (child,) = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()
    return int(child)


@pytest.mark.holds("shell-as-process-1")
def test_a_shell_as_process_1_is_told_of(supervised: Supervised) -> None:
    """The signal that announces the container's end stops at the shell: said at the start; what was durable is there
    when the container was killed."""
    container = _container(supervised, shlex.join(supervised.command({"5": "hold"}, "--interval-s", "0")) + "; true")
    until(lambda: supervised.noted("holds") != [], "the fifth step")
    assert "process 1 of this container (sh) ignores SIGTERM" in supervised.output.read_text()
    os.kill(_first(container), signal.SIGTERM)
    until(lambda: supervised.newest() > 0, "a commit")
    assert container.poll() is None
    container.kill()
    container.wait(60)
    supervised.until_quiet()
    durable = supervised.newest()
    assert supervised.play({}) == 0
    assert supervised.noted("start")[1][0] >= durable


@pytest.mark.holds("shell-as-process-1")
def test_surefoot_as_process_1_hears_of_the_containers_end(supervised: Supervised) -> None:
    """Started by `exec`, it gets the signal itself: nothing is said at the start, the newest step is saved."""
    container = _container(supervised, "exec " + shlex.join(supervised.command({"5": "hold"})))
    until(lambda: supervised.noted("holds") != [], "the fifth step")
    assert "ignores SIGTERM" not in supervised.output.read_text()
    os.kill(_first(container), signal.SIGTERM)
    assert container.wait(120) == 75, supervised.output.read_text()
    supervised.until_quiet()
    assert supervised.newest() == 6
    assert supervised.play({}) == 0
    assert [step for (step,) in supervised.noted("step")] == list(range(TOTAL))
