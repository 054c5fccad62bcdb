"""Frames between agents: a length, and that many bytes; once both sides have proved themselves, each with a proof.

Before: 4 bytes little-endian length and JSON, at most `MAX_PLAIN_BYTES`.
After:  4 bytes little-endian length, 1 byte kind, the content, 32 bytes HMAC-SHA-256 of the frame's number, kind and
content, under a key of this connection and direction. The number is counted by both sides and never sent, so a frame
that is repeated, left out, put into another order, taken from another connection or sent back proves nothing.

Also on the loopback interface, and also below TLS: another user of the machine may listen at the port of an agent that
died and pass on what he hears. He can then listen, and end the connection; he can say nothing. One rule for both is
simpler than two.
"""

from __future__ import annotations

import asyncio
import hmac
import struct
from hashlib import sha256

from surefoot.core.documents import compact, parse_json
from surefoot.errors import CorruptError, WireError
from surefoot.ipc.wire import Body

MAX_PLAIN_BYTES = 1024
"""A frame from somebody who has proved nothing."""
MAX_CONTENT_BYTES = 64 * 1024
"""Content of one frame; a longer message is sent in pieces, so that a notice waits for one piece at most."""
_PROOF_BYTES = 32
_LENGTH = struct.Struct("<I")
_NUMBERED = struct.Struct("<QB")

WHOLE = 0
PIECE = 1
LAST_PIECE = 2
_KINDS = (WHOLE, PIECE, LAST_PIECE)


class Sealer:
    """Puts frames into their form for one direction of one connection."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, kind: int, content: bytes) -> bytes:
        """The bytes to send. Each frame must be sent, in this order: the other side counts them."""
        assert len(content) <= MAX_CONTENT_BYTES
        proof = _proof(self._key, self._number, kind, content)
        self._number += 1
        return b"".join((_LENGTH.pack(1 + len(content) + _PROOF_BYTES), bytes((kind,)), content, proof))


class Opener:
    """Takes frames of one direction of one connection out of their form."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    async def receive(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        """Kind and content of the next frame.

        Raises:
            WireError: it is too long, or not what the other side has sent at this place.
            EOFError: the connection ended.
        """
        data = await _receive(reader, 1 + _PROOF_BYTES, 1 + MAX_CONTENT_BYTES + _PROOF_BYTES)
        return self.open(data)

    def open(self, data: bytes) -> tuple[int, bytes]:
        """The same of a frame's bytes after the length."""
        kind, content, proof = data[0], data[1:-_PROOF_BYTES], data[-_PROOF_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._key, self._number, kind, content)):
            raise WireError("a frame without the proof that belongs to it")
        if kind not in _KINDS:
            raise WireError(f"a frame of the unknown kind {kind}")
        self._number += 1
        return kind, content


def plain(body: Body) -> bytes:
    """A frame of somebody who has proved nothing yet."""
    data = compact(body)
    assert len(data) <= MAX_PLAIN_BYTES
    return _LENGTH.pack(len(data)) + data


async def receive_plain(reader: asyncio.StreamReader) -> Body:
    """The next such frame.

    Raises:
        WireError: it is too long, or no JSON object.
        EOFError: the connection ended.
    """
    return decode(await _receive(reader, 2, MAX_PLAIN_BYTES))


def decode(data: bytes) -> Body:
    """A JSON object.

    Raises:
        WireError: it is not a message.
    """
    try:
        body = parse_json(data, "a frame")
    except CorruptError as error:
        raise WireError(str(error)) from error
    if type(body) is not dict:
        raise WireError("a frame that is not an object")
    return body


async def _receive(reader: asyncio.StreamReader, least: int, most: int) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if not least <= length <= most:
        raise WireError(f"a frame of {length} bytes; {least} to {most} are allowed")
    return await reader.readexactly(length)


def _proof(key: bytes, number: int, kind: int, content: bytes) -> bytes:
    return hmac.digest(key, _NUMBERED.pack(number, kind) + content, sha256)
