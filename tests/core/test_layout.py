"""Keys: what is written is what is found, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.documents import Fields
from surefoot.core.layout import (
    BoundaryId,
    ShardId,
    ack_key,
    boundary_prefix,
    commit_key,
    events_key,
    generation_key,
    is_safe_key,
    parse_ack,
    parse_commit,
    parse_generation,
    parse_plan,
    parse_shard,
    plan_key,
    quarantine_key,
    shard_key,
)

_PARSERS = (parse_generation, parse_commit, parse_shard, parse_ack, parse_plan)
_steps = st.builds(BoundaryId, st.integers(0, 2**63 - 1), st.integers(1, 2**63 - 1))
_shards = st.builds(ShardId, _steps, st.integers(0, 10**9 - 1), st.text("0123456789abcdef", min_size=4, max_size=16))


@given(_shards)
def test_each_key_is_read_back_by_its_own_parser_alone(shard: ShardId) -> None:
    """Keys of any step, generation, rank and attempt parse to what they were made of; other parsers refuse them."""
    at = shard.at
    made = {
        generation_key(at.generation): (parse_generation, at.generation),
        commit_key(at): (parse_commit, at),
        shard_key(shard): (parse_shard, shard),
        ack_key(shard): (parse_ack, shard),
        plan_key("0123456789abcdef" * 2): (parse_plan, "0123456789abcdef" * 2),
    }
    for key, (parser, value) in made.items():
        assert is_safe_key(key)
        assert {parse: parse(key) for parse in _PARSERS if parse(key) is not None} == {parser: value}
    assert shard_key(shard).startswith(boundary_prefix(at))


def test_keys_are_what_the_format_says() -> None:
    """The keys of the format's description, letter by letter."""
    shard = ShardId(BoundaryId(1200, 7), 3, "a3f2")
    assert generation_key(7) == "generations/g0007.json"
    assert commit_key(shard.at) == "commits/00001200-g0007.json"
    assert shard_key(shard) == "steps/00001200-g0007/rank-00003-a3f2.safetensors"
    assert ack_key(shard) == "steps/00001200-g0007/rank-00003-a3f2.ok.json"
    assert events_key("node-a", 17, "0a1b2c3d", 4) == "events/node-a-17-0a1b2c3d-0004.jsonl"
    assert quarantine_key(shard_key(shard)) == "quarantine/steps~00001200-g0007~rank-00003-a3f2.safetensors.json"


@given(_steps, _steps)
def test_steps_order_as_their_keys_do_not_beyond_the_padding(a: BoundaryId, b: BoundaryId) -> None:
    """Steps order by step, then generation, as numbers."""
    assert (a < b) == ((a.boundary, a.generation) < (b.boundary, b.generation))


@pytest.mark.parametrize(
    "key",
    [
        "generations/g0007.json\n",
        "generations/g٠٠٠٧.json",
        "generations/g00007.json",
        "generations/g007.json",
        "generations/g0007.json.tmp",
        "/generations/g0007.json",
        "x/generations/g0007.json",
        "generations/g-007.json",
        "generations/g+007.json",
        "generations/g00_7.json",
        f"generations/g{'9' * 5000}.json",
        "commits/00001200-g0007.json\n",
        "commits/000001200-g0007.json",
        "commits/1200-g0007.json",
        "commits/00001200-g00007.json",
        "commits/0000120０-g0007.json",
        "commits/00001200-g0007.ok.json",
        "steps/00001200-g0007/rank-00003-a3f2.safetensors\n",
        "steps/00001200-g0007/rank-000003-a3f2.safetensors",
        "steps/00001200-g0007/rank-3-a3f2.safetensors",
        "steps/00001200-g0007/rank-00003-A3F2.safetensors",
        "steps/00001200-g0007/rank-00003-a3f.safetensors",
        "steps/00001200-g0007/rank-00003-.safetensors",
        "steps/00001200-g0007/x/rank-00003-a3f2.safetensors",
        "steps/00001200-g0007/rank-00003-a3f2.ok.json\n",
        "steps/00001200-g0007/rank-00003-a3f2.json",
        "plans/abc.json",
        f"plans/{'A' * 32}.json",
        f"plans/{'a' * 32}.json\n",
        f"plans/{'a' * 33}.json",
        "",
        "generations/",
    ],
)
def test_a_key_that_we_would_not_write_is_nobodys(key: str) -> None:
    """Another spelling of a number, a stray newline or a foreign file is not taken for a key of ours."""
    assert [parse(key) for parse in _PARSERS] == [None] * len(_PARSERS)


@given(st.text(max_size=40) | st.from_regex(r"(generations|commits|steps|plans)/[0-9gr\w./-]{0,30}\n?"))
def test_a_parser_reads_only_canonical_keys(key: str) -> None:
    """Whatever text a parser accepts, the key built from the result is that text."""
    if (number := parse_generation(key)) is not None:
        assert generation_key(number) == key
    if (at := parse_commit(key)) is not None:
        assert commit_key(at) == key
    if (shard := parse_shard(key)) is not None:
        assert shard_key(shard) == key
    if (ack := parse_ack(key)) is not None:
        assert ack_key(ack) == key
    if (plan := parse_plan(key)) is not None:
        assert plan_key(plan) == key


@pytest.mark.holds("keys-stay-in-prefix", "names-collide")
@pytest.mark.parametrize(
    "key",
    ["", "/", "a/", "/a", "a//b", ".", "..", "a/..", "../a", "a/./b", "a\\b", "a b", "a\n", "a\0", "é", "a/b\n", "a:b"],
)
def test_keys_that_could_leave_their_prefix_are_unsafe(key: str) -> None:
    """Empty and dotted components, separators of other systems, control and non-ASCII characters are refused."""
    assert not is_safe_key(key)


@pytest.mark.parametrize("key", ["a", "...", "a/b/c.json", "quarantine/steps~1.json", ".hidden", "a..b", "-x_Y~0"])
def test_ordinary_keys_are_safe(key: str) -> None:
    """Names with dots inside, tildes and dashes are allowed."""
    assert is_safe_key(key)


@pytest.mark.holds("boundary-identity")
@pytest.mark.parametrize(
    ("step", "label", "names"),
    [
        (7, "step 7", {"step": 7}),
        (5, "step 5 (boundary 7)", {"step": 5, "boundary": 7}),
        (0, "step 0 (boundary 7)", {"step": 0, "boundary": 7}),
        (None, "boundary 7", {"step": None, "boundary": 7}),
    ],
)
def test_labels_travel_with_a_boundary_and_say_nothing_of_its_identity(
    step: int | None, label: str, names: dict[str, int | None]
) -> None:
    """With other labels it is the same key, set member and place in the order; what is sent arrives with its labels."""
    at, bare = BoundaryId(7, 2, step, 3), BoundaryId(7, 2)
    assert (at == bare, {at} == {bare}, at < BoundaryId(8, 1, 1), commit_key(at)) == (
        True,
        True,
        True,
        commit_key(bare),
    )
    assert (at.label, at.names) == (label, names)
    sent = BoundaryId.of(Fields(at.to_json(), "message"))
    assert (sent, sent.step, sent.epoch) == (bare, step, 3)
    assert parse_commit(commit_key(at)) == at
