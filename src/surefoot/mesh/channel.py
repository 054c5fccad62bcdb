"""A connection between two agents before anybody has proved anything: plain TCP on the loopback interface, else TLS."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from dataclasses import dataclass

from surefoot.mesh.certificate import Certificate, dialing_context, fingerprint

_READ_AHEAD_BYTES = 64 * 1024
_UNSENT_BYTES = 128 * 1024
PLAIN = "plain"


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


async def connect(host: str, port: int, tls: bool) -> Channel:
    """Dial. Bounded by the caller in time.

    Raises:
        OSError: nobody listens there, or not in the way asked for.
    """
    context = dialing_context() if tls else None
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=_READ_AHEAD_BYTES)
    except UnicodeError as error:
        raise OSError(f"{host[:80]!r} is no name of a host") from error
    return Channel(reader, _keep_short(writer), _shown(writer) if tls else PLAIN)


async def accept(sock: socket.socket, certificate: Certificate | None) -> Channel:
    """The listener's end of a connection that has just come. Bounded by the caller in time.

    Raises:
        OSError: the other side does not speak TLS, or went away.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(_READ_AHEAD_BYTES, loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    context = certificate.context if certificate else None
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=context)
    writer = _keep_short(asyncio.StreamWriter(transport, protocol, reader, loop))
    return Channel(reader, writer, certificate.fingerprint if certificate else PLAIN)


def _keep_short(writer: asyncio.StreamWriter) -> asyncio.StreamWriter:
    """Let little wait in the kernel, where nothing can overtake it, and no packet wait for more to send."""
    sock: socket.socket = writer.get_extra_info("socket")
    # asyncio leaves Nagle's algorithm on for sockets that do not name their protocol, as accepted ones do not.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    return writer


def _shown(writer: asyncio.StreamWriter) -> str:
    tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
    der = tls.getpeercert(binary_form=True)
    assert der is not None, "TLS 1.3 has no listener without a certificate"
    return fingerprint(der)
