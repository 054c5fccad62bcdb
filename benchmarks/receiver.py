"""`python -m benchmarks.receiver BYTES_PER_S`: an S3 receiver behind a link of known speed.

It hashes every body with SHA-256 and refuses one that does not match the hash its request was signed with, so a part
that changed on the way does not count. It checks no signature. It prints its port, and ends when its input does.
"""

from __future__ import annotations

import hashlib
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks.bucket import KEPT_BYTES, Answer, Body, Bucket, Request, mismatch

_PIECE_BYTES = 128 * 1024
_RECEIVE_BUFFER_BYTES = 256 * 1024
"""Of a connection. What the kernel takes in before we read it has not come through the link."""
_BURST_S = 0.005


class Link:
    """A bandwidth that all connections share. 0: unbounded."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = time.monotonic()
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> None:
        """Let so many bytes through: wait until the link has carried all that came before."""
        if not self._bytes_per_s:
            return
        with self._lock:
            start_s = max(self._free_at_s, time.monotonic() - _BURST_S)
            self._free_at_s = start_s + size_bytes / self._bytes_per_s
            wait_s = self._free_at_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)


class Receiver(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, bytes_per_s: float) -> None:
        self.link = Link(bytes_per_s)
        self.bucket = Bucket()
        super().__init__(("127.0.0.1", 0), _Handler, bind_and_activate=False)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self.server_bind()
        self.server_activate()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Receiver

    def _serve(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        if headers.get("expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        body = self._body(int(headers.get("content-length", "0")))
        if headers.get("x-amz-content-sha256") != body.sha256:
            self._reply(mismatch())
            return
        self._reply(self.server.bucket.answer(Request.parse(self.command, self.path, headers, body)))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815 - the base class's names

    def _body(self, size_bytes: int) -> Body:
        digest = hashlib.sha256()
        kept = bytearray()
        piece = memoryview(bytearray(min(_PIECE_BYTES, max(1, size_bytes))))
        left = size_bytes
        while left:
            self.server.link.take(min(left, len(piece)))
            got = self.rfile.readinto(piece[: min(left, len(piece))])
            if not got:
                raise ConnectionError("the body broke off")
            digest.update(piece[:got])
            if size_bytes <= KEPT_BYTES:
                kept += piece[:got]
            left -= got
        return Body(size_bytes, digest.hexdigest(), bytes(kept) if size_bytes <= KEPT_BYTES else None)

    def _reply(self, answer: Answer) -> None:
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.data) if answer.length is None else answer.length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.data)


def main() -> None:
    with Receiver(float(sys.argv[1])) as receiver:
        sys.stdout.write(f"{receiver.server_address[1]}\n")
        sys.stdout.flush()
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        sys.stdin.read()
        receiver.shutdown()


if __name__ == "__main__":
    main()
