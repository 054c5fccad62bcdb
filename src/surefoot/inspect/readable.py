"""Kept values as a person reads them. Shows any document, also one whose classes are not installed here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from surefoot.core.values import decode
from surefoot.errors import SurefootError

_SHOWN_ITEMS = 8
_SHOWN_CHARS = 120
_SHOWN_BYTES = 16
_TAG, _PAYLOAD = "$", "v"
_BRACKETS = {"tuple": "()", "set": "{}", "frozenset": "{}", "deque": "[]"}
_EXACT = {"int", "float", "bytes", "bytearray", "decimal", "date", "datetime", "time", "timedelta", "path"}
"""Small values of the standard library, shown as they are."""


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """An encoded value as (path, encoded leaf): mappings and lists of mappings are taken apart."""
    if type(value) is dict and _TAG not in value and value:
        for key, child in value.items():
            yield from leaves(child, f"{path}.{key}")
    elif type(value) is list and any(type(item) is dict and _TAG not in item for item in value):
        for index, child in enumerate(value):
            yield from leaves(child, f"{path}[{index}]")
    else:
        yield path, value


def readable(value: Any) -> str:
    """An encoded value as short text: long values are cut, and the cut is marked."""
    if type(value) is list:
        return _sequence(value, "[]")
    if type(value) is not dict:
        return _cut(repr(value))
    if _TAG not in value:
        return _pairs([[key, child] for key, child in value.items()])
    return _tagged(str(value[_TAG]), value.get(_PAYLOAD))


def _tagged(tag: str, payload: Any) -> str:
    if tag == "ints" and type(payload) is list and len(payload) == 2:
        return _packed(tag, payload)
    if tag in _EXACT:
        return _exact(tag, payload)
    if tag in _BRACKETS:
        return _bracketed(tag, payload)
    if tag == "dict" and type(payload) is list:
        return _pairs(payload)
    text = readable(payload)
    return f"<{tag} {text}>" if len(text) <= _SHOWN_CHARS else f"<{tag} {text[:_SHOWN_CHARS]}…>"


def _bracketed(tag: str, payload: Any) -> str:
    """A deque is [greatest length, items]; the others are their items. Many small ints are packed."""
    items = payload[1] if tag == "deque" and type(payload) is list and len(payload) == 2 else payload
    if type(items) is dict and items.get(_TAG) == "ints":
        items = _numbers(items.get(_PAYLOAD))
    return _sequence(items, _BRACKETS[tag]) if type(items) is list else f"<{tag}>"


def _packed(tag: str, payload: list[Any]) -> str:
    numbers = _numbers(payload)
    return f"<{tag}>" if numbers is None else _sequence(numbers, "[]")


def _numbers(payload: Any) -> list[Any] | None:
    try:
        numbers = decode({_TAG: "ints", _PAYLOAD: payload})
    except SurefootError:
        return None
    return numbers if type(numbers) is list else None


def _exact(tag: str, payload: Any) -> str:
    try:
        value = decode({_TAG: tag, _PAYLOAD: payload})
    except SurefootError:
        return f"<{tag} {_cut(repr(payload))}>"
    if isinstance(value, bytes | bytearray) and len(value) > _SHOWN_BYTES:
        return f"<{len(value)} {tag} {value[:_SHOWN_BYTES].hex(' ')} …>"
    return _cut(repr(value))


def _sequence(items: list[Any], brackets: str) -> str:
    shown = [readable(item) for item in items[:_SHOWN_ITEMS]]
    if len(items) > _SHOWN_ITEMS:
        shown.append(f"… {len(items) - _SHOWN_ITEMS} more")
    return brackets[0] + ", ".join(shown) + ("," if brackets == "()" and len(items) == 1 else "") + brackets[1]


def _pairs(pairs: list[Any]) -> str:
    whole = [pair for pair in pairs if type(pair) is list and len(pair) == 2]
    shown = [f"{readable(key)}: {readable(child)}" for key, child in whole[:_SHOWN_ITEMS]]
    if len(whole) > _SHOWN_ITEMS:
        shown.append(f"… {len(whole) - _SHOWN_ITEMS} more")
    return "{" + ", ".join(shown) + "}"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}… ({len(text)} characters)"
