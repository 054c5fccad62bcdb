"""Holds one other node of the round, as this one sees it: its connection, waiting messages and open questions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from surefoot.core.documents import compact
from surefoot.errors import SurefootError, WireError
from surefoot.ipc.wire import Body
from surefoot.mesh.channel import Channel
from surefoot.mesh.exchange import Handlers, Questions
from surefoot.mesh.handshake import Session
from surefoot.mesh.link import Link
from surefoot.mesh.outbox import Outbox

Place = tuple[str, int]
"""Address and port."""

_ANSWERING_AT_ONCE = 256


class Member:
    """Lives as long as the round does; connections to it come and go."""

    def __init__(
        self,
        node: str,
        place: Place,
        outbox: Outbox,
        handlers: Handlers,
        beaten: Callable[[str, str, int], None],
        say: Callable[[str], None],
    ) -> None:
        self.node = node
        self.place = place
        self.link: Link | None = None
        self.life = ""
        """Of the process that was connected last."""
        self.lost = False
        self.silent = False
        """When it was dialed last, nothing came back in time."""
        self.dialing: asyncio.Task[None] | None = None
        self.questions = Questions(node)
        self._outbox = outbox
        self._handlers = handlers
        self._beaten = beaten
        self._say = say
        self._said = ""
        self._answering = 0

    def post(self, message: Body) -> bool:
        """Queue a message; False if the member is lost, or takes nothing, so that the queue is full."""
        if self.lost and self.link is None:
            return False
        if self._outbox.put(compact(message)):
            return True
        self.say_once(f"{self._outbox.waiting_bytes} bytes wait for node {self.node}, which takes none: cut off")
        self.cut()
        return False

    def cut(self) -> None:
        """End the connection and forget what waits."""
        self._outbox.clear()
        self.questions.fail("the connection was cut")
        if self.link is not None:
            self.link.end()
            self.link = None

    def say_once(self, text: str) -> None:
        """Log a fault; log it again only after another fault or a connection."""
        if text != self._said:
            self._said = text
            self._say(text)

    async def serve(
        self, group: asyncio.TaskGroup, channel: Channel, session: Session, most_bytes: int, linked: Callable[[], None]
    ) -> None:
        """Use a connection until it ends; it takes the place of an older one."""
        link = Link(channel, session, self._outbox, most_bytes)
        if self.link is not None:
            self.link.end()
        if self.life and session.life != self.life:
            # The waiting messages were meant for a process that has ended.
            self._outbox.clear()
        self._outbox.rewind()
        self.link, self.life, self._said = link, session.life, ""
        linked()
        why = await link.serve(group, lambda message: self._take(group, link, message))
        if self.link is link:
            self.link = None
            self.questions.fail(why)
            self.say_once(f"the connection to node {self.node} ended: {why}")

    def _take(self, group: asyncio.TaskGroup, link: Link, message: Body) -> None:
        if "beat" in message:
            self._beaten(self.node, link.life, _integer(message["beat"]))
        elif "tell" in message:
            self._told(_object(message["tell"]))
        elif "ask" in message:
            self._asked(group, _integer(message["ask"]), _object(message.get("body")))
        elif "answer" in message:
            self.questions.answered(message)
        else:
            raise WireError("a message of an unknown kind")

    def _told(self, body: Body) -> None:
        try:
            self._handlers.told(self.node, body)
        except SurefootError as error:
            self._say(f"a message from node {self.node} was not understood: {error}")

    def _asked(self, group: asyncio.TaskGroup, number: int, body: Body) -> None:
        if self._answering >= _ANSWERING_AT_ONCE:
            self.post({"answer": number, "error": f"more than {_ANSWERING_AT_ONCE} questions at once"})
            return
        self._answering += 1
        group.create_task(self._answer(number, body))

    async def _answer(self, number: int, body: Body) -> None:
        try:
            self.post({"answer": number, **await self._handlers.asked(self.node, body)})
        finally:
            self._answering -= 1


def _integer(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise WireError("a message whose number is not valid")
    return value


def _object(value: object) -> Body:
    if type(value) is not dict:
        raise WireError("a message whose body is not an object")
    return value
