"""Two real ranks over gloo on one machine: what is kept once, what each for itself, and how they act as one."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from stage import Stage


def printed(text: str) -> list[Any]:
    return sorted((json.loads(line) for line in text.splitlines() if line.startswith("[")), key=str)


def shard_bytes(stage: Stage, step: int) -> list[int]:
    (directory,) = stage.run.glob(f"steps/{step:08d}-*")
    return sorted(path.stat().st_size for path in directory.glob("*.safetensors"))


@pytest.mark.holds("values-collapse")
def test_shared_once_and_local_for_each(stage: Stage) -> None:
    """Replicated tensors are uploaded once, by balanced owners; values of one name come back to their own rank."""
    stage.play("rank_local", ranks=2, total=3, values=True)
    sizes = shard_bytes(stage, 3)
    state_bytes = 3 * (2 * 64 * 64 + 2 * 64) * 4
    assert state_bytes <= sum(sizes) <= state_bytes + 2 * 8192
    assert max(sizes) <= 0.6 * sum(sizes)
    lines = printed(stage.play("rank_local", ranks=2, total=3, values=False))
    assert lines[4:] == [["state", 0, 3, [1.0, 1.0], 100], ["state", 1, 3, [2.0, 2.0], 101]]
    (_, _, bias, own), (_, _, same, none) = lines[:2]
    assert (bias, own, none) == (same, 5, 0)

    # Two ranks' state in one, and one's in two: what is shared is right, what is not is said.
    text = stage.play("restart_alone")
    assert printed(text) == [[3, [1.0, 1.0], 100, bias, [0, 1, 2, 3, 4]]]
    assert "saved by 2 rank(s), resumed by 1" in text
    text = stage.play("rank_local", ranks=2, total=5, values=False)
    assert "saved by 1 rank(s), resumed by 2" in text
    lines = printed(text)
    assert [line[2] for line in lines[:2]] == [bias, bias]
    assert lines[2][2] != lines[3][2]


@pytest.mark.holds("replicas-once")
def test_what_differs_although_it_should_not(stage: Stage) -> None:
    """A parameter that DDP claims equal and is not: kept for each rank, and named."""
    text = stage.play("rank_local", ranks=2, total=2, values=True, differ=True)
    assert "model.1.bias differs between ranks" in text
    before = [line for line in printed(text) if line[0] == "bias"]
    assert before[0][2] != before[1][2]
    again = printed(stage.play("rank_local", ranks=2, total=2, values=False))
    assert [line for line in again if line[0] == "bias"] == before


@pytest.mark.holds("replan-together")
def test_a_structure_that_changes(stage: Stage) -> None:
    """Born late on one rank, grown on both, outgrown on one, and changed on one rank at the very eviction: every
    checkpoint is of one step on both ranks, and the eviction's is the newest finished step."""
    job = stage.start("changing", ranks=2, total=40, stop=True)
    assert job.wait() == 75, job.output
    stage.until_quiet()
    assert "Traceback" not in job.output
    newest = max(int(path.name.rsplit("-", 1)[1]) for path in stage.place.glob("run-*"))
    skipped = [
        event["step"] for event in stage.history() if event["event"] == "skipped" and "structure" in event["why"]
    ]
    assert set(skipped) <= {6, 9, 12, 15}
    shown = [line for line in stage.play("show", ranks=2).splitlines() if line.startswith("restored")]
    assert len(shown) == 2
    for line in shown:
        _restored, rank, step, text = line.split(" ", 3)
        assert int(step) == newest >= 15
        assert json.loads(text) == json.loads(Path(f"{stage.run}-{rank}-{step}").read_text())


@pytest.mark.holds("save-on-rank-0-only")
def test_a_save_on_one_rank_only(stage: Stage) -> None:
    """In a save, and as two different totals: told to the caller, by name, within seconds."""
    for number, (at, deed) in enumerate(((3, "save"), (0, "total"))):
        job = stage.start("lonely_save", ranks=2, to=str(stage.place / f"run{number}"), at=at, deed=deed)
        code = job.wait()
        assert "told 0 rank 0 takes step" in job.output, job.output
        assert "call save() on every rank" in job.output
        assert code != 0
        stage.until_quiet()


@pytest.mark.holds("one-notice", "one-told-others-hang")
def test_a_notice_to_one_rank_stops_both_at_one_step(stage: Stage) -> None:
    """SIGTERM to rank 1 alone, twice, the second time with a save under way: the log is the undisturbed one."""
    stage.play("train", ranks=2, to=str(stage.place / "other"), total=30, log=str(stage.place / "straight"))
    log = str(stage.place / "log")
    for deeds in ({"3@1": "term"}, {"12@1": "save_and_term", "12@0": "save"}):
        job = stage.start("train", ranks=2, total=30, log=log, deeds=deeds)
        assert job.wait() == 75, job.output
        stage.until_quiet()
        lines = [Path(f"{log}{rank}").read_text().splitlines() for rank in (0, 1)]
        assert len(lines[0]) == len(lines[1])

    assert "after the run True" in stage.play("train", ranks=2, total=30, log=log)
    for rank in (0, 1):
        assert Path(f"{log}{rank}").read_text() == (stage.place / f"straight{rank}").read_text()


@pytest.mark.holds("save-on-rank-0-only")
def test_opened_on_one_rank_only(stage: Stage) -> None:
    """The missing rank is named within the agent's patience, shortened here by a program that is the agent's."""
    impatient = stage.place / "impatient"
    impatient.write_text(
        f"#!{sys.executable}\nimport runpy, sys\nimport surefoot.agent.start.opening as opening\n"
        "opening.COMPLETE_WITHIN_S = 1.0\nsys.argv = sys.argv[2:]\n"
        "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
    )
    impatient.chmod(0o700)
    job = stage.start("opened_on_one", ranks=2, env={"SUREFOOT_TEST_PYTHON": str(impatient)})
    job.until_printed("rank(s) [0] opened the run, rank(s) [1] did not within 1 s: open surefoot.Run on every rank")
    job.signal_group(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
