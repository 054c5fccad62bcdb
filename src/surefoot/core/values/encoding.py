"""The walk from values to JSON; `surefoot.core.values` lists what it writes.

Invariant: every refusal is raised here, with the full path, and what is returned can be written and read back.
"""

from __future__ import annotations

import array
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import Any

from surefoot.core.values.classes import take_apart
from surefoot.core.values.forms import (
    EXACT_INT,
    FACTORIES,
    FORMS,
    INT_WIDTHS,
    MAX_DEPTH,
    PAYLOAD,
    TAG,
    At,
    Form,
    Json,
    Verbatim,
    float_bits,
    little_endian,
    refusal,
    to_base64,
    type_name,
)
from surefoot.errors import UnsupportedStateError

_COMPACT_ITEMS = 64
_ONLY_STR = {str}
_MISS = object()

write = json.JSONEncoder(allow_nan=False, separators=(",", ":"), check_circular=False).encode
"""Encoded values as ASCII text without blanks."""


def _tagged(tag: str, payload: Json) -> Json:
    return {TAG: tag, PAYLOAD: payload}


def _plain(value: object) -> Json:
    """A scalar as JSON, or `_MISS` for everything else. The hot path of every save."""
    kind = type(value)
    if kind is float:
        return value if isfinite(value) else _tagged("float", float_bits(value))  # type: ignore[arg-type]
    if kind is int:
        small = -EXACT_INT < value < EXACT_INT  # type: ignore[operator]
        return value if small else _tagged("int", f"{value:x}")
    if kind is str:
        return value if value.isascii() else _text(value)  # type: ignore[attr-defined,arg-type]
    if value is None or kind is bool:
        return value
    return _MISS


