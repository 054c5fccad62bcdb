"""Precedence: whoever asks, however often and at once, all nodes get one decision; without one the newest step goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fleet_nodes import BOUND_S, Node, meeting

import surefoot.agent.precedence as precedence_module
from surefoot.agent.journal import Journal
from surefoot.agent.precedence import Newest, Precedence
from surefoot.core.emergency import Forecast, Rest
from surefoot.core.layout import StepId
from surefoot.events import describe, make_event
from surefoot.tiers.disk import DiskTier

_NEWEST = Newest("emergency 9 1", StepId(9, 1), "f" * 32)
_OLDER = Rest("periodic 7 1", StepId(7, 1), 10)
_FITS = Forecast(newest_bytes=100, bytes_per_s=1000.0, left_s=5.0, rests=(_OLDER,), committed=StepId(5, 1))
_TOO_LARGE = Forecast(newest_bytes=100, bytes_per_s=10.0, left_s=None, rests=(_OLDER,))
_UNFIT = {
    "step": 9,
    "bytes": 100,
    "bytes_per_s": 10,
    "needed_s": 10.0,
    "left_s": 5.0,
    "where": "node1",
    "first": 7,
    "first_bytes": 30,
}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other things is no silent node."""
    monkeypatch.setattr(precedence_module, "_DECIDED_WITHIN_S", BOUND_S)
    monkeypatch.setattr(precedence_module, "_FORECAST_WITHIN_S", BOUND_S)


class _Node(Node):
    """A node, its journal and what it forecasts."""

    def __init__(self, place: Path, name: str, forecast: Forecast) -> None:
        super().__init__(place / "run", name)
        self.asked = 0
        self.forecast = forecast
        path = place / f"{name}.jsonl"
        tier = DiskTier(place / "run")
        self._journal = Journal("run-1", "launch", name, tier, path.open("a", buffering=1), path)
        self.precedence = Precedence(self.fleet, self._journal, self._forecast)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._journal.path.read_text().splitlines()]

    def _forecast(self, newest: Newest) -> Forecast:
        assert newest == _NEWEST
        self.asked += 1
        return self.forecast


@asynccontextmanager
async def _nodes(place: Path, *forecasts: Forecast) -> AsyncIterator[list[_Node]]:
    """Nodes with a rank each, in a round."""
    nodes = [_Node(place, f"node{number}", forecast) for number, forecast in enumerate(forecasts)]
    async with meeting(nodes, ranks=1):
        yield nodes


def _story(place: Path, forecasts: list[Forecast], tell: Callable[[list[_Node]], Any]) -> None:
    async def story() -> None:
        async with _nodes(place, *forecasts) as nodes:
            await tell(nodes)

    asyncio.run(story())


@pytest.mark.parametrize("asking", [(0, 1, 2), (2,), (1, 2, 2, 1)])
def test_all_hear_one_decision(tmp_path: Path, asking: tuple[int, ...]) -> None:
    """On one node alone the newest step fits not: each is told to finish the older one first, also one that asks much
    later, when it would fit; it is written down once."""

    async def tell(nodes: list[_Node]) -> None:
        first = await asyncio.gather(*(nodes[number].precedence.first(_NEWEST) for number in asking))
        assert set(first) == {_OLDER.name}
        for node in nodes:
            node.forecast = _FITS
        assert [await node.precedence.first(_NEWEST) for node in nodes] == [_OLDER.name] * 3
        assert [node.asked for node in nodes] == [1, 1, 1]
        (event,) = [event for node in nodes for event in node.events()]
        assert (event["event"], event["node"]) == ("unfit", "node0")
        assert {name: event[name] for name in _UNFIT} == _UNFIT

    _story(tmp_path, [_FITS, _TOO_LARGE, _FITS], tell)


def test_what_fits_goes_first(tmp_path: Path) -> None:
    """Nothing is finished before a newest step that fits everywhere, and nothing is said."""

    async def tell(nodes: list[_Node]) -> None:
        assert [await node.precedence.first(_NEWEST) for node in nodes] == [None, None]
        assert [node.events() for node in nodes] == [[], []]

    _story(tmp_path, [_FITS, _FITS], tell)


def test_one_node_decides_by_itself(tmp_path: Path) -> None:
    """A node that is alone asks nobody; a step that fits not is said also if nothing else is under way."""

    async def tell(nodes: list[_Node]) -> None:
        (node,) = nodes
        assert await node.precedence.first(_NEWEST) is None
        (event,) = node.events()
        assert (event["event"], event["where"], event["first"], event["first_bytes"]) == ("unfit", None, None, None)

    _story(tmp_path, [Forecast(100, 10.0, 5.0)], tell)


def test_without_a_leader_the_newest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that does not answer is waited for no longer than the bound; what it says after that changes nothing."""
    monkeypatch.setattr(precedence_module, "_DECIDED_WITHIN_S", 0.2)

    async def tell(nodes: list[_Node]) -> None:
        leader, other = nodes
        async with leader.precedence._deciding:
            assert await other.precedence.first(_NEWEST) is None
        assert [event["event"] for event in other.events()] == ["warning"]
        assert await leader.precedence.first(_NEWEST) == _OLDER.name
        assert await other.precedence.first(_NEWEST) is None

    _story(tmp_path, [_FITS, _TOO_LARGE], tell)


def test_a_node_that_says_nothing_of_its_uploads(tmp_path: Path) -> None:
    """What one node answers cannot be read: nothing is given up on a guess."""

    async def tell(nodes: list[_Node]) -> None:
        nodes[1].forecast = Forecast(-1, 10.0, 5.0, (_OLDER,))
        assert await nodes[0].precedence.first(_NEWEST) is None
        assert [event["event"] for event in nodes[0].events()] == ["warning"]

    _story(tmp_path, [_FITS, _TOO_LARGE], tell)


def test_what_a_person_reads() -> None:
    """Which step, how much, how fast, how long it would take, and what is done instead."""
    need: dict[str, Any] = {"bytes": 4_000_000_000, "bytes_per_s": 200e6, "needed_s": 20.0, "left_s": 9.62}
    common = {"t": 1.0, "run": "r", "launch": "l", "node": "n", "generation": 1, "step": 812, **need}
    older = make_event("unfit", **common, where=None, first=790, first_bytes=600_000_000)
    assert describe(older) == (
        "step 812 does not fit into the 9.6 s that are left: 4.0 GB at 200.0 MB/s need 20.0 s; step 790, of which "
        "600.0 MB are still to be uploaded, is finished first"
    )
    nothing = make_event("unfit", **common, where="m", first=None, first_bytes=None)
    assert describe(nothing) == (
        "step 812 does not fit into the 9.6 s that are left: 4.0 GB of node m at 200.0 MB/s need 20.0 s; no older step "
        "under way does, so it is tried all the same"
    )
