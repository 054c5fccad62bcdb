"""The memory tier of an agent that takes another one's place."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator

import pytest

from surefoot.agent.memory.memory import Memory
from surefoot.core.layout import BoundaryId
from surefoot.core.plan import Leaf, Report, make_plan
from surefoot.ipc.home import Home

PLAN = make_plan([Report((Leaf("weight", "uint8", (1000,), "local"),), '{"$dict":[],"type":"dict"}')])


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    # A socket's path is short.
    with tempfile.TemporaryDirectory(prefix="sf-test-", dir="/dev/shm") as base:
        monkeypatch.setenv("SUREFOOT_SHM", base)
        home = Home.take("run-1", "launch", "node")
        yield home
        home.release()


def _memory(home: Home) -> Memory:
    def bad(what: str, why: str) -> None:
        raise AssertionError(f"{what}: {why}")

    return Memory(home, bad)


def test_a_segment_that_has_a_name_and_is_brought_too_is_one(home: Home) -> None:
    """An agent ended, its trainer lives on and brings its segment to the next agent, which has found it by its name:
    the step that the next generation begins with is kept, and the others are emptied."""

    async def story() -> None:
        (segment,) = _memory(home).reserve(PLAN, [0], 4096, 2)
        for slot, step in ((0, 7), (1, 8)):
            segment.begin(slot)
            segment.image(slot)[-1000:] = bytes([step]) * 1000
            record = json.dumps({"boundary": step, "step": None, "epoch": None, "generation": 1, "rank": 0}).encode()
            segment.seal(slot, BoundaryId(step, 1), record, durable=False, staged_ns=step)
        memory = _memory(home)
        assert memory.adopt_files() == 1
        memory.adopt_descriptor(os.dup(segment.fd))
        assert len(memory.segments) == 1
        newest = next(one for one in await memory.whole_sets() if one.at == BoundaryId(8, 1))
        memory.void_all_but(newest.parts)
        assert [one.at for one in await memory.whole_sets()] == [BoundaryId(8, 1)]

    asyncio.run(story())


def test_a_segment_without_a_name_is_brought(home: Home) -> None:
    """Nobody could have found it: the next agent has it from the trainer."""
    (segment,) = _memory(home).reserve(PLAN, [0], 4096, 2)
    fd = os.dup(segment.fd)
    segment.remove()
    memory = _memory(home)
    assert memory.adopt_files() == 0
    memory.adopt_descriptor(fd)
    assert [(one.rank, one.plan_hash) for one in memory.segments] == [(0, PLAN.hash)]
