"""Deliveries: which of those that wait is the next."""

from __future__ import annotations

from surefoot.agent.save.queue import Deliveries, Delivery
from surefoot.core.layout import StepId


def _delivery(step: int, trigger: str, *, missing: int = 0) -> Delivery:
    """Of a node with no rank, or of one whose ranks are all missing."""
    return Delivery(StepId(step, 1), trigger, None, missing, f"{trigger} {step} 1")


def _order(waiting: Deliveries) -> list[str]:
    names = []
    while (delivery := waiting.next()) is not None:
        waiting.remove(delivery)
        names.append(delivery.name)
    return names


def test_the_most_urgent_goes_first() -> None:
    """What belongs to an eviction, then what somebody asked for, the oldest first, then the rest, the newest first;
    never what is not whole yet."""
    waiting = Deliveries()
    for delivery in (
        _delivery(1, "periodic"),
        _delivery(2, "periodic"),
        _delivery(6, "final"),
        _delivery(5, "manual"),
        _delivery(3, "manual"),
        _delivery(4, "agent"),
        _delivery(7, "emergency", missing=1),
    ):
        waiting.add(delivery)
    assert waiting.urgent()
    assert _order(waiting) == ["agent 4 1", "manual 3 1", "manual 5 1", "final 6 1", "periodic 2 1", "periodic 1 1"]
    assert not waiting.urgent()


def test_a_favoured_one_goes_first_until_it_fails() -> None:
    """An older step that is to be finished before an eviction's newest is next, but holds nothing up by failing."""
    waiting = Deliveries()
    older, newest = _delivery(7, "periodic"), _delivery(9, "emergency")
    for delivery in (older, newest):
        waiting.add(delivery)
    waiting.favour(older.at)
    assert waiting.next() is older
    waiting.remove(older)
    waiting.failed(older)
    assert _order(waiting) == [newest.name, older.name]


def test_a_whole_newer_one_overtakes_what_waits() -> None:
    """Older periodic ones that are whole are let go; not what somebody waits for, what is being committed, or what
    another rank of this node has yet to bring its part to."""
    waiting = Deliveries()
    whole, committed, lacking = _delivery(1, "periodic"), _delivery(2, "periodic"), _delivery(3, "periodic", missing=1)
    committed.committed = True
    for delivery in (whole, committed, lacking, _delivery(4, "manual"), _delivery(6, "periodic")):
        waiting.add(delivery)
    for trigger in ("periodic", "manual", "final"):
        assert waiting.overtaken(_delivery(5, trigger)) == [whole]
    assert waiting.overtaken(_delivery(5, "emergency")) == []
