"""Precedence: whether a delivery under way is finished before an eviction's newest step, decided once for all nodes.

Nodes that decided alone could each finish another step, and none would be whole. The leader asks all nodes, decides by
`surefoot.core.emergency.unfit`, and tells all. A node that does not hear of a decision in time goes on with the newest
step, as if that fitted.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from surefoot.agent.fleet import Fleet
from surefoot.agent.journal import Journal
from surefoot.core.documents import Fields
from surefoot.core.emergency import Forecast, Rest, Unfit, unfit
from surefoot.core.layout import StepId
from surefoot.errors import CorruptError, SurefootError
from surefoot.wire import Body

_DECIDED_WITHIN_S = 2.0
"""For a node that asks the leader. Meanwhile what is under way goes on, so the time is not wasted on either side."""
_FORECAST_WITHIN_S = 1.0
"""For the other nodes to answer the leader."""
_KEPT = 64
"""Decisions."""


@dataclass(frozen=True, slots=True)
class Newest:
    """A step that an eviction wants to be shipped."""

    name: str
    """Of its delivery: the same on all nodes."""
    at: StepId
    plan: str

    def to_json(self) -> Body:
        return {"name": self.name, "plan": self.plan, **self.at.to_json()}

    @classmethod
    def from_json(cls, body: Body) -> Newest:
        fields = Fields(body, "newest step")
        return cls(fields.text("name"), StepId.of(fields), fields.text("plan"))


class Precedence:
    """One node's part. `forecast` says what this node knows, `Fleet.leads` whether it decides."""

    def __init__(self, fleet: Fleet, journal: Journal, forecast: Callable[[Newest], Forecast]) -> None:
        self._fleet = fleet
        self._journal = journal
        self._forecast = forecast
        self._decided: OrderedDict[str, str | None] = OrderedDict()
        """By the newest step's delivery: the one that is finished first."""
        self._deciding = asyncio.Lock()
        fleet.answer("precedence", self._asked)
        fleet.answer("forecast", self._asked_for_forecast)
        fleet.hear("precedence", self._hear)

    async def first(self, newest: Newest) -> str | None:
        """Name of the delivery that is finished before `newest`; None if none is, or nobody says so in time."""
        if newest.name in self._decided:
            return self._decided[newest.name]
        if self._fleet.leads:
            return await self._lead(newest)
        if self._fleet.apart:
            return self._keep(newest.name, None)
        ask = {"op": "precedence", **newest.to_json()}
        try:
            answer = await self._fleet.ask(self._fleet.leader, ask, _DECIDED_WITHIN_S)
            first = Fields(answer, "precedence").optional_text("first")
        except SurefootError as error:
            self._journal.record("warning", what=f"step {newest.at.step} goes first, as nobody decides: {error}")
            first = None
        return self._keep(newest.name, first)

    async def _lead(self, newest: Newest) -> str | None:
        # Whoever asks while it is being decided gets the same.
        async with self._deciding:
            if newest.name not in self._decided:
                self._keep(newest.name, await self._decide(newest))
        return self._decided[newest.name]

    async def _decide(self, newest: Newest) -> str | None:
        forecasts = {self._fleet.me: self._forecast(newest)}
        for node, answer in (
            await self._fleet.ask_all({"op": "forecast", **newest.to_json()}, _FORECAST_WITHIN_S)
        ).items():
            try:
                forecasts[node] = _forecast_from_json(answer)
            except CorruptError as error:
                self._journal.record("warning", what=f"node {node} says nothing of its uploads: {error}")
        found = unfit(forecasts, self._fleet.nodes)
        first = found.first.name if found is not None and found.first is not None else None
        self._fleet.tell_all({"op": "precedence", "name": newest.name, "first": first})
        if found is not None:
            self._say(newest, found)
        return first

    def _say(self, newest: Newest, found: Unfit) -> None:
        self._journal.record(
            "unfit",
            step=newest.at.step,
            bytes=found.size_bytes,
            bytes_per_s=round(found.bytes_per_s),
            needed_s=round(found.needed_s, 3),
            left_s=round(found.left_s, 3),
            where=None if found.node == self._fleet.me else found.node,
            first=found.first and found.first.at.step,
            first_bytes=found.first and found.first.left_bytes,
        )

    def _keep(self, name: str, first: str | None) -> str | None:
        """The first decision stands: a later one would find this node at work on it."""
        while len(self._decided) >= _KEPT:
            self._decided.popitem(last=False)
        return self._decided.setdefault(name, first)

    async def _asked(self, _node: str, body: Body) -> Body:
        return {"first": await self._lead(Newest.from_json(body))}

    async def _asked_for_forecast(self, _node: str, body: Body) -> Body:
        return _forecast_to_json(self._forecast(Newest.from_json(body)))

    def _hear(self, _node: str, body: Body) -> None:
        fields = Fields(body, "precedence")
        self._keep(fields.text("name"), fields.optional_text("first"))


def _forecast_to_json(forecast: Forecast) -> Body:
    return {
        "newest_bytes": forecast.newest_bytes,
        "bytes_per_s": forecast.bytes_per_s,
        "left_s": forecast.left_s,
        "rests": [{"name": rest.name, "bytes": rest.left_bytes, **rest.at.to_json()} for rest in forecast.rests],
        "committed": None if forecast.committed is None else forecast.committed.to_json(),
    }


def _forecast_from_json(body: Body) -> Forecast:
    fields = Fields(body, "forecast")
    committed = fields.optional_mapping("committed")
    return Forecast(
        fields.integer("newest_bytes"),
        fields.number("bytes_per_s"),
        fields.optional_number("left_s"),
        tuple(_rest_from_json(rest) for rest in fields.items("rests")),
        None if committed is None else StepId.of(Fields(committed, "committed step")),
    )


def _rest_from_json(body: Body) -> Rest:
    fields = Fields(body, "rest of a delivery")
    return Rest(fields.text("name"), StepId.of(fields), fields.integer("bytes"))
