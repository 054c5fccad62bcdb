"""The bucket of the benchmark's own receiver: what S3's protocol says of objects, parts and conditions.

Small objects are kept whole. Of larger ones only size and hash are kept, so that a receiver needs no memory beside
the trainers'; they can be listed and asked for their size, not read.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

KEPT_BYTES = 1 << 20
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_WHEN = "2020-01-01T00:00:00.000Z"


@dataclass(frozen=True, slots=True)
class Body:
    """What came with a request, already held against the hash that the request names."""

    size_bytes: int
    sha256: str
    data: bytes | None
    """None if it was too large to be kept."""

    @property
    def etag(self) -> str:
        return f'"{self.sha256[:32]}"'


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    key: str
    query: Mapping[str, str]
    if_absent: bool
    body: Body

    @classmethod
    def parse(cls, method: str, target: str, headers: Mapping[str, str], body: Body) -> Request:
        """A path-style request: bucket first, then the key."""
        parts = urlsplit(target)
        _, _, key = parts.path.lstrip("/").partition("/")
        query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return cls(method, unquote(key), query, headers.get("if-none-match") == "*", body)


@dataclass(frozen=True, slots=True)
class Answer:
    status: HTTPStatus
    data: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    length: int | None = None
    """Content-Length where it is not that of `data`: the answer to HEAD."""


class Bucket:
    """Objects and uploads under way. Any thread may ask."""

    def __init__(self) -> None:
        self._objects: dict[str, Body] = {}
        self._uploads: dict[str, dict[int, Body]] = {}
        self._lock = threading.Lock()

    def answer(self, request: Request) -> Answer:
        """Do what a request asks."""
        with self._lock:
            if request.key:
                return self._object(request)
            if request.method == "POST" and "delete" in request.query:
                return self._delete_many(request.body)
            return self._listing(request.query) if request.method == "GET" else _refused("MethodNotAllowed")

    def _object(self, request: Request) -> Answer:
        upload = request.query.get("uploadId")
        if request.method == "POST":
            return self._begin() if upload is None else self._complete(request, upload)
        if request.method == "DELETE":
            (self._objects if upload is None else self._uploads).pop(request.key if upload is None else upload, None)
            return Answer(HTTPStatus.NO_CONTENT)
        if request.method == "PUT":
            return self._put(request) if upload is None else self._part(request, upload)
        return self._get(request)

    def _put(self, request: Request) -> Answer:
        if request.if_absent and request.key in self._objects:
            return _refused("PreconditionFailed")
        self._objects[request.key] = request.body
        return Answer(HTTPStatus.OK, headers=(("ETag", request.body.etag),))

    def _get(self, request: Request) -> Answer:
        found = self._objects.get(request.key)
        if found is None:
            return _refused("NoSuchKey")
        headers = (("ETag", found.etag), ("Last-Modified", "Wed, 01 Jan 2020 00:00:00 GMT"))
        if request.method == "HEAD":
            return Answer(HTTPStatus.OK, headers=headers, length=found.size_bytes)
        if found.data is None:
            return _refused("NotImplemented")
        return Answer(HTTPStatus.OK, found.data, headers)

    def _begin(self) -> Answer:
        upload = secrets.token_hex(16)
        self._uploads[upload] = {}
        return _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")

    def _part(self, request: Request, upload: str) -> Answer:
        if upload not in self._uploads:
            return _refused("NoSuchUpload")
        self._uploads[upload][int(request.query["partNumber"])] = request.body
        return Answer(HTTPStatus.OK, headers=(("ETag", request.body.etag),))

    def _complete(self, request: Request, upload: str) -> Answer:
        """The object is there only if exactly the parts that came are named, each with its own tag."""
        parts = self._uploads.get(upload)
        if parts is None:
            return _refused("NoSuchUpload")
        named = {
            int(_text(part, "PartNumber")): _text(part, "ETag").strip('"')
            for part in ElementTree.fromstring(request.body.data or b"")
        }
        if named != {number: part.etag.strip('"') for number, part in parts.items()}:
            return _refused("InvalidPart")
        del self._uploads[upload]
        size_bytes = sum(part.size_bytes for part in parts.values())
        whole = hashlib.sha256("".join(parts[number].sha256 for number in sorted(parts)).encode()).hexdigest()
        self._objects[request.key] = Body(size_bytes, whole, None)
        return _xml("CompleteMultipartUploadResult", f"<ETag>{escape(self._objects[request.key].etag)}</ETag>")

    def _delete_many(self, body: Body) -> Answer:
        root = ElementTree.fromstring(body.data or b"")
        keys = [element.text or "" for element in root.iter() if element.tag.endswith("Key")]
        for key in keys:
            self._objects.pop(key, None)
        return _xml("DeleteResult", "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys))

    def _listing(self, query: Mapping[str, str]) -> Answer:
        keys = [key for key in sorted(self._objects) if key.startswith(query.get("prefix", ""))]
        return _xml("ListBucketResult", f"<IsTruncated>false</IsTruncated>{''.join(map(self._listed, keys))}")

    def _listed(self, key: str) -> str:
        found = self._objects[key]
        return (
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_WHEN}</LastModified><ETag>{escape(found.etag)}</ETag>"
            f"<Size>{found.size_bytes}</Size></Contents>"
        )


_STATUSES = {
    "NoSuchKey": HTTPStatus.NOT_FOUND,
    "NoSuchUpload": HTTPStatus.NOT_FOUND,
    "PreconditionFailed": HTTPStatus.PRECONDITION_FAILED,
    "InvalidPart": HTTPStatus.BAD_REQUEST,
    "XAmzContentSHA256Mismatch": HTTPStatus.BAD_REQUEST,
    "MethodNotAllowed": HTTPStatus.METHOD_NOT_ALLOWED,
    "NotImplemented": HTTPStatus.NOT_IMPLEMENTED,
}


def _refused(code: str) -> Answer:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return Answer(_STATUSES[code], text.encode())


def mismatch() -> Answer:
    """The bytes that came are not those whose hash the request names."""
    return _refused("XAmzContentSHA256Mismatch")


def _xml(kind: str, inner: str) -> Answer:
    return Answer(HTTPStatus.OK, f'<?xml version="1.0"?><{kind} xmlns="{_NAMESPACE}">{inner}</{kind}>'.encode())


def _text(part: ElementTree.Element, name: str) -> str:
    return next(child.text or "" for child in part if child.tag.endswith(name))
