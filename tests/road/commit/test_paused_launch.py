"""Agents that sleep at the worst moment while another launch takes the run over, and launches that race for it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import evidence
import pytest
from machines import Machine, MakeMachine, wait_for

from surefoot.exits import SUPERSEDED

NO_PAUSE = {"agent.save.shipping._RETENTION_EVERY_S": 0.0}


def superseded(place: Machine) -> None:
    """The whole launch ends with the code that nothing restarts."""
    assert place.agent is not None
    assert [trainer.exit_code() for trainer in place.trainers] == [SUPERSEDED] * len(place.trainers)
    assert place.agent.exit_code() == SUPERSEDED
    assert place.events("superseded")


@pytest.mark.holds("lineage-decides")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_committer_that_slept_through_a_takeover_changes_nothing_that_counts(
    machine: MakeMachine, tmp_path: Path, ranks: int
) -> None:
    """Stopped between its check and its manifest; generation 2 commits; awake, it commits, and lineage passes it by."""
    run = tmp_path / "run"
    paused, taker, later = machine(run), machine(run), machine(run)
    paused.begin(ranks, {"kind": "stop", "call": "link", "name": "00000003-g0001.json"})
    paused.saved(1)
    paused.saved(2)
    for shard in (run / "steps/00000002-g0001").glob("*.safetensors"):
        shard.write_bytes(b"bad")  # so that the newer launch goes back beyond what the older one builds on
    paused.tell_all("save", step=3)
    assert paused.agent is not None
    paused.agent.wait_until_stopped()
    assert not (run / "commits/00000003-g0001.json").exists()
    for ack in (run / "steps/00000003-g0001").glob("*.ok.json"):
        ack.unlink()  # else the newer launch would commit it: see below
    assert taker.begin(ranks) == 1
    taker.saved(2)
    paused.agent.signal(signal.SIGCONT)
    superseded(paused)
    assert (run / "commits/00000003-g0001.json").exists(), "the sleeper did put its manifest"
    taker.saved(4)
    taker.finish(4)
    assert later.begin(ranks) == 4
    later.kill()
    (run / "commits/00000004-g0002.json").unlink()
    for path in (run / "steps/00000004-g0002").iterdir():
        path.unlink()
    # 3 of generation 1 is newer by its number, whole and visible; but generation 2 branched off at step 1.
    assert later.begin(ranks) == 2


def test_a_launch_that_was_taken_over_does_not_start_again(machine: MakeMachine, tmp_path: Path) -> None:
    """Its trainer dies and is started again after another launch took the run over: refused, and no generation more."""
    run = tmp_path / "run"
    older, newer = machine(run), machine(run)
    older.begin(1, owner_pid=os.getpid())
    older.saved(1)
    assert newer.begin(1) == 1
    (answer,) = older.restart_trainers()
    assert "step" not in answer, answer
    assert older.agent is not None
    assert older.agent.exit_code() == SUPERSEDED
    newer.saved(2)
    assert len(list((run / "generations").iterdir())) == 2


@pytest.mark.holds("start-finishes-commit")
def test_a_fully_acknowledged_step_of_a_sleeper_is_the_taker_s_start(machine: MakeMachine, tmp_path: Path) -> None:
    """Stopped before the manifest with all acknowledgements there: the next launch commits the step and goes on."""
    run = tmp_path / "run"
    paused, taker = machine(run), machine(run)
    paused.begin(2, {"kind": "stop", "call": "link", "name": "00000002-g0001.json"})
    paused.saved(1)
    paused.tell_all("save", step=2)
    assert paused.agent is not None
    paused.agent.wait_until_stopped()
    assert taker.begin(2) == 2
    assert [event["step"] for event in taker.events("committed")] == [2]
    before = (run / "commits/00000002-g0001.json").read_bytes()
    paused.agent.signal(signal.SIGCONT)
    superseded(paused)
    assert (run / "commits/00000002-g0001.json").read_bytes() == before
    taker.saved(3)


@pytest.mark.holds("commit-is-pure")
def test_a_killed_committer_s_step_is_committed_by_the_next_start(machine: MakeMachine, tmp_path: Path) -> None:
    """Killed after the last acknowledgement and before the manifest; elsewhere the step is finished and used."""
    run = tmp_path / "run"
    killed, following = machine(run), machine(run)
    killed.begin(2, {"kind": "stop", "call": "link", "name": "00000002-g0001.json"})
    killed.saved(1)
    killed.tell_all("save", step=2)
    assert killed.agent is not None
    killed.agent.wait_until_stopped()
    killed.kill()
    assert sorted(evidence.checkpoints(evidence.of_directory(run))) == [(1, 1)]
    assert following.begin(2) == 2
    assert sorted(evidence.checkpoints(evidence.of_directory(run))) == [(1, 1), (2, 1)]


@pytest.mark.holds("attempts-mixed")
def test_a_partial_attempt_is_never_mixed_in_and_later_swept(machine: MakeMachine, tmp_path: Path) -> None:
    """Four ranks die with three shards of step 2 written; two ranks go on and save step 2: theirs alone is loaded."""
    run = tmp_path / "run"
    four, two, later = machine(run), machine(run), machine(run, bounds=NO_PAUSE)
    four.begin(4, {"kind": "stop", "call": "link", "name": "00000002-g0001.json"})
    four.save(1, trigger=None)
    four.tell_all("save", step=2)
    assert four.agent is not None
    four.agent.wait_until_stopped()

    def shards(at: str) -> list[str]:
        return sorted(path.name[:10] for path in (run / "steps" / at).glob("*.safetensors"))

    four.kill()
    # What a death before the last shard leaves, whichever order the shards were written in.
    for of_rank_3 in (run / "steps/00000002-g0001").glob("rank-00003*"):
        of_rank_3.unlink()
    assert shards("00000002-g0001") == ["rank-00000", "rank-00001", "rank-00002"]
    assert two.begin(2) is None
    two.save(1, trigger=None)
    two.saved(2)
    two.kill()
    assert later.begin(2) == 2
    later.saved(3)
    later.saved(4)
    wait_for(lambda: not shards("00000002-g0001"), "the partial attempt to be swept")
    assert later.finish(4) == 0
    assert "tombstone" in json.loads((run / "commits/00000002-g0001.json").read_bytes())["body"]
    assert {(3, 3), (4, 3)} <= set(evidence.checkpoints(evidence.of_directory(run)))


@pytest.mark.holds("tombstones")
def test_an_abandoned_step_that_was_swept_cannot_be_committed_any_more(machine: MakeMachine, tmp_path: Path) -> None:
    """The sweep takes the manifest's key first: a committer that wakes up after it finds the key taken, and ends."""
    run = tmp_path / "run"
    paused, taker = machine(run), machine(run, bounds=NO_PAUSE)
    paused.begin(1, {"kind": "stop", "call": "link", "name": "00000002-g0001.json"})
    paused.saved(1)
    paused.tell_all("save", step=2)
    assert paused.agent is not None
    paused.agent.wait_until_stopped()
    (ack,) = (run / "steps/00000002-g0001").glob("*.ok.json")
    ack.unlink()
    assert taker.begin(1) == 1
    taker.saved(2)
    taker.saved(3)
    taker.saved(4)
    wait_for(lambda: not (run / "steps/00000002-g0001").exists(), "the abandoned step to be swept")
    paused.agent.signal(signal.SIGCONT)
    superseded(paused)
    assert set(evidence.checkpoints(evidence.of_directory(run))) >= {(3, 2), (4, 2)}


