"""Serves the agent's socket: accepts connections of this user's processes, one `Link` per connection."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from surefoot.errors import SurefootError
from surefoot.ipc.wire import Body, Frame, peer_pid, receive_async, send_async

_BACKLOG = 256


class Link:
    """One connection to a process of this machine."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.pid = pid
        self._sock = sock
        self._sending = asyncio.Lock()

    async def send(self, body: Body, fds: tuple[int, ...] = ()) -> bool:
        """Send a frame. False if the other side is gone, which the connection's own `receive` loop notices."""
        try:
            async with self._sending:
                await send_async(self._sock, body, fds)
        except OSError:
            return False
        return True

    async def reply(self, request: Body, **body: object) -> bool:
        return await self.send({"id": request.get("id"), **body})

    async def receive(self) -> Frame | None:
        """The next frame; None when the other side is gone."""
        try:
            return await receive_async(self._sock)
        except OSError:
            return None

    def close(self) -> None:
        self._sock.close()


Handler = Callable[[Link, Body, list[int]], Awaitable[None]]


class Server:
    """Accepts connections and hands each, with its first frame, to the handler."""

    def __init__(self, path: Path, handler: Handler) -> None:
        self._path = path
        self._handler = handler
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    async def serve(self, group: asyncio.TaskGroup) -> None:
        """Accept for ever; the connections' tasks belong to `group`."""
        loop = asyncio.get_running_loop()
        with self._listener:
            while True:
                sock, _address = await loop.sock_accept(self._listener)
                sock.setblocking(False)
                group.create_task(self._converse(sock))

    def listen(self) -> None:
        """Start to take connections."""
        listener = self._listener
        # Bound under another name and renamed: as soon as the name exists, the socket is listening.
        fresh = self._path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        listener.bind(str(fresh))
        os.chmod(fresh, 0o600)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        fresh.rename(self._path)

    async def _converse(self, sock: socket.socket) -> None:
        try:
            link = Link(sock, peer_pid(sock))
            first = await link.receive()
            if first is not None:
                await self._handler(link, *first)
        except SurefootError as error:
            # Another user, or a peer that breaks the protocol: it gets the error, and no other connection suffers.
            await Link(sock, 0).send({"error": str(error)})
        finally:
            sock.close()
