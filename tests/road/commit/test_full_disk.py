"""A directory that is full: training goes on, it is said what to free, and the next save after that commits."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import evidence
import pytest
from machines import Machine, MakeMachine, wait_for

from surefoot.core.cadence import Cadence

ALARM = {"agent.agent._AGE_LIMIT_S": 0.5, "agent.agent._AGE_LOOK_S": 0.05}


def full(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    arm = tmp_path / "full"
    return arm, {"kind": "full", "arm": str(arm)}


def fill(path: Path) -> None:
    """Take every byte of space that is left."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def visible(run: Path) -> list[evidence.At]:
    return sorted(evidence.checkpoints(evidence.of_directory(run)))


@pytest.mark.parametrize("trigger", ["periodic", "manual"])
def test_training_goes_on_and_the_next_save_commits_once_there_is_space(
    machine: MakeMachine, tmp_path: Path, trigger: str
) -> None:
    """Saves fail with the place and the remedy, steps are sealed on; space freed, the same agent commits."""
    run = tmp_path / "run"
    arm, faults = full(tmp_path)
    place = machine(run)
    place.begin(2, faults)
    place.saved(1)
    arm.touch()
    answers = place.save(2, trigger=trigger)
    assert [answer["ok"] for answer in answers] == [False, False]
    assert all("No space left" in answer["error"] and "free some space" in answer["error"] for answer in answers)
    for step in (3, 4, 5):
        place.save(step, trigger=None)
    failed = place.events("save_failed")
    assert {event["step"] for event in failed} == {2}
    assert [event["attempt"] for event in failed] == list(range(1, len(failed) + 1))
    assert all("free some space" in event["why"] for event in failed)
    assert any("full and holds nothing to delete" in event["what"] for event in place.events("warning"))
    assert visible(run) == [(1, 1)]
    assert not list((run / "steps/00000002-g0001").glob("*")), "something was left under a final name"
    arm.unlink()
    place.saved(6, trigger=trigger)
    assert visible(run) == [(1, 1), (6, 1)]
    assert place.finish(6) == 0


def test_the_final_save_ends_in_an_error_and_not_in_a_hang(machine: MakeMachine, tmp_path: Path) -> None:
    """A disk that stays full: the wish for the last step ends with the reason, on every rank."""
    arm, faults = full(tmp_path)
    place = machine(tmp_path / "run")
    place.begin(2, faults)
    place.saved(1)
    arm.touch()
    place.save(2, trigger="final", wait=False)
    answers = place.do_all("ensure", step=2)
    assert [answer["ok"] for answer in answers] == [False, False]
    assert all("step 2 could not be made durable" in answer["error"] for answer in answers)
    assert all("free some space" in answer["error"] for answer in answers)


def test_who_asks_late_hears_how_a_save_ended(machine: MakeMachine, tmp_path: Path) -> None:
    """Saves that failed or succeeded a while ago, and one that never was: every wish to wait is answered."""
    arm, faults = full(tmp_path)
    place = machine(tmp_path / "run")
    place.begin(1, faults)
    place.saved(1)
    arm.touch()
    place.save(2)
    arm.unlink()
    place.saved(3)
    assert place.do_all("wait", step=1)[0]["ok"]
    assert "free some space" in place.do_all("wait", step=2)[0]["error"]
    assert place.do_all("wait", step=3)[0]["ok"]
    assert "not being saved" in place.do_all("wait", step=7)[0]["error"]


def test_a_disk_that_stays_full_raises_the_alarm(machine: MakeMachine, tmp_path: Path) -> None:
    """The newest durable checkpoint grows old: the alarm names its step and its age."""
    arm, faults = full(tmp_path)
    place = machine(tmp_path / "run", bounds=ALARM, cadence=Cadence(interval_s=0.1))
    place.begin(1, faults)
    place.saved(1)
    arm.touch()
    place.save(2)
    alarm = place.wait_for_event("durable_age")
    assert alarm["step"] == 1
    assert alarm["age_s"] >= 0.5


