"""Plain `python script.py`: every way out of the loop, and the way back in."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from stage import Stage


def committed(stage: Stage) -> int:
    """Newest committed step."""
    return max((int(path.name.split("-")[0]) for path in stage.run.glob("commits/*.json")), default=0)


def finished(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.holds("outlives-without-supervisor")
def test_every_way_out_loses_nothing(stage: Stage) -> None:
    """Evicted at once, twice, in a save, in a long C call; an exception, an exit, a break: the log is that of one
    undisturbed run, line by line, with no step done twice. Only who is evicted has no time to look for garbage."""
    straight = stage.place / "straight"
    printed = stage.play("train", to=str(stage.place / "other"), total=40, log=str(straight))
    assert "ends, garbage spared: False" in printed

    log = stage.place / "log0"

    def play(code: int, deed: str, step: int) -> str:
        printed = stage.play("train", code=code, total=40, log=str(stage.place / "log"), deeds={str(step): deed})
        stage.until_quiet()
        assert committed(stage) == finished(log)
        return printed

    printed = play(75, "term", 0)
    assert "after the run" not in printed
    assert "ends, garbage spared: True" in printed
    play(75, "term_twice", 4)
    play(75, "save_and_term", 8)
    printed = play(1, "raise", 12)
    assert "ValueError: boom" in printed
    assert "During handling" not in printed
    assert finished(log) == 12
    play(7, "exit", 15)
    assert finished(log) == 15
    printed = play(0, "break", 18)
    assert "after the run False" in printed
    assert finished(log) == 18

    job = stage.start("train", total=40, log=str(stage.place / "log"), deeds={"21": "long_call"})
    job.until_printed("calling")
    job.signal(signal.SIGTERM)
    job.until_printed("notice")
    assert "called" not in job.output
    assert job.wait() == 75
    stage.until_quiet()
    assert finished(log) == committed(stage) == 22

    assert "after the run True" in stage.play("train", total=40, log=str(stage.place / "log"))
    assert log.read_text() == straight.with_name("straight0").read_text()
    printed = stage.play("train", total=40, log=str(stage.place / "log"), deeds={"40": "raise"})
    assert "entered at 40" in printed
    assert "after the run True" in printed
    assert finished(log) == 40
    stage.until_quiet()
    assert [path.name for path in stage.memory.iterdir() if path.is_dir()] == []


@pytest.mark.holds("newest-alone", "notice-outside-the-loop")
def test_a_body_that_never_ends(stage: Stage) -> None:
    """No boundary comes before the deadline: the newest finished step is shipped without the trainer, exit 75."""
    job = stage.start("train", total=40, log=str(stage.place / "log"), deeds={"9": "hang"}, grace_s=3.0)
    job.until_printed("hanging")
    job.signal(signal.SIGTERM)
    assert job.wait() == 75
    stage.until_quiet()
    assert committed(stage) == finished(stage.place / "log0") == 9


@pytest.mark.holds("outlives-without-supervisor", "shared-memory-vanishes")
def test_the_agent_outlives_the_group(stage: Stage) -> None:
    """SIGKILL to the trainer's whole process group: the agent makes the newest step durable all the same."""
    job = stage.start("train", total=40, log=str(stage.place / "log"), deeds={"9": "hang"})
    job.until_printed("hanging")
    job.signal_group(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    stage.until_quiet()
    assert committed(stage) == finished(stage.place / "log0") == 9


def test_a_killed_agent_is_replaced(stage: Stage) -> None:
    """SIGKILL to the agent, twice in one run: training is not disturbed, and later steps are committed by a new one."""
    stage.play("train", to=str(stage.place / "other"), total=40, log=str(stage.place / "straight"))
    deeds = {"5": "kill_agent", "7": "save", "20": "kill_agent"}
    printed = stage.play("train", total=40, log=str(stage.place / "log"), deeds=deeds)
    assert "after the run True" in printed
    assert (stage.place / "log0").read_text() == (stage.place / "straight0").read_text()
    stage.until_quiet()
    assert committed(stage) == 40
    assert printed.count("step 8 on disk") == 1
    assert printed.count("agent restarted") == 2
    assert [path.name for path in stage.memory.iterdir() if path.is_dir()] == []


@pytest.mark.holds("workers-killed-first")
def test_workers_do_not_die_of_the_groups_sigterm(stage: Stage) -> None:
    """SIGTERM to the whole group, data loader workers included: an eviction like any other, and no worker is left."""
    stage.play("train", to=str(stage.place / "other"), total=40, log=str(stage.place / "straight"), workers=2)
    job = stage.start("train", total=40, log=str(stage.place / "log"), workers=2, deeds={"14": "long_call"})
    job.until_printed("calling")
    job.signal_group(signal.SIGTERM)
    assert job.wait() == 75, job.output
    assert "Traceback" not in job.output
    stage.until_quiet()
    stage.play("train", total=40, log=str(stage.place / "log"), workers=2)
    assert (stage.place / "log0").read_text() == (stage.place / "straight0").read_text()


@pytest.mark.holds("notice-outside-the-loop")
def test_evicted_while_it_restores(stage: Stage) -> None:
    """SIGTERM as soon as the handler is there, and at once after entry: exit 75, and nothing is lost."""
    stage.play("train", code=75, total=40, log=str(stage.place / "log"), deeds={"3": "term"})
    before = finished(stage.place / "log0")
    for _ in range(3):
        # However late this test's signal is, the job is not over before.
        job = stage.start("train", total=10**9, log=str(stage.place / "log"))
        job.until_printed("agent started")
        os.kill(job.pid, signal.SIGTERM)
        # Until the handler is installed, a SIGTERM is anybody's.
        assert job.wait() in (75, -signal.SIGTERM), job.output
        stage.until_quiet()
        assert committed(stage) == finished(stage.place / "log0") >= before


def test_two_loaders_one_after_the_other(stage: Stage) -> None:
    """Loaders that have no name keep their places apart, also when the first one's loop is passed over."""
    for name, stops in (("straight", [None]), ("stopped", [7, 9, None])):
        for stop in stops:
            options = {"to": str(stage.place / f"run-{name}"), "log": str(stage.place / name), "stop": stop}
            print(stop, stage.play("two_phases", code=0 if stop is None else 1, **options))
    assert (stage.place / "stopped").read_text() == (stage.place / "straight").read_text()
