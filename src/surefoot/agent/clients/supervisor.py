"""The supervisor's connection: what it reports of its launch, and what it is told."""

from __future__ import annotations

import asyncio

from surefoot.agent.clients.server import Link
from surefoot.agent.evict.eviction import Eviction
from surefoot.agent.node import Node
from surefoot.core.documents import Fields
from surefoot.ipc.home import Home
from surefoot.ipc.wire import Body


class Supervisor:
    """The process that starts the trainers, where there is one."""

    def __init__(self, node: Node, home: Home, eviction: Eviction) -> None:
        self._trainers = node.trainers
        self._status = node.status
        self._journal = node.journal
        self._tasks = node.tasks
        self._home = home
        self._eviction = eviction
        self._link: Link | None = None
        self.done = asyncio.Event()
        """It said that its launch is over, or died."""
        node.trainers.when_all_gone(self._trainers_gone)

    async def serve(self, link: Link) -> None:
        """Its connection, to its end."""
        self._link = link
        await link.send({"ok": True})
        while (frame := await link.receive()) is not None:
            await self._says(link, frame[0])
        self._link = None

    async def tell(self, body: Body) -> None:
        if self._link is not None:
            await self._link.send(body)

    async def part(self, code: int) -> None:
        """Tell it that the agent is done, and wait a while for it to be."""
        if self._link is None:
            return
        await self.tell({"op": "drained", "code": code})
        try:
            async with asyncio.timeout(10.0):
                await self.done.wait()
        except TimeoutError:
            return

    async def lost(self) -> None:
        """It died, whether it had come to connect or not: the job is over here, and nothing may train without it."""
        if self.done.is_set():
            return
        # Whoever starts the run again waits for this agent's end.
        self._home.set_draining()
        self._journal.record("warning", what="the supervisor died: this node stops training")
        self._trainers.kill_launcher()
        self._trainers.stop_all()
        await self._trainers.gone(5.0)
        self.done.set()

    def _trainers_gone(self) -> None:
        if self._eviction.noticed.is_set():
            self._tasks.create_task(self.tell({"op": "trainers_gone"}))

    async def _says(self, link: Link, body: Body) -> None:
        operation = body.get("op")
        if operation == "notice":
            fields = Fields(body, "notice")
            self._eviction.notice(fields.text("source"), fields.optional_number("grace_s"))
        elif operation == "torchrun":
            self._trainers.set_launcher(Fields(body, "torchrun").integer("pid", 1))
        elif operation == "progress":
            status = self._status
            generation = status.generation.number if status.has_generation else 0
            ending = self._eviction.noticed.is_set() or status.superseded_by is not None
            await link.reply(body, generation=generation, barren=status.barren(), ending=ending)
        elif operation == "done":
            self._status.finished = self._status.finished or bool(body.get("finished"))
            self.done.set()