@pytest.mark.holds("slow-collector")
@pytest.mark.parametrize(
    ("call", "name", "bad", "expected"),
    [("rename", "00000001-g0001.json", (2, 3), 1), ("unlink", "rank-00000", (3,), 2)],
    ids=["giving up", "deleting"],
)
def test_a_paused_collector_takes_nothing_that_the_new_lineage_needs(
    machine: MakeMachine, tmp_path: Path, call: str, name: str, bad: tuple[int, ...], expected: int
) -> None:
    """Stopped before it gives up or deletes step 1; another launch has to go back so far, and still can later."""
    run = tmp_path / "run"
    bounds = {**NO_PAUSE, "agent.save.retention.SWEEP_DELAY_S": 0.0 if call == "unlink" else 3600.0}
    paused, taker, later = machine(run, bounds=bounds), machine(run, bounds=NO_PAUSE), machine(run)
    paused.begin(1, {"kind": "stop", "call": call, "name": name})
    for step in (1, 2, 3):
        paused.saved(step)
    assert paused.agent is not None
    paused.agent.wait_until_stopped()
    for step in bad:
        for path in (run / f"steps/{step:08d}-g0001").glob("*.safetensors"):
            path.write_bytes(b"bad")
    assert taker.begin(1) == expected
    paused.agent.signal(signal.SIGCONT)
    paused.tell_all("save", step=4)
    superseded(paused)
    # The taker saved nothing yet: what it stands on must still be there.
    taker.kill()
    assert later.begin(1) == expected
    later.saved(expected + 1)


@pytest.mark.holds("one-launch-trains")
def test_of_two_launches_on_two_machines_one_trains_on(machine: MakeMachine, tmp_path: Path) -> None:
    """The second launch takes the run over; the first finds out at its next save and ends with 73, as do its ranks."""
    run = tmp_path / "run"
    first, second = machine(run), machine(run)
    assert first.begin(2) is None
    first.saved(1)
    assert second.begin(2) == 1
    first.tell_all("save", step=2)
    superseded(first)
    second.saved(2)
    assert second.finish(2) == 0


@pytest.mark.parametrize("repetition", range(10))
def test_racing_starts_end_with_one_trainer(machine: MakeMachine, tmp_path: Path, repetition: int) -> None:
    """Two first launches at one moment: one run, two generations, and only the later one may go on."""
    run = tmp_path / "run"
    racers = [machine(run), machine(run)]
    for racer in racers:
        racer.start(1)
    for racer in racers:
        assert racer.agent is not None
        racer.trainers[0].tell("open", socket=racer.agent.answer["socket"], rank=0, world_size=1)
    generations = [racer.answers()[0]["generation"] for racer in racers]
    assert sorted(generations) == [1, 2]
    winner, loser = racers[generations.index(2)], racers[generations.index(1)]
    loser.tell_all("save", step=1)
    superseded(loser)
    winner.saved(1)
    assert winner.finish(1) == 0
    assert (1, 2) in evidence.checkpoints(evidence.of_directory(run))
