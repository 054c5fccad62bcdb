"""Speed: what is left of an upload, and which uploads say what a link can do."""

from __future__ import annotations

import asyncio

import pytest

import surefoot.agent.speed as speed_module
from surefoot.agent.pacer import Pacer
from surefoot.agent.speed import Speed, Transfer


class _Clock:
    """The time that a transfer is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(speed_module, "boot_s", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    return _Clock(monkeypatch)


def test_what_was_handed_out_is_not_faster_than_the_link(clock: _Clock) -> None:
    """A tier takes much at once: it counts as sent no faster than the link is, and never before it was handed out."""
    transfer = Transfer(1000)
    assert transfer.left_bytes(100.0) == 1000
    transfer.handed(1000, 0.0)
    clock.now_s += 3.0
    assert transfer.left_bytes(100.0) == 700
    assert transfer.left_bytes(1e9) == 0
    slow = Transfer(1000)
    slow.handed(200, 0.0)
    clock.now_s += 60.0
    assert slow.left_bytes(100.0) == 800


def test_the_best_of_the_last_uploads_counts(clock: _Clock) -> None:
    """One that was disturbed does not count, nor one that the bandwidth cap held back, nor one of long ago."""
    speed = Speed()
    assert speed.bytes_per_s == 0.0

    def upload(took_s: float, held_s: float = 0.0) -> None:
        transfer = Transfer(1000)
        transfer.handed(1000, held_s)
        clock.now_s += took_s
        speed.note(transfer)

    upload(took_s=10.0, held_s=9.0)
    assert speed.bytes_per_s == 0.0
    for took_s in (10.0, 2.0, 5.0):
        upload(took_s)
    assert speed.bytes_per_s == 500.0
    for _ in range(8):
        upload(4.0)
    assert speed.bytes_per_s == 250.0


def test_nothing_is_held_back_once_the_cap_is_lifted() -> None:
    """Bytes that wait for their turn under a cap of one an hour pass at once when it is lifted."""

    async def story() -> None:
        pacer = Pacer(1 / 3600)
        async with asyncio.timeout(60.0):
            await pacer.take(1)
            waiting = [asyncio.create_task(pacer.take(1)) for _ in range(3)]
            await asyncio.sleep(0)
            assert not any(task.done() for task in waiting)
            pacer.release()
            await asyncio.gather(*waiting)
            assert await pacer.take(10**12) == 0.0

    asyncio.run(story())
