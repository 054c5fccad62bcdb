"""Checks before an image that must be whole: one answer for all, and who has not come is said, by rank and machine."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from membership_nodes import until

import surefoot.agent.clients.checks as checks_module
from surefoot.agent.clients.checks import Checks
from surefoot.agent.clients.server import Link
from surefoot.agent.clients.trainers import Trainer, Trainers
from surefoot.agent.journal import Journal
from surefoot.agent.nodes.membership import Membership
from surefoot.agent.status import Status
from surefoot.core.manifest import Generation
from surefoot.events import describe
from surefoot.ipc.board import Board, RankWord
from surefoot.ipc.wire import receive_async
from surefoot.tiers.disk import DiskTier

_BOUND_S = 60.0
_STEP = 5
_OF_ALL = {"v", "t", "run", "launch", "node", "generation", "seconds"}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "_LOOK_EVERY_S", 0.1)


class Site:
    """A node's agent, as far as checks go, and its ranks' ends of their connections."""

    def __init__(self, place: Path, name: str, ranks: list[int], world_size: int) -> None:
        self.ranks = ranks
        self._world_size = world_size
        self.tasks: list[asyncio.Task[Any]] = []
        tier = DiskTier(place / "run", direct=False)
        self._file = place / name
        self.journal = Journal("run-1", "launch", name, tier, self._file.open("a", buffering=1), self._file)
        self.membership = Membership(tier, "run-1", name, self._spawn, print, print)
        self.board = Board.create(place / f"{name}-board", len(ranks))
        self.trainers = Trainers(self.board)
        status = Status(self.board, self.journal)
        status.enter(Generation(1, "launch", None, world_size, name, 0.0), None)
        self.checks = Checks(self.membership, self.trainers, status, self.journal, self._spawn)
        self.ends: dict[int, socket.socket] = {}
        self.workers: dict[int, Trainer] = {}

    def _spawn(self, work: Any) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    async def enter(self) -> None:
        await self.membership.enter("round-0001", "127.0.0.1", self.ranks, self._world_size)
        for number, rank in enumerate(self.ranks):
            mine, end = socket.socketpair()
            for sock in (mine, end):
                sock.setblocking(False)
            hello = {"rank": rank, "world_size": self._world_size, "local_rank": number, "incarnation": rank + 1}
            hello["local_world_size"] = len(self.ranks)
            self.workers[rank] = self.trainers.register(Link(mine, os.getpid()), hello)
            self.ends[rank] = end
            self.board.set_rank(number, RankWord.SEALED_GENERATION, 1)

    async def ask(self, rank: int, *, drift: bool = False) -> None:
        await self.checks.ask(
            self.workers[rank],
            {"op": "check", "id": rank, "boundary": _STEP, "generation": 1, "step": _STEP, "drift": drift},
        )

    async def answer(self, rank: int) -> dict[str, Any]:
        frame = await receive_async(self.ends[rank])
        assert frame is not None
        body = frame[0]
        assert body.pop("id") == rank
        return body

    def set(self, rank: int, word: RankWord, value: int) -> None:
        self.board.set_rank(self.ranks.index(rank), word, value)

    def journal_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._file.read_text().splitlines()]

    def told(self) -> list[dict[str, Any]]:
        """What was noted, without the fields that all events have, and times."""
        return [{key: value for key, value in one.items() if key not in _OF_ALL} for one in self.journal_lines()]

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def _sites(place: Path, **ranks: list[int]) -> AsyncIterator[list[Site]]:
    world_size = sum(len(some) for some in ranks.values())
    sites = [Site(place, name, some, world_size) for name, some in ranks.items()]
    try:
        async with asyncio.timeout(_BOUND_S):
            await asyncio.gather(*(site.enter() for site in sites))
            yield sites
    finally:
        for site in sites:
            await site.end()


def test_one_answer_for_all(tmp_path: Path) -> None:
    """One rank's drift is every rank's new plan; nothing is said as long as all come soon."""

    async def story() -> None:
        async with _sites(tmp_path, a=[0, 1], b=[2]) as (a, b):
            for site, rank in ((a, 1), (b, 2), (a, 0)):
                await site.ask(rank, drift=rank == 2)
            assert [await site.answer(rank) for site, rank in ((a, 0), (a, 1), (b, 2))] == [{"replan": True}] * 3
            assert [site.told() for site in (a, b)] == [[], []]

    asyncio.run(story())


def test_who_has_not_come_is_said_and_then_that_all_have(tmp_path: Path) -> None:
    """Each machine whose ranks wait says once which ranks of which machines have not come, and again when they have;
    the ranks wait, and get their answer."""

    async def story() -> None:
        async with _sites(tmp_path, a=[0, 1], b=[2, 3], c=[4]) as (a, b, c):
            for site, rank in ((a, 0), (a, 1), (b, 2)):
                await site.ask(rank)
            await until(lambda: bool(a.told()) and bool(b.told()))
            assert a.told() == [_waits([0, 1], {"b": [3], "c": [4]})]
            assert b.told() == [_waits([2], {"b": [3], "c": [4]})]
            assert "for rank(s) 3 of node b; rank(s) 4 of node c" in str(describe(a.journal_lines()[0]))
            await c.ask(4)
            await b.ask(3)
            ranks = [(a, 0), (a, 1), (b, 2), (b, 3), (c, 4)]
            assert [await site.answer(rank) for site, rank in ranks] == [{"replan": False}] * 5
            for site in (a, b):
                assert site.told()[1:] == [{"event": "save_goes_on", "step": _STEP}]

    asyncio.run(story())


def test_within_one_machine(tmp_path: Path) -> None:
    """The same where all ranks are on one."""

    async def story() -> None:
        async with _sites(tmp_path, only=[0, 1, 2]) as (only,):
            await only.ask(1)
            await until(lambda: bool(only.told()))
            assert only.told() == [_waits([1], {"only": [0, 2]})]
            for rank in (0, 2):
                await only.ask(rank)
            assert [await only.answer(rank) for rank in range(3)] == [{"replan": False}] * 3
            assert only.told()[1:] == [{"event": "save_goes_on", "step": _STEP}]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("word", "value", "certain"),
    [
        (RankWord.SEALED, _STEP + 1, True),
        (RankWord.FINISHED, _STEP + 2, True),
        (RankWord.SEALED, _STEP, False),
        (RankWord.FINISHED, _STEP + 1, False),
    ],
)
def test_a_rank_that_went_on_is_an_error(tmp_path: Path, word: RankWord, value: int, *, certain: bool) -> None:
    """Whoever took the step without asking, or finished a later one, will never ask: those that wait are told so, by
    rank and machine. One that has only finished this step may still come."""

    async def story() -> None:
        async with _sites(tmp_path, a=[0, 1], b=[2, 3]) as (a, b):
            b.set(3, word, value)
            for site, rank in ((a, 0), (a, 1), (b, 2)):
                await site.ask(rank)
            await until(lambda: bool(a.told()))
            assert a.told() == [_waits([0, 1], {"b": [3]})]
            if not certain:
                await b.ask(3)
            answers = [await a.answer(rank) for rank in (0, 1)]
            if not certain:
                assert answers == [{"replan": False}] * 2
                return
            for rank, answer in enumerate(answers):
                assert answer["kind"] == "UsageError"
                assert f"rank {rank} takes step 5 (save(), or its last step)" in answer["error"]
                assert "rank(s) 3 of node b went on without it: call save() on every rank" in answer["error"]

    asyncio.run(story())


def test_a_rank_that_reports_does_not_come(tmp_path: Path) -> None:
    """At the first step all report for a plan; whoever does so without having asked takes no part in the save. What it
    reported in an older generation says nothing."""

    async def story() -> None:
        async with _sites(tmp_path, a=[0], b=[1, 2]) as (a, b):
            await b.checks.reported(b.workers[1], {"boundary": 9, "generation": 7, "step": 9})
            await b.checks.reported(b.workers[2], {"boundary": _STEP, "generation": 1, "step": _STEP})
            await a.ask(0)
            assert "and rank(s) 2 of node b went on without" in (await a.answer(0))["error"]
            assert a.told() == [_waits([0], {"b": [1, 2]})]

    asyncio.run(story())


def test_a_machine_that_does_not_say_is_named(tmp_path: Path) -> None:
    """Its agent is gone and not yet given up."""

    async def story() -> None:
        async with _sites(tmp_path, a=[0], b=[1]) as (a, b):
            await b.end()
            await a.ask(0)
            await until(lambda: bool(a.told()))
            assert a.told() == [_waits([0], {}, silent=["b"])]

    asyncio.run(story())


def test_ranks_that_are_gone_are_not_waited_for(tmp_path: Path) -> None:
    """All trainers of the machine died: what they asked is void, and the next ones' checks are their own."""

    async def story() -> None:
        async with _sites(tmp_path, only=[0, 1]) as (only,):
            await only.ask(0)
            only.checks.forget()
            await only.ask(1)
            await until(lambda: bool(only.told()))
            assert only.told() == [_waits([1], {"only": [0]})]

    asyncio.run(story())


def _waits(ranks: list[int], missing: dict[str, list[int]], silent: Sequence[str] = ()) -> dict[str, Any]:
    return {"event": "save_waits", "step": _STEP, "ranks": ranks, "missing": missing, "silent": list(silent)}
