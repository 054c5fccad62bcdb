"""A machine is lost while the run's place does not answer."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from membership_nodes import SOON

import surefoot.agent.nodes.membership as membership_module
from surefoot.agent.nodes.membership import Membership
from surefoot.errors import AgentError
from surefoot.scenario.s3_server import S3Server
from surefoot.tiers.open import open_tier

_BOUND_S = 40.0
"""Less than one request to a place that does not answer takes to be given up."""


def test_a_dead_node_is_found_dead_though_the_store_hangs(s3_env: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its agent was replaced is looked up in the run's place; that this is not answered ends no waiting later
    than it would end otherwise."""
    monkeypatch.setattr(membership_module, "DEAD_AFTER_S", 1.0)
    monkeypatch.setattr(membership_module, "Mesh", SOON)

    async def story() -> None:
        tasks: dict[str, list[asyncio.Task[Any]]] = {"a": [], "b": []}
        dead: list[str] = []

        def spawn(name: str, work: Any) -> None:
            tasks[name].append(asyncio.get_running_loop().create_task(work))

        async def end(name: str) -> None:
            for task in tasks[name]:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

        a, b = (
            Membership(open_tier(s3_env.url("hung-place")), "run-1", name, lambda w, n=name: spawn(n, w), print, print)  # type: ignore[misc]
            for name in tasks
        )
        a.when_dead(dead.append)
        await asyncio.gather(*(one.enter("round-0001", "127.0.0.1", [rank], 2) for rank, one in enumerate((a, b))))
        s3_env.pause()
        try:
            await end("b")
            async with asyncio.timeout(_BOUND_S):
                with pytest.raises(AgentError, match="node b is gone"):
                    await a.gather("plan", {})
        finally:
            s3_env.go_on()
            await end("a")
        assert dead == ["b"]

    asyncio.run(story())
