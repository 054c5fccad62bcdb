"""The walk from untrusted JSON back to values.

Invariant: nothing is imported, opened or called by a name in the document, nothing is allocated beyond the size of
the document, and nonsense of any sort is `CorruptError`.
"""

from __future__ import annotations

import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

from surefoot.core.values.classes import BUILDERS, put_together
from surefoot.core.values.forms import (
    EXACT_INT,
    FACTORIES,
    FORMS_BY_TAG,
    INT_WIDTHS,
    MAX_DEPTH,
    PAYLOAD,
    TAG,
    At,
    Form,
    Json,
    Verbatim,
    float_from_bits,
    from_base64,
    int_from_hex,
    little_endian,
    type_name,
)
from surefoot.errors import ConfigError, CorruptError, SurefootError

_MEMBERS = {TAG, PAYLOAD}
_ONLY_STR = {str}


def _is_plain(data: Json) -> bool:
    """A scalar that stands for itself. The hot path of every restore."""
    kind = type(data)
    if kind is int:
        return -EXACT_INT < data < EXACT_INT  # type: ignore[no-any-return]
    if kind is float:
        return isfinite(data)
    return kind is str or kind is bool or data is None


def decode(data: Json, path: str = "value", *, extras: Sequence[Form] = ()) -> Any:
    """The value that `encode` was given, made anew. Safe on hostile data: nothing is imported or called by name.

    Raises:
        CorruptError: the document breaks the format.
        UnsupportedStateError: the document is sound, but names a class (enum, named tuple, dataclass) that is not
            imported here or has changed, or a device that this machine lacks.
        ConfigError: two forms bear the same tag.
    """
    try:
        return Decoder(extras).any(data, At(None, Verbatim(path), None))
    except RecursionError as error:
        raise CorruptError(f"{path}: nested too deeply for the stack that is left here") from error