def test_a_start_on_a_full_disk_says_what_to_free_and_changes_nothing(machine: MakeMachine, tmp_path: Path) -> None:
    """The generation's record does not fit: refused with place and remedy; with space the same trainers may come."""
    run = tmp_path / "run"
    first, second = machine(run), machine(run)
    first.begin(1)
    first.saved(1)
    first.finish(1)
    before = evidence.of_directory(run)
    arm, faults = full(tmp_path)
    arm.touch()
    second.start(1, faults)
    (answer,) = second.open()
    assert answer["kind"] == "TierFullError"
    assert "free some space" in answer["error"]
    second.kill()
    assert evidence.of_directory(run) == before
    arm.unlink()
    assert second.begin(1, faults) == 1


def test_space_is_made_of_what_was_given_up(machine: MakeMachine, small_disk: Path) -> None:
    """A disk for four checkpoints and thirty saves: given-up ones go at once instead of an hour later."""
    run = small_disk / "run"
    place = machine(run, bounds={"agent.save.shipping._RETENTION_EVERY_S": 0.0})
    place.start(1)
    place.went_on_from(place.open(own_bytes=600_000))
    for step in range(1, 31):
        place.saved(step)
    assert place.events("save_failed"), "the disk was never full: this proves nothing"
    assert [event["steps"] for event in place.events("swept")]
    place.finish(30)
    assert visible(run)[-2:] == [(29, 1), (30, 1)]
    there = machine(run)
    there.start(1)
    assert there.went_on_from(there.open(own_bytes=600_000)) == 30


def test_room_for_records_is_enough(machine: MakeMachine, small_disk: Path) -> None:
    """16 kB are free, nothing was given up so far: the next save still finds its room."""
    run = small_disk / "run"
    place = machine(run)
    place.start(1)
    place.went_on_from(place.open(own_bytes=600_000))
    for step in (1, 2, 3):
        place.saved(step)
    fill(small_disk / "ballast")
    os.truncate(small_disk / "ballast", (small_disk / "ballast").stat().st_size - 16384)
    place.saved(4)
    assert visible(run)[-2:] == [(3, 1), (4, 1)]


def test_tries_of_a_save_do_not_fill_the_disk_themselves(machine: MakeMachine, small_disk: Path) -> None:
    """Room for one of two ranks' shards: however often it is tried, at most one a step is left, and later none."""
    run = small_disk / "run"
    place = machine(run, bounds={"agent.save.shipping._RETENTION_EVERY_S": 0.0})
    place.start(2)
    place.went_on_from(place.open(own_bytes=300_000))
    for step in (1, 2):
        place.saved(step)
    fill(small_disk / "ballast")
    os.truncate(small_disk / "ballast", (small_disk / "ballast").stat().st_size - 450_000)
    for step in (3, 4):
        answers = place.save(step)
        assert [answer["ok"] for answer in answers] == [False, False]
    # None, where both ranks reserved at once and neither found its room.
    assert len(list(run.glob("steps/0000000[34]-g0001/*"))) <= 1
    (small_disk / "ballast").unlink()
    for step in (5, 6):
        place.saved(step)
    place.finish(6)
    assert not list(run.glob("steps/0000000[34]-g0001/*"))


def test_a_disk_for_one_checkpoint_keeps_it(machine: MakeMachine, small_disk: Path) -> None:
    """The second does not fit: the first stays, what to free is said, and after that it fits."""
    run = small_disk / "run"
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 1_500_000)
    place: Machine = machine(run)
    place.start(1)
    place.went_on_from(place.open(own_bytes=600_000))
    place.saved(1)
    (answer,) = place.save(2)
    assert not answer["ok"]
    assert visible(run) == [(1, 1)]
    ballast.unlink()
    place.saved(3)
    assert visible(run) == [(1, 1), (3, 1)]


def test_a_full_local_disk_does_not_end_the_agent(machine: MakeMachine, tmp_path: Path, small_disk: Path) -> None:
    """The events' own directory is on a full disk: saving goes on, the events reach the run at the end."""
    run = tmp_path / "run"
    place = machine(run, env={"XDG_STATE_HOME": str(small_disk / "state")})
    place.begin(1)
    fill(small_disk / "ballast")
    for step in range(1, 200, 10):
        place.saved(step)
    place.finish(191)
    events = b"".join(path.read_bytes() for path in (run / "events").iterdir())
    assert events.count(b'"event":"committed"') == 20
    wait_for(lambda: place.agent is not None and place.agent.ended, "the agent's end")
