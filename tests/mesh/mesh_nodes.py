"""Several meshes in one process, over real sockets, that note down what happens to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from surefoot.core.liveness import Bounds
from surefoot.ipc.wire import Body
from surefoot.mesh.mesh import Mesh, MeshConfig
from surefoot.mesh.secret import RoundKey, Secret, round_key

BOUND_S = 60.0
"""Nothing here takes long; whatever takes this long hangs."""
ROUND = "round-000001"
KEY = round_key(Secret(bytes(range(32))), "run", ROUND)
OTHER_ROUND = round_key(Secret(bytes(range(32))), "run", "round-000002")
OTHER_SECRET = round_key(Secret(bytes(range(1, 33))), "run", ROUND)
# Long enough for a machine with something else to do.
BOUNDS = Bounds(beat_s=0.1, stood_still_s=1.0, lost_after_s=3.0)
SOON = Bounds(beat_s=0.05, stood_still_s=0.2, lost_after_s=1.0)
"""For tests that want a loss, with all nodes in one process: whichever looks has let the others beat, too."""


def config(*, tls: bool | None = None, bounds: Bounds = BOUNDS, **more: float) -> MeshConfig:
    return MeshConfig(tls=tls, bounds=bounds, **more)  # type: ignore[arg-type]


@dataclass
class Node:
    """A mesh and what was seen of it."""

    mesh: Mesh
    said: list[str] = field(default_factory=list)
    happened: list[tuple[str, str]] = field(default_factory=list)
    told: list[tuple[str, Body]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.mesh.me.node

    async def stop(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.wait([self.task])


def make_node(name: str, settings: MeshConfig | None = None) -> Node:
    said: list[str] = []
    node = Node(Mesh(name, settings or config(), say=said.append), said)
    node.mesh.on_lost = lambda other: node.happened.append(("lost", other))
    node.mesh.on_back = lambda other: node.happened.append(("back", other))
    node.mesh.on_linked = lambda other, fresh: node.happened.append(("first" if fresh else "again", other))
    node.mesh.hear("note", lambda other, body: node.told.append((other, body)))

    async def double(_other: str, body: Body) -> Body:
        return {"twice": 2 * body["number"]}

    node.mesh.answer("double", double)
    return node


@asynccontextmanager
async def running(nodes: Iterable[Node], *, host: str = "127.0.0.1") -> AsyncIterator[dict[str, tuple[str, int]]]:
    """The nodes, listening and running; where they listen."""
    nodes = list(nodes)
    places = {node.name: await node.mesh.listen(host) for node in nodes}
    try:
        for node in nodes:
            node.task = asyncio.create_task(node.mesh.run())
        await asyncio.sleep(0)
        yield places
        for node in nodes:
            assert node.task is not None
            if node.task.done() and not node.task.cancelled():
                node.task.result()
    finally:
        for node in nodes:
            await node.stop()


@asynccontextmanager
async def joined(nodes: Iterable[Node], key: RoundKey = KEY) -> AsyncIterator[dict[str, tuple[str, int]]]:
    """The nodes, all in one round and connected with one another."""
    nodes = list(nodes)
    async with running(nodes) as places:
        for node in nodes:
            node.mesh.join(places, key)
        for node in nodes:
            await node.mesh.wait_linked(BOUND_S)
        yield places


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; a machine however slow gets there."""
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110 - conditions of several nodes, and of what they said
            await asyncio.sleep(0.01)
