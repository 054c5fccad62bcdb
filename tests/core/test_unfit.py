"""Which step an eviction's time is spent on: the newest if it fits everywhere, else an older one that does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.emergency import Forecast, Rest, Unfit, unfit
from surefoot.core.layout import StepId

OLDER, NEWEST = StepId(7, 1), StepId(9, 1)
NODES = ("a", "b", "c")

_sizes = st.integers(0, 1000)
_speeds = st.floats(0.1, 1000)
_steps = st.lists(st.integers(1, 8), unique=True, max_size=3)


@st.composite
def _worlds(draw: st.DrawFn) -> dict[str, Forecast]:
    """What up to three nodes forecast; some may lack a delivery that others have, or have seen it committed."""
    names = NODES[: draw(st.integers(1, 3))]
    steps = draw(_steps)
    world = {}
    for name in names:
        here = [step for step in steps if draw(st.booleans()) or draw(st.booleans())]
        rests = tuple(Rest(f"periodic {step}", StepId(step, 1), draw(_sizes)) for step in here)
        committed = draw(st.one_of(st.none(), st.integers(1, 8)))
        world[name] = Forecast(
            newest_bytes=draw(_sizes),
            bytes_per_s=draw(_speeds),
            left_s=draw(st.one_of(st.none(), st.floats(-5, 100))),
            rests=rests,
            committed=None if committed is None else StepId(committed, 1),
        )
    return world


def _left_s(world: dict[str, Forecast]) -> float | None:
    return min((one.left_s for one in world.values() if one.left_s is not None), default=None)


def _fits(world: dict[str, Forecast], left_s: float) -> bool:
    return all(one.newest_bytes / one.bytes_per_s <= left_s for one in world.values())


def _older_fits(world: dict[str, Forecast], at: StepId, left_s: float) -> bool:
    """Told without the function's own way: node by node, what is durable or fast enough."""
    for one in world.values():
        durable = one.committed is not None and one.committed >= at
        quick = [rest for rest in one.rests if rest.at == at and rest.left_bytes / one.bytes_per_s <= left_s]
        if not durable and not quick:
            return False
    return True


@pytest.mark.holds("evictions-lose-nothing")
@given(_worlds())
def test_never_gives_up_what_fits_for_what_does_not(world: dict[str, Forecast]) -> None:
    """The newest step waits only if it is too large somewhere; what comes first is small enough everywhere, and nothing
    newer is; if nothing is named, nothing would have fitted."""
    found, left_s = unfit(world, list(world)), _left_s(world)
    if left_s is None:
        assert found is None
        return
    left_s = max(0.0, left_s)
    assert (found is None) == _fits(world, left_s)
    if found is None:
        return
    assert (found.left_s, found.needed_s) == (left_s, max(one.newest_bytes / one.bytes_per_s for one in world.values()))
    assert world[found.node].newest_bytes == found.size_bytes
    under_way = {rest.at for one in world.values() for rest in one.rests}
    fitting = [at for at in under_way if _older_fits(world, at, left_s)]
    assert (found.first and found.first.at) == max(fitting, default=None)


def _committed(world: dict[str, Forecast]) -> int:
    """The step that the decision leads to, if links keep their speed; 0: none."""
    found, left_s = unfit(world, list(world)), max(0.0, _left_s(world) or 0.0)
    if found is None:
        return NEWEST.step if _fits(world, left_s) else 0
    return found.first.at.step if found.first is not None else 0


@given(_worlds(), st.sampled_from(NODES), st.floats(1, 100))
def test_a_faster_link_never_leads_to_an_older_step(world: dict[str, Forecast], node: str, times: float) -> None:
    """One node's bandwidth goes up, whatever it was: the step that gets committed is the same or a newer one."""
    if node in world and _left_s(world) is not None:
        faster = {**world, node: replace(world[node], bytes_per_s=world[node].bytes_per_s * times)}
        assert _committed(faster) >= _committed(world)


@given(_worlds(), st.floats(0, 100))
def test_a_longer_window_never_leads_to_an_older_step(world: dict[str, Forecast], more_s: float) -> None:
    """The same for time."""
    if _left_s(world) is not None:
        later = {
            name: replace(one, left_s=None if one.left_s is None else one.left_s + more_s)
            for name, one in world.items()
        }
        assert _committed(later) >= _committed(world)


@given(_worlds(), st.permutations(NODES))
def test_who_is_asked_first_does_not_matter(world: dict[str, Forecast], order: list[str]) -> None:
    """Any node that decides from these forecasts decides the same."""
    turned = {name: world[name] for name in order if name in world}
    assert unfit(turned, list(turned)) == unfit(world, list(world))


def _world(**forecasts: Forecast) -> dict[str, Forecast]:
    return forecasts


def _rest(left_bytes: int) -> tuple[Rest, ...]:
    return (Rest("periodic 7 1", OLDER, left_bytes),)


def test_the_example() -> None:
    """4 GB at 200 MB/s do not fit into 9.6 s, 600 MB of an older step do; at twice the speed both do."""
    here = Forecast(4_000_000_000, 200e6, 9.6, _rest(600_000_000))
    there = Forecast(4_000_000_000, 500e6, 9.8, _rest(0))
    first = Rest("periodic 7 1", OLDER, 600_000_000)
    assert unfit(_world(a=here, b=there), "ab") == Unfit("a", 4_000_000_000, 200e6, 20.0, 9.6, first)
    assert unfit(_world(a=replace(here, bytes_per_s=420e6), b=there), "ab") is None


@pytest.mark.parametrize(
    "world",
    [
        _world(a=Forecast(100, 1.0, 5.0, _rest(1))),
        _world(a=Forecast(100, 1.0, 5.0, _rest(1)), b=Forecast(100, 0.0, 5.0, _rest(1))),
        _world(a=Forecast(100, 1.0, None, _rest(1)), b=Forecast(100, 1.0, None, _rest(1))),
    ],
    ids=["a node does not answer", "a node has measured nothing", "nobody knows the deadline"],
)
def test_what_cannot_be_told_is_taken_for_fitting(world: dict[str, Forecast]) -> None:
    """Then the newest step goes first: nothing is given up on a guess."""
    assert unfit(world, ["a", "b"]) is None


def test_one_node_without_the_older_step_is_enough() -> None:
    """A node that gave the older step up will not bring its part: the newest one is tried, though it is too large."""
    has, has_not = Forecast(100, 1.0, 5.0, _rest(1)), Forecast(100, 1.0, 5.0)
    found = unfit(_world(a=has, b=has_not), "ab")
    assert found is not None
    assert found.first is None
    durable = replace(has_not, committed=OLDER)
    found = unfit(_world(a=has, b=durable), "ab")
    assert found is not None
    assert found.first == Rest("periodic 7 1", OLDER, 1)
