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
    dict                 pairs [key, value] in order; used for keys that are not strings, and for the key "$"
    ordered_dict         [pairs, attributes or null]
    counter              pairs
    defaultdict          [factory's name or null, pairs]
    deque                [greatest length or null, list]
    enum, namedtuple, dataclass   [module, qualified name, member or fields]: see `surefoot.core.values.classes`
    others               see `surefoot.core.values.forms`, and the forms that the caller adds

Not kept: identity. An object that is referred to twice comes back as two equal ones; one that contains itself is
refused. Also refused: subclasses of the built-in types that no form knows (their meaning would be lost), time zones
other than fixed offsets, and everything that is code or a handle.

Every refusal happens in `encode`, never later. Pure: values in, values out.
"""

from surefoot.core.values.decoding import decode
from surefoot.core.values.encoding import encode
from surefoot.core.values.forms import MAX_DEPTH, At, Form, Json, refusal

__all__ = ["MAX_DEPTH", "At", "Form", "Json", "decode", "encode", "refusal"]