class Decoder:
    """One walk over one untrusted document."""

    __slots__ = ("_extras",)

    def __init__(self, extras: Sequence[Form]) -> None:
        self._extras = _by_tag(extras)

    def any(self, data: Json, at: At) -> Any:
        kind = type(data)
        if kind is dict:
            return self._tagged(data, at) if TAG in data else self._dict(data, at)
        if kind is list:
            return self._list(data, at)
        if _is_plain(data):
            return data
        raise CorruptError(f"{at}: a {type_name(kind)} that JSON does not keep exactly")

    def _deeper(self, at: At) -> None:
        if at.depth >= MAX_DEPTH:
            raise CorruptError(f"{at.chain()[8]}…: nested deeper than {MAX_DEPTH} levels")

    def _dict(self, data: dict[str, Json], at: At) -> dict[str, Any]:
        self._deeper(at)
        if not set(map(type, data)) <= _ONLY_STR:
            raise CorruptError(f"{at}: a member whose name is not a string")
        return {key: item if _is_plain(item) else self.any(item, At(at, key, None)) for key, item in data.items()}

    def _list(self, data: list[Json], at: At) -> list[Any]:
        self._deeper(at)
        return [item if _is_plain(item) else self.any(item, At(at, index, None)) for index, item in enumerate(data)]

    def _tagged(self, data: dict[str, Json], at: At) -> Any:
        self._deeper(at)
        tag = data[TAG]
        if data.keys() != _MEMBERS or type(tag) is not str:
            raise CorruptError(f"{at}: a tagged value has exactly the members {TAG!r} (text) and {PAYLOAD!r}")
        try:
            return self._form(tag, data[PAYLOAD], at)
        except (SurefootError, MemoryError):  # a machine short of memory does not make the document bad
            raise
        except Exception as error:
            # Nonsense may raise anything in a constructor: the caller gets a CorruptError with the cause.
            raise CorruptError(f"{at}: not a {ascii(tag)[1:-1]}: {error}") from error

    def _form(self, tag: str, payload: Json, at: At) -> Any:
        reader = _READERS.get(tag)
        if reader is not None:
            return reader(self, payload, at)
        if tag in BUILDERS:
            module, qualname, parts = payload
            fields = parts if type(parts) is str else self._dict(parts, at)
            return put_together(tag, module, qualname, fields, at)
        form = FORMS_BY_TAG.get(tag) or self._extras.get(tag)
        if form is None:
            raise CorruptError(f"{at}: unknown tag {tag!a}")
        return form.rebuild(self.any(payload, at.inside()))

    def _items(self, payload: Json, at: At) -> list[Any]:
        """The list inside a tagged value: plain, or packed ints."""
        if type(payload) is dict and payload.get(TAG) == "ints":
            return _unpacked(payload[PAYLOAD])
        if type(payload) is not list:
            raise TypeError("a list expected")
        return self._list(payload, at)

    def _pairs(self, payload: Json, at: At) -> list[tuple[Any, Any]]:
        if type(payload) is not list:
            raise TypeError("a list of pairs expected")
        pairs: list[tuple[Any, Any]] = []
        for index, (key, item) in enumerate(payload):
            name = self.any(key, At(at, Verbatim(f".keys()[{index}]"), None))
            pairs.append((name, self.any(item, At(at, name, None))))
        return pairs

    def _pair_dict(self, payload: Json, at: At) -> dict[Any, Any]:
        pairs = self._pairs(payload, at)
        members = dict(pairs)
        if len(members) != len(pairs):
            raise ValueError("a key occurs twice")
        return members

    def _ordered_dict(self, payload: Json, at: At) -> OrderedDict[Any, Any]:
        pairs, attributes = payload
        members = OrderedDict(self._pair_dict(pairs, at))
        vars(members).update(self._attributes(attributes, at))
        return members

    def _counter(self, payload: Json, at: At) -> Counter[Any]:
        counter: Counter[Any] = Counter()
        dict.update(counter, self._pair_dict(payload, at))  # Counter.update would add
        return counter

    def _attributes(self, attributes: Json, at: At) -> dict[str, Any]:
        if attributes is None:
            return {}
        if type(attributes) is not dict or TAG in attributes:
            raise TypeError("attributes are named by strings")
        return self._dict(attributes, at)

    def _defaultdict(self, payload: Json, at: At) -> defaultdict[Any, Any]:
        name, pairs = payload
        factory = None if name is None else FACTORIES[name]
        return defaultdict(factory, self._pair_dict(pairs, at))

    def _deque(self, payload: Json, at: At) -> deque[Any]:
        maxlen, items = payload
        values = self._items(items, at)
        if maxlen is not None and len(values) > maxlen:
            raise ValueError("longer than its greatest length")
        return deque(values, maxlen)

    def _set(self, payload: Json, at: At) -> set[Any]:
        items = self._items(payload, at)
        values = set(items)
        if len(values) != len(items):
            raise ValueError("an element occurs twice")
        return values


def _by_tag(extras: Sequence[Form]) -> dict[str, Form]:
    table = {form.tag: form for form in extras}
    taken = [tag for tag in table if tag in _READERS or tag in FORMS_BY_TAG or tag in BUILDERS]
    if taken or len(table) != len(extras):
        raise ConfigError(f"two forms of values bear one tag, among {', '.join(sorted(table))}: rename one")
    return table


def _unpacked(payload: Json) -> list[int]:
    width, text = payload
    items: array.array[int] = array.array(INT_WIDTHS[width])
    items.frombytes(from_base64(text))
    return little_endian(items).tolist()


_READERS: dict[str, Callable[[Decoder, Json, At], Any]] = {
    "int": lambda decoder, payload, at: int_from_hex(payload),
    "float": lambda decoder, payload, at: float_from_bits(payload),
    "str": lambda decoder, payload, at: from_base64(payload).decode("utf-8", "surrogatepass"),
    "bytes": lambda decoder, payload, at: from_base64(payload),
    "bytearray": lambda decoder, payload, at: bytearray(from_base64(payload)),
    "ints": lambda decoder, payload, at: _unpacked(payload),
    "tuple": lambda decoder, payload, at: tuple(decoder._items(payload, at)),
    "set": Decoder._set,
    "frozenset": lambda decoder, payload, at: frozenset(decoder._set(payload, at)),
    "dict": Decoder._pair_dict,
    "ordered_dict": Decoder._ordered_dict,
    "counter": Decoder._counter,
    "defaultdict": Decoder._defaultdict,
    "deque": Decoder._deque,
}
