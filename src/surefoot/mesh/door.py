"""Listens for other agents. Strangers can take only a bounded number of places, each for a bounded time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from surefoot.errors import ConfigError
from surefoot.mesh.certificate import Certificate, make_certificate
from surefoot.mesh.channel import Channel, accept, is_loopback
from surefoot.mesh.handshake import Session

_BACKLOG = 1024
_REST_S = 1.0
"""After an `accept` that failed for want of descriptors or memory."""

Prove = Callable[[Channel], Awaitable[Session]]
Enter = Callable[[Channel, Session], Awaitable[None]]


class Door:
    """Accepts connections and lets in those that prove themselves.

    When all places are taken, the oldest half-open connection goes. An honest one needs some milliseconds, so a flood
    keeps it out only if it opens as many connections in that time as there are places.
    """

    def __init__(self, sock: socket.socket, certificate: Certificate | None, places: int, within_s: float) -> None:
        self._sock = sock
        self._certificate = certificate
        self._places = places
        self._within_s = within_s
        # Oldest first: a dict keeps the order in which it was filled.
        self._half_open: dict[asyncio.Task[None], None] = {}

    @classmethod
    async def open(cls, host: str, port: int, tls: bool | None, places: int, within_s: float) -> Door:
        """Listen. `tls` None: use TLS unless the address is one of the loopback interface.

        Raises:
            ConfigError: this machine has no such address, or the port is taken.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _kind, _protocol, _name, address = found[0]
            sock = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"cannot listen at {host} port {port}: {error}; give an address of this node") from error
        sock.setblocking(False)
        wanted = tls if tls is not None else not is_loopback(str(address[0]))
        return cls(sock, make_certificate() if wanted else None, places, within_s)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._sock.getsockname()[:2]
        return str(host), int(port)

    @property
    def half_open(self) -> int:
        return len(self._half_open)

    def close(self) -> None:
        self._sock.close()

    async def serve(self, group: asyncio.TaskGroup, prove: Prove, enter: Enter, say: Callable[[str], None]) -> None:
        """For ever: let in each connection that passes `prove`; `enter` has the connection for as long as it lasts."""
        while True:
            try:
                sock = await self._accept()
            except ConnectionAbortedError:
                continue
            except OSError as error:
                # Short of descriptors or memory: connections that wait go on waiting.
                say(f"cannot take a connection: {error}")
                await asyncio.sleep(_REST_S)
                continue
            self._make_room()
            self._half_open[group.create_task(self._visit(sock, prove, enter))] = None
            # Lets the visit begin: from then on it owns the socket, whatever comes.
            await asyncio.sleep(0)

    async def _accept(self) -> socket.socket:
        # Not by the loop's own `sock_accept`: cancelled with a connection at hand, that loses the connection and logs
        # an error.
        while True:
            try:
                return self._sock.accept()[0]
            except BlockingIOError:
                await self._readable()

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._sock, _wake, ready)
        try:
            await ready
        finally:
            loop.remove_reader(self._sock)

    def _make_room(self) -> None:
        while len(self._half_open) >= self._places:
            oldest = next(iter(self._half_open))
            del self._half_open[oldest]
            oldest.cancel()

    async def _visit(self, sock: socket.socket, prove: Prove, enter: Enter) -> None:
        visit = asyncio.current_task()
        assert visit is not None
        channel: Channel | None = None
        try:
            async with asyncio.timeout(self._within_s):
                channel = await accept(sock, self._certificate, self._within_s)
                session = await prove(channel)
            self._half_open.pop(visit, None)
            await enter(channel, session)
        except (OSError, EOFError):
            # Not reported: strangers knock at every port, and members that fail report it at their own end.
            return
        finally:
            self._half_open.pop(visit, None)
            if channel is not None:
                channel.abort()


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
