"""The wire between processes of one machine: length-limited JSON frames over a private Unix socket.

A frame is a 4-byte little-endian length and that many bytes of JSON, an object. Descriptors travel with the length.
Nothing here unpickles anything. Each side checks that the other has the same user id.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

from surefoot.core.documents import compact
from surefoot.errors import AgentError, WireError

MAX_FRAME_BYTES = 256 * 1024 * 1024
_MAX_FDS = 4
_LENGTH = struct.Struct("<I")
_DESCRIPTOR = struct.Struct("i")
_CREDENTIALS = struct.Struct("iII")

Body = dict[str, Any]
Frame = tuple[Body, list[int]]


def peer_pid(sock: socket.socket) -> int:
    """Process id of the other side.

    Raises:
        AgentError: the other side runs as another user.
    """
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(raw)
    if uid != os.geteuid():
        raise AgentError(f"process {pid} of user {uid} is at the other end of the socket; only user {os.geteuid()} may")
    return int(pid)


def connect(path: str, timeout_s: float) -> socket.socket:
    """A blocking connection to the agent at `path`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
        peer_pid(sock)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


def send(sock: socket.socket, body: Body, fds: Sequence[int] = ()) -> None:
    """Send one frame on a blocking socket.

    Raises:
        WireError: the frame is longer than the other side would take, or brings too many descriptors.
    """
    header, data = _encode(body, fds)
    sent = socket.send_fds(sock, [header], list(fds)) if fds else 0
    sock.sendall(header[sent:] + data)


def receive(sock: socket.socket) -> Frame | None:
    """The next frame on a blocking socket; None at the end of the stream. The caller owns the descriptors.

    Raises:
        WireError: the frame breaks the protocol; its descriptors are closed.
    """
    header, fds = _receive_header(sock)
    if not header:
        return None
    try:
        header += _exactly(sock, _LENGTH.size - len(header))
        return _decode(_exactly(sock, _checked_length(header))), fds
    except BaseException:
        _close_all(fds)
        raise


async def send_async(sock: socket.socket, body: Body, fds: Sequence[int] = ()) -> None:
    """Send one frame on a non-blocking socket. Callers hold the connection's lock: frames must not interleave.

    Raises:
        WireError: the frame is longer than the other side would take, or brings too many descriptors.
    """
    loop = asyncio.get_running_loop()
    header, data = _encode(body, fds)
    sent = await _send_fds_async(loop, sock, header, fds) if fds else 0
    await loop.sock_sendall(sock, header[sent:] + data)


async def receive_async(sock: socket.socket) -> Frame | None:
    """The next frame on a non-blocking socket; None at the end of the stream. The caller owns the descriptors.

    Raises:
        WireError: the frame breaks the protocol; its descriptors are closed.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            header, fds = _receive_header(sock)
            break
        except BlockingIOError:
            await _ready(loop.add_reader, loop.remove_reader, sock)
    if not header:
        return None
    try:
        header += await _exactly_async(loop, sock, _LENGTH.size - len(header))
        return _decode(await _exactly_async(loop, sock, _checked_length(header))), fds
    except BaseException:
        _close_all(fds)
        raise


async def _send_fds_async(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, header: bytes, fds: Sequence[int]
) -> int:
    while True:
        try:
            return socket.send_fds(sock, [header], list(fds))
        except BlockingIOError:
            await _ready(loop.add_writer, loop.remove_writer, sock)


def _receive_header(sock: socket.socket) -> tuple[bytes, list[int]]:
    # Descriptors come with a frame's first byte. Not by socket.recv_fds, which drops its flags: without this one every
    # program started later would inherit the descriptors.
    space = socket.CMSG_SPACE(_MAX_FDS * _DESCRIPTOR.size)
    header, ancillary, flags, _address = sock.recvmsg(_LENGTH.size, space, socket.MSG_CMSG_CLOEXEC)
    fds = [
        fd
        for level, kind, data in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (fd,) in _DESCRIPTOR.iter_unpack(data[: len(data) // _DESCRIPTOR.size * _DESCRIPTOR.size])
    ]
    if flags & socket.MSG_CTRUNC:
        _close_all(fds)
        raise WireError(f"a frame carries more descriptors than {_MAX_FDS}, or more than this process may open")
    return header, fds


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


async def _ready(add: Any, remove: Any, sock: socket.socket) -> None:
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    add(sock.fileno(), _resolve, ready)
    try:
        await ready
    finally:
        remove(sock.fileno())


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _encode(body: Body, fds: Sequence[int]) -> tuple[bytes, bytes]:
    data = compact(body)
    if len(data) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(data)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    if len(fds) > _MAX_FDS:
        raise WireError(f"a frame with {len(fds)} descriptors; at most {_MAX_FDS} are allowed")
    return _LENGTH.pack(len(data)), data


def _checked_length(header: bytes) -> int:
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return int(length)


def _exactly(sock: socket.socket, size_bytes: int) -> bytes:
    buffer = bytearray(size_bytes)
    view = memoryview(buffer)
    while view:
        count = sock.recv_into(view)
        if count == 0:
            raise WireError("the connection ended inside a frame")
        view = view[count:]
    return bytes(buffer)


async def _exactly_async(loop: asyncio.AbstractEventLoop, sock: socket.socket, size_bytes: int) -> bytes:
    buffer = bytearray(size_bytes)
    view = memoryview(buffer)
    while view:
        count = await loop.sock_recv_into(sock, view)
        if count == 0:
            raise WireError("the connection ended inside a frame")
        view = view[count:]
    return bytes(buffer)


def _decode(data: bytes) -> Body:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame that is not JSON: {error}") from error
    if type(body) is not dict:
        raise WireError("a frame that is not an object")
    return body
