"""Several nodes, as launches of their own with agents and memory of their own: one step, one truth."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from stage import Stage
from warm import free_port, processes_with, until

from surefoot.exits import SUPERSEDED
from surefoot.ipc.board import Board, NodeWord, Phase

SCENES = Path(__file__).with_name("node_scenes.py")


def _said(outputs: list[str], what: str) -> list[list[Any]]:
    """What ranks said, in rank order."""
    lines = [json.loads(line) for output in outputs for line in output.splitlines() if line.startswith(f'["{what}"')]
    return sorted(lines, key=lambda line: line[1])


@pytest.fixture(scope="module")
def truths() -> dict[str, list[object]]:
    """By kind and total: what an undisturbed run ended with."""
    return {}


def _truth(stage: Stage, truths: dict[str, list[object]], kind: str, total: int) -> object:
    key = f"{kind} {total}"
    if key not in truths:
        place = stage.place / "straight"
        output = stage.play("train", ranks=2, scenes=SCENES, to=str(place), total=total, kind=kind)
        truths[key] = [line[3] for line in _said([output], "ends")]
    digests = truths[key]
    assert digests[0] == digests[1]
    return digests[0]


@pytest.mark.holds("one-told-others-hang")
@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.soak), "fsdp"])
def test_a_notice_on_one_node_saves_all(stage: Stage, truths: dict[str, list[object]], kind: str) -> None:
    """The second node is evicted: both stop after the same step, it is committed whole, both leave with the reserved
    code, and the run goes on to the bits of an undisturbed one."""
    options = {"scenes": SCENES, "kind": kind}
    outputs = stage.play_nodes("train", 2, code=75, total=8, evict=[1, 3], **options)
    assert [line[2] for line in _said(outputs, "begins")] == [0, 0]
    stage.until_quiet()
    (notice,) = [event for event in stage.history() if event["event"] == "notice" and "on node" not in event["source"]]
    assert notice["source"] == "sigterm"
    committed = [event for event in stage.history() if event["event"] == "committed"]
    assert committed[-1]["trigger"] == "emergency"
    outputs = stage.play_nodes("train", 2, total=8, **options)
    assert [line[2] for line in _said(outputs, "begins")] == [committed[-1]["step"]] * 2
    assert [line[3] for line in _said(outputs, "ends")] == [_truth(stage, truths, kind, 8)] * 2


@pytest.mark.holds("lost-agreement-is-silent", "machine-disappears")
@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.soak), "fsdp"])
def test_a_node_dies_and_one_goes_on(stage: Stage, truths: dict[str, list[object]], kind: str) -> None:
    """A node is killed with its agent: the other one's trainers are ended, not left in a collective; what was committed
    is taken up by one node alone, and later by two again, with equal values."""
    options = {"scenes": SCENES, "kind": kind}
    first, second = stage.start_nodes("train", 2, total=10**6, wait=True, **options)
    until(lambda: bool(_steps(stage, newest=True)), "a commit")
    for pid in [second.pid, *second.children(), *processes_with(str(stage.memory / "node1"))]:
        second.signal_of(pid, signal.SIGKILL)
    assert first.wait() not in (0, 75), first.output
    stage.until_quiet()
    (last,) = {event["step"] for event in stage.history() if event["event"] == "committed"} & _steps(stage, newest=True)
    alone = stage.play("train", scenes=SCENES, kind=kind, total=last + 2, ranks=2)
    (begun, _), (ended, _) = _said([alone], "begins"), _said([alone], "ends")
    assert begun[2] == last
    stage.until_quiet()
    outputs = stage.play_nodes("train", 2, total=last + 4, **options)
    resumed = _said(outputs, "begins")
    assert [line[2:] for line in resumed] == [[last + 2, ended[3]]] * 2
    assert [line[3] for line in _said(outputs, "ends")] == [_truth(stage, truths, kind, last + 4)] * 2


_SLOW_TO_COME_BACK = """#!{python}
import asyncio, runpy, sys
import surefoot.agent.nodes.membership as membership
announce = membership.announce
async def late(tier, nonce, mine, *, instead):
    if instead:
        await asyncio.sleep(2.0)
    await announce(tier, nonce, mine, instead=instead)
