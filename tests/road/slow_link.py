"""A link of known speed before a server: so many bytes a second of what clients send get through, answers at once."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from listener import Listener

_PIECE_BYTES = 16 * 1024
_BUFFER_BYTES = 64 * 1024
"""What the kernel takes in has not come through the link."""


class SlowLink(Listener):
    """All connections share the link."""

    def __init__(self, upstream: str, bytes_per_s: float) -> None:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        super().__init__(upstream, listening)
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0
        self.passed_bytes = 0
        """So far, from clients to the server."""

    def _accept(self) -> None:
        while True:
            try:
                client, _address = self._listener.accept()
                server = socket.create_connection(self._upstream)
            except OSError:
                return
            for source, target, slow in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._carry, args=(source, target, slow), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        """One direction of one connection, to its end."""
        with suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                if slow:
                    self._wait_for_turn(len(data))
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _wait_for_turn(self, size_bytes: int) -> None:
        with self._lock:
            now_s = time.monotonic()
            self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self._bytes_per_s
            wait_s = self._free_at_s - now_s
        time.sleep(wait_s)
        with self._lock:
            self.passed_bytes += size_bytes
