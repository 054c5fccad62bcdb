"""Which step an eviction's time is spent on: the newest if it fits everywhere, else an older one that does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.eviction import Link, UploadReport, unfit
from surefoot.core.layout import BoundaryId

NEWEST = 9
NODES = ("a", "b", "c")

_seconds = st.floats(0, 100)


@st.composite
def _worlds(draw: st.DrawFn) -> dict[str, UploadReport]:
    """What up to three nodes report; some may lack an upload that others have."""
    names = NODES[: draw(st.integers(1, 3))]
    steps = draw(st.lists(st.integers(1, 8), unique=True, max_size=3))
    world = {}
    for name in names:
        here = [BoundaryId(step, 1) for step in steps if draw(st.booleans()) or draw(st.booleans())]
        left_s = draw(st.one_of(st.none(), st.floats(-5, 100)))
        world[name] = UploadReport(draw(_seconds), left_s, {at: draw(_seconds) for at in here})
    return world


def _left_s(world: dict[str, UploadReport]) -> float | None:
    return min((max(0.0, one.left_s) for one in world.values() if one.left_s is not None), default=None)


def _fits(world: dict[str, UploadReport], left_s: float, at: BoundaryId | None = None) -> bool:
    needed_s = [one.newest_s if at is None else one.older_s.get(at) for one in world.values()]
    return all(one_s is not None and one_s <= left_s for one_s in needed_s)


@pytest.mark.holds("evictions-lose-nothing")
@given(_worlds())
def test_never_gives_up_what_fits_for_what_does_not(world: dict[str, UploadReport]) -> None:
    """The newest step waits only if it is too large somewhere; what comes first is small enough everywhere, and nothing
    newer is; if nothing is named, nothing would have fitted."""
    found, left_s = unfit(world), _left_s(world)
    if left_s is None or _fits(world, left_s):
        assert found is None
        return
    assert found is not None
    assert (found.left_s, found.needed_s) == (left_s, max(one.newest_s or 0.0 for one in world.values()))
    assert world[found.slowest].newest_s == found.needed_s
    under_way = {at for one in world.values() for at in one.older_s}
    assert found.first == max((at for at in under_way if _fits(world, left_s, at)), default=None)


def _committed(world: dict[str, UploadReport]) -> int:
    """The step that the decision leads to, if links keep their speed; 0: none."""
    found, left_s = unfit(world), _left_s(world) or 0.0
    if found is None:
        return NEWEST if _fits(world, left_s) else 0
    return found.first.boundary if found.first is not None else 0


@given(_worlds(), st.sampled_from(NODES), st.floats(1, 100))
def test_a_faster_link_never_leads_to_an_older_step(world: dict[str, UploadReport], node: str, times: float) -> None:
    """One node's bandwidth goes up, whatever it was: the step that gets committed is the same or a newer one."""
    if node in world and _left_s(world) is not None:
        slow = world[node]
        assert slow.newest_s is not None
        older_s = {at: rest_s / times for at, rest_s in slow.older_s.items()}
        faster = {**world, node: UploadReport(slow.newest_s / times, slow.left_s, older_s)}
        assert _committed(faster) >= _committed(world)


@given(_worlds(), st.floats(0, 100))
def test_a_longer_window_never_leads_to_an_older_step(world: dict[str, UploadReport], more_s: float) -> None:
    """The same for time."""
    if _left_s(world) is not None:
        later = {
            name: replace(one, left_s=None if one.left_s is None else one.left_s + more_s)
            for name, one in world.items()
        }
        assert _committed(later) >= _committed(world)


@given(_worlds(), st.permutations(NODES))
def test_whose_report_comes_first_does_not_matter(world: dict[str, UploadReport], order: list[str]) -> None:
    """Any node that decides from these reports decides the same."""
    assert unfit({name: world[name] for name in order if name in world}) == unfit(world)


def test_the_best_of_the_last_uploads_counts() -> None:
    """One that was disturbed does not count, nor one that the bandwidth cap held back, nor one of long ago."""
    link = Link()
    assert link.bytes_per_s is None
    link.uploaded(1000, took_s=10.0, held_s=9.0)
    assert link.bytes_per_s is None
    for took_s in (10.0, 2.0, 5.0):
        link.uploaded(1000, took_s, held_s=0.0)
    assert link.bytes_per_s == 500.0
    for _ in range(8):
        link.uploaded(1000, took_s=4.0, held_s=0.0)
    assert link.bytes_per_s == 250.0
