"""Nodes of a round for tests: fleets that have met in a directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from surefoot.agent.nodes.membership import Membership
from surefoot.core.liveness import Bounds
from surefoot.mesh.mesh import Mesh, MeshConfig
from surefoot.tiers.disk import DiskTier

ROUND = "round-0001"
BOUND_S = 60.0
SOON = partial(Mesh, config=MeshConfig(bounds=Bounds(beat_s=0.05, stood_still_s=0.2, lost_after_s=1.0)))
"""A mesh that loses a node soon. All are in one process here: whichever looks has let the others beat, too."""


class Node:
    """A membership, and the tasks that belong to it."""

    def __init__(self, place: Path, name: str) -> None:
        self.said: list[str] = []
        self.dead: list[str] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.membership = Membership(DiskTier(place), "run-1", name, self.spawn, self.said.append, self.said.append)
        self.membership.when_dead(self.dead.append)

    def spawn(self, work: Any) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def nodes_of(place: Path, *names: str, ranks: int = 2) -> AsyncIterator[list[Node]]:
    """Nodes with as many ranks each, in a round."""
    nodes = [Node(place, name) for name in names]
    async with meeting(nodes, ranks):
        yield nodes


@asynccontextmanager
async def meeting(nodes: Sequence[Node], ranks: int) -> AsyncIterator[None]:
    """Let nodes meet in a round, with as many ranks each; they end with the block."""
    try:
        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(
                *(
                    node.membership.enter(
                        ROUND, "127.0.0.1", list(range(n * ranks, (n + 1) * ranks)), ranks * len(nodes)
                    )
                    for n, node in enumerate(nodes)
                )
            )
            yield
    finally:
        for node in nodes:
            await node.end()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what others bring about."""
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110 - several causes
            await asyncio.sleep(0.01)
