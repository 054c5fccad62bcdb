"""A node agent of the tests, as a program: finds the others through a directory, says what happens, does as told.

    mesh_actor.py NODE RANK WORLD RUN HOST PORT [instead]

Orders come on stdin, one JSON object a line ({"tell": body}, {"ask": [node, body]}); what happens goes to stdout, one
JSON list a line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from surefoot.core.liveness import Bounds
from surefoot.core.presence import Presence
from surefoot.errors import AgentError
from surefoot.host.clock import boot_s
from surefoot.ipc.wire import Body
from surefoot.mesh.discovery import announce, gather, places
from surefoot.mesh.mesh import Mesh, MeshConfig
from surefoot.mesh.secret import round_key, run_secret
from surefoot.tiers.open import open_tier

ROUND = "round-of-processes"
BOUNDS = Bounds(beat_s=0.2, stood_still_s=1.0, lost_after_s=4.0)


def report(*what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def orders(mesh: Mesh) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        order = json.loads(line)
        if "tell" in order:
            report("not told", mesh.tell_all(order["tell"]))
        else:
            try:
                report("answer", await mesh.ask(*order["ask"], 30.0))
            except AgentError as error:
                report("no answer", str(error))


def listen_to(mesh: Mesh) -> None:
    mesh.on_lost = lambda node: report("lost", node)
    mesh.on_back = lambda node: report("back", node)
    mesh.on_linked = lambda node, fresh: report("linked", node, fresh)

    def note(node: str, body: Body) -> None:
        report("told", node, body)
        if body.get("reply"):
            mesh.tell(node, {"op": "note", "at": body["at"]})

    async def where(_node: str, _body: Body) -> Body:
        return {"node": mesh.me.node}

    mesh.hear("note", note)
    mesh.answer("where", where)


async def main(node: str, rank: str, world: str, run: str, host: str, port: str, *instead: str) -> None:
    tier = open_tier(run)
    secret = await run_secret(tier)
    mesh = Mesh(node, MeshConfig(bounds=BOUNDS), say=lambda text: report("said", text))
    listen_to(mesh)
    address, bound = await mesh.listen(host, int(port))
    report("listening", bound)
    presence = Presence(node, mesh.me.life, (address,), bound, (int(rank),), int(world))
    await announce(tier, ROUND, presence, instead=bool(instead))
    found = await gather(tier, ROUND, 60.0)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(mesh.run())
        mesh.join(places(found.values()), round_key(secret, "run", ROUND))
        await mesh.wait_linked(60.0)
        report("ready", round(boot_s(), 1))
        await orders(mesh)
        running.cancel()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
