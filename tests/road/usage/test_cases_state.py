"""Failures told of other systems, as one process meets them: snapshots, locks, accumulation, exchanged weights."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from case_scenes import PLACES
from stage import Stage

SCENES = Path(__file__).with_name("case_scenes.py")


def said(text: str, what: str) -> list[list[Any]]:
    """What was said under a word, in rank order where there are ranks."""
    return sorted(json.loads(line) for line in text.splitlines() if line.startswith(f'["{what}"'))


def noted(log: Path) -> list[list[Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.holds("save-sees-later-values")
def test_what_changes_right_after_a_step_is_kept_as_it_was(stage: Stage) -> None:
    """Tensors, arrays, containers and an object's own attributes, overwritten in place at once, come back as of the
    step's end."""
    log = stage.place / "log"
    for spoil_at in (3, 7):
        job = stage.start("spoiled_at_once", scenes=SCENES, log=str(log), spoil_at=spoil_at)
        assert job.wait() == -signal.SIGKILL, job.output
        stage.until_quiet()
    truth = dict(noted(log))
    job = stage.start("spoiled_at_once", scenes=SCENES, log=str(log), spoil_at=7)
    job.wait()
    assert said(job.output, "begins") == [["begins", 7, truth[7]]]
    assert len(set(truth.values())) == 7


@pytest.mark.holds("fork-with-locks")
def test_locks_that_other_threads_hold_stop_nobody(stage: Stage) -> None:
    """The agent is a program of its own, never a fork of a process with threads: it starts, saves and ends."""
    text = stage.play("locks_are_held", scenes=SCENES)
    assert said(text, "done") == [["done", 3, [3.0, 3.0, 3.0]]]
    assert any(event["event"] == "committed" and event["step"] == 3 for event in stage.history())


@pytest.mark.holds("resumed-twice", "handler-saves-mid-update", "eviction-between-micro-batches")
@pytest.mark.parametrize("places", [PLACES[1::2], pytest.param(PLACES, marks=pytest.mark.soak)], ids=len)
def test_an_eviction_at_any_place_of_a_step(stage: Stage, places: tuple[str, ...]) -> None:
    """Between micro-batches, with one parameter changed and the others not, under a logger's lock, in an evaluation:
    the step is finished first. Resumed each time, the compiled model's run is the straight one, line by line."""
    total, log, straight = 20, stage.place / "log", stage.place / "straight"
    stage.play("accumulates", scenes=SCENES, to=str(stage.place / "other"), total=total, log=str(straight))
    for number, place in enumerate(places):
        at = 2 + 3 * number
        stage.play("accumulates", scenes=SCENES, code=75, total=total, log=str(log), at=[at, place])
        stage.until_quiet()
        assert [line[0] for line in noted(log)] == list(range(at + 1)), place
    assert said(stage.play("accumulates", scenes=SCENES, total=total, log=str(log)), "finished") == [["finished", True]]
    assert log.read_text() == straight.read_text()
    assert len({line[-1] for line in noted(log)}) == total


@pytest.mark.holds("averaged-weights-saved")
@pytest.mark.parametrize("how", ["copy_", pytest.param("data.copy_", marks=pytest.mark.soak), "data ="])
def test_weights_that_stand_in_for_a_while_are_never_saved_as_the_model(stage: Stage, how: str) -> None:
    """A notice in an evaluation with averaged weights in the model: what is made safe is some finished step's own."""
    log = stage.place / "log"
    job = stage.start("exchanged_weights", scenes=SCENES, log=str(log), stuck_at=6, how=how)
    job.until_printed('["exchanged"')
    job.signal(signal.SIGTERM)
    assert job.wait() in (74, 75), job.output
    stage.until_quiet()
    truth = dict(noted(log))
    ((_, averaged),) = said(job.output, "exchanged")
    assert averaged not in truth.values()
    job = stage.start("exchanged_weights", scenes=SCENES, log=str(log), stuck_at=6, how=how)
    job.until_printed('["begins"')
    ((_, step, digest),) = said(job.output, "begins")
    assert step > 0
    assert digest == truth[step]
    job.signal_group(signal.SIGKILL)
    job.wait()
