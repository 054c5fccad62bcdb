"""Failures told of other systems, as several ranks meet them: empty and partial ranks, one that fails, collectives."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from stage import Stage

SCENES = Path(__file__).with_name("case_scenes.py")


def said(text: str, what: str) -> list[list[Any]]:
    """What ranks said under a word, in rank order."""
    return sorted(json.loads(line)[1:] for line in text.splitlines() if line.startswith(f'["{what}"'))


def newest(stage: Stage) -> int:
    return max((int(path.name[:8]) for path in stage.run.glob("commits/*.json")), default=0)


@pytest.mark.holds("rank-without-tensors")
@pytest.mark.parametrize("elements", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_ranks_without_a_byte(stage: Stage, elements: bool) -> None:
    """Only rank 0 has anything, the others no object or a tensor without elements: 2, 1 and 3 ranks, in turn."""
    total = 0
    for ranks in (2, 1, 3):
        total += 2
        text = stage.play("empty_ranks", scenes=SCENES, ranks=ranks, total=total, elements=elements)
        begun = said(text, "begins")
        assert begun[0] == [0, total - 2, [total - 2.0] * 3]
        assert [line[1:] for line in begun[1:]] == [[total - 2, [0.0] * 3]] * (ranks - 1)
        assert said(text, "ends") == [[rank, total, [0, 5]] for rank in range(ranks)]
        stage.until_quiet()


@pytest.mark.holds("flat-parts")
def test_parts_that_only_the_script_knows_to_be_parts(stage: Stage) -> None:
    """Three ranks' own parts of a vector. Two ranks that need parts of another length are refused by name, with both
    lengths, and nothing is lost; two that need the same length take their numbers', and it is said whose are left."""
    stage.play("flat_parts", scenes=SCENES, ranks=3, total=2, lengths=[2, 2, 2])
    stage.until_quiet()
    job = stage.start("flat_parts", scenes=SCENES, ranks=2, total=3, lengths=[3, 3])
    assert job.wait() != 0
    refused = said(job.output, "refused")
    assert [line[0] for line in refused] == [0, 1], job.output
    for _rank, kind, why in refused:
        assert kind == "ConfigError"
        assert all(what in why for what in ("part", "[2]", "[3]")), why
    stage.until_quiet()
    text = stage.play("flat_parts", scenes=SCENES, ranks=2, total=2, lengths=[2, 2])
    assert said(text, "begins") == [[0, 2, [0.0, 1.0]], [1, 2, [2.0, 3.0]]]
    assert "part: each of 3 ranks saved its own, and no rank takes those of rank(s) 2" in text


@pytest.mark.holds("one-rank-fails")
def test_a_rank_that_cannot_give_its_state(stage: Stage) -> None:
    """Its own error, which no pickle could carry, ends it and the rank that waits for it; the step that both had
    before is made durable, and both go on from it."""
    job = stage.start("breaks", scenes=SCENES, ranks=2, total=1000, give_until=5)
    assert job.wait() != 0
    stage.until_quiet()
    assert "UnpicklableError: the tape of rank 1 is torn" in job.output
    (codes,) = [line for line in job.output.splitlines() if line.startswith("codes ")]
    assert all(json.loads(codes.removeprefix("codes "))), codes
    text = stage.play("breaks", scenes=SCENES, ranks=2, total=6)
    assert said(text, "begins") == [[0, 4, [4.0, 4.0]], [1, 4, [4.0, 4.0]]]


@pytest.mark.holds("one-rank-fails")
def test_a_rank_that_cannot_take_its_state(stage: Stage) -> None:
    """Both ranks hear the first cause, by an error of their own; nothing is trained, and the next start is right."""
    stage.play("breaks", scenes=SCENES, ranks=2, total=3)
    stage.until_quiet()
    job = stage.start("breaks", scenes=SCENES, ranks=2, total=6, take=False)
    assert job.wait() != 0
    told = said(job.output, "told")
    assert [line[0] for line in told] == [0, 1], job.output
    for _rank, _kind, why in told:
        assert "UnpicklableError: the tape of rank 1 is torn" in why
    assert said(job.output, "begins") == []
    stage.until_quiet()
    text = stage.play("breaks", scenes=SCENES, ranks=2, total=4)
    assert said(text, "begins") == [[0, 3, [3.0, 3.0]], [1, 3, [3.0, 3.0]]]