membership.announce = late
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def _kill_agent_at_work(memory: Path) -> None:
    """In the middle of a save, whose image the trainer will tell the next agent of."""
    (path,) = memory.glob("*/board")
    board = Board.open(path)
    pid = board.node(NodeWord.AGENT_PID)

    def held() -> bool:
        if board.node(NodeWord.PHASE) != Phase.FLUSHING:
            return False
        os.kill(pid, signal.SIGSTOP)
        if board.node(NodeWord.PHASE) == Phase.FLUSHING:
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    until(held, "a save")
    os.kill(pid, signal.SIGKILL)


def test_an_agent_that_is_slow_to_come_back(stage: Stage, truths: dict[str, list[object]]) -> None:
    """The agent of the first node is killed, and the one that replaces it reaches the others' only after a while, with
    trainers that seal step after step meanwhile: it commits nothing by itself and does not fail, training goes on,
    and saves do."""
    slow = stage.place / "slow"
    slow.write_text(_SLOW_TO_COME_BACK.format(python=sys.executable))
    slow.chmod(0o700)
    options = {"scenes": SCENES, "kind": "ddp", "stage": 1, "interval_s": 0.1}
    first, second = stage.start_nodes(
        "train", 2, total=10**6, wait=True, env={"SUREFOOT_TEST_PYTHON": str(slow)}, **options
    )
    until(lambda: bool(_steps(stage, newest=True)), "a commit")
    _kill_agent_at_work(stage.memory / "node0")
    until(lambda: "agent restarted" in first.output, "an agent in its place")
    before = max(_steps(stage, newest=True))
    until(lambda: max(_steps(stage, newest=True)) > before + 1, "later commits")
    os.kill(first.children()[0], signal.SIGTERM)
    assert [job.wait() for job in (first, second)] == [75, 75], first.output + second.output
    stage.until_quiet()
    assert first.output.count("agent restarted") == 1
    assert "Traceback" not in first.output + second.output
    (last,) = _steps(stage, newest=True)
    outputs = stage.play_nodes("train", 2, total=last + 2, **options)
    assert [line[2] for line in _said(outputs, "begins")] == [last] * 2
    assert [line[3] for line in _said(outputs, "ends")] == [_truth(stage, truths, "ddp", last + 2)] * 2


def _steps(stage: Stage, *, newest: bool) -> set[int]:
    steps = sorted(int(path.name[:8]) for path in stage.run.glob("commits/*.json"))
    return set(steps[-1:] if newest else steps)


@pytest.mark.holds("late-staging", "handler-never-runs")
@pytest.mark.soak
def test_a_step_that_was_not_due_with_a_rank_stuck(stage: Stage, truths: dict[str, list[object]]) -> None:
    """One node's rank stands still outside of any collective, the other's waits for it in one, and no step was due to
    be copied for long: at a notice the newest finished step is taken on both, and committed whole."""
    options = {"scenes": SCENES, "kind": "fsdp", "stage": 1000, "interval_s": 3600, "grace_s": 24}
    first, second = stage.start_nodes("train", 2, total=100, hang=[1, 5], **options)
    second.until_printed('["hangs", 1]')
    os.kill(first.children()[0], signal.SIGTERM)
    assert [job.wait() for job in (first, second)] == [75, 75], first.output + second.output
    stage.until_quiet()
    assert {event["step"] for event in _events(stage, "late")} == {5}
    assert _events(stage, "committed")[-1]["step"] == 5
    outputs = stage.play_nodes("train", 2, total=8, **{**options, "stage": 1})
    assert [line[2] for line in _said(outputs, "begins")] == [5, 5]
    assert [line[3] for line in _said(outputs, "ends")] == [_truth(stage, truths, "fsdp", 8)] * 2


