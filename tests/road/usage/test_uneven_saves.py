"""Ranks of several machines that do not come to a save together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stage import Stage

SCENES = Path(__file__).with_name("uneven_scenes.py")
ALL = [0, 1, 2, 3]


def _noted(stage: Stage, kind: str) -> list[dict[str, Any]]:
    return [event for event in stage.history() if event["event"] == kind]


def _last_line(output: str) -> list[Any]:
    return json.loads([line for line in output.splitlines() if line.startswith('["')][-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("last", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["save", "last step"])
def test_a_late_rank_is_waited_for_and_named(stage: Stage, *, last: bool) -> None:
    """One rank takes its time before a save that all call, or before the last step: both machines' ranks wait;
    each machine says once who is missing, by rank and machine,
    and then that all have come; everything ends well."""
    go, total, calls = stage.place / "go", 4, [] if last else ALL
    at = total - 1 if last else 1
    options = {"total": total, "at": at, "calls": calls, "go": str(go), "late": 3}
    jobs = stage.start_nodes("uneven", 2, ranks=2, scenes=SCENES, **options)
    for job, ranks in zip(jobs, ("0-1", "2"), strict=True):
        job.until_printed(f"rank(s) {ranks} have waited")
        (said,) = [line for line in job.output.splitlines() if "have waited" in line]
        assert f"to save step {at + 1} for rank(s) 3 of node" in said
    assert [job.code for job in jobs] == [None, None]
    go.touch()
    assert [job.wait() for job in jobs] == [0, 0], "\n".join(job.output for job in jobs)
    waits = _noted(stage, "save_waits")
    assert sorted(event["ranks"] for event in waits) == [[0, 1], [2]]
    assert [list(event["missing"].values()) for event in waits] == [[[3]]] * 2
    assert {node for event in waits for node in event["missing"]} < _nodes(stage)
    assert [event["step"] for event in _noted(stage, "save_goes_on")] == [at + 1] * 2


def _nodes(stage: Stage) -> set[str]:
    """Names that the agents go by among each other."""
    return {path.stem for path in stage.run.glob("agents/*/*.json")}


@pytest.mark.parametrize("at", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_a_save_on_one_machine_only_is_an_error(stage: Stage, at: int) -> None:
    """All ranks of one machine call save(), none of the other: those that wait are told so by rank and machine, also
    at the first step, for which there is no plan yet; no other rank finishes as if all were well."""
    jobs = stage.start_nodes("uneven", 2, scenes=SCENES, total=6, at=at, calls=[0])
    first, second = jobs
    assert first.wait() != 0
    assert second.wait() != 0
    word, rank, error = _last_line(first.output)
    assert (word, rank) == ("told", 0), first.output
    assert "rank 0 takes step" in error
    assert "rank(s) 1 of node" in error
    assert "call save() on every rank" in error
    assert '"ends"' not in second.output
    stage.until_quiet()
