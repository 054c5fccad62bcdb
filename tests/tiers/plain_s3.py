"""A second, plain S3 client: what is really in the bucket, seen past the tier and its library."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import re
from datetime import UTC, datetime
from urllib.parse import quote

from surefoot.scenario.s3_server import BUCKET, S3Server

_SIGNED = "host;x-amz-content-sha256;x-amz-date"


class PlainS3:
    """Signature version 4 by hand (AWS, "Signature Version 4 signing process")."""

    def __init__(self, server: S3Server) -> None:
        self._server = server
        self._host = server.endpoint.removeprefix("http://")

    def read(self, path: str) -> bytes | None:
        """An object's bytes, or None if the store says that the key does not exist."""
        status, body = self._request("GET", f"/{BUCKET}/{path}")
        if status == 404 and b"<Code>NoSuchKey</Code>" in body:
            return None
        assert status == 200, body
        return body

    def write(self, path: str, data: bytes) -> None:
        status, body = self._request("PUT", f"/{BUCKET}/{path}", body=data)
        assert status == 200, body

    def keys(self, prefix: str) -> list[str]:
        return self._tags("Key", f"list-type=2&prefix={quote(prefix, safe='')}")

    def uploads(self, prefix: str) -> list[str]:
        """Keys of multipart uploads that were begun and neither completed nor aborted."""
        return [key for key in self._tags("Key", "uploads=") if key.startswith(prefix)]

    def _tags(self, tag: str, query: str) -> list[str]:
        status, body = self._request("GET", f"/{BUCKET}", query)
        assert status == 200, body
        assert b"<IsTruncated>true" not in body, "the test asks for too much"
        return re.findall(f"<{tag}>([^<]*)</{tag}>", body.decode())

    def _request(self, method: str, path: str, query: str = "", body: bytes = b"") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, timeout=30)
        try:
            url = quote(path) + (f"?{query}" if query else "")
            connection.request(method, url, body, self._signed(method, quote(path), query, body))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _signed(self, method: str, path: str, query: str, body: bytes) -> dict[str, str]:
        now = datetime.now(UTC)
        stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
        digest = hashlib.sha256(body).hexdigest()
        headers = f"host:{self._host}\nx-amz-content-sha256:{digest}\nx-amz-date:{stamp}\n"
        request = "\n".join([method, path, query, headers, _SIGNED, digest])
        scope = f"{day}/us-east-1/s3/aws4_request"
        to_sign = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(request.encode()).hexdigest()])
        key = f"AWS4{self._server.secret_key}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
        credential = f"Credential={self._server.access_key}/{scope}"
        return {
            "x-amz-date": stamp,
            "x-amz-content-sha256": digest,
            "Authorization": f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={_SIGNED}, Signature={signature}",
        }
