"""Several nodes, as launches of their own with agents and memory of their own: one step, one truth."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from stage import Stage
from warm import until

SCENES = Path(__file__).with_name("node_scenes.py")


def _said(outputs: list[str], what: str) -> list[list[object]]:
    """What ranks said, in rank order."""
    lines = [json.loads(line) for output in outputs for line in output.splitlines() if line.startswith(f'["{what}"')]
    return sorted(lines, key=lambda line: line[1])


@pytest.fixture(scope="module")
def truths() -> dict[str, list[object]]:
    """By kind and total: what an undisturbed run ended with."""
    return {}


def _truth(stage: Stage, truths: dict[str, list[object]], kind: str, total: int) -> object:
    key = f"{kind} {total}"
    if key not in truths:
        place = stage.place / "straight"
        output = stage.play("train", ranks=2, scenes=SCENES, to=str(place), total=total, kind=kind)
        truths[key] = [line[3] for line in _said([output], "ends")]
    digests = truths[key]
    assert digests[0] == digests[1]
    return digests[0]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_notice_on_one_node_saves_all(stage: Stage, truths: dict[str, list[object]], kind: str) -> None:
    """The second node is evicted: both stop after the same step, it is committed whole, both leave with the reserved
    code, and the run goes on to the bits of an undisturbed one."""
    options = {"scenes": SCENES, "kind": kind}
    outputs = stage.play_nodes("train", 2, code=75, total=8, evict=[1, 3], **options)
    assert [line[2] for line in _said(outputs, "begins")] == [0, 0]
    stage.until_quiet()
    (notice,) = [event for event in stage.events() if event["event"] == "notice" and "on node" not in event["source"]]
    assert notice["source"] == "sigterm"
    committed = [event for event in stage.events() if event["event"] == "committed"]
    assert committed[-1]["trigger"] == "emergency"
    outputs = stage.play_nodes("train", 2, total=8, **options)
    assert [line[2] for line in _said(outputs, "begins")] == [committed[-1]["step"]] * 2
    assert [line[3] for line in _said(outputs, "ends")] == [_truth(stage, truths, kind, 8)] * 2


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_node_dies_and_one_goes_on(stage: Stage, truths: dict[str, list[object]], kind: str) -> None:
    """A node is killed with its agent: the other one's trainers are ended, not left in a collective; what was committed
    is taken up by one node alone, and later by two again, with equal values."""
    options = {"scenes": SCENES, "kind": kind}
    first, second = stage.start_nodes("train", 2, total=1000, wait=True, **options)
    until(lambda: any(event["event"] == "committed" for event in stage.events()), "a commit")
    for pid in [*second.children(), *_agents(stage, "node1")]:
        second.signal_of(pid, signal.SIGKILL)
    second.signal_group(signal.SIGKILL)
    assert first.wait() not in (0, 75), first.output
    stage.until_quiet()
    (last,) = {event["step"] for event in stage.events() if event["event"] == "committed"} & _steps(stage, newest=True)
    alone = stage.play("train", scenes=SCENES, kind=kind, total=last + 2, ranks=2)
    (begun, _), (ended, _) = _said([alone], "begins"), _said([alone], "ends")
    assert begun[2] == last
    stage.until_quiet()
    outputs = stage.play_nodes("train", 2, total=last + 4, **options)
    resumed = _said(outputs, "begins")
    assert [line[2:] for line in resumed] == [[last + 2, ended[3]]] * 2
    assert [line[3] for line in _said(outputs, "ends")] == [_truth(stage, truths, kind, last + 4)] * 2


def _agents(stage: Stage, node: str) -> list[int]:
    from warm import processes_with

    return list(processes_with(str(stage.memory / node)))


def _steps(stage: Stage, *, newest: bool) -> set[int]:
    steps = sorted(int(path.name[:8]) for path in stage.run.glob("commits/*.json"))
    return set(steps[-1:] if newest else steps)
