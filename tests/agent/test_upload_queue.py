"""Uploads: which of those that wait is the next."""

from __future__ import annotations

from surefoot.agent.save.queue import Upload, UploadQueue
from surefoot.core.layout import BoundaryId


def _upload(step: int, trigger: str, *, missing: int = 0) -> Upload:
    """Of a node with no rank, or of one whose ranks are all missing."""
    return Upload(BoundaryId(step, 1), trigger, None, missing, f"{trigger} {step} 1")


def _order(waiting: UploadQueue) -> list[str]:
    names = []
    while (upload := waiting.next()) is not None:
        waiting.remove(upload)
        names.append(upload.name)
    return names


def test_the_most_urgent_goes_first() -> None:
    """What belongs to an eviction, then what somebody asked for, the oldest first, then the rest, the newest first;
    never what is not whole yet."""
    waiting = UploadQueue()
    for upload in (
        _upload(1, "periodic"),
        _upload(2, "periodic"),
        _upload(6, "final"),
        _upload(5, "manual"),
        _upload(3, "manual"),
        _upload(4, "agent"),
        _upload(7, "emergency", missing=1),
    ):
        waiting.add(upload)
    assert waiting.urgent()
    assert _order(waiting) == ["agent 4 1", "manual 3 1", "manual 5 1", "final 6 1", "periodic 2 1", "periodic 1 1"]
    assert not waiting.urgent()


def test_a_favoured_one_goes_first_until_it_fails() -> None:
    """An older step that is to be finished before an eviction's newest is next, but holds nothing up by failing."""
    waiting = UploadQueue()
    older, newest = _upload(7, "periodic"), _upload(9, "emergency")
    for upload in (older, newest):
        waiting.add(upload)
    waiting.favour(older.at)
    assert waiting.next() is older
    waiting.remove(older)
    waiting.failed(older)
    assert _order(waiting) == [newest.name, older.name]


def test_a_whole_newer_one_overtakes_what_waits() -> None:
    """Older periodic ones that are whole are let go; not what somebody waits for, what is being committed, or what
    another rank of this node has yet to bring its part to."""
    waiting = UploadQueue()
    whole, committed, lacking = _upload(1, "periodic"), _upload(2, "periodic"), _upload(3, "periodic", missing=1)
    committed.committed = True
    for upload in (whole, committed, lacking, _upload(4, "manual"), _upload(6, "periodic")):
        waiting.add(upload)
    for trigger in ("periodic", "manual", "final"):
        assert waiting.overtaken(_upload(5, trigger)) == [whole]
    assert waiting.overtaken(_upload(5, "emergency")) == []
