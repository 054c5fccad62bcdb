"""Discovery: nodes find each other through the run's place, round by round, or say who is missing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from mesh_nodes import BOUND_S

from surefoot.core.documents import seal
from surefoot.core.layout import agent_key
from surefoot.core.presence import Presence
from surefoot.errors import AgentError, ConfigError, CorruptError, ObjectMissingError, TierDeniedError, TierError
from surefoot.mesh.discovery import announce, find, gather, places
from surefoot.scenario.s3_server import S3Server
from surefoot.tiers.base import Entry, Tier
from surefoot.tiers.open import open_tier

_ROUND, _OLDER = "round-000002", "round-000001"


def _node(name: str, *ranks: int, world: int = 4, life: str = "1", port: int = 4000) -> Presence:
    return Presence(name, life, ("10.0.0.1", "fe80::1"), port, ranks, world)


def test_nodes_find_each_other_whoever_comes_first(tmp_path: Path) -> None:
    """Some wait while others come: all get the same full list, equal to what was put."""

    async def node(me: Presence, after: asyncio.Event | None) -> dict[str, Presence]:
        if after is not None:
            await after.wait()
        await announce(open_tier(tmp_path), _ROUND, me)
        return await gather(open_tier(tmp_path), _ROUND, BOUND_S)

    async def story() -> None:
        go = asyncio.Event()
        nodes = [_node("a", 0, 1), _node("b", 2), _node("c", 3, port=5000), _node("idle")]
        first = [asyncio.create_task(node(each, None)) for each in nodes[:2]]
        done, _ = await asyncio.wait(first, timeout=0.3)
        assert not done
        go.set()
        found = await asyncio.gather(*first, *(node(each, go) for each in (nodes[3], nodes[2])))
        whole = {each.node: each for each in nodes}
        # The node without ranks is needed by nobody, so it may be missed by those that were complete before.
        assert [{**whole, **each} for each in found] == [whole] * 4
        assert all(set("abc") <= set(each) for each in found)
        assert places(found[2].values())["c"] == ("10.0.0.1", 5000)

    asyncio.run(story())


def test_a_bucket_does_too(s3_env: S3Server) -> None:
    """The same over an object store; a name that is taken is refused there as well."""

    async def story() -> None:
        tier = open_tier(s3_env.url("discovery-run"))
        await announce(tier, _ROUND, _node("a", 0, 1))
        await announce(tier, _ROUND, _node("b", 2, 3))
        assert sorted(await gather(tier, _ROUND, BOUND_S)) == ["a", "b"]
        with pytest.raises(ConfigError, match=r"node a has been announced by another process, with rank\(s\) 0-1"):
            await announce(tier, _ROUND, _node("a", 2, 3, life="2"))
        await tier.close()

    asyncio.run(story())


@pytest.mark.holds("no-shared-files")
def test_who_is_missing_is_named(tmp_path: Path) -> None:
    """After the bound: the missing ranks, the round, who is here, and where it was looked for."""

    async def story() -> None:
        tier = open_tier(tmp_path)
        with pytest.raises(AgentError, match=r"all ranks did not come to round round-000002 .*nodes here: none"):
            await gather(tier, _ROUND, 0.0)
        await announce(tier, _ROUND, _node("a", 0, 5, world=8))
        with pytest.raises(AgentError, match=r"rank\(s\) 1-4, 6-7 of 8 did not come .* within 0 s \(nodes here: a\)"):
            await gather(tier, _ROUND, 0.0)

    asyncio.run(story())


def test_older_rounds_are_not_seen(tmp_path: Path) -> None:
    """Entries of a round before fill no gap and contradict nothing."""

    async def story() -> None:
        tier = open_tier(tmp_path)
        for each in (_node("a", 0, 1), _node("b", 2, 3)):
            await announce(tier, _OLDER, each)
        await announce(tier, _ROUND, _node("a", 0, 1, 2, world=3))
        assert list(await gather(tier, _ROUND, BOUND_S)) == ["a"]
        with pytest.raises(ObjectMissingError):
            await find(tier, _ROUND, "b")

    asyncio.run(story())


def test_what_contradicts_ends_the_wait(tmp_path: Path) -> None:
    """A rank on two nodes is an error at once, not a wait for the bound."""

    async def story() -> None:
        tier = open_tier(tmp_path)
        await announce(tier, _ROUND, _node("a", 0, 1))
        await announce(tier, _ROUND, _node("b", 1))
        with pytest.raises(ConfigError, match="rank 1 is on node a and on node b"):
            await gather(tier, _ROUND, BOUND_S)

    asyncio.run(story())


def test_a_successor_takes_its_predecessor_s_place_only_knowingly(tmp_path: Path) -> None:
    """Another node of a name is refused; so is this node's next agent, which is told what happened and who begins
    again; one that knows its trainers train on replaces it; a repeated put is fine."""

    async def story() -> None:
        tier = open_tier(tmp_path)
        for _ in range(2):
            await announce(tier, _ROUND, _node("a", 0))
        with pytest.raises(ConfigError, match="announced by another process"):
            await announce(tier, _ROUND, _node("a", 1, life="2"))
        with pytest.raises(AgentError, match=r"agent of node a was lost while.* launcher starts it again"):
            await announce(tier, _ROUND, _node("a", 0, life="2", port=4001))
        await announce(tier, _ROUND, _node("a", 0, life="2", port=4001), instead=True)
        assert (await find(tier, _ROUND, "a")).place == ("10.0.0.1", 4001)

    asyncio.run(story())


@pytest.mark.parametrize(
    "data",
    [b"{}", seal(_node("b", 0).body()), seal({**_node("a", 0).body(), "port": 99999}), seal({"node": "a"})],
    ids=["no document", "about another node", "no port", "not all"],
)
def test_a_damaged_entry_is_an_error_and_named(tmp_path: Path, data: bytes) -> None:
    """An entry that is not what it should be is neither believed nor passed over."""
    path = tmp_path / agent_key(_ROUND, "a")
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"agents/round-000002/a\.json"):
        asyncio.run(gather(open_tier(tmp_path), _ROUND, BOUND_S))


def test_an_entry_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    """Sixteen megabytes and one byte: refused by its size."""
    path = tmp_path / agent_key(_ROUND, "a")
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(16 * 1024 * 1024 + 1)
    with pytest.raises(CorruptError, match="too many for an entry"):
        asyncio.run(gather(open_tier(tmp_path), _ROUND, BOUND_S))


class _Faulty:
    """A tier whose listing fails a few times."""

    def __init__(self, tier: Tier, faults: list[TierError]) -> None:
        self._tier = tier
        self._faults = faults

    @property
    def uri(self) -> str:
        return self._tier.uri

    async def get(self, key: str) -> bytes:
        return await self._tier.get(key)

    async def list(self, prefix: str) -> list[Entry]:
        if self._faults:
            raise self._faults.pop(0)
        return await self._tier.list(prefix)


def test_a_place_that_stumbles_is_asked_again_and_one_that_refuses_is_not(tmp_path: Path) -> None:
    """Passing faults are waited out; one that stays is in the error; a refused credential ends the wait."""

    async def story() -> None:
        tier = open_tier(tmp_path)
        await announce(tier, _ROUND, _node("a", 0, world=1))
        stumbling: Tier = _Faulty(tier, [TierError("slow down"), TierError("slow down")])  # type: ignore[assignment]
        assert list(await gather(stumbling, _ROUND, BOUND_S)) == ["a"]
        dead: Tier = _Faulty(tier, [TierError("no route")] * 1000)  # type: ignore[assignment]
        with pytest.raises(AgentError, match=r"are still unknown after .*failed at the last look: no route"):
            await gather(dead, _ROUND, 0.2)
        denied: Tier = _Faulty(tier, [TierDeniedError("denied")])  # type: ignore[assignment]
        with pytest.raises(TierDeniedError):
            await gather(denied, _ROUND, BOUND_S)

    asyncio.run(story())


@pytest.mark.parametrize(("round_nonce", "node"), [("short", "a"), (_ROUND, "../a"), (_ROUND, ""), ("../../etc", "a")])
def test_names_that_could_leave_the_round_are_refused(tmp_path: Path, round_nonce: str, node: str) -> None:
    """Neither a round nor a node can name another key."""
    with pytest.raises(ConfigError):
        asyncio.run(announce(open_tier(tmp_path), round_nonce, _node(node, 0)))
    assert list(tmp_path.iterdir()) == []
