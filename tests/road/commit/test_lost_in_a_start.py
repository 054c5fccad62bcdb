"""An agent that is lost while the trainers of several machines start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from machines import Machine, MakeMachine, wait_for


def _open(one: Machine, number: int, round_name: str) -> None:
    assert one.agent is not None
    assert one.agent.error is None, one.agent.error
    nodes = {"round": round_name, "first": number, "here": 1}
    (trainer,) = one.trainers
    trainer.tell("open", socket=one.agent.answer["socket"], rank=number, world_size=2, nodes=nodes)


def test_the_start_is_given_up_with_what_happened(machine: MakeMachine, tmp_path: Path) -> None:
    """Its next agent does not pretend to be the one that others may have met: it ends the start, says that its
    predecessor was lost and who begins again, and the next round of the same agents trains."""
    run = tmp_path / "run"
    first, second = (machine(run) for _ in range(2))
    first.start(owner_pid=os.getpid())
    _open(first, 0, "round-0001")
    wait_for(lambda: list(run.glob("agents/round-0001/*.json")) != [], "the first machine's entry")
    assert first.agent is not None
    first.agent.kill()
    assert first.answers() == [{"lost": True}]
    first.start_agent(owner_pid=os.getpid())
    _open(first, 0, "round-0001")
    (answer,) = first.answers()
    error: Any = answer["error"]
    assert "the agent of node m0-m0-1 was lost while its trainers started" in error
    assert "the trainers' launcher starts it again" in error
    assert "another process" not in error
    first.kill_trainers()
    first.trainers = [first._start_trainer(0)]
    second.start()
    for number, one in enumerate((first, second)):
        _open(one, number, "round-0002")
    assert [Machine.went_on_from(one.answers()) for one in (first, second)] == [None, None]
