"""Where an agent listens, and what strangers can take from it: a bounded number of places, for a bounded time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from surefoot.errors import ConfigError
from surefoot.mesh.certificate import Certificate, make_certificate
from surefoot.mesh.channel import Channel, accept, is_loopback
from surefoot.mesh.handshake import Session

_BACKLOG = 1024
_REST_S = 0.2
"""After an `accept` that failed for want of descriptors or memory."""

Prove = Callable[[Channel], Awaitable[Session]]
Enter = Callable[[Channel, Session], Awaitable[None]]


class Door:
    """Accepts connections and lets in those that prove themselves.

    When all places are taken, the oldest half-open connection goes. An honest one needs some milliseconds, so a flood
    must bring as many connections in those as there are places, to keep anybody out.
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
        """Listen. TLS unless `tls` says otherwise or the address is one of the loopback interface.

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

    async def serve(self, group: asyncio.TaskGroup, prove: Prove, enter: Enter) -> None:
        """For ever: let in whoever passes `prove`; `enter` has the connection for as long as it lasts."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _address = await loop.sock_accept(self._sock)
            except OSError:
                # Short of something, or the other side is gone already: whoever waits still waits.
                await asyncio.sleep(_REST_S)
                continue
            self._make_room()
            visit = group.create_task(self._visit(sock, prove, enter))
            self._half_open[visit] = None
            # A task that is cancelled before its first step never sees its socket.
            visit.add_done_callback(lambda done, sock=sock: self._over(done, sock))  # type: ignore[misc]

    def _make_room(self) -> None:
        while len(self._half_open) >= self._places:
            oldest = next(iter(self._half_open))
            del self._half_open[oldest]
            oldest.cancel()

    def _over(self, visit: asyncio.Task[None], sock: socket.socket) -> None:
        self._half_open.pop(visit, None)
        sock.close()

    async def _visit(self, sock: socket.socket, prove: Prove, enter: Enter) -> None:
        channel: Channel | None = None
        try:
            async with asyncio.timeout(self._within_s):
                channel = await accept(sock, self._certificate)
                session = await prove(channel)
            visit = asyncio.current_task()
            assert visit is not None
            self._half_open.pop(visit, None)
            await enter(channel, session)
        except (OSError, EOFError):
            # Nobody is told: strangers knock at every port, and members that fail say so at their own end.
            return
        finally:
            if channel is not None:
                channel.abort()
