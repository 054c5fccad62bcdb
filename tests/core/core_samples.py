"""Values that the tests of the core build again and again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from surefoot.core.documents import digest
from surefoot.core.layout import BoundaryId, ShardId
from surefoot.core.manifest import Generation, Manifest, Parent, Shard, Trigger

PLAN_A = "a" * 32
PLAN_B = "b" * 32


def generation(number: int, parent: tuple[int, int] | None = None, *, committed: bool = True) -> Generation:
    """Generation `number`, started from (generation, step)."""
    origin = None if parent is None else Parent(parent[0], parent[1], committed)
    return Generation(number, f"launch{number}", origin, 2, "node-a", 1000.0 + number)


def history(*made: Generation) -> dict[int, Generation]:
    return {each.number: each for each in made}


def shard(
    at: BoundaryId,
    rank: int,
    *,
    world_size: int = 2,
    attempt: str = "aaaa",
    plan: str = PLAN_A,
    record: Mapping[str, Any] | None = None,
) -> Shard:
    content = {"world_size": world_size, **(record or {})}
    return Shard(ShardId(at, rank, attempt), plan, 4096 + rank, digest(f"{at}{rank}".encode()), content)


def manifest(
    at: BoundaryId, *, tag: str | None = None, retired: float | None = None, trigger: Trigger = "periodic"
) -> Manifest:
    shards = tuple(shard(at, rank) for rank in range(2))
    return Manifest(at, PLAN_A, 2, trigger, tag, {}, "launch", None, 1.5, shards, retired)


def raw_document(body: bytes) -> bytes:
    """A document whose hash fits, whatever its body: what a forger or a bug elsewhere would write."""
    return b'{"blake2b":"' + digest(body).encode() + b'","body":' + body + b"}\n"


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, 10**400, -1, 0, 1])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../x", "a/b", "\ud800", "٣", "true", "\n"])
)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def damaged(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """A copy of `body` in which one thing, at any depth, is replaced by something else or left out."""
    copy: dict[str, Any] = json.loads(json.dumps(body))
    node: Any = copy
    while True:
        key = draw(st.sampled_from(sorted(node))) if isinstance(node, dict) else draw(st.integers(0, len(node) - 1))
        child = node[key]
        if isinstance(child, dict | list) and child and draw(st.booleans()):
            node = child
            continue
        if draw(st.integers(0, 4)) == 0:
            del node[key]
        else:
            node[key] = draw(json_values)
        return copy
