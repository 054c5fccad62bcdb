"""The commit path on a directory: the process ends, and the disk fails, at every call that changes the file system."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import evidence
import pytest
from machines import Machine, Nursery
from one_save import RANKS, check_and_go_on, save_under


def _machine(nursery: Nursery, directory: Path, name: str) -> Machine:
    return Machine(nursery, directory, str(directory / "run"), name)


def _number_of_calls(nursery: Nursery, directory: Path) -> int:
    """How many calls the second save makes, its aftermath included."""
    directory.mkdir()
    trace, arm = directory / "trace", directory / "arm"
    with _machine(nursery, directory, "counting") as place:
        assert save_under(place, arm, {"kind": "count", "arm": str(arm), "trace": str(trace)})["ok"]
        place.finish(2)
    return len(trace.read_text().splitlines())


def _strike(nursery: Nursery, directory: Path, faults: dict[str, object]) -> tuple[bool, int]:
    """Whether the save under the fault was reported as committed, and the step that was gone on from."""
    directory.mkdir()
    arm = directory / "arm"
    with _machine(nursery, directory, "struck") as struck, _machine(nursery, directory, "next") as following:
        answer = save_under(struck, arm, {**faults, "arm": str(arm)})
        if faults["kind"] == "die" and not answer.get("ok"):
            assert answer == {"lost": True}
            assert struck.agent.exit_code() == 9  # type: ignore[union-attr]
        struck.kill()
        step = check_and_go_on(lambda: evidence.of_directory(directory / "run"), following)
        assert step == 2 or not answer.get("ok"), "a step that was reported as committed was lost"
        return bool(answer.get("ok")), step


def _every(nursery: Nursery, directory: Path, kind: str, *, done: bool, stride: int = 1, **more: object) -> list[int]:
    number = _number_of_calls(nursery, directory / "count")
    assert number > 40
    found = []
    for n in range(0, number, stride):
        ok, step = _strike(nursery, directory / f"{n}", {"kind": kind, "number": n, "done": done, **more})
        found.append(step)
        if kind == "fail":
            assert ok, f"one failing call ({n}) was not made good by another try"
    return found


@pytest.mark.holds("whole-or-absent", "pointer-moves-first")
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_an_agent_that_dies_in_a_save_leaves_whole_checkpoints_only(
    nursery: Nursery, tmp_path: Path, done: bool
) -> None:
    """Killed at every 4th call of a save: nothing torn, nothing lost, the next start goes on with the right bytes."""
    steps = _every(nursery, tmp_path, "die", done=done, stride=4)
    assert steps == sorted(steps), "a later death saved less"
    assert steps[0] == 1
    assert steps[-1] == 2


@contextmanager
def _died_at(nursery: Nursery, directory: Path, number: int) -> Iterator[Machine]:
    """A machine whose agent died at a call of the second save; its trainers are still there."""
    directory.mkdir()
    arm = directory / "arm"
    with _machine(nursery, directory, "here") as place:
        answer = save_under(place, arm, {"kind": "die", "number": number, "done": True, "arm": str(arm)})
        assert answer == {"lost": True}
        place.answers_left(1)
        assert place.agent is not None
        assert place.agent.exit_code() == 9
        yield place


POINTS = range(2, 36, 9)


@pytest.mark.parametrize("number", POINTS)
def test_a_launch_whose_agent_is_replaced_gets_its_save(nursery: Nursery, tmp_path: Path, number: int) -> None:
    """The agent dies in a save, its successor takes over memory and trainers: the same save is committed, once."""
    directory = tmp_path / "x"
    with _died_at(nursery, directory, number) as place:
        assert place.start_agent().error is None
        place.do_all("reconnect")
        assert [answer["ok"] for answer in place.do_all("wait", step=2)] == [True, True]
        place.saved(3)
        assert place.finish(3) == 0
    found = evidence.checkpoints(evidence.of_directory(directory / "run"))
    assert {(2, 1), (3, 1)} <= set(found)
    assert {at[1] for at in found} == {1}


@pytest.mark.holds("memory-outlives-trainers", "shared-memory-vanishes")
@pytest.mark.parametrize("number", POINTS)
def test_memory_that_outlived_its_agent_is_the_newest_source(nursery: Nursery, tmp_path: Path, number: int) -> None:
    """Agent and trainers die in a save; started again on the same machine they go on from step 2, wherever it lies."""
    with _died_at(nursery, tmp_path / "x", number) as place:
        place.kill()
        assert place.begin(RANKS) == 2
        place.saved(3)


@pytest.mark.holds("newest-cut-short")
@pytest.mark.campaign
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_an_agent_that_dies_at_any_call_of_a_save(nursery: Nursery, tmp_path: Path, done: bool) -> None:
    """Killed at every single call."""
    _every(nursery, tmp_path, "die", done=done)


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_call_that_fails_once_costs_a_try_and_no_checkpoint(nursery: Nursery, tmp_path: Path, done: bool) -> None:
    """Every 7th call of a save fails once, before or after its work: the save is tried again and committed whole."""
    _every(nursery, tmp_path, "fail", done=done, stride=7)


@pytest.mark.campaign
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS], ids=["EIO", "ENOSPC", "EROFS"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_any_call_that_fails_once_costs_a_try_and_no_checkpoint(
    nursery: Nursery, tmp_path: Path, done: bool, code: int
) -> None:
    """Every single call fails once, with every kind of error."""
    _every(nursery, tmp_path, "fail", done=done, code=code)
