"""Small documents that a run keeps: JSON with a hash over its exact bytes.

    {"blake2b":"<32 hex digits>","body":<JSON text>}

The hash is BLAKE2b-128 of the body's bytes as they stand in the file. The fixed frame lets a reader cut the body
out without re-serialising it, and any JSON reader opens the whole.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from math import isfinite
from typing import Any, NoReturn

from surefoot.errors import CorruptError, FormatError

FORMAT_VERSION = 2
"""Version of everything that a run keeps, in its place and in memory. A reader refuses any other."""

_HEAD = b'{"blake2b":"'
_MIDDLE = b'","body":'
_TAIL = b"}\n"
_HASH_BYTES = 16
_LARGEST = sys.float_info.max


def digest(data: bytes) -> str:
    """BLAKE2b-128 of `data`, as 32 hex digits."""
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).hexdigest()


def compact(body: Any) -> bytes:
    """JSON as Surefoot writes it: compact, ASCII, insertion order, no NaN."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")


def parse_json(text: bytes | str, what: str) -> Any:
    """The value of a JSON text (UTF-8) that somebody else wrote.

    Stricter than `json.loads`: no NaN, no infinity and no number that would turn into one, since they could not be
    written back.

    Raises:
        CorruptError: it is not such a text, or nested too deeply to be read.
    """
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        return json.loads(decoded, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{what}: not JSON: {error}") from error


def seal(body: dict[str, Any]) -> bytes:
    """A document holding `body` and the hash of its bytes."""
    text = compact({"format": FORMAT_VERSION, **body})
    return _HEAD + digest(text).encode("ascii") + _MIDDLE + text + _TAIL


def unseal(data: bytes, what: str) -> dict[str, Any]:
    """The body of a document.

    Args:
        data: the document's bytes.
        what: its key, for messages.

    Raises:
        CorruptError: it is not whole, or its hash does not match.
        FormatError: it is of another format.
    """
    start = len(_HEAD) + 2 * _HASH_BYTES + len(_MIDDLE)
    framed = data.startswith(_HEAD) and data[start - len(_MIDDLE) : start] == _MIDDLE and data.endswith(_TAIL)
    text = data[start : -len(_TAIL)]
    if not framed or digest(text).encode("ascii") != data[len(_HEAD) : start - len(_MIDDLE)]:
        raise CorruptError(f"{what}: not a whole document (its hash does not match its {len(data)} bytes)")
    body = parse_json(text, what)
    if type(body) is not dict or type(body.get("format")) is not int or body["format"] < 1:
        raise CorruptError(f"{what}: not a Surefoot document")
    if body["format"] != FORMAT_VERSION:
        raise FormatError(
            f"{what}: written in format {body['format']}, and this surefoot reads and writes format {FORMAT_VERSION}: "
            "go on with the version of surefoot that wrote it, or start a new run at another place"
        )
    return body


class Fields:
    """Typed access to a document's fields; whatever is missing or of another type is a `CorruptError`."""

    def __init__(self, body: Any, what: str) -> None:
        self._body = body
        self._what = what

    @property
    def body(self) -> dict[str, Any]:
        """All fields as they stand."""
        if type(self._body) is not dict:
            raise CorruptError(f"{self._what}: not an object")
        return self._body

    def integer(self, name: str, minimum: int = 0) -> int:
        value = self._field(name)
        if type(value) is not int or value < minimum:
            raise self._wrong(name, f"an integer of at least {minimum}")
        return value

    def number(self, name: str) -> float:
        value = self._field(name)
        if type(value) not in (int, float) or not abs(value) <= _LARGEST:
            raise self._wrong(name, "a finite number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._field(name)
        if type(value) is not bool:
            raise self._wrong(name, "true or false")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self._optional(name) is None else self.integer(name)

    def optional_number(self, name: str) -> float | None:
        return None if self._optional(name) is None else self.number(name)

    def text(self, name: str) -> str:
        value = self._field(name)
        if type(value) is not str:
            raise self._wrong(name, "a string")
        return value

    def binary(self, name: str) -> bytes:
        """What stands there in base64."""
        try:
            return base64.b64decode(self.text(name), validate=True)
        except ValueError as error:
            raise CorruptError(f"{self._what}: {name}: {error}") from error

    def optional_text(self, name: str) -> str | None:
        return None if self._optional(name) is None else self.text(name)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._field(name)
        if type(value) is not dict:
            raise self._wrong(name, "an object")
        return value

    def optional_mapping(self, name: str) -> dict[str, Any] | None:
        return None if self._optional(name) is None else self.mapping(name)

    def items(self, name: str) -> list[Any]:
        value = self._field(name)
        if type(value) is not list:
            raise self._wrong(name, "a list")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        values = self.items(name)
        if any(type(value) is not int or value < 0 for value in values):
            raise self._wrong(name, "a list of non-negative integers")
        return tuple(values)

    def raw(self, name: str) -> Any:
        return self._field(name)

    def _field(self, name: str) -> Any:
        if type(self._body) is not dict or name not in self._body:
            raise CorruptError(f"{self._what}: field {name!r} is missing")
        return self._body[name]

    def _optional(self, name: str) -> Any:
        return self._body.get(name) if type(self._body) is dict else None

    def _wrong(self, name: str, wanted: str) -> CorruptError:
        return CorruptError(f"{self._what}: field {name!r} is not {wanted}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value
