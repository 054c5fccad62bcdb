"""How single values are taken apart and put together again: where they lie, forms, those of the standard library.

A *form* takes a value apart into simpler values (`reduce`) and makes an equal one from them (`rebuild`). The codec
encodes what `reduce` returns like any other value, so a form never deals with JSON.

Invariant: `rebuild` is fed from untrusted documents. It may raise anything on nonsense (the codec turns that into
`CorruptError`), but it must not allocate more than its input is large, import, open or call what the input names.
"""

from __future__ import annotations

import argparse
import array
import base64
import datetime as dt
import decimal
import pathlib
import random
import struct
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from surefoot.errors import UnsupportedStateError

MAX_DEPTH = 100
"""Levels of nesting that are kept. Each costs up to four interpreter frames, and the default limit is 1000."""

EXACT_INT = 2**53
"""Every reader of JSON keeps ints below this exact."""

TAG, PAYLOAD = "$", "v"
INT_WIDTHS = {"u1": "B", "u2": "H", "u4": "I", "i8": "q", "u8": "Q"}
"""Packed ints: the width's name to the array's type code, narrow first."""
FACTORIES: dict[str, type] = {
    kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, Counter)
}
"""What a defaultdict may make."""

Json: TypeAlias = Any
"""None, bool, int, finite float, str, and lists and string-keyed dicts of these."""

_SHOWN_KEY_CHARS = 60


class Verbatim(str):
    """A part of a path that is shown as it is."""

    __slots__ = ()


class At:
    """Where a value lies: a chain to the root, turned into text only when somebody has to read it."""

    __slots__ = ("_text", "depth", "owner", "parent", "part")

    def __init__(self, parent: At | None, part: object, owner: object) -> None:
        self.parent = parent
        self.part = part
        self.owner = owner  # the value that lies there, held so that ids along a chain are unique; None: nobody
        self.depth: int = 0 if parent is None else parent.depth + 1
        self._text = ""

    def inside(self) -> At:
        """The same place, one level deeper: what a value was taken apart into."""
        return At(self, Verbatim(""), None)

    def chain(self) -> list[At]:
        """From the root down to this one."""
        links: list[At] = []
        at: At | None = self
        while at is not None:
            links.append(at)
            at = at.parent
        return links[::-1]

    def __str__(self) -> str:
        if not self._text:  # kept, because many children of one container may ask
            self._text = (str(self.parent) if self.parent is not None else "") + _shown(self.part)
        return self._text


def _shown(part: object) -> str:
    if type(part) is Verbatim:
        return str(part)
    if type(part) is str and part.isidentifier():
        return f".{part}"
    if type(part) is str or type(part) is int:
        return f"[{ascii(part)[:_SHOWN_KEY_CHARS]}]"
    return f"[<{type_name(type(part))}>]"  # no repr: it would run the user's code


def type_name(kind: type) -> str:
    """The name of a class as a person knows it: ``int``, ``torch.Tensor``."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def refusal(at: At, value: object, why: str = "") -> UnsupportedStateError:
    """The error for a value that cannot be checkpointed, naming path, type, reason and remedy."""
    because = f" ({why})" if why else ""
    return UnsupportedStateError(
        f"{at}: a value of type {type_name(type(value))} cannot be checkpointed{because}: "
        "give the object that holds it a state_dict() of plain values, or leave it out"
    )


@dataclass(frozen=True, slots=True)
class Form:
    """How values of some type are kept.

    Invariant: `matches` accepts only what `rebuild(reduce(value, at))` gives back equal by type and value.
    """

    tag: str
    """Name in the document; must not be one of the codec's own."""
    matches: Callable[[object], bool]
    reduce: Callable[[Any, At], object]
    """(value, at) to simpler values. Raises `refusal(at, value, why)`."""
    rebuild: Callable[[Any], object]
    """What `reduce` returned (or any nonsense) back to a value."""


def to_base64(raw: bytes | bytearray) -> str:
    """Bytes as text."""
    return base64.b64encode(raw).decode("ascii")


def from_base64(text: object) -> bytes:
    """Text back to bytes; raises TypeError or ValueError on anything that is not base64 text."""
    if type(text) is not str:
        raise TypeError("base64 text expected")
    return base64.b64decode(text, validate=True)


def little_endian(items: array.array[int]) -> array.array[int]:
    """The array with its bytes in the document's order, or back from it."""
    if sys.byteorder == "big":
        items.byteswap()
    return items


def float_bits(value: float) -> str:
    """The 64 bits of a float in hexadecimal: keeps the sign and payload of a NaN."""
    return struct.pack(">d", value).hex()


def float_from_bits(text: str) -> float:
    """The float with these bits."""
    (value,) = struct.unpack(">d", bytes.fromhex(text))
    return float(value)


def int_from_hex(text: object) -> int:
    """Hexadecimal, because decimal text of more than 4300 digits is refused by Python, and slow."""
    if type(text) is not str:
        raise TypeError("hexadecimal text expected")
    return int(text, 16)


def _parts(*names: str) -> Callable[[Any], object]:
    return lambda value: {name: getattr(value, name) for name in names}


_DATE = ("year", "month", "day")
_TIME = ("hour", "minute", "second", "microsecond", "fold", "tzinfo")


def _zone_parts(value: dt.timezone) -> list[object]:
    # The name, if one was given, shows only in the pickle protocol's arguments.
    return list(value.__getinitargs__())  # type: ignore[attr-defined]


def _random(state: Any) -> random.Random:
    made = random.Random()
    made.setstate(state)
    return made


def _exact(
    tag: str, kind: type, reduce: Callable[[Any], object], rebuild: Callable[[Any], object]
) -> tuple[type, Form]:
    """A form for exactly this type, no subclass."""
    return kind, Form(tag, lambda value: type(value) is kind, lambda value, at: reduce(value), rebuild)


FORMS: dict[type, Form] = dict(
    [
        _exact("complex", complex, lambda v: [v.real, v.imag], lambda p: complex(*p)),
        _exact("range", range, lambda v: [v.start, v.stop, v.step], lambda p: range(*p)),
        _exact("decimal", decimal.Decimal, str, decimal.Decimal),
        _exact("datetime", dt.datetime, _parts(*_DATE, *_TIME), lambda p: dt.datetime(**p)),
        _exact("date", dt.date, _parts(*_DATE), lambda p: dt.date(**p)),
        _exact("time", dt.time, _parts(*_TIME), lambda p: dt.time(**p)),
        _exact("timedelta", dt.timedelta, lambda v: [v.days, v.seconds, v.microseconds], lambda p: dt.timedelta(*p)),
        _exact("timezone", dt.timezone, _zone_parts, lambda p: dt.timezone(*p)),
        _exact("path", pathlib.PosixPath, str, pathlib.PosixPath),
        _exact("pure_path", pathlib.PurePosixPath, str, pathlib.PurePosixPath),
        _exact("uuid", uuid.UUID, str, uuid.UUID),
        _exact("random", random.Random, random.Random.getstate, _random),
        _exact("namespace", argparse.Namespace, vars, lambda p: argparse.Namespace(**p)),
    ]
)
"""Types of the standard library that are kept beside the containers."""

FORMS_BY_TAG: dict[str, Form] = {form.tag: form for form in FORMS.values()}