def test_two_supervised_machines(stage: Stage) -> None:
    """`surefoot run` on two machines: a trainer of one is killed and both start again, together, from the newest step
    in their memory; a SIGTERM to one of them is saved by both, and both say with their exit code that they are to be
    started again."""
    with _machines(stage, _command(stage), range(2)) as machines:
        until(lambda: all(machine.begun() for machine in machines), "the first start")
        until(lambda: bool(_steps(stage, newest=True)), "a commit")
        os.kill(machines[1].trainer(), signal.SIGKILL)
        until(lambda: all(len(machine.begun()) == 2 for machine in machines), "the second start")
        steps = {line[2] for machine in machines for line in machine.begun()[1:]}
        assert len(steps - {0}) == len(steps) == 1
        resumed: list[dict[str, Any]] = []

        def all_resumed() -> bool:
            # One look: the files are put anew while the run goes on.
            resumed[:] = [event for event in stage.events() if event["event"] == "resumed"]
            return len(resumed) == 4

        until(all_resumed, "the end of the start")
        assert [(event["tier"], event["redone_steps"] <= 1) for event in resumed[2:]] == [("ram", True)] * 2
        machines[0].process.terminate()
        for machine in machines:
            assert machine.process.wait(120) == 75, machine.output
    stage.until_quiet()
    committed = [event for event in stage.history() if event["event"] == "committed"]
    assert committed[-1]["trigger"] == "emergency"
    assert committed[-1]["step"] > max(steps)


@pytest.mark.soak
def test_two_jobs_of_two_machines_each(stage: Stage) -> None:
    """The second one takes the run over. The first, whose next save is an hour away, hears of it when a trainer of it
    dies: it does not start again, and says so with its exit code on both machines; the second one trains on."""
    rare = ("--interval-s", "3600")
    with _machines(stage, _command(stage, *rare), range(2)) as older:
        until(lambda: all(machine.begun() for machine in older), "the first job's start")
        until(lambda: bool(_steps(stage, newest=True)), "a commit")
        with _machines(stage, _command(stage, *rare), range(2, 4)) as newer:
            until(lambda: all(machine.begun() for machine in newer), "the second job's start")
            os.kill(older[1].trainer(), signal.SIGKILL)
            for machine in older:
                assert machine.process.wait(120) == SUPERSEDED, machine.output
            assert [len(machine.begun()) for machine in older + newer] == [1, 1, 1, 1]
            newer[0].process.terminate()
            for machine in newer:
                assert machine.process.wait(120) == 75, machine.output
    stage.until_quiet()
    generations = sorted(path.name for path in stage.run.glob("generations/*"))
    assert generations == ["g0001.json", "g0002.json"]
    assert [event["by"].startswith("generation 2 of launch") for event in _events(stage, "superseded")] == [True] * 2


def _command(stage: Stage, *options: str) -> list[str]:
    """Of each machine of a job."""
    arguments = json.dumps({"to": None, "total": 100_000, "kind": "fsdp", "wait": True})
    command = [sys.executable, "-m", "surefoot.cli.main", "run", "--to", str(stage.run), "--nnodes", "2", *options]
    return [*command, "--rdzv", f"127.0.0.1:{free_port()}", str(SCENES), "train", arguments]


@contextmanager
def _machines(stage: Stage, command: list[str], numbers: range) -> Iterator[list[_Machine]]:
    stage.place.joinpath("log").mkdir(exist_ok=True)
    machines = [_Machine(stage, command, number) for number in numbers]
    try:
        yield machines
    finally:
        for machine in machines:
            machine.process.kill()


def _events(stage: Stage, kind: str) -> list[dict[str, Any]]:
    return [event for event in stage.history() if event["event"] == kind]


class _Machine:
    """One of several, as a launch of its own."""

    def __init__(self, stage: Stage, command: list[str], number: int) -> None:
        self._log = stage.place / "log" / str(number)
        memory = stage.memory / f"node{number}"
        memory.mkdir(mode=0o700)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "SUREFOOT_SHM": str(memory)}, start_new_session=True
            )
        self._memory = memory

    @property
    def output(self) -> str:
        return self._log.read_text()

    def begun(self) -> list[list[Any]]:
        return _said([self.output], "begins")

    def trainer(self) -> int:
        """The newest process that was given a rank."""
        ranked = [pid for pid in processes_with(str(self._memory)) if b"\0RANK=" in _environment(pid)]
        return max(ranked)


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
