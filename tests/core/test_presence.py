"""Presence: a round is complete when its ranks are the whole world, each once; nothing odd is believed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.layout import agent_key, agents_prefix, is_node_name, is_round, is_safe_key, parse_agent
from surefoot.core.presence import Presence, count, spans
from surefoot.errors import ConfigError, CorruptError


def _node(name: str, *ranks: int, world: int = 4) -> Presence:
    return Presence(name, "life", ("10.0.0.1",), 4000, ranks, world)


def test_complete_is_every_rank_once() -> None:
    """Two nodes of two ranks are a world of four; one of them is half; none is none."""
    assert count([]).complete is False
    half = count([_node("a", 0, 1)])
    assert (half.complete, half.missing, half.world_size) == (False, (2, 3), 4)
    assert count([_node("b", 2, 3), _node("a", 0, 1), _node("idle")]).complete


@given(st.integers(1, 40), st.data())
def test_any_partition_is_complete_and_any_hole_is_named(world: int, data: st.DataObject) -> None:
    """However the ranks are spread, whatever the order: complete, and a missing node's ranks are named."""
    holders = data.draw(st.lists(st.sampled_from("abcdef"), min_size=world, max_size=world))
    nodes = [
        _node(name, *(rank for rank in range(world) if holders[rank] == name), world=world)
        for name in sorted(set(holders))
    ]
    shuffled = data.draw(st.permutations(nodes))
    assert count(shuffled).complete
    without = count(shuffled[1:])
    assert without.complete is False
    if shuffled[1:]:
        assert without.missing == shuffled[0].ranks


def test_what_contradicts_is_refused() -> None:
    """A rank on two nodes, and two sizes of the world: refused by name, whatever the order."""
    with pytest.raises(ConfigError, match="rank 1 is on node a and on node b"):
        count([_node("b", 1, 2), _node("a", 0, 1)])
    with pytest.raises(ConfigError, match=r"node b has a world of 8 ranks, node a of 4"):
        count([_node("b", 4, world=8), _node("a", 0)])


@given(
    st.builds(
        Presence,
        st.from_regex(r"\A[0-9A-Za-z][0-9A-Za-z._-]{0,127}\Z"),
        st.text(min_size=1, max_size=64),
        st.lists(st.sampled_from(["10.0.0.1", "fe80::1%eth0", "host.example"]), min_size=1, max_size=3).map(tuple),
        st.integers(1, 65535),
        st.sets(st.integers(0, 99)).map(lambda ranks: tuple(sorted(ranks))),
        st.integers(100, 1_000_000),
    )
)
def test_an_entry_comes_back_as_it_was_put(presence: Presence) -> None:
    """Every valid entry survives its JSON form."""
    assert Presence.from_body(presence.body(), "key") == presence


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("node", "../a"),
        ("node", ""),
        ("node", 7),
        ("life", ""),
        ("life", "x" * 65),
        ("addresses", []),
        ("addresses", ["10.0.0.1"] * 17),
        ("addresses", ["a\nb"]),
        ("addresses", [7]),
        ("addresses", "10.0.0.1"),
        ("port", 0),
        ("port", 65536),
        ("port", True),
        ("ranks", [1, 0]),
        ("ranks", [0, 0]),
        ("ranks", [-1]),
        ("ranks", [4]),
        ("ranks", [0.0]),
        ("world_size", 0),
        ("world_size", 10**9),
    ],
)
def test_an_entry_that_breaks_the_form_is_corrupt(member: str, value: Any) -> None:
    """One wrong member is enough, and the key is named."""
    body = {**_node("a", 0, 1).body(), member: value}
    with pytest.raises(CorruptError, match="agents/x"):
        Presence.from_body(body, "agents/x")
    del body[member]
    with pytest.raises(CorruptError, match=member):
        Presence.from_body(body, "agents/x")


def test_ranks_are_told_as_people_read_them() -> None:
    """Runs are joined, and long lists cut with the number left out."""
    assert spans([]) == ""
    assert spans([3, 0, 1, 2, 7]) == "0-3, 7"
    assert spans(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12, 14 and 12 more"


def test_keys_of_agents_are_read_back_and_nothing_else_is() -> None:
    """The key of a round's node, letter by letter; odd rounds and names are none."""
    key = agent_key("0123456789abcdef", "ip-10-0-0-1.internal")
    assert key == "agents/0123456789abcdef/ip-10-0-0-1.internal.json"
    assert key.startswith(agents_prefix("0123456789abcdef"))
    assert is_safe_key(key)
    assert parse_agent(key) == ("0123456789abcdef", "ip-10-0-0-1.internal")
    for other in ("agents/short/a.json", "agents/0123456789abcdef/.json", "agents/0123456789abcdef/a/b.json", "a"):
        assert parse_agent(other) is None
    assert not any(is_node_name(name) for name in ("", ".", "..", ".a", "a/b", "a b", "a\n", "é", "a" * 129))
    assert not any(is_round(text) for text in ("", "short", "x" * 65, "with space", "with/slash", "0123456.89"))
