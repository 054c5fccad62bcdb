"""Events as data."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from surefoot.demo.demo import plan_events
from surefoot.errors import ConfigError
from surefoot.scenario.events import AGENT_PHASES, TRAINER_PHASES, Event, Kind, Strike, draw

_EVENT = Event(kind=Kind.KILL_TRAINER, phase="filling", step=3, latest=9, rank=None, node=2)


def test_events_and_strikes_survive_json() -> None:
    """What is written as JSON is read back equal, kind included."""
    strike = Strike(event=_EVENT, t=1.5, at_step=4, struck_in="filling", pids=(7, 8), durable=2, exit_code=-9)
    again = Event.from_json(json.loads(json.dumps(_EVENT.to_json())))
    assert again == _EVENT
    assert again.kind is Kind.KILL_TRAINER
    assert Strike.from_json(json.loads(json.dumps(strike.to_json()))) == strike


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "flood"}, "flood"),
        ({"phase": "sleeping"}, "phase is 'sleeping'"),
        ({"step": -1}, "step is -1"),
        ({"latest": 2}, "step is 3, latest 2"),
        ({"when": 5}, "no field when"),
    ],
)
def test_what_is_no_event_is_refused(change: dict[str, object], says: str) -> None:
    """Unknown kinds, phases and fields and impossible ranges are refused, and named."""
    with pytest.raises(ConfigError, match=says):
        Event.from_json({**_EVENT.to_json(), **change})


def test_drawing_settles_within_the_range_and_by_the_seed_alone() -> None:
    """A drawn event has a step in its range and a rank of the world; the same seed draws the same."""
    drawn = [draw([_EVENT] * 50, random.Random(seed), 3) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert {event.step for event in drawn[0]} == set(range(3, 10))
    assert {event.rank for event in drawn[0]} == {0, 1, 2}
    assert {event.latest for event in drawn[0]} == {None}
    settled = Event(kind=Kind.EVICT, phase="training", step=5)
    assert draw([settled], random.Random(0), 3) == [settled]


@pytest.mark.parametrize("seed", range(20))
def test_the_demo_has_every_kind_apart_from_each_other_and_before_the_end(seed: int) -> None:
    """Each kind once; each event at least a tenth of the run after the one before and before the end; by the seed."""
    events = plan_events(seed, 200, 2)
    assert {event.kind for event in events} == {Kind.EVICT, Kind.KILL_TRAINER, Kind.KILL_AGENT, Kind.KILL_ALL}
    steps = [0, *(event.step for event in events), 200]
    assert all(after - before >= 20 for before, after in pairwise(steps))
    assert all(event.phase in TRAINER_PHASES + AGENT_PHASES and event.rank in (0, 1) for event in events)
    assert events == plan_events(seed, 200, 2)
    assert events != plan_events(seed + 1, 200, 2)
