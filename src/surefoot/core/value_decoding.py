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

from surefoot.core.value_classes import CLASS_TAGS, put_together
from surefoot.core.value_forms import (
    EXACT_INT,
    FACTORIES,
    FORMS_BY_TAG,
    INT_WIDTHS,
    MAX_DEPTH,
    PAYLOAD,
    TAG,
    Extra,
    Json,
    LeafReader,
    Place,
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


class Decoder:
    """One walk over one untrusted document."""

    __slots__ = ("_extras", "_leaf")

    def __init__(self, extras: Sequence[Extra], leaf: LeafReader | None) -> None:
        self._extras = _by_tag(extras)
        self._leaf = leaf

    def any(self, data: Json, place: Place) -> Any:
        kind = type(data)
        if kind is dict:
            return self._tagged(data, place) if TAG in data else self._dict(data, place)
        if kind is list:
            return self._list(data, place)
        if _is_plain(data):
            return data
        raise CorruptError(f"{place}: a {type_name(kind)} that JSON does not keep exactly")

    def _deeper(self, place: Place) -> None:
        if place.depth >= MAX_DEPTH:
            raise CorruptError(f"{place.chain()[8]}…: nested deeper than {MAX_DEPTH} levels")

    def _dict(self, data: dict[str, Json], place: Place) -> dict[str, Any]:
        self._deeper(place)
        if not set(map(type, data)) <= _ONLY_STR:
            raise CorruptError(f"{place}: a member whose name is no string")
        return {key: item if _is_plain(item) else self.any(item, Place(place, key, None)) for key, item in data.items()}

    def _list(self, data: list[Json], place: Place) -> list[Any]:
        self._deeper(place)
        return [
            item if _is_plain(item) else self.any(item, Place(place, index, None)) for index, item in enumerate(data)
        ]

    def _tagged(self, data: dict[str, Json], place: Place) -> Any:
        self._deeper(place)
        tag = data[TAG]
        if data.keys() != _MEMBERS or type(tag) is not str:
            raise CorruptError(f"{place}: a tagged value has exactly the members {TAG!r} (text) and {PAYLOAD!r}")
        try:
            return self._form(tag, data[PAYLOAD], place)
        except (SurefootError, MemoryError):  # a machine short of memory does not make the document bad
            raise
        except Exception as error:
            # Whatever nonsense trips in a constructor: the caller hears of it as CorruptError, with the cause.
            raise CorruptError(f"{place}: not a {ascii(tag)[1:-1]}: {error}") from error

    def _form(self, tag: str, payload: Json, place: Place) -> Any:
        reader = _READERS.get(tag)
        if reader is not None:
            return reader(self, payload, place)
        if tag in CLASS_TAGS:
            module, qualname, parts = payload
            fields = parts if type(parts) is str else self._dict(parts, place)
            return put_together(tag, module, qualname, fields, place)
        form = FORMS_BY_TAG.get(tag) or self._extras.get(tag)
        if form is None:
            raise CorruptError(f"{place}: unknown tag {tag!a}")
        return form.rebuild(self.any(payload, place.inside()))

    def _reference(self, payload: Json, place: Place) -> object:
        if self._leaf is None:
            raise CorruptError(f"{place}: a reference, where only plain values are expected")
        return self._leaf(payload)

    def _items(self, payload: Json, place: Place) -> list[Any]:
        """The list inside a tagged value: plain, or packed ints."""
        if type(payload) is dict and payload.get(TAG) == "ints":
            return _unpacked(payload[PAYLOAD])
        if type(payload) is not list:
            raise TypeError("a list expected")
        return self._list(payload, place)

    def _pairs(self, payload: Json, place: Place) -> list[tuple[Any, Any]]:
        if type(payload) is not list:
            raise TypeError("a list of pairs expected")
        pairs: list[tuple[Any, Any]] = []
        for index, (key, item) in enumerate(payload):
            name = self.any(key, Place(place, Verbatim(f".keys()[{index}]"), None))
            pairs.append((name, self.any(item, Place(place, name, None))))
        return pairs

    def _pair_dict(self, payload: Json, place: Place) -> dict[Any, Any]:
        pairs = self._pairs(payload, place)
        members = dict(pairs)
        if len(members) != len(pairs):
            raise ValueError("a key occurs twice")
        return members

    def _ordered_dict(self, payload: Json, place: Place) -> OrderedDict[Any, Any]:
        pairs, attributes = payload
        members = OrderedDict(self._pair_dict(pairs, place))
        vars(members).update(self._attributes(attributes, place))
        return members

    def _counter(self, payload: Json, place: Place) -> Counter[Any]:
        pairs, attributes = payload
        counter: Counter[Any] = Counter()
        dict.update(counter, self._pair_dict(pairs, place))  # Counter.update would add
        vars(counter).update(self._attributes(attributes, place))
        return counter

    def _attributes(self, attributes: Json, place: Place) -> dict[str, Any]:
        if attributes is None:
            return {}
        if type(attributes) is not dict or TAG in attributes:
            raise TypeError("attributes are named by strings")
        return self._dict(attributes, place)

    def _defaultdict(self, payload: Json, place: Place) -> defaultdict[Any, Any]:
        name, pairs = payload
        factory = None if name is None else FACTORIES[name]
        return defaultdict(factory, self._pair_dict(pairs, place))

    def _deque(self, payload: Json, place: Place) -> deque[Any]:
        maxlen, items = payload
        values = self._items(items, place)
        if maxlen is not None and len(values) > maxlen:
            raise ValueError("longer than its greatest length")
        return deque(values, maxlen)

    def _set(self, payload: Json, place: Place) -> set[Any]:
        items = self._items(payload, place)
        values = set(items)
        if len(values) != len(items):
            raise ValueError("an element occurs twice")
        return values


def _by_tag(extras: Sequence[Extra]) -> dict[str, Extra]:
    table = {extra.tag: extra for extra in extras}
    taken = [tag for tag in table if tag in _READERS or tag in FORMS_BY_TAG or tag in CLASS_TAGS]
    if taken or len(table) != len(extras):
        raise ConfigError(f"two forms of values bear one tag, among {', '.join(sorted(table))}: rename one")
    return table


def _unpacked(payload: Json) -> list[int]:
    width, text = payload
    items: array.array[int] = array.array(INT_WIDTHS[width])
    items.frombytes(from_base64(text))
    return little_endian(items).tolist()


_READERS: dict[str, Callable[[Decoder, Json, Place], Any]] = {
    "int": lambda decoder, payload, place: int_from_hex(payload),
    "float": lambda decoder, payload, place: float_from_bits(payload),
    "str": lambda decoder, payload, place: from_base64(payload).decode("utf-8", "surrogatepass"),
    "bytes": lambda decoder, payload, place: from_base64(payload),
    "bytearray": lambda decoder, payload, place: bytearray(from_base64(payload)),
    "ints": lambda decoder, payload, place: _unpacked(payload),
    "tuple": lambda decoder, payload, place: tuple(decoder._items(payload, place)),
    "set": Decoder._set,
    "frozenset": lambda decoder, payload, place: frozenset(decoder._set(payload, place)),
    "dict": Decoder._pair_dict,
    "ordered_dict": Decoder._ordered_dict,
    "counter": Decoder._counter,
    "defaultdict": Decoder._defaultdict,
    "deque": Decoder._deque,
    "leaf": Decoder._reference,
}
