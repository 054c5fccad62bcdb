"""Checks: before an image that must be whole every rank asks whether all must plan again; all get the same answer.

If only some ranks want to take an image (a save() that the others do not call), they would wait for it silently. So
each node asks the nodes that lack ranks which ranks have not come, logs that once, and answers its own ranks with an
error once it is certain that the missing ranks never will.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from surefoot.agent.clients.trainers import Trainer, Trainers
from surefoot.agent.journal import Journal
from surefoot.agent.nodes.membership import Membership
from surefoot.agent.status import Status
from surefoot.core.documents import Fields
from surefoot.core.layout import BoundaryId
from surefoot.core.presence import spans
from surefoot.errors import AgentError, SurefootError
from surefoot.host.clock import boot_s
from surefoot.ipc.board import RankWord
from surefoot.ipc.wire import Body

_LOOK_EVERY_S = 4.0
"""Also how long the ranks that have come wait before the log reports it."""
_ANSWER_WITHIN_S = 2.0


@dataclass(slots=True, eq=False)
class _Check:
    """One image that ranks of this node want to take."""

    at: BoundaryId
    began_s: float
    asked: dict[int, tuple[Trainer, Body]] = field(default_factory=dict)
    """The ranks that have come, each with its request."""
    logged: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def what(self) -> str:
        return _name(self.at)


@dataclass(frozen=True, slots=True)
class _Absent:
    """The ranks that have not come."""

    ranks: dict[str, list[int]]
    """All of them, by node."""
    past: dict[str, list[int]]
    """Those of them that went on without the image."""
    silent: list[str]
    """Nodes that do not answer."""


class Checks:
    """One node's part of the checks."""

    def __init__(
        self,
        membership: Membership,
        trainers: Trainers,
        status: Status,
        journal: Journal,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._membership = membership
        self._trainers = trainers
        self._status = status
        self._journal = journal
        self._spawn = spawn
        self._open: _Check | None = None
        """The check to which some ranks of this node have come, and some have not."""
        self._whole = ""
        """The last check to which all of them have come."""
        self._reports: dict[int, BoundaryId] = {}
        """By rank: the last boundary at which it reported for a plan."""
        membership.answer("absent", self._answer_absent)
        trainers.hear("check", self.ask)
        trainers.hear("report", self.reported)
        trainers.when_all_gone(self.forget)

    async def ask(self, trainer: Trainer, body: Body) -> None:
        """Take a rank's question. After this node's last rank, wait for the other nodes, and answer all ranks."""
        if self._open is None:
            self._open = _Check(BoundaryId.of(Fields(body, "check")), boot_s())
            self._spawn(self._watch(self._open))
        check = self._open
        check.asked[trainer.rank] = (trainer, body)
        if len(check.asked) == trainer.local_world_size:
            self._open, self._whole = None, check.what
            self._spawn(self._answer(check))

    async def reported(self, trainer: Trainer, body: Body) -> None:
        """Note that a rank reports for a plan: at that step's end it asks nothing any more."""
        self._reports[trainer.rank] = BoundaryId.of(Fields(body, "report"))

    def forget(self) -> None:
        """Drop all questions: this node's ranks are gone."""
        self._reports.clear()
        if self._open is not None:
            self._open.over.set()
            self._open = None

    async def _answer(self, check: _Check) -> None:
        drift = any(bool(request.get("drift")) for _worker, request in check.asked.values())
        try:
            brought = await self._membership.gather(check.what, {"drift": drift})
            answer: Body = {"replan": any(bool(one.get("drift")) for one in brought)}
            if check.logged:
                self._journal.record("save_goes_on", **check.at.names, seconds=round(boot_s() - check.began_s, 1))
        except AgentError as error:
            answer = {"error": str(error), "kind": "AgentError"}
        if not check.over.is_set():
            check.over.set()
            for trainer, request in check.asked.values():
                await trainer.link.reply(request, **answer)

    # ------------------------------------------------------------------ who has not come

    async def _watch(self, check: _Check) -> None:
        while not check.over.is_set():
            try:
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await check.over.wait()
            except TimeoutError:
                await self._look(check)

    async def _look(self, check: _Check) -> None:
        absent = await self._absent(check)
        if check.over.is_set():
            return
        if not check.logged and (absent.ranks or absent.silent):
            check.logged = True
            self._journal.record(
                "save_waits",
                **check.at.names,
                ranks=sorted(check.asked),
                missing=absent.ranks,
                silent=absent.silent,
                seconds=round(boot_s() - check.began_s, 1),
            )
        if absent.past:
            check.over.set()
            for trainer, request in check.asked.values():
                why = _why(trainer.rank, check.at, absent.past)
                await trainer.link.reply(request, error=why, kind="UsageError")

    async def _absent(self, check: _Check) -> _Absent:
        me, found = self._membership.me, _Absent({}, {}, [])
        self._sort(found, me, self._absent_here(check.at))
        others = [node for node in self._membership.lacking(check.what) if node != me]
        for node, ranks in zip(others, await asyncio.gather(*(self._ask(node, check) for node in others)), strict=True):
            self._sort(found, node, ranks)
        return found

    async def _ask(self, node: str, check: _Check) -> list[tuple[int, bool]] | None:
        question = {"op": "absent", **check.at.to_json()}
        try:
            answer = Fields(await self._membership.ask(node, question, _ANSWER_WITHIN_S), "absent")
            return [(int(rank), bool(past)) for rank, past in answer.items("ranks")]
        except SurefootError:
            # The log names this node as one that does not answer.
            return None

    @staticmethod
    def _sort(found: _Absent, node: str, ranks: list[tuple[int, bool]] | None) -> None:
        if ranks is None:
            found.silent.append(node)
        for rank, past in ranks or ():
            found.ranks.setdefault(node, []).append(rank)
            if past:
                found.past.setdefault(node, []).append(rank)

    async def _answer_absent(self, _node: str, body: Body) -> Body:
        return {"ranks": [list(one) for one in self._absent_here(BoundaryId.of(Fields(body, "absent")))]}

    def _absent_here(self, at: BoundaryId) -> list[tuple[int, bool]]:
        """Ranks of this node that have not come to that boundary's check, and whether they are past it."""
        status = self._status
        if not status.has_generation or status.generation.number != at.generation:
            raise AgentError("this node is in another generation")
        what = _name(at)
        if what == self._whole:
            return []
        here = self._open.asked if self._open is not None and self._open.what == what else {}
        absent = [trainer for trainer in self._trainers.live if trainer.rank not in here]
        return [(trainer.rank, self._is_past(trainer, at)) for trainer in absent]

    def _is_past(self, trainer: Trainer, at: BoundaryId) -> bool:
        """True if the rank took the boundary without asking, came to a later one, or left: it will never ask."""
        reported = self._reports.get(trainer.rank)
        if reported is not None and reported.generation == at.generation and reported >= at:
            return True
        board, rank = self._status.board, trainer.local_rank
        if board.rank(rank, RankWord.SEALED_GENERATION) != at.generation:
            return False
        return board.rank(rank, RankWord.SEALED) > at.boundary or board.rank(rank, RankWord.FINISHED) > at.boundary + 1


def _name(at: BoundaryId) -> str:
    return f"check {at.generation} {at.boundary}"


def _why(rank: int, at: BoundaryId, past: dict[str, list[int]]) -> str:
    who = "; ".join(f"rank(s) {spans(ranks)} of node {node}" for node, ranks in past.items())
    return (
        f"rank {rank} takes {at.label} (save(), or its last step), and {who} went on without it: "
        "call save() on every rank, and give every rank the same total"
    )
