"""Failures told of other systems, as two machines meet them: one fails, is slow, or is lost while a step is saved."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import evidence
import pytest
from machines import Agent, Machine, MakeMachine, Trainer, wait_for

from surefoot.exits import FINISHED

SOON_DEAD = {"agent.nodes.membership.DEAD_AFTER_S": 1.0}


class Pair:
    """Two machines with a trainer each."""

    def __init__(
        self,
        machine: MakeMachine,
        run: Path,
        faults: dict[str, Any] | None = None,
        bounds: dict[str, float] | None = None,
        seconds: Path | None = None,
    ) -> None:
        """`seconds`: the run's place as the second machine sees it."""
        self.run = run
        self.machines = [machine(place, bounds=bounds) for place in (run, seconds or run)]
        self._faults = [None, faults]
        """The second one's place is what goes wrong."""

    def begin(self, round_name: str = "round-0001") -> int | None:
        self.start(round_name)
        return self.went_on_from()

    def start(self, round_name: str) -> None:
        for number, (one, faults) in enumerate(zip(self.machines, self._faults, strict=True)):
            agent = one.start(faults=faults)
            assert agent.error is None, agent.error
            nodes = {"round": round_name, "first": number, "here": 1}
            (trainer,) = one.trainers
            trainer.tell("open", socket=agent.answer["socket"], rank=number, world_size=2, nodes=nodes)

    def went_on_from(self) -> int | None:
        (step,) = {Machine.went_on_from(one.answers()) for one in self.machines}
        return step

    @property
    def trainers(self) -> list[Trainer]:
        return [trainer for one in self.machines for trainer in one.trainers]

    def do(self, what: str, **arguments: Any) -> list[dict[str, Any]]:
        for trainer in self.trainers:
            trainer.tell(what, **arguments)
        return [trainer.answer() for trainer in self.trainers]

    def saved(self, step: int, trigger: str = "manual") -> None:
        assert all(answer.get("ok") for answer in self.do("save", step=step, trigger=trigger))

    def stop_the_second(self) -> Agent:
        """Its agent stands still from here on."""
        agent = self.machines[1].agent
        assert agent is not None
        agent.signal(signal.SIGSTOP)
        agent.wait_until_stopped()
        return agent

    def wait_for_first_part(self, step: int) -> None:
        """Wait until the first machine has done its part of a step of generation 1."""
        directory = self.run / f"steps/{step:08d}-g0001"
        wait_for(lambda: any(directory.glob("rank-00000*.ok.json")), f"the first machine's part of step {step}")

    def checkpoints(self) -> list[evidence.At]:
        return sorted(evidence.checkpoints(evidence.of_directory(self.run)))

    def finish(self, step: int) -> None:
        self.do("bye", step=step, finished=True)
        for one in self.machines:
            one.end_trainers()
            assert one.agent is not None
            assert one.agent.exit_code() == FINISHED


@pytest.mark.holds("part-missing-declared-whole")
def test_one_machine_that_cannot_write_makes_no_checkpoint(machine: MakeMachine, tmp_path: Path) -> None:
    """Its disk is full: no manifest, the same reason on both machines, the step before loads; with space again the
    next save is whole."""
    arm = tmp_path / "full"
    pair = Pair(machine, tmp_path / "run", {"kind": "full", "arm": str(arm)})
    assert pair.begin() is None
    pair.saved(1)
    arm.touch()
    answers = pair.do("save", step=2)
    assert all("No space left" in answer["error"] for answer in answers), answers
    assert pair.checkpoints() == [(1, 1)]
    arm.unlink()
    pair.saved(3)
    assert pair.checkpoints() == [(1, 1), (3, 1)]
    pair.finish(3)
    assert machine(pair.run).begin(2) == 3


@pytest.mark.parametrize(("older", "newer"), [("periodic", "final"), ("periodic", "manual"), ("manual", "final")])
def test_machines_at_work_on_two_steps_do_not_wait_for_each_other(
    machine: MakeMachine, tmp_path: Path, older: str, newer: str
) -> None:
    """One is at work on the older step when the other, which was busy, has both to choose from: both steps that
    somebody asked for are committed, and a periodic one gives way."""
    pair = Pair(machine, tmp_path / "run")
    assert pair.begin() is None
    pair.saved(1)
    busy = pair.stop_the_second()
    pair.do("save", step=2, trigger=older, wait=False)
    pair.wait_for_first_part(2)
    pair.do("save", step=3, trigger=newer, wait=False)
    busy.signal(signal.SIGCONT)
    assert [answer.get("ok") for answer in pair.do("wait", step=3)] == [True, True]
    found = set(pair.checkpoints())
    assert {(1, 1), (3, 1)} <= found
    if older != "periodic":
        assert (2, 1) in found
    pair.finish(3)


def test_a_rank_that_died_before_it_sealed_what_the_other_ships(machine: MakeMachine, tmp_path: Path) -> None:
    """One machine is at work on a step that the other will never have; both end, with the newest step that both have
    committed, before anything runs out."""
    pair = Pair(machine, tmp_path / "run")
    assert pair.begin() is None
    pair.saved(1)
    pair.do("save", step=2, trigger=None)
    first, second = pair.machines
    first.trainers[0].do("save", step=3, trigger="periodic", wait=False)
    pair.wait_for_first_part(3)
    for one in (second, first):
        one.kill_trainers()
    for one in pair.machines:
        assert one.agent is not None
        assert one.agent.exit_code() == FINISHED
    assert pair.checkpoints() == [(1, 1), (2, 1)]