@pytest.mark.holds("saves-share-the-group", "planned-each-time")
def test_saves_cost_no_collective(stage: Stage) -> None:
    """Ranks of one machine, with the training's own collectives at every step, and saves as often as the place takes
    them: planned once, and afterwards none is called, on whatever group."""
    total, count_from = 250, 20
    text = stage.play("saves_all_the_time", scenes=SCENES, ranks=2, total=total, count_from=count_from)
    counted = said(text, "counted")
    assert [line[:2] for line in counted] == [[0, {}], [1, {}]]
    assert min(commits for _rank, _calls, commits in counted) > 3
    events = stage.history()
    assert len([event for event in events if event["event"] == "planned"]) == 1
    assert newest(stage) == total


@pytest.mark.holds("saves-share-the-group")
def test_saves_across_machines_cost_one_small_collective_a_step(stage: Stage) -> None:
    """Of two machines: nothing but one all-reduce of a few bytes, on a group of its own."""
    total, count_from = 250, 20
    texts = stage.play_nodes("saves_all_the_time", 2, scenes=SCENES, total=total, count_from=count_from)
    counted = said("".join(texts), "counted")
    assert [line[0] for line in counted] == [0, 1]
    for _rank, calls, commits in counted:
        ((what, number),) = calls.items()
        name, size_bytes = what.split()
        assert name == "all_reduce"
        assert int(size_bytes) <= 64
        # One a boundary, and the last word of a rank that leaves.
        assert total - count_from <= number <= total - count_from + 1
        assert commits > 3
    events = stage.history()
    assert len([event for event in events if event["event"] == "planned"]) == 2
    assert newest(stage) == total


@pytest.mark.holds("one-told-others-hang")
def test_whoever_of_three_is_told_all_stop_at_one_step(stage: Stage) -> None:
    """SIGTERM to one rank while the others wait for it in a collective; to two of them at different steps; to the
    agent alone, which is deaf to it: one step on all, committed, and each is done once."""
    total, log = 12, str(stage.place / "log")
    for deeds in ({"2@2": "term"}, {"5@0": "term", "6@1": "term"}):
        job = stage.start("together", scenes=SCENES, ranks=3, total=total, log=log, deeds=deeds)
        assert job.wait() == 75, job.output
        stage.until_quiet()
        lines = [Path(f"{log}{rank}").read_text().splitlines() for rank in range(3)]
        assert len({len(one) for one in lines}) == 1
        assert newest(stage) == len(lines[0])
    job = stage.start("together", scenes=SCENES, ranks=3, total=total, log=log, pause=10)
    job.until_printed('["pauses", 2]')
    (lock,) = stage.memory.glob("surefoot-*.lock")
    os.kill(int(json.loads(lock.read_text())["pid"]), signal.SIGTERM)
    Path(f"{log}-go").touch()
    assert job.wait() == 0, job.output
    stage.until_quiet()
    for rank in range(3):
        truth = [[step, [float(rank + 3 * (step + 1) * (step + 2))] * 2] for step in range(total)]
        assert [json.loads(line) for line in Path(f"{log}{rank}").read_text().splitlines()] == truth
    assert newest(stage) == total


@pytest.mark.holds("slow-save-times-out")
@pytest.mark.soak
def test_a_slow_place_times_out_no_collective(stage: Stage) -> None:
    """Each save takes longer than the training's collectives may: training goes on meanwhile, and who waits for the
    last one waits for the agent, not for the other rank."""
    # A save's second chunk waits until the first one's 8 MiB may have passed: eight seconds, whatever else is slow.
    text = stage.play("slow_place", scenes=SCENES, ranks=2, timeout_s=6.0, own_bytes=9 << 20, max_bytes_per_s=1 << 20)
    assert said(text, "ends") == [[0, True, True], [1, True, True]]
    slow = [event["seconds"] for event in stage.history() if event["event"] == "committed"]
    assert len([took_s for took_s in slow if took_s > 6.0]) >= 2


@pytest.mark.holds("new-ranks-without-random-state")
def test_ranks_that_are_new_draw_streams_of_their_own(stage: Stage) -> None:
    """Two ranks, then three: the first two go on where they were, all three differ, and a second start from the same
    checkpoint draws the same."""
    stage.play("draws", scenes=SCENES, ranks=2, total=2)
    stage.until_quiet()
    for name in ("two", "again"):
        shutil.copytree(stage.run, stage.place / name)

    def drawn(ranks: int, to: Path) -> list[list[Any]]:
        found = said(stage.play("draws", scenes=SCENES, ranks=ranks, to=str(to), total=2), "draws")
        stage.until_quiet()
        assert [line[:2] for line in found] == [[rank, 2] for rank in range(ranks)]
        return [line[2:] for line in found]

    before, three, again = drawn(2, stage.place / "two"), drawn(3, stage.run), drawn(3, stage.place / "again")
    assert three == again
    assert three[:2] == before
    for kind in range(3):
        assert len({str(line[kind]) for line in three}) == 3
