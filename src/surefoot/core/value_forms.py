"""How single values are taken apart and put together again: places, forms, and the forms of the standard library.

A *form* takes a value apart into simpler values (`reduce`) and makes an equal one from them (`rebuild`). The codec
(`surefoot.core.values`) encodes what `reduce` returns like any other value, so a form never deals with JSON.

Invariant: `rebuild` is fed from untrusted documents. It may raise anything on nonsense (the codec turns that into
`CorruptError`), but it must not allocate more than its input is large, import, open or call what the input names.
"""

from __future__ import annotations

import array
import base64
import datetime as dt
import decimal
import fractions
import pathlib
import struct
import sys
import types
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
LeafWriter: TypeAlias = Callable[[object, str], Json | None]
"""(value, path) to a reference, or None for "not mine"."""
LeafReader: TypeAlias = Callable[[Json], object]
"""A reference back to the value."""

_SHOWN_KEY_CHARS = 60


class Verbatim(str):
    """A part of a place that is shown as it is."""

    __slots__ = ()


class Place:
    """Where a value lies: a chain to the root, turned into text only when somebody has to read it."""

    __slots__ = ("_text", "depth", "owner", "parent", "part")

    def __init__(self, parent: Place | None, part: object, owner: object) -> None:
        self.parent = parent
        self.part = part
        self.owner = owner  # the value at this place, held so that ids along a chain are unique; None: nobody
        self.depth: int = 0 if parent is None else parent.depth + 1
        self._text = ""

    def inside(self) -> Place:
        """The same place, one level deeper: what a value was taken apart into."""
        return Place(self, Verbatim(""), None)

    def chain(self) -> list[Place]:
        """Every place from the root down to this one."""
        places: list[Place] = []
        place: Place | None = self
        while place is not None:
            places.append(place)
            place = place.parent
        return places[::-1]

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


def refusal(place: Place, value: object, why: str = "") -> UnsupportedStateError:
    """The error for a value that cannot be kept, naming place, type, reason and remedy."""
    because = f" ({why})" if why else ""
    return UnsupportedStateError(
        f"{place}: a value of type {type_name(type(value))} cannot be kept{because}: "
        "give the object that holds it a state_dict() of plain values, or leave it out"
    )


@dataclass(frozen=True, slots=True)
class Extra:
    """A form that the codec is given beside its own.

    Invariant: `matches` accepts only what `rebuild(reduce(value, place))` gives back equal by type and value.
    """

    tag: str
    """Name in the document; must not be one of the codec's own."""
    matches: Callable[[object], bool]
    reduce: Callable[[Any, Place], object]
    """(value, place) to simpler values. Raises `refusal(place, value, why)`."""
    rebuild: Callable[[Any], object]
    """What `reduce` returned (or any nonsense) back to a value."""


def exact(
    kind: type, tag: str, reduce: Callable[[Any], object], rebuild: Callable[[Any], object]
) -> tuple[type, Extra]:
    """A form for exactly this type, no subclass."""

    def is_kind(value: object) -> bool:
        return type(value) is kind

    def reduced(value: Any, place: Place) -> object:
        return reduce(value)

    return kind, Extra(tag, is_kind, reduced, rebuild)


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


def _time_parts(value: dt.time | dt.datetime) -> dict[str, object]:
    return {
        "hour": value.hour,
        "minute": value.minute,
        "second": value.second,
        "microsecond": value.microsecond,
        "fold": value.fold,
        "tzinfo": value.tzinfo,
    }


def _date_parts(value: dt.date) -> dict[str, object]:
    return {"year": value.year, "month": value.month, "day": value.day}


def _zone_parts(value: dt.timezone) -> list[object]:
    # The name, if one was given, shows only in the pickle protocol's arguments.
    return list(value.__getinitargs__())  # type: ignore[attr-defined]


def _uuid(parts: Any) -> uuid.UUID:
    number, safe = parts
    return uuid.UUID(int=number, is_safe=uuid.SafeUUID(safe))


_NOTHING: Callable[[Any], object] = lambda value: None  # noqa: E731

FORMS: dict[type, Extra] = dict(
    [
        exact(complex, "complex", lambda v: [v.real, v.imag], lambda p: complex(*p)),
        exact(range, "range", lambda v: [v.start, v.stop, v.step], lambda p: range(*p)),
        exact(
            slice,
            "slice",
            lambda v: {"start": v.start, "stop": v.stop, "step": v.step},
            lambda p: slice(p["start"], p["stop"], p["step"]),
        ),
        exact(types.EllipsisType, "ellipsis", _NOTHING, lambda p: ...),
        exact(decimal.Decimal, "decimal", str, decimal.Decimal),
        exact(
            fractions.Fraction,
            "fraction",
            lambda v: [v.numerator, v.denominator],
            lambda p: fractions.Fraction(*p),
        ),
        exact(
            dt.datetime,
            "datetime",
            lambda v: _date_parts(v) | _time_parts(v),
            lambda p: dt.datetime(**p),
        ),
        exact(dt.date, "date", _date_parts, lambda p: dt.date(**p)),
        exact(dt.time, "time", _time_parts, lambda p: dt.time(**p)),
        exact(
            dt.timedelta,
            "timedelta",
            lambda v: [v.days, v.seconds, v.microseconds],
            lambda p: dt.timedelta(*p),
        ),
        exact(dt.timezone, "timezone", _zone_parts, lambda p: dt.timezone(*p)),
        exact(pathlib.PosixPath, "path", str, pathlib.PosixPath),
        exact(pathlib.PurePosixPath, "pure_path", str, pathlib.PurePosixPath),
        exact(uuid.UUID, "uuid", lambda v: [v.int, v.is_safe.value], _uuid),
    ]
)
"""Types of the standard library without children of arbitrary type (a slice excepted)."""

FORMS_BY_TAG: dict[str, Extra] = {form.tag: form for form in FORMS.values()}
