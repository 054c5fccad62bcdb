"""Who ends the trainers of a launch when one of them has died: the agent, and not torchrun, whose way takes half a
minute."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from stage import Stage
from warm import until

SCENES = Path(__file__).with_name("node_scenes.py")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _only(pids: list[int], *words: str) -> int:
    """The one of them in whose command line all of these words stand."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in pids}
    (found,) = [pid for pid, command in commands.items() if all(word.encode() in command for word in words)]
    return found


def _has_ended(pid: int) -> bool:
    """Also if nobody has collected it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _rank(pid: int) -> str:
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(entry for entry in environment if entry.startswith(b"RANK=")).decode()


@pytest.mark.holds("agent-ends-trainers")
def test_the_agent_ends_the_others_with_torchrun_standing_still(stage: Stage) -> None:
    """Rank 0 hangs outside of any collective, rank 1 is killed, and torchrun is stopped: rank 0 is ended all the same.
    Then the supervisor is killed, and nothing of the launch is left."""
    arguments = json.dumps({"to": None, "total": 100, "kind": "ddp", "hang": [0, 3]})
    command = [sys.executable, "-m", "surefoot.cli.main", "run", "--to", str(stage.run), "--nproc", "2"]
    output = stage.place / "output"
    with output.open("wb") as file:
        supervisor = subprocess.Popen(
            [*command, str(SCENES), "train", arguments],
            env={**os.environ, "SUREFOOT_SHM": str(stage.memory)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: '["hangs", 0]' in output.read_text(), "rank 0 to hang", 240.0)
        torchrun = _only(_children(supervisor.pid), "surefoot.launch.torchrun")
        trainers = {_rank(pid): pid for pid in _children(torchrun)}
        os.kill(torchrun, signal.SIGSTOP)
        os.kill(trainers["RANK=1"], signal.SIGKILL)
        until(lambda: _has_ended(trainers["RANK=0"]), "the end of rank 0")
        assert not _has_ended(torchrun)
    finally:
        supervisor.kill()
        supervisor.wait()
    stage.until_quiet()
    assert _has_ended(torchrun)
