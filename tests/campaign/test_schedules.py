"""Schedules of faults on several nodes: a few here, hundreds in the campaign. `schedules.py` replays any of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
_SHORT = 22
"""Evicted, killed on all nodes, and evicted again, with an object store and copies on the nodes' own disks."""
_EACH = 10
_IN_ALL = 300
_EVICTIONS = 67
"""At each of three windows: 200 in all."""


def _run(program: str, *options: object, within_s: float) -> list[dict[str, Any]]:
    command = [sys.executable, str(HERE / program), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert told, done.stderr
    assert done.returncode == 0, "\n".join(json.dumps(each) for each in told if each.get("problems"))
    return told


def _check(told: list[dict[str, Any]], count: int) -> None:
    assert [each["verdict"] for each in told] == ["PASS"] * count
    assert all(each["bit_identical"] for each in told)


def _check_evictions(told: dict[str, Any], count: int) -> None:
    assert told["problems"] == []
    assert told["bit_identical"]
    assert told["safe"]
    assert (told["evictions"], told["measured"], told["redone_steps"]) == (count, count, 0)


@pytest.mark.parametrize(("first", "count"), [(_SHORT, 1), pytest.param(0, 2, marks=pytest.mark.soak)])
def test_some_schedules(first: int, count: int) -> None:
    """Whatever befalls three nodes, every sample and every loss bit is that of undisturbed training, no committed step
    is lost, nothing hangs, and nothing is left."""
    _check(_run("schedules.py", "--seeds", first, count, within_s=900), count)


@pytest.mark.soak
def test_some_evictions() -> None:
    """Evictions of one job on three nodes: each time the newest finished step is committed, and none is redone."""
    (told,) = _run("evictions.py", "--count", 3, "--grace", 30, within_s=900)
    _check_evictions(told, 3)


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(0, _IN_ALL, _EACH))
def test_many_schedules(first: int) -> None:
    """The same, three hundred times."""
    _check(_run("schedules.py", "--seeds", first, _EACH, within_s=3600), _EACH)


def _event(kind: str, phase: str, step: int, node: int, lasts_s: float = 0.0) -> dict[str, Any]:
    return {"kind": kind, "phase": phase, "step": step, "node": node, "lasts_s": lasts_s}


_KEPT = {
    "machines that waited for each other's part of two steps": (
        71,
        [_event("store_cut", "flushing", 80, 1, 6.0), _event("slow", "training", 117, 0, 20.0)],
    ),
    "an eviction after a launch that the cluster itself had started again": (
        200,
        [
            _event("kill_job", "committing", 12, 0),
            _event("evict", "filling", 40, 1),
            _event("cut", "flushing", 60, 2, 1.0),
        ],
    ),
    "a death in the recovery from the loss of everything": (
        311,
        [_event("kill_job", "filling", 30, 1), _event("kill_trainer", "restoring", 20, 1)],
    ),
    "a node asleep in a slow save, which the others gave up for a newer one": (
        238,
        [
            _event("evict", "training", 29, 0),
            _event("store_cut", "training", 65, 1, 20.0),
            _event("slow", "flushing", 81, 2, 1.0),
            _event("pause", "sealed", 115, 0, 20.0),
        ],
    ),
    "a rank whose process could not end, as its group never heard of its peers' deaths": (
        224,
        [
            _event("kill_trainer", "sealed", 17, 0),
            _event("pause", "filling", 53, 2, 20.0),
            _event("pause", "sealed", 97, 1, 20.0),
            _event("pause", "flushing", 126, 1, 1.0),
        ],
    ),
}


@pytest.mark.campaign
@pytest.mark.parametrize(("seed", "events"), _KEPT.values(), ids=_KEPT)
def test_kept_schedules(seed: int, events: list[dict[str, Any]], tmp_path: Path) -> None:
    """Each failed once."""
    written = tmp_path / "events"
    written.write_text(json.dumps(events))
    _check(_run("schedules.py", "--events", written, "--seed", seed, within_s=900), 1)


@pytest.mark.campaign
@pytest.mark.parametrize(("seed", "grace_s"), [(0, 30), (1, 10), (2, 5)])
def test_many_evictions(seed: int, grace_s: float) -> None:
    """The same, two hundred times, within half a minute, ten and five seconds."""
    (told,) = _run("evictions.py", "--count", _EVICTIONS, "--grace", grace_s, "--seed", seed, within_s=3600)
    _check_evictions(told, _EVICTIONS)
