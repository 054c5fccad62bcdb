"""One node of `python -m benchmarks notice`: a mesh that reports when a notice arrived."""

from __future__ import annotations

import asyncio
import sys

from surefoot.core.liveness import Bounds
from surefoot.core.presence import Presence
from surefoot.host.clock import boot_ns
from surefoot.ipc.wire import Body
from surefoot.mesh.discovery import announce, gather, places
from surefoot.mesh.mesh import Mesh, MeshConfig
from surefoot.mesh.secret import Secret, round_key, run_secret
from surefoot.tiers.open import open_tier

NOTICE = "notice"
_HEARD = "heard"
_ROUND = "round-of-notices"
_WITHIN_S = 120.0
# Neither beats nor bounds are of interest here: sixty nodes in one process have one core between them.
_BOUNDS = Bounds(beat_s=600.0, stood_still_s=1200.0, lost_after_s=2400.0, first_within_s=2400.0)


class Node:
    """A mesh that has found the others."""

    def __init__(self, mesh: Mesh, secret: Secret, found: dict[str, Presence]) -> None:
        self.mesh = mesh
        self._secret = secret
        self._found = found
        self._number = -1
        self._heard_ns: dict[str, int] = {}
        self._all = asyncio.Event()
        mesh.hear(NOTICE, self._notice)
        mesh.hear(_HEARD, self._heard)

    def join(self) -> None:
        self.mesh.join(places(self._found.values()), round_key(self._secret, "bench", _ROUND))

    def begin(self, number: int) -> None:
        self._number = number
        self._heard_ns.clear()
        self._all.clear()

    async def heard_by_all(self) -> int:
        """When the last one had it, on the boot clock."""
        await self._all.wait()
        return max(self._heard_ns.values())

    def _notice(self, node: str, body: Body) -> None:
        self.mesh.tell(node, {"op": _HEARD, "number": body["number"], "at_ns": boot_ns()})

    def _heard(self, node: str, body: Body) -> None:
        if body["number"] == self._number:
            self._heard_ns[node] = body["at_ns"]
            if len(self._heard_ns) == len(self.mesh.members):
                self._all.set()


async def enter(run: str, rank: int, world: int, tls: bool) -> Node:
    """Listen, and find the others through the directory `run`."""
    tier = open_tier(run)
    secret = await run_secret(tier)
    mesh = Mesh(f"node-{rank:03d}", MeshConfig(tls=tls, bounds=_BOUNDS, connect_s=_WITHIN_S, handshake_s=_WITHIN_S))
    address, port = await mesh.listen()
    await announce(tier, _ROUND, Presence(mesh.me.node, mesh.me.life, (address,), port, (rank,), world))
    return Node(mesh, secret, await gather(tier, _ROUND, _WITHIN_S))


async def _serve(run: str, rank: str, world: str, tls: str) -> None:
    node = await enter(run, int(rank), int(world), tls == "1")
    async with asyncio.TaskGroup() as group:
        running = group.create_task(node.mesh.run())
        node.join()
        # The process that started this one holds the other end.
        await asyncio.to_thread(sys.stdin.buffer.read)
        running.cancel()


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
