"""What waits to be sent to one member: bounded, short messages first.

Order is kept among the short messages, and among the long ones. A long message is sent in pieces, and short ones go
between them, so a notice waits for one piece of a report at most.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from surefoot.errors import WireError
from surefoot.mesh.frames import LAST_PIECE, MAX_CONTENT_BYTES, PIECE, WHOLE

SHORT_BYTES = 4096
"""A message up to this length does not wait for longer ones."""


@dataclass(slots=True)
class _Long:
    message: bytes
    sent_bytes: int = 0


class Outbox:
    """Two lanes. Whoever puts never waits; whoever takes does."""

    def __init__(self, most_messages: int, most_bytes: int) -> None:
        self._most_messages = most_messages
        self._most_bytes = most_bytes
        self._short: deque[bytes] = deque()
        self._long: deque[_Long] = deque()
        self._bytes = 0
        self._filled = asyncio.Event()

    @property
    def waiting_bytes(self) -> int:
        return self._bytes

    def put(self, message: bytes) -> bool:
        """Queue a message; False if there is no room for it."""
        full = len(self._short) + len(self._long) >= self._most_messages
        if full or self._bytes + len(message) > self._most_bytes:
            return False
        self._bytes += len(message)
        if len(message) <= SHORT_BYTES:
            self._short.append(message)
        else:
            self._long.append(_Long(message))
        self._filled.set()
        return True

    async def take(self) -> tuple[int, bytes]:
        """Kind and content of the next frame."""
        while not self._short and not self._long:
            self._filled.clear()
            await self._filled.wait()
        if self._short:
            message = self._short.popleft()
            self._bytes -= len(message)
            return WHOLE, message
        return self._piece(self._long[0])

    def rewind(self) -> None:
        """Begin the long message that was under way anew: the connection on which it was has ended."""
        if self._long:
            self._bytes += self._long[0].sent_bytes
            self._long[0].sent_bytes = 0

    def clear(self) -> None:
        self._short.clear()
        self._long.clear()
        self._bytes = 0

    def _piece(self, long: _Long) -> tuple[int, bytes]:
        content = long.message[long.sent_bytes : long.sent_bytes + MAX_CONTENT_BYTES]
        long.sent_bytes += len(content)
        self._bytes -= len(content)
        if long.sent_bytes < len(long.message):
            return PIECE, content
        self._long.popleft()
        return LAST_PIECE, content


class Joiner:
    """Puts the pieces of long messages together again. Memory is bounded by `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._pieces: list[bytes] = []
        self._bytes = 0

    def add(self, kind: int, content: bytes) -> bytes | None:
        """The message that this frame completes, if it does.

        Raises:
            WireError: the message is longer than allowed.
        """
        if kind == WHOLE:
            return content
        self._bytes += len(content)
        if self._bytes > self._most_bytes:
            raise WireError(f"a message of more than {self._most_bytes} bytes")
        self._pieces.append(content)
        if kind == PIECE:
            return None
        message = b"".join(self._pieces)
        self._pieces.clear()
        self._bytes = 0
        return message
