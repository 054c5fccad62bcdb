"""Evictions of a supervised job: whoever is told, and whenever, the newest finished step is committed in time."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evictions import SUREFOOT, Evicted

from surefoot.exits import EVICTED, EVICTED_UNSAVED, FINISHED
from surefoot.ipc.board import NodeWord

Start = Callable[..., Evicted]


def _to_supervisor(run: Evicted) -> None:
    assert run.job.supervisor is not None
    os.kill(run.job.supervisor.pid, signal.SIGTERM)


def _to_group(run: Evicted) -> None:
    assert run.job.supervisor is not None
    os.killpg(run.job.supervisor.pid, signal.SIGTERM)


def _to_everybody(run: Evicted) -> None:
    """As a batch system does: every process of the job, data loader workers included, in whatever session."""
    for pid in run.job.members():
        os.kill(pid, signal.SIGTERM)


def _twice(run: Evicted) -> None:
    _to_supervisor(run)
    run.wait_for(
        "notice on the board", lambda: (board := run.job.board()) is not None and board.node(NodeWord.NOTICE) == 1
    )
    _to_everybody(run)


def _by_file(run: Evicted) -> None:
    (run.root / "evict-me").touch()


def _by_command(run: Evicted) -> None:
    subprocess.run(
        [SUREFOOT, "evict", str(run.uri), "--grace-s", "30"],
        check=True,
        capture_output=True,
        env={**os.environ, "SUREFOOT_SHM": str(run.memory)},
    )


def _check_safe(run: Evicted, code: int) -> None:
    """The step that all had finished is committed, and nothing after the loop ran."""
    tail = run.job.output_tail()
    assert code == EVICTED, tail
    finished = max((line["step"] + 1 for line in run.lines()), default=0)
    assert run.newest_commit() == finished, tail
    assert "after the loop" not in run.job.output.read_text()
    assert [event["safe"] for event in run.events("evicted")] == [True]


def _check_resumed(run: Evicted, undisturbed: list[dict[str, Any]]) -> None:
    """Started again, it goes on to the end, and every line is that of the undisturbed run, none trained twice."""
    (run.root / "evict-me").unlink(missing_ok=True)
    run.job.start()
    assert run.wait_for_end() == FINISHED, run.job.output_tail()
    assert run.lines() == undisturbed


# However a notice comes, the road behind it is one: two ways stand for all in the short form.
_WAYS = (_to_supervisor, _to_group, _to_everybody, _twice, _by_file, _by_command)
_SHORT = (_to_everybody, _by_command)


@pytest.mark.holds("one-notice", "workers-killed-first")
@pytest.mark.parametrize("told", [way if way in _SHORT else pytest.param(way, marks=pytest.mark.soak) for way in _WAYS])
def test_whoever_is_told_the_step_is_safe(
    evicted: Start, tmp_path: Path, undisturbed: list[dict[str, Any]], told: Callable[[Evicted], None]
) -> None:
    """Each way of announcing an eviction ends in one committed step, exit code 75 and an exact resume."""
    run = evicted(options=["--grace-s", "60", "--watch", str(tmp_path / "evict-me")], LOADER_WORKERS="2", HOLD_AT="50")
    run.wait_for_steps(15)
    told(run)
    _check_safe(run, run.wait_for_end())
    _check_resumed(run, undisturbed)


@pytest.mark.holds("evictions-lose-nothing")
def test_during_a_save(evicted: Start, undisturbed: list[dict[str, Any]]) -> None:
    """A notice while an upload is under way: the newest step is committed all the same."""
    run = evicted(options=["--grace-s", "60", "--interval-s", "0", "--max-bytes-per-s", "20000"], HOLD_AT="50")
    run.wait_for_steps(5)
    run.wait_for("flushing", lambda: run.job.agent_phase() == "flushing")
    _to_supervisor(run)
    _check_safe(run, run.wait_for_end())
    _check_resumed(run, undisturbed)


@pytest.mark.holds("notice-outside-the-loop")
@pytest.mark.soak
def test_before_the_first_step(evicted: Start, undisturbed: list[dict[str, Any]]) -> None:
    """A notice before anything was trained loses nothing: 75, and the next start begins at step 0."""
    run = evicted(options=["--grace-s", "60"])
    run.wait_for("agent", lambda: run.job.agent_pid() is not None)
    _to_supervisor(run)
    _check_safe(run, run.wait_for_end())
    assert run.lines() == []
    _check_resumed(run, undisturbed)


@pytest.mark.holds("notice-outside-the-loop")
@pytest.mark.soak
def test_during_a_restore(evicted: Start, undisturbed: list[dict[str, Any]]) -> None:
    """A notice while a later start restores: what was safe stays safe, and the start after that is exact."""
    run = evicted(options=["--grace-s", "60"], HOLD_AT="50")
    run.wait_for_steps(12)
    _to_supervisor(run)
    _check_safe(run, run.wait_for_end())
    before = run.newest_commit()
    run.job.start()
    run.wait_for("trainer that starts", lambda: run.job.trainer_phase(0) in ("starting", "restoring"))
    _to_supervisor(run)
    assert run.wait_for_end() == EVICTED, run.job.output_tail()
    assert run.newest_commit() >= before
    run.job.start()
    assert run.wait_for_end() == FINISHED, run.job.output_tail()
    assert run.lines() == undisturbed


@pytest.mark.holds("agent-ends-trainers", "handler-never-runs")
def test_no_boundary_comes(evicted: Start) -> None:
    """A trainer stuck in a step until the deadline: the agent ships the newest image alone, and ends the trainer."""
    run = evicted(options=["--grace-s", "5", "--interval-s", "1000"], STUCK_AT="9")
    run.wait_for("trainer that is stuck", run.stuck.exists)
    assert run.newest_commit() < 9
    _to_supervisor(run)
    assert run.wait_for_end() == EVICTED, run.job.output_tail()
    assert run.newest_commit() == 9
    assert [event["trigger"] for event in run.events("committed") if event["step"] == 9] == ["agent"]


@pytest.mark.holds("late-staging", "handler-never-runs")
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_step_that_was_not_due_is_staged_late(evicted: Start, ranks: int) -> None:
    """Steps are staged seldom, and one rank is stuck in its step (the other in a collective) until the deadline: the
    newest finished step is taken all the same, shipped, and gone on from."""
    options = ["--grace-s", "6", "--interval-s", "1000", "--nproc", str(ranks)]
    run = evicted(options=options, STUCK_AT="12", STAGE="1000", WIDTH="2000", total=20)
    run.wait_for("trainer that is stuck", run.stuck.exists)
    assert run.newest_commit() < 12
    _to_supervisor(run)
    assert run.wait_for_end() == EVICTED, run.job.output_tail()
    assert [event["step"] for event in run.events("late")] == [12]
    assert run.newest_commit() == 12
    run.go.touch()
    run.job.start()
    assert run.wait_for_end() == FINISHED, run.job.output_tail()
    assert run.events("resumed")[-1]["from_step"] == 12
    assert [line["step"] for line in run.lines()] == list(range(20))


@pytest.mark.holds("evictions-lose-nothing", "no-time-to-save")
@pytest.mark.soak
def test_it_cannot_be_made_safe(evicted: Start) -> None:
    """A place that takes nothing any more: 74, said in the log, and the older checkpoint is still there."""
    run = evicted(options=["--grace-s", "4", "--interval-s", "1000"])
    run.wait_for("first commit", lambda: run.newest_commit() > 0)
    first = run.newest_commit()
    run.wait_for_steps(first + 10)
    (run.uri / "steps").rename(run.uri / "kept")
    (run.uri / "steps").touch()
    _to_supervisor(run)
    assert run.wait_for_end() == EVICTED_UNSAVED, run.job.output_tail()
    assert "could NOT be made safe" in run.job.output.read_text()
    assert run.newest_commit() == first
