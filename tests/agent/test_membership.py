"""The membership: agents of several nodes meet in the run's place, bring parts together, and learn who is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from membership_nodes import ROUND, SOON, Node, nodes_of

import surefoot.agent.nodes.membership as membership_module
from surefoot.errors import AgentError


def test_each_gets_what_all_brought(tmp_path: Path) -> None:
    """In the order of the nodes' ranks, whatever their names, and whoever is last."""

    async def story() -> None:
        async with nodes_of(tmp_path, "zoe", "abe", "kim") as nodes:
            assert [node.membership.nodes for node in nodes] == [["zoe", "abe", "kim"]] * 3
            assert [node.membership.leads for node in nodes] == [True, False, False]
            late = asyncio.create_task(nodes[0].membership.gather("plan", {"n": 0}))
            await asyncio.sleep(0.1)
            assert not late.done()
            answers = await asyncio.gather(
                late, *(node.membership.gather("plan", {"n": number}) for number, node in enumerate(nodes) if number)
            )
            assert answers == [[{"n": 0}, {"n": 1}, {"n": 2}]] * 3

    asyncio.run(story())


def test_all_hear_what_the_first_node_says(tmp_path: Path) -> None:
    """What the node of rank 0 brings reaches every node, whether it waited for it or not."""

    async def story() -> None:
        async with nodes_of(tmp_path, "b", "a") as (first, second):
            waiting = asyncio.create_task(second.membership.from_first("order 1"))
            await asyncio.sleep(0.1)
            first.membership.bring("order 1", {"step": 7})
            first.membership.bring("order 2", {"step": 8})
            assert await waiting == {"step": 7}
            assert (
                await second.membership.from_first("order 2")
                == await first.membership.from_first("order 2")
                == {"step": 8}
            )
            assert (first.membership.is_first, second.membership.is_first) == (True, False)

    asyncio.run(story())


def test_a_node_that_is_gone_ends_the_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection ends and nobody comes back: those that wait for it are told who is gone, once."""
    monkeypatch.setattr(membership_module, "DEAD_AFTER_S", 1.0)
    monkeypatch.setattr(membership_module, "Mesh", SOON)

    async def story() -> None:
        async with nodes_of(tmp_path, "a", "b", "c") as (first, second, third):
            waiting = asyncio.gather(
                first.membership.gather("plan", {}), second.membership.gather("plan", {}), return_exceptions=True
            )
            await third.end()
            assert [str(error) for error in await waiting] == ["node c is gone"] * 2
            assert (first.dead, second.dead) == (["c"], ["c"])

    asyncio.run(story())


def test_an_agent_that_replaces_another_misses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's agent ends and another one takes its place in the same round, elsewhere: it gets what the others had
    brought before, and they get what it brings."""
    monkeypatch.setattr(membership_module, "Mesh", SOON)

    async def story() -> None:
        async with nodes_of(tmp_path, "a", "b") as nodes:
            waiting = asyncio.create_task(nodes[0].membership.gather("plan", {"n": 0}))
            await asyncio.sleep(0.1)
            await nodes[1].end()
            nodes[1] = Node(tmp_path, "b")
            await nodes[1].membership.enter(ROUND, "127.0.0.1", [2, 3], 4, again=True)
            assert await nodes[1].membership.gather("plan", {"n": 1}) == [{"n": 0}, {"n": 1}]
            assert await waiting == [{"n": 0}, {"n": 1}]
            assert nodes[0].dead == []
            await nodes[1].end()

    asyncio.run(story())


def test_an_agent_that_replaces_another_decides_nothing_before_it_has_met_the_others(tmp_path: Path) -> None:
    """Until then it is neither alone nor the one that leads, what it would bring waits, and what it tells is heard
    once it has come back."""

    async def story() -> None:
        async with nodes_of(tmp_path, "a", "b") as nodes:
            await nodes[0].end()
            nodes[0] = Node(tmp_path, "a")
            heard = asyncio.Event()
            nodes[1].membership.hear("notice", lambda node, body: heard.set())
            membership = nodes[0].membership
            membership.replaces_one()
            assert (membership.alone, membership.leads, membership.apart) == (False, False, True)
            membership.tell_on({"op": "notice"})
            waiting = asyncio.create_task(membership.gather("plan", {"n": 0}))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await membership.enter(ROUND, "127.0.0.1", [0, 1], 4, again=True)
            assert (membership.alone, membership.leads, membership.apart) == (False, True, False)
            assert await nodes[1].membership.gather("plan", {"n": 1}) == [{"n": 0}, {"n": 1}]
            assert await waiting == [{"n": 0}, {"n": 1}]
            await heard.wait()

    asyncio.run(story())


def test_an_agent_that_cannot_come_back_says_why(tmp_path: Path) -> None:
    """Who waits for the others hears it; in the next round all is well again."""

    async def story() -> None:
        node = Node(tmp_path, "a")
        node.membership.replaces_one()
        waiting = asyncio.create_task(node.membership.gather("plan", {"n": 0}))
        await asyncio.sleep(0)
        node.membership.miss("no way to the others")
        with pytest.raises(AgentError, match="no way to the others"):
            await waiting
        assert (node.membership.alone, node.membership.leads) == (False, False)
        await node.membership.enter("round-0002", "127.0.0.1", [0, 1], 2)
        assert await node.membership.gather("plan", {"n": 1}) == [{"n": 1}]

    asyncio.run(story())


def test_one_node_alone_listens_nowhere(tmp_path: Path) -> None:
    """All ranks on one node: nothing is put into the run's place, and everything is answered at once."""

    async def story() -> None:
        node = Node(tmp_path, "only")
        await node.membership.enter(ROUND, "127.0.0.1", [0, 1], 2)
        assert await node.membership.gather("plan", {"n": 1}) == [{"n": 1}]
        assert (node.membership.alone, node.membership.leads, node.tasks) == (True, True, [])

    asyncio.run(story())
    assert list(tmp_path.iterdir()) == []
