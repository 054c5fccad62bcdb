"""An event that lasts: the store's server stands still, and goes on."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import pytest

from surefoot.errors import ConfigError
from surefoot.scenario.engine import Scenario, View
from surefoot.scenario.events import Event, Kind
from surefoot.scenario.job import Node
from surefoot.scenario.processes import state_of
from surefoot.scenario.s3_server import S3Server
from surefoot.tiers.open import open_tier

_JOB = Path(__file__).with_name("phased_job.py")
_EVENT = Event(kind=Kind.STORE_HANG, phase="training", step=5, lasts_s=1.0)


def _node(memory: str, output: Path) -> Node:
    (output / "out").mkdir()
    command = [sys.executable, str(_JOB), "1000", "1", "--progress", str(output / "progress")]
    return Node(name="n", command=command, memory=Path(memory), output=output / "out")


def _answers(server: S3Server) -> bool:
    async def asked() -> bool:
        tier = open_tier(server.url("hang"))
        await tier.put("run.json", b"here")
        found = await tier.get("run.json")
        await tier.close()
        return found == b"here"

    return asyncio.run(asked())


def test_the_server_stands_still_and_goes_on(s3_env: S3Server, tmp_path: Path) -> None:
    """It is stopped while the event lasts, the job is not, and it answers again afterwards."""
    assert s3_env._process is not None
    pid, states, steps = s3_env._process.pid, list[str](), list[int]()

    def look_on(view: View) -> None:
        states.append(state_of(pid))
        if states[-1] == "T":
            steps.append(view.step)

    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sf-test-") as memory:
        scenario = Scenario([_node(memory, tmp_path)], [_EVENT], num_ranks=1, store=s3_env, look_on=look_on)
        outcome = scenario.run()
    assert outcome.problems == ()
    assert [strike.event for strike in outcome.strikes] == [_EVENT]
    stood = [number for number, state in enumerate(states) if state == "T"]
    assert stood
    assert stood == list(range(stood[0], stood[-1] + 1))
    assert stood[-1] < len(states) - 1
    assert steps[-1] > steps[0]
    assert _answers(s3_env)


def test_a_stopped_server_is_stopped_once_and_ends(s3_env: S3Server) -> None:
    """To stop it again changes nothing; a server that stands still can be ended, and leaves nothing."""
    with S3Server() as server:
        for _ in range(2):
            server.pause()
        assert server._process is not None
        assert state_of(server._process.pid) == "T"
        directory = server._directory
    assert not directory.exists()
    assert _answers(s3_env)


def test_without_a_server_there_is_nothing_to_stop(tmp_path: Path) -> None:
    """A scenario that has none of its own refuses the event instead of leaving it out."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sf-test-") as memory,
        pytest.raises(ConfigError, match="store_hang of n: there is nothing there"),
    ):
        Scenario([_node(memory, tmp_path)], [_EVENT], num_ranks=1).run()
