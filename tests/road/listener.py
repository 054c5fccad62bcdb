"""What stands before a real S3 server: listens on a port of its own, and ends with its block."""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from types import TracebackType
from typing import Self


class Listener(ABC):
    """`endpoint` is what clients use; `_accept` runs in a thread of its own until the listening socket is closed.

    Args:
        upstream: the server's endpoint.
        listening: listens on the loopback address.
    """

    def __init__(self, upstream: str, listening: socket.socket) -> None:
        host, _, port = upstream.removeprefix("http://").partition(":")
        self._upstream = (host, int(port))
        self._listener = listening

    @abstractmethod
    def _accept(self) -> None: ...

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
