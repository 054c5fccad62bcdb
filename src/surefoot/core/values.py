"""Plain Python state as JSON, equal by type and value when it comes back.

None, booleans, strings, ints below 2**53 in size, finite floats, lists, and dicts of string keys are themselves.
Everything else is an object of two members, ``{"$": TAG, "v": PAYLOAD}``:

    int                  hexadecimal text, with a sign
    float                a float that is not finite: its 64 bits, hexadecimal, big-endian
    str                  text with lone surrogates: base64 of its UTF-8 bytes (surrogates passed)
    bytes, bytearray     base64
    ints                 a list of more than 64 ints: [width, base64], little-endian; width is one of u1 u2 u4 i8 u8
    tuple                a list
    set, frozenset       a list, sorted (a set's order of iteration is not kept)
    dict                 pairs [key, value] in order; used for keys that are no strings and for the key "$"
    ordered_dict, counter   [pairs, attributes or null]
    defaultdict          [factory's name or null, pairs]
    deque                [greatest length or null, list]
    enum, namedtuple, dataclass   [module, qualified name, member or fields]: see `surefoot.core.value_classes`
    leaf                 what the caller's hook answered
    others               see `surefoot.core.value_forms`, and the forms that the caller adds

Not kept: identity. An object that is referred to twice comes back as two equal ones; one that contains itself is
refused. Also refused: subclasses of the built-in types that no form knows (their meaning would be lost), time zones
other than fixed offsets, and everything that is code or a handle.

Every refusal happens in `encode`, never later. Pure: values in, values out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

from surefoot.core.value_decoding import Decoder
from surefoot.core.value_encoding import Encoder, write
from surefoot.core.value_forms import (
    MAX_DEPTH,
    Extra,
    Json,
    LeafReader,
    LeafWriter,
    Place,
    Verbatim,
    refusal,
)
from surefoot.errors import CorruptError, UnsupportedStateError

__all__ = [
    "MAX_DEPTH",
    "Extra",
    "Json",
    "LeafReader",
    "LeafWriter",
    "Place",
    "decode",
    "dumps",
    "encode",
    "loads",
    "refusal",
]


def encode(value: object, path: str, *, extras: Sequence[Extra] = (), leaf: LeafWriter | None = None) -> Json:
    """A value as JSON, in new lists and dicts.

    Args:
        value: what to keep. It is read, never called (a form in `extras` may call its own types).
        path: the value's name, with which every refusal begins.
        extras: forms for types that the standard library does not know.
        leaf: asked, before any form, for each value that is no plain scalar, list, tuple or dict.

    Raises:
        UnsupportedStateError: something in it cannot be kept; the message names its path and type.
    """
    try:
        return Encoder(extras, leaf).child(value, None, Verbatim(path))
    except RecursionError as error:
        raise UnsupportedStateError(f"{path}: nested too deeply for the stack that is left here") from error


def decode(data: Json, path: str = "value", *, extras: Sequence[Extra] = (), leaf: LeafReader | None = None) -> Any:
    """The value that `encode` was given, made anew. Safe on hostile data: nothing is imported or called by name.

    Raises:
        CorruptError: the document breaks the format.
        UnsupportedStateError: the document is sound, but names a class (enum, named tuple, dataclass) that is not
            imported here or has changed, or what a form says is absent from this machine.
        ConfigError: two forms bear the same tag.
    """
    try:
        return Decoder(extras, leaf).any(data, Place(None, Verbatim(path), None))
    except RecursionError as error:
        raise CorruptError(f"{path}: nested too deeply for the stack that is left here") from error


def dumps(encoded: Json) -> bytes:
    """Canonical bytes: ASCII, no blanks, members in the order they have (a user's dict keeps its order)."""
    return write(encoded).encode("ascii")


def loads(raw: bytes) -> Json:
    """JSON from untrusted bytes, strictly: ASCII, no NaN, no member twice.

    Raises:
        CorruptError: the bytes are no such document.
    """
    try:
        return json.loads(raw.decode("ascii"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # ValueError: bad JSON, bad ASCII, an int of too many digits
        raise CorruptError(f"document of {len(raw)} bytes is not strict JSON: {error}") from error


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member occurs twice")
    return members


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
