"""A link of known speed before a server: so many bytes a second of what clients send get through, answers at once."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

_PIECE_BYTES = 16 * 1024
_BUFFER_BYTES = 64 * 1024
"""What the kernel takes in has not come through the link."""


class SlowLink:
    """Listens on a port of its own; `endpoint` is what clients use. All connections share the link."""

    def __init__(self, upstream: str, bytes_per_s: float) -> None:
        host, _, port = upstream.removeprefix("http://").partition(":")
        self._upstream = (host, int(port))
        self._bytes_per_s = bytes_per_s
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(64)
        self._lock = threading.Lock()
        self._free_at_s = 0.0
        self.passed_bytes = 0
        """So far, from clients to the server."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

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