@pytest.mark.holds("host-leaves-early")
def test_nobody_leaves_before_the_slowest_part_of_the_last_save(machine: MakeMachine, tmp_path: Path) -> None:
    """One machine has done its part and waits, its agent too, as long as the other one's part is missing."""
    pair = Pair(machine, tmp_path / "run")
    assert pair.begin() is None
    pair.saved(1)
    slow = pair.stop_the_second()
    pair.do("save", step=2, trigger="final", wait=False)
    first, second = pair.trainers
    for trainer in (first, second):
        trainer.tell("ensure", step=2)
    wait_for(lambda: list(pair.run.glob("steps/00000002-*/rank-00000-*.ok.json")) != [], "the first machine's part")
    with pytest.raises(TimeoutError):
        first.answer(0.3)
    assert pair.checkpoints() == [(1, 1)]
    slow.signal(signal.SIGCONT)
    assert [first.answer()["ok"], second.answer()["ok"]] == [True, True]
    assert pair.checkpoints() == [(1, 1), (2, 1)]
    pair.finish(2)


@pytest.mark.holds("part-missing-declared-whole")
def test_a_machine_that_is_lost_in_the_last_save_is_named(machine: MakeMachine, tmp_path: Path) -> None:
    """Who waits for the last step hears that it is not durable, and whose part is missing, instead of waiting for ever;
    the step before is what the next start finds."""
    pair = Pair(machine, tmp_path / "run", bounds=SOON_DEAD)
    assert pair.begin() is None
    pair.saved(1)
    pair.stop_the_second()
    pair.do("save", step=2, trigger="final", wait=False)
    first = pair.trainers[0]
    first.tell("ensure", step=2)
    wait_for(lambda: list(pair.run.glob("steps/00000002-*/rank-00000-*.ok.json")) != [], "the first machine's part")
    pair.machines[1].kill()
    answer = first.answer()
    assert "ended" in answer or "step 2" in answer["error"], answer
    assert pair.machines[0].wait_for_event("stopped")["why"].startswith("node m1-")
    assert pair.checkpoints() == [(1, 1)]
    pair.machines[0].kill()
    assert machine(pair.run).begin(2) == 1


@pytest.fixture
def stale(tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """Another view of a run in which its newest manifest is not there, as a shared directory may show to a machine for
    a while. Needs the right to mount; where that is missing there is none to be had."""
    view = tmp_path / "view"
    mounted: list[Path] = []

    def make(run: Path) -> Path:
        view.mkdir()
        for file in (path for path in run.iterdir() if path.is_file()):
            shutil.copy(file, view)
        shutil.copytree(run / "commits", view / "commits")
        max((view / "commits").glob("*-g*.json")).unlink()
        for directory in (path for path in run.iterdir() if path.is_dir() and path.name != "commits"):
            (view / directory.name).mkdir()
            command = ["mount", "--bind", str(directory), str(view / directory.name)]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip("no right to mount")
            mounted.append(view / directory.name)
        return view

    yield make
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _saved_twice(machine: MakeMachine, run: Path) -> None:
    pair = Pair(machine, run)
    assert pair.begin() is None
    pair.saved(1)
    pair.saved(2)
    for one in pair.machines:
        one.kill()


@pytest.mark.holds("ranks-disagree-on-files")
def test_a_machine_that_sees_the_newest_checkpoint_late(
    machine: MakeMachine, tmp_path: Path, stale: Callable[[Path], Path]
) -> None:
    """One machine's view of the place is older than the other's: it is waited for, and no step is lost by it."""
    run = tmp_path / "run"
    _saved_twice(machine, run)
    view = stale(run)
    pair = Pair(machine, run, seconds=view)
    pair.start("round-0002")
    wait_for(lambda: bool(list((run / "agents" / "round-0002").glob("*"))), "the machines to meet")
    (missing,) = {path.name for path in (run / "commits").iterdir()} - {
        path.name for path in (view / "commits").iterdir()
    }
    shutil.copy(run / "commits" / missing, view / "commits")
    assert pair.went_on_from() == 2
    for one in pair.machines:
        one.kill()


@pytest.mark.holds("ranks-disagree-on-files")
def test_a_machine_that_never_sees_the_newest_checkpoint(
    machine: MakeMachine, tmp_path: Path, stale: Callable[[Path], Path]
) -> None:
    """Nobody waits for ever: both start from the one before, and the one that is passed over is named."""
    _saved_twice(machine, tmp_path / "run")
    bounds = {"agent.start.choosing._LISTED_WITHIN_S": 0.5}
    pair = Pair(machine, tmp_path / "run", bounds=bounds, seconds=stale(tmp_path / "run"))
    assert pair.begin("round-0002") == 1
    said = [event["what"] for event in pair.machines[0].events("warning")]
    assert any(what.startswith("step 2") and "is passed over" in what for what in said), said
    for one in pair.machines:
        one.kill()
