"""A connection between two agents before anybody has proved anything: plain TCP on the loopback interface, else TLS."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from typing import Any

from surefoot.mesh.certificate import Certificate, dialing_context, fingerprint

_READ_AHEAD_BYTES = 64 * 1024
_UNSENT_BYTES = 128 * 1024
PLAIN = "plain"
DEFAULT_HANDSHAKE_S = 10.0


@dataclass(frozen=True, slots=True)
class Channel:
    """Streams, and what both ends can see of the channel and nobody between them can make alike."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    name: str

    def abort(self) -> None:
        """End it at once; what was not sent yet is lost. For a closing that waits, close the writer."""
        self.writer.transport.abort()


def is_loopback(host: str) -> bool:
    """True for an address of the loopback interface. Nothing is looked up: of names only `localhost` is one."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def address_towards(host: str, port: int = 9) -> str:
    """The address of this machine's interface by which `host` is reached. Nothing is sent.

    Raises:
        OSError: the host has no address, or there is no way to it.
    """
    for family, kind, protocol, _name, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    raise OSError(f"{host} has no address")


async def connect(host: str, port: int) -> socket.socket:
    """Dial. Bounded by the caller in time.

    Raises:
        OSError: nobody listens there.
    """
    failed: OSError | None = None
    for family, address in await _addresses(host, port):
        try:
            return await _connect(family, address)
        except OSError as error:
            failed = failed or error
    raise failed or OSError(f"{host} has no address")


async def _addresses(host: str, port: int) -> list[tuple[int, Any]]:
    loop = asyncio.get_running_loop()
    try:
        # Numbers are understood at once; only names need a thread to be looked up in.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host[:80]!r} is not a host name") from error
    return [(family, address) for family, _kind, _protocol, _name, address in found]


async def _connect(family: int, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def enter(sock: socket.socket, tls: bool, within_s: float = DEFAULT_HANDSHAKE_S) -> Channel:
    """The dialer's end of a connection that stands. Bounded by the caller in time. The socket is taken over: it ends
    with the channel, and with an error.

    Raises:
        OSError: the other side speaks TLS and should not, or the other way round, or went away.
    """
    context, name = (dialing_context(), "") if tls else (None, None)
    # The transport owns the socket from here on. Closed beneath it, its descriptor's number would be another's soon.
    reader, writer = await asyncio.open_connection(
        sock=sock,
        ssl=context,
        server_hostname=name,
        ssl_handshake_timeout=_bound(context, within_s),
        limit=_READ_AHEAD_BYTES,
    )
    return Channel(reader, _keep_short(writer), _shown(writer) if tls else PLAIN)


async def accept(
    sock: socket.socket, certificate: Certificate | None, within_s: float = DEFAULT_HANDSHAKE_S
) -> Channel:
    """The listener's end of a connection that has just come. Bounded by the caller in time. The socket is taken over.

    Raises:
        OSError: the other side does not speak TLS, or went away.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(_READ_AHEAD_BYTES, loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    context = certificate.context if certificate else None
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, sock, ssl=context, ssl_handshake_timeout=_bound(context, within_s)
    )
    writer = _keep_short(asyncio.StreamWriter(transport, protocol, reader, loop))
    return Channel(reader, writer, certificate.fingerprint if certificate else PLAIN)


def _keep_short(writer: asyncio.StreamWriter) -> asyncio.StreamWriter:
    """Let little wait in the kernel, where nothing can overtake it, and no packet wait for more to send."""
    sock: socket.socket = writer.get_extra_info("socket")
    # asyncio leaves Nagle's algorithm on for sockets that do not name their protocol, as accepted ones do not.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    return writer


def _bound(context: ssl.SSLContext | None, within_s: float) -> float | None:
    # The caller's bound cancels; a TLS transport that is cancelled before its first step goes on all the same, until
    # its own bound ends it.
    return None if context is None else within_s


def _shown(writer: asyncio.StreamWriter) -> str:
    tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
    der = tls.getpeercert(binary_form=True)
    assert der is not None, "TLS 1.3 has no listener without a certificate"
    return fingerprint(der)