def _text(value: str) -> Json:
    # Two lone surrogates side by side would come back from JSON as one character.
    return value if _is_text(value) else _tagged("str", to_base64(value.encode("utf-8", "surrogatepass")))


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _alike(values: Sequence[Any]) -> Json:
    """A long sequence of scalars of one type at the speed of C, or `_MISS`."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return _packed(values)
    if kinds == {float} and all(map(isfinite, values)):
        return list(values)
    if kinds == _ONLY_STR and all(map(str.isascii, values)):
        return list(values)
    return _MISS


def _packed(values: Sequence[int]) -> Json:
    for width, code in INT_WIDTHS.items():  # narrow first: what does not fit mostly shows at once
        try:
            items = array.array(code, values)
        except OverflowError:
            continue
        return _tagged("ints", [width, to_base64(little_endian(items).tobytes())])
    return _MISS


def _has_plain_keys(value: dict[Any, Any]) -> bool:
    if not set(map(type, value)) <= _ONLY_STR or TAG in value:
        return False
    return all(map(str.isascii, value)) or all(map(_is_text, value))


def encode(value: object, path: str, *, extras: Sequence[Form] = ()) -> Json:
    """A value as JSON, in new lists and dicts.

    Args:
        value: what to keep. It is read, never called (a form in `extras` may call its own types).
        path: the value's name, with which every refusal begins.
        extras: forms for types that the standard library does not know.

    Raises:
        UnsupportedStateError: something in it cannot be checkpointed; the message names its path and type.
    """
    try:
        return Encoder(extras).child(value, None, Verbatim(path))
    except RecursionError as error:
        raise UnsupportedStateError(f"{path}: nested too deeply for the stack that is left here") from error


class Encoder:
    """One walk over one value."""

    __slots__ = ("_extras",)

    def __init__(self, extras: Sequence[Form]) -> None:
        self._extras = extras

    def child(self, value: object, parent: At | None, part: object) -> Json:
        plain = _plain(value)
        return plain if plain is not _MISS else self._any(value, At(parent, part, value))

    def _any(self, value: Any, at: At) -> Json:
        if at.depth >= MAX_DEPTH:
            raise _too_deep(at)
        kind = type(value)
        if kind is dict:
            return self._dict(value, at)
        if kind is list:
            return self._list(value, at)
        if kind is tuple:
            return _tagged("tuple", self._list(value, at))
        return self._other(value, kind, at)

    def _other(self, value: Any, kind: type, at: At) -> Json:
        container = _CONTAINERS.get(kind)
        if container is not None:
            return _tagged(container[0], container[1](self, value, at))
        form = FORMS.get(kind) or next((extra for extra in self._extras if extra.matches(value)), None)
        if form is not None:
            return _tagged(form.tag, self._inner(form.reduce(value, at), at))
        named = take_apart(value, at)
        if named is not None:
            tag, parts = named
            return _tagged(tag, [kind.__module__, kind.__qualname__, self._parts(parts, at)])
        raise refusal(at, value, _why_not(value))

    def _inner(self, reduced: object, at: At) -> Json:
        plain = _plain(reduced)
        return plain if plain is not _MISS else self._any(reduced, at.inside())

    def _parts(self, parts: Any, at: At) -> Json:
        return parts if type(parts) is str else self._dict(parts, at)

    def _list(self, values: Sequence[object], at: At) -> Json:
        if len(values) > _COMPACT_ITEMS:
            alike = _alike(values)
            if alike is not _MISS:
                return alike
        return self._items(values, at)

    def _items(self, values: Iterable[object], at: At) -> list[Json]:
        items: list[Json] = []
        for index, value in enumerate(values):
            plain = _plain(value)
            items.append(plain if plain is not _MISS else self._any(value, At(at, index, value)))
        return items

    def _dict(self, value: dict[Any, Any], at: At) -> Json:
        if not _has_plain_keys(value):
            return _tagged("dict", self._pairs(value, at))
        members: dict[str, Json] = {}
        for key, item in value.items():
            plain = _plain(item)
            members[key] = plain if plain is not _MISS else self._any(item, At(at, key, item))
        return members

    def _pairs(self, value: dict[Any, Any], at: At) -> list[Json]:
        pairs: list[Json] = []
        for index, (key, item) in enumerate(value.items()):
            pair = [self.child(key, at, Verbatim(f".keys()[{index}]")), self.child(item, at, key)]
            pairs.append(pair)
        return pairs

    def _with_attributes(self, value: Any, at: At) -> Json:
        # A module's state_dict() is an OrderedDict that carries versions in an attribute of its own.
        pairs = self._pairs(value, at)
        return [pairs, self._dict(vars(value), at) if vars(value) else None]

    def _set(self, values: Any, at: At) -> Json:
        if set(map(type, values)) == {int}:
            return self._list(sorted(values), at)
        items = [self.child(item, at, Verbatim(f"{{{i}}}")) for i, item in enumerate(values)]
        return sorted(items, key=write)

    def _defaultdict(self, value: defaultdict[Any, Any], at: At) -> Json:
        factory = value.default_factory
        name = next((name for name, kind in FACTORIES.items() if kind is factory), None)
        if name is None and factory is not None:
            raise refusal(at, value, f"its factory is none of {', '.join(FACTORIES)}")
        return [name, self._pairs(value, at)]

    def _deque(self, value: deque[Any], at: At) -> Json:
        return [value.maxlen, self._list(list(value), at)]


def _bytes(encoder: Encoder, value: bytes | bytearray, at: At) -> Json:
    return to_base64(value)


_CONTAINERS: dict[type, tuple[str, Callable[[Encoder, Any, At], Json]]] = {
    bytes: ("bytes", _bytes),
    bytearray: ("bytearray", _bytes),
    OrderedDict: ("ordered_dict", Encoder._with_attributes),
    Counter: ("counter", Encoder._pairs),
    defaultdict: ("defaultdict", Encoder._defaultdict),
    deque: ("deque", Encoder._deque),
    set: ("set", Encoder._set),
    frozenset: ("frozenset", Encoder._set),
}

_BUILT_IN = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, deque)


def _why_not(value: object) -> str:
    for kind in _BUILT_IN:
        if isinstance(value, kind):
            return f"a subclass of {kind.__name__}: convert it to a plain {kind.__name__} if that is all it means"
    return ""


def _too_deep(at: At) -> UnsupportedStateError:
    """A cycle is looked for only here: without one, nobody pays for the search."""
    seen: dict[int, At] = {}
    for here in at.chain():
        if here.owner is None:
            continue
        first = seen.setdefault(id(here.owner), here)
        if first is not here:
            name = type_name(type(here.owner))
            return UnsupportedStateError(
                f"{here}: this {name} is {first} again: a value that contains itself cannot be checkpointed"
            )
    # The chain would fill pages: its beginning shows where.
    start = at.chain()[min(8, at.depth)]
    return UnsupportedStateError(f"{start}…: nested deeper than {MAX_DEPTH} levels: flatten it, or leave it out")
