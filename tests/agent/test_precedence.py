"""Precedence: all nodes come to one decision; where a report is missing, the newest step goes first."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from membership_nodes import BOUND_S, Node, meeting

import surefoot.agent.evict.precedence as precedence_module
from surefoot.agent.evict.precedence import goes_first
from surefoot.agent.journal import Journal
from surefoot.core.eviction import UploadReport
from surefoot.core.layout import BoundaryId
from surefoot.events import describe, make_event
from surefoot.tiers.disk import DiskTier

_NEWEST, _OLDER = BoundaryId(9, 1, 9), BoundaryId(7, 1, 7)
_FITS = UploadReport(newest_s=0.1, left_s=5.0, older_s={_OLDER: 0.01})
_TOO_LARGE = UploadReport(newest_s=10.0, left_s=None, older_s={_OLDER: 1.0})


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other things is no silent node."""
    monkeypatch.setattr(precedence_module, "_REPORTED_WITHIN_S", BOUND_S)


class _Node(Node):
    """A node and its journal."""

    def __init__(self, place: Path, name: str) -> None:
        super().__init__(place / "run", name)
        path = place / f"{name}.jsonl"
        tier = DiskTier(place / "run")
        self._journal = Journal("run-1", "launch", name, tier, path.open("a", buffering=1), path)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._journal.path.read_text().splitlines()]

    async def first(self, mine: UploadReport) -> BoundaryId | None:
        return await goes_first(self.membership, self._journal, "emergency 9 1", _NEWEST, mine)


def _story(place: Path, number: int, tell: Callable[[list[_Node]], Any]) -> None:
    async def story() -> None:
        nodes = [_Node(place, f"node{n}") for n in range(number)]
        async with meeting(nodes, ranks=1):
            await tell(nodes)

    asyncio.run(story())


def test_all_come_to_one_decision(tmp_path: Path) -> None:
    """On one node alone the newest step does not fit: each finishes the older one first, and that node logs why."""

    async def tell(nodes: list[_Node]) -> None:
        reports = (_FITS, _TOO_LARGE, _FITS)
        found = await asyncio.gather(*(node.first(one) for node, one in zip(nodes, reports, strict=True)))
        assert found == [_OLDER] * 3
        (event,) = [event for node in nodes for event in node.events()]
        figures = {name: event[name] for name in ("event", "node", "step", "needed_s", "left_s", "first")}
        assert figures == {
            "event": "unfit",
            "node": "node1",
            "step": 9,
            "needed_s": 10.0,
            "left_s": 5.0,
            "first": 7,
        }

    _story(tmp_path, 3, tell)


def test_what_fits_goes_first(tmp_path: Path) -> None:
    """Nothing is finished before a newest step that fits everywhere, and nothing is logged."""

    async def tell(nodes: list[_Node]) -> None:
        assert await asyncio.gather(*(node.first(_FITS) for node in nodes)) == [None, None]
        assert [node.events() for node in nodes] == [[], []]

    _story(tmp_path, 2, tell)


def test_one_node_decides_by_itself(tmp_path: Path) -> None:
    """A node that is alone waits for nobody; a step that does not fit is logged also if nothing else is under way."""

    async def tell(nodes: list[_Node]) -> None:
        assert await nodes[0].first(UploadReport(10.0, 5.0)) is None
        (event,) = nodes[0].events()
        assert (event["event"], event["first"]) == ("unfit", None)

    _story(tmp_path, 1, tell)


def test_without_a_report_the_newest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that does not report is waited for no longer than the bound; it has all reports when its own comes."""
    monkeypatch.setattr(precedence_module, "_REPORTED_WITHIN_S", 0.2)

    async def tell(nodes: list[_Node]) -> None:
        assert await nodes[0].first(_TOO_LARGE) is None
        assert [event["event"] for event in nodes[0].events()] == ["warning"]
        monkeypatch.setattr(precedence_module, "_REPORTED_WITHIN_S", BOUND_S)
        assert await nodes[1].first(_FITS) == _OLDER

    _story(tmp_path, 2, tell)


def test_a_report_that_cannot_be_read(tmp_path: Path) -> None:
    """Nothing is given up on a guess."""

    async def tell(nodes: list[_Node]) -> None:
        nodes[1].membership.bring("uploads beside emergency 9 1", {"newest_s": "soon"})
        assert await nodes[0].first(replace(_TOO_LARGE, left_s=5.0)) is None
        assert [event["event"] for event in nodes[0].events()] == ["warning"]

    _story(tmp_path, 2, tell)


def test_what_a_person_reads() -> None:
    """Which step, how long it would take, how long there is, and what is done instead."""
    common = {"t": 1.0, "run": "r", "launch": "l", "node": "n", "generation": 1, "step": 812}
    older = make_event("unfit", **common, needed_s=20.0, left_s=9.62, first=790)  # type: ignore[arg-type]
    cause = "step 812 does not fit into the 9.6 s that are left: its upload from here needs 20.0 s; "
    assert describe(older) == cause + "step 790 is finished first"
    assert describe({**older, "first": None}) == cause + "no older step under way fits, so it is tried all the same"
