"""The orders of a start: each comes to the other nodes as it was given, and nothing else is obeyed."""

from __future__ import annotations

import json

import pytest

from surefoot.agent.start.orders import Begin, GiveUp, StartOrder, Try, order_from_json
from surefoot.core.layout import BoundaryId
from surefoot.core.manifest import Generation, Parent
from surefoot.core.recovery import Copy, Source
from surefoot.errors import CorruptError

_AT = BoundaryId(7, 1)
_COPY = Copy(_AT, "a" * 32, 1, 0, "b" * 32, 4096, "node-a")


@pytest.mark.parametrize(
    "order",
    [
        Try(Source(_AT, "object", "a" * 32, committed=True)),
        Try(Source(_AT, "ram", "a" * 32, committed=False, copies=((_COPY,),))),
        Begin(Generation(2, "launch", Parent(1, 7, True), 4, "node-a", 5.0, ("launch", "other"))),
        GiveUp("node of rank 0 is being evicted"),
        GiveUp("launch two", superseded=True),
    ],
)
def test_an_order_comes_as_it_was_given(order: StartOrder) -> None:
    """Through JSON and back."""
    assert order_from_json(json.loads(json.dumps(order.to_json()))) == order


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"do": "dance"},
        {"do": "try"},
        {"do": "begin", "number": 0, "record": ""},
        {"do": "begin", "number": 1, "record": "{}"},
        {"do": "give up", "why": 5, "superseded": False},
    ],
)
def test_what_is_no_order_is_refused(body: dict[str, object]) -> None:
    """A missing or damaged field is named, and nothing is done."""
    with pytest.raises(CorruptError):
        order_from_json(body)
