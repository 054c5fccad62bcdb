"""One authenticated connection to another agent, while it lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

from surefoot.ipc.wire import Body
from surefoot.mesh.channel import Channel
from surefoot.mesh.frames import decode
from surefoot.mesh.handshake import Session
from surefoot.mesh.outbox import Joiner, Outbox


class Link:
    """Sends what is in the outbox, hands on what arrives. One task writes, one reads; the end of one is both's."""

    def __init__(self, channel: Channel, session: Session, outbox: Outbox, most_bytes: int) -> None:
        self.life = session.life
        self._channel = channel
        self._session = session
        self._outbox = outbox
        self._joiner = Joiner(most_bytes)
        self._writing: asyncio.Task[None] | None = None
        self._ended = False

    async def serve(self, group: asyncio.TaskGroup, take: Callable[[Body], None]) -> str:
        """Run until the connection ends; returns why it did. `take` gets each message, in order.

        A `WireError` of `take` ends the connection too.
        """
        self._writing = group.create_task(self._write())
        try:
            await self._read(take)
        except (OSError, EOFError) as error:
            return str(error) or type(error).__name__
        finally:
            self.end()

    def end(self) -> None:
        """End the connection at once. What has come but was not handed on is not handed on any more."""
        self._ended = True
        if self._writing is not None:
            self._writing.cancel()
        self._channel.abort()

    async def _read(self, take: Callable[[Body], None]) -> NoReturn:
        while True:
            kind, content = await self._session.opener.receive(self._channel.reader)
            if self._ended:
                # Of a round that is over, or from before a newer connection of the same node.
                raise EOFError("the connection was ended")
            message = self._joiner.add(kind, content)
            if message is not None:
                take(decode(message))

    async def _write(self) -> None:
        writer = self._channel.writer
        try:
            while True:
                kind, content = await self._outbox.take()
                writer.write(self._session.sealer.seal(kind, content))
                # Waits while the other side does not read; meanwhile messages wait where short ones can overtake.
                await writer.drain()
        except OSError:
            # The reader notices: its stream ends.
            self._channel.abort()
