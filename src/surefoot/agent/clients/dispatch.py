"""Dispatches the requests of trainers, of the supervisor and of commands to the parts of the agent that answer."""

from __future__ import annotations

from surefoot.agent.clients.commands import Commands
from surefoot.agent.clients.server import Link
from surefoot.agent.clients.supervisor import Supervisor
from surefoot.agent.clients.trainers import Trainer
from surefoot.agent.evict.eviction import Eviction
from surefoot.agent.node import Node
from surefoot.core.documents import Fields
from surefoot.errors import SurefootError
from surefoot.ipc.wire import Body


class Dispatch:
    """Takes connections of trainers, of the supervisor and of commands. The parts hear the trainers' messages."""

    def __init__(self, node: Node, eviction: Eviction, supervisor: Supervisor, commands: Commands) -> None:
        self._trainers = node.trainers
        self._memory = node.memory
        self._journal = node.journal
        self._eviction = eviction
        self._supervisor = supervisor
        self._commands = commands
        node.trainers.hear("event", self._event)

    async def converse(self, link: Link, first: Body, fds: list[int]) -> None:
        """Serve one connection, from its first frame to its end."""
        role = first.get("role")
        if role == "trainer":
            await self._serve_trainer(link, first, fds)
        elif role == "supervisor":
            await self._supervisor.serve(link)
        elif role == "cli":
            await self._commands.serve(link, first)
        else:
            await link.send({"error": "the first frame names no role"})

    async def _serve_trainer(self, link: Link, hello: Body, fds: list[int]) -> None:
        trainer = await self._admit(link, hello, fds)
        if trainer is None:
            return
        while (frame := await link.receive()) is not None:
            await self._trainers.said(trainer, frame[0])
        self._trainers.hung_up(trainer)

    async def _admit(self, link: Link, hello: Body, fds: list[int]) -> Trainer | None:
        refusal = None if hello.get("reconnect") else self._eviction.refusal()
        if refusal is not None:
            await link.reply(hello, **refusal)
            return None
        try:
            trainer = self._trainers.register(link, hello)
            self._take_over(fds)
        except SurefootError as error:
            await link.reply(hello, error=str(error), kind=type(error).__name__)
            return None
        return trainer

    def _take_over(self, fds: list[int]) -> None:
        """Take over the segment of a trainer that outlived the previous agent, in case this one does not have it."""
        for fd in fds:
            self._memory.adopt_descriptor(fd)

    async def _event(self, _worker: Trainer, body: Body) -> None:
        fields = Fields(body, "event")
        self._journal.record(fields.text("event"), **fields.mapping("fields"))
