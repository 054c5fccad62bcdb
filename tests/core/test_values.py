"""The typed-value codec: equal by type and value, refused by path, safe on hostile documents."""

from __future__ import annotations

import abc
import argparse
import base64
import collections
import contextlib
import dataclasses
import datetime as dt
import enum
import json
import math
import random
import signal
import struct
import sys
import threading
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from surefoot.core.values import MAX_DEPTH, At, Form, decode, encode, refusal
from surefoot.errors import ConfigError, CorruptError, UnsupportedStateError


def dumps(encoded: Any) -> bytes:
    return json.dumps(encoded, allow_nan=False, separators=(",", ":")).encode("ascii")


loads = json.loads
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
T = TypeVar("T")


class Colour(enum.Enum):
    RED = 1
    GREEN = "g"


class Level(enum.IntEnum):
    LOW = 1
    SMALL = 1  # an alias


class Bits(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: float
    y: object = None


Pair = collections.namedtuple("Pair", "left right")


class Fancy(Pair):
    """A named tuple with methods, and room for attributes."""


@dataclasses.dataclass
class Config:
    lr: float
    names: list[str] = dataclasses.field(default_factory=list)
    kind: ClassVar[str] = "not a field"
    made: int = dataclasses.field(init=False, default=7)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: object

    def __post_init__(self) -> None:
        RAN.append(self)


RAN: list[object] = []


@dataclasses.dataclass
class Derived(Config, Generic[T], abc.ABC):
    more: object = None


@dataclasses.dataclass
class Hooked:
    x: int
    y: int


Hooked.y = property(lambda self: self._y, lambda self, y: setattr(self, "_y", y))  # type: ignore[assignment]


@dataclasses.dataclass
class DictBased(dict):  # type: ignore[type-arg]
    x: int = 0


class Outer:
    class Inner(enum.Enum):
        ONE = 1


class MyInt(int):
    pass


class MyList(list):  # type: ignore[type-arg]
    pass


def fingerprint(value: Any) -> Any:
    """A value's types and bits, all the way down, so that == compares exactly."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack(">d", value)
    if kind is complex:
        return kind, struct.pack(">dd", value.real, value.imag)
    if isinstance(value, dict):
        beside = fingerprint(vars(value)) if kind in (OrderedDict, Counter) else None
        pairs = [(fingerprint(k), fingerprint(v)) for k, v in value.items()]
        return kind, pairs, getattr(value, "default_factory", None), beside
    if isinstance(value, list | tuple | deque):
        return kind, [fingerprint(item) for item in value], getattr(value, "maxlen", None)
    if isinstance(value, set | frozenset):
        return kind, sorted(map(repr, map(fingerprint, value)))
    if dataclasses.is_dataclass(value):
        return kind, [fingerprint(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if kind is argparse.Namespace:
        return kind, fingerprint(vars(value))
    if kind in (dt.datetime, dt.time):
        return kind, repr(value), value.fold
    return kind, repr(value) if kind is Decimal else value


def through(value: object, **how: Any) -> Any:
    """The value after a trip through bytes."""
    reader = {"extras": how["extras"]} if "extras" in how else {}
    return decode(loads(dumps(encode(value, "x", **how))), **reader)


def nan(bits: str) -> float:
    return float(struct.unpack(">d", bytes.fromhex(bits))[0])


def ordered_with_attribute() -> OrderedDict[str, int]:
    state = OrderedDict(b=1, a=2)
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    return state


def seeded_random() -> object:
    source = random.Random(7)
    source.gauss(0, 1)
    return source.getstate()


TZ = dt.timezone(dt.timedelta(hours=5, minutes=45, seconds=7), "odd")

ZOO: dict[str, object] = {
    "none": None,
    "true": True,
    "bool_is_not_int": [True, 1, False, 0, 1.0],
    "int_edges": [0, -1, 2**53 - 1, 2**53, -(2**53) + 1, -(2**53), 2**63, -(2**64)],
    "int_of_10000_digits": 10**10000 + 1,
    "float_edges": [0.0, -0.0, 5e-324, 1.7976931348623157e308, 0.1, 1e22, 1e-7],
    "infinities": [math.inf, -math.inf],
    "nans": [nan("7ff8000000000000"), nan("fff8000000000001"), nan("7ff0000000000001"), nan("7ff8dead0000beef")],
    "complex": [complex(-0.0, math.inf), complex(1, -2), complex(nan("7ff8000000000003"), -0.0)],
    "text": ["", "é", '\x00\n"\\', "🦶", "$"],
    "lone_surrogates": ["\ud800", "\ud83d\ude00", "a\udcffb", {"\ud83d\ude00": 1}],
    "bytes": [b"", b"\x00\xff", bytearray(b"\x01"), bytes(range(256))],
    "list": [[], [[]], [1, [2, [3]]]],
    "tuple": ((), (1,), ((2,), [3])),
    "sets": [set(), {1, "a", None, (1, 2)}, frozenset(), frozenset({frozenset({1}), 2.5})],
    "dict": {"a": 1, "": {"b": {}}},
    "dict_order": {"z": 1, "a": 2, "m": 3},
    "dict_with_tag": {"$": "tuple", "v": [1]},
    "dict_with_only_tag": {"$": {"$": None}},
    "dict_odd_keys": {3: "c", 1: "a", 2: "b", None: 0, (1, 2): [], "s": 1, b"k": 2, 1.5: 3},
    "ordered": OrderedDict([("b", 1), ("a", OrderedDict())]),
    "ordered_attribute": ordered_with_attribute(),
    "defaultdicts": [defaultdict(list, {1: [2]}), defaultdict(None, a=1), defaultdict(Counter)],
    "counter": Counter({"a": 3, 7: -1}),
    "deques": [deque(), deque([1, 2], 2), deque([[]], None), deque(maxlen=0)],
    "range": [range(5), range(3, -7, -2), range(2**70)],
    "decimal": [Decimal("1.10"), Decimal("-0E-3"), Decimal("sNaN12"), Decimal("-Infinity"), Decimal("1E+999999")],
    "date": [dt.date.min, dt.date(2024, 2, 29)],
    "datetime": [
        dt.datetime(2024, 1, 2, 3, 4, 5, 678901),
        dt.datetime(2024, 1, 2, tzinfo=dt.UTC),
        dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=TZ),
    ],
    "time": [dt.time(1, 2, 3, 4, fold=1), dt.time(tzinfo=dt.timezone(dt.timedelta(microseconds=-1)))],
    "timedelta": [dt.timedelta.min, dt.timedelta(days=-1, microseconds=1)],
    "path": [PosixPath("/a/../b"), PurePosixPath("rel/x"), PosixPath("a\udcff")],
    "uuid": [uuid.UUID(int=5), uuid.UUID(int=2**128 - 1)],
    "namespace": argparse.Namespace(lr=0.1, names=["a"], sub=argparse.Namespace(x=(1,))),
    "enum": [Colour.RED, Colour.GREEN, Level.SMALL, Bits.B, Outer.Inner.ONE, signal.SIGTERM],
    "namedtuple": [Point(1.0), Pair(1, Pair([2], 3)), Fancy(1, 2)],
    "dataclass": [Config(0.1, ["a"]), Frozen((1,)), Derived(1.0, [], {1: 2})],
    "python_rng": seeded_random(),
    "long_ints": [list(range(65)), tuple(range(-5, 400)), list(range(2**32 - 1, 2**32 + 99)), [2**63] * 80],
    "long_but_not_packed": [[2**64] * 70, [True] * 70, [1] * 70 + [1.0], [-1, 2**63] * 40, [*range(99), None]],
    "long_floats": [[0.5] * 100, [math.nan, -0.0] * 50],
    "long_text": [["a"] * 100, ["é", "\ud800"] * 50],
    "long_set": [set(range(1000)), frozenset(range(2**60, 2**60 + 100)), deque(range(100), 100)],
    "shared": [[1]] * 3,
}


@pytest.mark.holds("unreadable-values")
@pytest.mark.parametrize("name", ZOO)
def test_zoo_comes_back_equal_by_type_and_bits(name: str) -> None:
    """Each kind of plain value survives the trip through bytes with its types, order and bits."""
    value = ZOO[name]
    assert fingerprint(through(value)) == fingerprint(value)


def test_fingerprint_tells_apart_what_equality_does_not() -> None:
    """The comparison that the round trips rest on is stricter than ==."""
    pairs: list[tuple[object, object]] = [(True, 1), (1, 1.0), (0.0, -0.0), ((1,), [1]), ({1: 1, 2: 2}, {2: 2, 1: 1})]
    pairs += [(OrderedDict(a=1), {"a": 1}), (Point(1.0, 2), (1.0, 2)), (deque([1]), deque([1], 5))]
    pairs += [(nan("7ff8000000000000"), nan("7ff8000000000001")), ({1}, frozenset({1})), (Level.LOW, 1)]
    assert [pair for pair in pairs if fingerprint(pair[0]) == fingerprint(pair[1])] == []


def test_the_document_of_plain_values_is_the_values_themselves() -> None:
    """Plain JSON stays readable: no tag where none is needed, in the order given."""
    value = {"step": 12, "lr": 0.1, "names": ["a", "é"], "none": None, "flag": True}
    assert encode(value, "x") == value
    assert dumps(encode(value, "x")) == rb'{"step":12,"lr":0.1,"names":["a","\u00e9"],"none":null,"flag":true}'


@pytest.mark.holds("other-library-version")
@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1, 2.5), '{"$":"tuple","v":[1,2.5]}'),
        (-(2**60), '{"$":"int","v":"-1000000000000000"}'),
        (math.inf, '{"$":"float","v":"7ff0000000000000"}'),
        ("\ud800", '{"$":"str","v":"7aCA"}'),
        (b"ab", '{"$":"bytes","v":"YWI="}'),
        ({"$": 1}, '{"$":"dict","v":[["$",1]]}'),
        ({2: "b", 1: "a"}, '{"$":"dict","v":[[2,"b"],[1,"a"]]}'),
        ({"b", "a", 3}, '{"$":"set","v":["a","b",3]}'),
        (deque([1], 2), '{"$":"deque","v":[2,[1]]}'),
        (Colour.RED, f'{{"$":"enum","v":["{__name__}","Colour","RED"]}}'),
        (Point(1.0), f'{{"$":"namedtuple","v":["{__name__}","Point",{{"x":1.0,"y":null}}]}}'),
    ],
)
def test_the_format(value: object, text: str) -> None:
    """The bytes of each tagged form are fixed: old checkpoints must stay readable."""
    assert dumps(encode(value, "x")) == text.encode()


@pytest.mark.parametrize(
    ("values", "width", "raw"),
    [
        ([255] * 65, "u1", b"\xff" * 65),
        ([256] * 65, "u2", b"\x00\x01" * 65),
        ([65536] * 65, "u4", b"\x00\x00\x01\x00" * 65),
        ([-2] * 65, "i8", (b"\xfe" + b"\xff" * 7) * 65),
        ([2**63] * 65, "u8", (b"\x00" * 7 + b"\x80") * 65),
    ],
)
def test_long_lists_of_ints_are_packed(values: list[int], width: str, raw: bytes) -> None:
    """More than 64 ints become one base64 of little-endian words, the narrowest that holds them."""
    assert encode(values, "x") == {"$": "ints", "v": [width, base64.b64encode(raw).decode()]}
    assert encode(values[:64], "x") == [encode(v, "x") for v in values[:64]]


def test_python_rng_goes_on_where_it_was() -> None:
    """A restored generator, or its state, draws the same numbers."""
    source, other = random.Random(3), random.Random(4)
    source.gauss(0, 1)
    other.setstate(through(source.getstate()))
    whole = through(source)
    expected = [source.gauss(0, 1) for _ in range(700)]
    assert [other.gauss(0, 1) for _ in range(700)] == expected
    assert [whole.gauss(0, 1) for _ in range(700)] == expected


def test_sets_are_written_in_one_order() -> None:
    """Equal sets give equal bytes, whatever order they iterate in."""
    one, other = {Decimal(0), Decimal(8)}, {Decimal(8), Decimal(0)}  # hashes that collide
    assert list(one) != list(other)
    assert dumps(encode(one, "x")) == dumps(encode(other, "x"))


def test_shared_references_become_equal_copies() -> None:
    """Identity is not kept: two references to one list come back as two equal lists."""
    shared = [1]
    first, second = through([shared, shared])
    assert first == second == [1]
    assert first is not second


def test_result_shares_nothing_with_the_source() -> None:
    """Changing the source after encode changes nothing in what was encoded."""
    source = {"a": [1, 2], "b": [0.5] * 100, "c": ["s"] * 100}
    encoded = encode(source, "x")
    before = dumps(encoded)
    source["a"].append(3)
    source["b"][0] = 1.0
    source["c"].clear()
    assert dumps(encoded) == before


def test_dataclass_is_made_without_running_its_code() -> None:
    """Neither __init__ nor __post_init__ runs at decode, and frozen and slotted classes work."""
    value = Frozen(1)
    RAN.clear()
    assert through(value) == value
    assert RAN == []


# --------------------------------------------------------------------------------------------------- hypothesis

FLOATS = st.floats() | st.integers(0, 2**64 - 1).map(lambda bits: nan(f"{bits:016x}"))
TEXT = st.text(st.characters(exclude_categories=())) | st.sampled_from(["$", "v", ""])
ZONES = st.none() | st.integers(-86399, 86399).map(lambda s: dt.timezone(dt.timedelta(seconds=s)))
HASHABLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    FLOATS,
    TEXT,
    st.binary(max_size=20),
    st.complex_numbers(),
    st.decimals(allow_nan=False),
    st.dates(),
    st.datetimes(timezones=ZONES),
    st.times(timezones=ZONES),
    st.timedeltas(),
    st.uuids(),
    st.sampled_from([*Colour, *Level, range(3), PurePosixPath("a")]),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.dictionaries(HASHABLE, inner, max_size=5)
    return st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.lists(st.integers(-(2**64), 2**64), min_size=60, max_size=70),
        st.dictionaries(TEXT, inner, max_size=5),
        pairs,
        pairs.map(OrderedDict),
        pairs.map(lambda d: defaultdict(list, d)),
        pairs.map(Counter),
        st.builds(deque, st.lists(inner, max_size=4), st.none() | st.integers(4, 9)),
        st.sets(HASHABLE, max_size=5),
        st.frozensets(HASHABLE, max_size=5),
        st.builds(Point, FLOATS, inner),
        st.builds(Config, FLOATS, inner),
        st.builds(Frozen, inner),
    )


VALUES = st.recursive(HASHABLE, containers, max_leaves=25)


@pytest.mark.holds("values-are-json")
@QUICK
@given(VALUES)
@example({"$": {"v": ("\ud83d\ude00", -0.0)}})
def test_any_value_comes_back(value: object) -> None:
    """Whatever is accepted comes back with the same types, order and bits, and gives the same bytes again."""
    raw = dumps(encode(value, "x"))
    back = decode(loads(raw))
    assert fingerprint(back) == fingerprint(value)
    assert dumps(encode(back, "x")) == raw


# ----------------------------------------------------------------------------------------------------- refusals


def local_enum() -> object:
    class Local(enum.Enum):
        A = 1

    return Local.A


def dataclass_with_attribute() -> object:
    value = Config(1.0)
    value.beside = 1  # type: ignore[attr-defined]
    return value


def dataclass_without_field() -> object:
    value = Config(1.0)
    del value.lr
    return value


def tuple_with_attribute() -> object:
    value = Fancy(1, 2)
    value.beside = 1  # type: ignore[attr-defined]
    return value


REFUSED: dict[str, tuple[object, str, str]] = {
    "function": ({"base_lrs": [1, 2, 3, {"fn": test_the_format}]}, "x.base_lrs[3].fn", "function"),
    "lambda": ([lambda: 0], "x[0]", "function"),
    "builtin": (len, "x", "builtin_function_or_method"),
    "module": ({"m": sys}, "x.m", "module"),
    "class": ((int,), "x[0]", "type"),
    "object": ({"a b": object()}, "x['a b']", "object"),
    "generator": ({4: (i for i in ())}, "x[4]", "generator"),
    "lock": ([[threading.Lock()]], "x[0][0]", "_thread.lock"),
    "thread_local": (threading.local(), "x", "_thread._local"),
    "file": (sys.__stdout__, "x", "_io.TextIOWrapper"),
    "memoryview": (memoryview(b""), "x", "memoryview"),
    "not_implemented": (NotImplemented, "x", "NotImplementedType"),
    "key": ({"ok": 1, frozenset({len}): 2}, "x.keys()[1]{0}", "builtin_function_or_method"),
    "under_odd_key": ({(1, 2): len}, "x[<tuple>]", "builtin_function_or_method"),
    "in_set": ([{len}], "x[0]{0}", "builtin_function_or_method"),
    "in_deque": (deque([1, len]), "x[1]", "builtin_function_or_method"),
    "in_counter": (Counter({"a": len}), "x.a", "builtin_function_or_method"),
    "in_ordered": (OrderedDict(a=[len]), "x.a[0]", "builtin_function_or_method"),
    "in_namedtuple": ([Point(1.0, len)], "x[0].y", "builtin_function_or_method"),
    "in_dataclass": (Config(1.0, [len]), "x.names[0]", "builtin_function_or_method"),
    "in_namespace": (argparse.Namespace(a=[len]), "x.a[0]", "builtin_function_or_method"),
    "slice": (slice(0, 1), "x", "slice"),
    "in_long_list": ([0] * 99 + [len], "x[99]", "builtin_function_or_method"),
    "int_subclass": ([MyInt(1)], "x[0]", f"{__name__}.MyInt"),
    "list_subclass": (MyList(), "x", f"{__name__}.MyList"),
    "dict_subclass": (types.MappingProxyType({}), "x", "mappingproxy"),
    "struct_sequence": (sys.version_info, "x", "sys.version_info"),
    "flags": (Bits.A | Bits.B, "x", f"{__name__}.Bits"),
    "no_flags": (Bits(0), "x", f"{__name__}.Bits"),
    "local_enum": (local_enum(), "x", f"{__name__}.local_enum.<locals>.Local"),
    "zoneinfo": (dt.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")), "x.tzinfo", "zoneinfo.ZoneInfo"),
    "windows_path": (PureWindowsPath("a"), "x", "pathlib.PureWindowsPath"),
    "factory": ([defaultdict(lambda: 0)], "x[0]", "collections.defaultdict"),
    "beside_fields": (dataclass_with_attribute(), "x", f"{__name__}.Config"),
    "field_unset": (dataclass_without_field(), "x", f"{__name__}.Config"),
    "tuple_attribute": (tuple_with_attribute(), "x", f"{__name__}.Fancy"),
    "hooked": (Hooked(1, 2), "x", f"{__name__}.Hooked"),
    "dict_based": (DictBased(), "x", f"{__name__}.DictBased"),
    "random": (random.SystemRandom(), "x", "random.SystemRandom"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_path_and_type(name: str) -> None:
    """What cannot be kept is refused in encode, with its full path, its type and a remedy."""
    value, path, kind = REFUSED[name]
    with pytest.raises(UnsupportedStateError) as caught:
        encode(value, "x")
    assert str(caught.value).startswith(f"{path}: a value of type {kind} cannot be checkpointed")
    assert "state_dict()" in str(caught.value)


def test_a_cycle_is_refused_with_both_ends() -> None:
    """What contains itself is refused where it closes, naming where it began."""
    state: dict[str, Any] = {"a": [1, {}]}
    state["a"][1]["back"] = state["a"]
    with pytest.raises(UnsupportedStateError, match=r"^x\.a\[1\]\.back: this list is x\.a again"):
        encode(state, "x")
    config = Config(1.0)
    config.names.append(config)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedStateError, match=r"^x\.names\[0\]: this .*Config is x again"):
        encode(config, "x")


def nested(depth: int, wrap: Any) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: {"a": v}, lambda v: {1: v}, Point, Frozen, lambda v: (v,)])
def test_depth_is_kept_up_to_the_limit_and_refused_beyond(wrap: Any) -> None:
    """The deepest value that is accepted comes back; one level more is refused, without exhausting the stack."""
    value = nested(MAX_DEPTH, wrap)
    assert fingerprint(through(value)) == fingerprint(value)
    with pytest.raises(UnsupportedStateError, match=f"nested deeper than {MAX_DEPTH} levels"):
        encode(nested(MAX_DEPTH + 1, wrap), "x")
    with pytest.raises(UnsupportedStateError):
        encode(nested(100_000, lambda v: [v]), "x")


def test_a_short_stack_is_a_refusal_not_a_recursion_error() -> None:
    """Where the caller has used up the stack, encode and decode still raise errors of the tree."""

    def at_depth(frames: int, call: Any) -> Any:
        return call() if frames == 0 else at_depth(frames - 1, call)

    value = nested(MAX_DEPTH, lambda v: [v])
    data = encode(value, "x")
    frames = sys.getrecursionlimit() - len(_frames()) - 60
    with pytest.raises(UnsupportedStateError, match="stack"):
        at_depth(frames, lambda: encode(value, "x"))
    with pytest.raises(CorruptError, match="stack"):
        at_depth(frames, lambda: decode(data))


def _frames() -> list[Any]:
    frame: Any = sys._getframe()
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


# ------------------------------------------------------------------------------------------------ hook and extras


class Handle:
    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


def _reduce_handle(value: Any, at: At) -> object:
    if value.number < 0:
        raise refusal(at, value, "negative")
    return (value.number, {"$": b"x"})


HANDLES = Form("test.handle", lambda v: type(v) is Handle, _reduce_handle, lambda parts: Handle(parts[0]))


def test_extras_take_apart_and_put_together() -> None:
    """A form's simpler values are encoded like any others, and it may refuse by path."""
    assert through({"a": (Handle(2**70),)}, extras=[HANDLES]) == {"a": (Handle(2**70),)}
    with pytest.raises(UnsupportedStateError, match=r"^x\.a\[0\]: a value of type .*Handle .*negative"):
        encode({"a": (Handle(-1),)}, "x", extras=[HANDLES])
    with pytest.raises(CorruptError, match=r"unknown tag 'test\.handle'"):
        decode(encode(Handle(1), "x", extras=[HANDLES]))


@pytest.mark.parametrize("tag", ["tuple", "decimal", "enum", "test.handle"])
def test_two_forms_with_one_tag_are_refused(tag: str) -> None:
    """A form cannot take the place of another unnoticed."""
    with pytest.raises(ConfigError, match=f"one tag.*{tag}"):
        decode(1, extras=[HANDLES, dataclasses.replace(HANDLES, tag=tag)])


# ------------------------------------------------------------------------------------------------ hostile documents

HOSTILE: dict[str, Any] = {
    "unknown_tag": {"$": "pickle", "v": "gASVAAAA"},
    "tag_only": {"$": "tuple"},
    "payload_more": {"$": "tuple", "v": [], "w": 1},
    "tag_number": {"$": 1, "v": []},
    "tag_list": {"$": [], "v": []},
    "big_int": 2**53,
    "nan": math.nan,
    "int_text": {"$": "int", "v": "zz"},
    "int_number": {"$": "int", "v": 5},
    "float_short": {"$": "float", "v": "7ff0"},
    "str_bad": {"$": "str", "v": "/w=="},
    "bytes_number": {"$": "bytes", "v": 10**12},
    "bytearray_number": {"$": "bytearray", "v": 10**12},
    "bytes_not_base64": {"$": "bytes", "v": "Y*I="},
    "ints_width": {"$": "ints", "v": ["d", "AAAAAAAAAAA="]},
    "ints_torn": {"$": "ints", "v": ["u8", "AAAA"]},
    "tuple_number": {"$": "tuple", "v": 10**12},
    "tuple_text": {"$": "tuple", "v": "abc"},
    "set_unhashable": {"$": "set", "v": [[]]},
    "set_twice": {"$": "set", "v": [1, {"$": "int", "v": "1"}]},
    "key_unhashable": {"$": "dict", "v": [[[], 1]]},
    "key_twice": {"$": "dict", "v": [[1, 1], [True, 2]]},
    "pair_of_three": {"$": "dict", "v": [[1, 2, 3]]},
    "factory": {"$": "defaultdict", "v": ["eval", []]},
    "deque_long": {"$": "deque", "v": [1, [1, 2]]},
    "deque_negative": {"$": "deque", "v": [-1, []]},
    "attributes": {"$": "ordered_dict", "v": [[], [1]]},
    "range_zero": {"$": "range", "v": [1, 2, 0]},
    "random_state": {"$": "random", "v": {"$": "tuple", "v": [3, {"$": "tuple", "v": [0] * 64 + [10**6]}, None]}},
    "namespace_key": {"$": "namespace", "v": {"$": "dict", "v": [[1, 2]]}},
    "decimal": {"$": "decimal", "v": "1.2.3"},
    "date": {"$": "date", "v": {"year": 2024, "month": 13, "day": 1}},
    "date_more": {"$": "date", "v": {"year": 2024, "month": 1, "day": 1, "cls": 1}},
    "datetime_zone": {"$": "time", "v": {"tzinfo": "UTC"}},
    "timedelta": {"$": "timedelta", "v": [10**10, 0, 0]},
    "uuid": {"$": "uuid", "v": [-1, None]},
    "path": {"$": "path", "v": [1]},
    "class_number": {"$": "enum", "v": [1, 2, 3]},
    "class_short": {"$": "enum", "v": ["os"]},
    "member_number": {"$": "enum", "v": [__name__, "Colour", {"a": 1}]},
    "parts_list": {"$": "dataclass", "v": [__name__, "Config", [1]]},
    "bytes_itself": b"x",
    "odd_member": {1: 2},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_documents_are_corrupt(name: str) -> None:
    """Every malformed document is CorruptError with the place, also when it is buried."""
    with pytest.raises(CorruptError, match=r"^value"):
        decode(HOSTILE[name])
    with pytest.raises(CorruptError, match=r"^value\.a\[1\]"):
        decode({"a": [0, HOSTILE[name]]})


@pytest.mark.parametrize("where", ["tuple", "complex", "namespace", "set", "ints", "dict", "test.handle"])
def test_deep_nesting_of_tags_is_corrupt(where: str) -> None:
    """Tags inside tags end at the depth limit or as nonsense, never as RecursionError."""
    data = nested(5000, lambda v: {"$": where, "v": v})
    with pytest.raises(CorruptError):
        decode(data, extras=[HANDLES])


CLASSES: dict[str, tuple[list[Any], str]] = {
    "absent_module": (["no.such", "X", {}], "is not imported: import no.such before the restore"),
    "absent_class": ([__name__, "Gone", {}], "is not imported"),
    "function": (["os", "system", {}], "is not imported"),
    "through_function": (["os", "system.__class__", {}], "is not imported"),
    "instance": (["sys", "stdout", {}], "is not imported"),
    "no_dataclass": (["subprocess", "Popen", {}], "is not a dataclass here"),
    "fields_changed": ([__name__, "Config", {"lr": 1.0}], "has the fields ('lr', 'names', 'made') here, not ('lr',)"),
    "fields_more": ([__name__, "Config", {"lr": 1.0, "names": [], "extra": 1}], "has the fields"),
    "hooked": ([__name__, "Hooked", {"x": 1}], "has the fields ('x', 'y') here"),
    "dict_based": ([__name__, "DictBased", {"x": 1}], "has a __new__ of its own here"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_that_is_gone_or_changed_is_the_programs_fault(name: str) -> None:
    """A sound document for another program is no corruption: the copy must not be thrown away for it."""
    payload, message = CLASSES[name]
    with pytest.raises(UnsupportedStateError) as caught:
        decode([{"$": "dataclass", "v": payload}])
    assert str(caught.value).startswith(f"value[0]: class '{payload[0]}.{payload[1]}' {message}")


def test_other_classes_that_changed() -> None:
    """Enum members and named tuples that are gone or changed are told apart from corruption too."""
    for data, message in [
        ({"$": "enum", "v": [__name__, "Colour", "BLUE"]}, "has no member 'BLUE' here"),
        ({"$": "enum", "v": [__name__, "Config", "lr"]}, "is not an enum here"),
        ({"$": "namedtuple", "v": [__name__, "Point", {"y": 1, "x": 2}]}, "has the fields"),
        ({"$": "namedtuple", "v": [__name__, "Colour", {}]}, "is not a named tuple here"),
    ]:
        with pytest.raises(UnsupportedStateError, match=message):
            decode(data)


@pytest.mark.holds("nothing-unpickled")
def test_looking_a_class_up_runs_and_imports_nothing() -> None:
    """A module's __getattr__ is not asked, a submodule is not imported, a class's attributes are not asked."""

    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            RAN.append(name)
            return Colour

    class Meta(type):
        def __getattr__(cls, name: str) -> Any:
            RAN.append(name)
            return Colour

    module = Lazy("lazy_module_of_test")
    module.Holder = Meta("Holder", (), {})  # type: ignore[attr-defined]
    sys.modules["lazy_module_of_test"] = module
    RAN.clear()
    try:
        before = set(sys.modules)
        for name, qualname in [
            ("lazy_module_of_test", "Colour"),
            ("lazy_module_of_test", "Holder.Colour"),
            ("xml.dom.pulldom", "X"),
        ]:
            with pytest.raises(UnsupportedStateError, match="is not imported"):
                decode({"$": "enum", "v": [name, qualname, "RED"]})
        assert RAN == []
        assert set(sys.modules) == before
    finally:
        del sys.modules["lazy_module_of_test"]


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("AAAA"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
TAGS = sorted(
    {"int", "float", "str", "bytes", "bytearray", "ints", "tuple", "set", "frozenset", "dict", "ordered_dict"}
    | {"counter", "defaultdict", "deque", "enum", "namedtuple", "dataclass", "complex", "range", "random", "namespace"}
    | {"decimal", "datetime", "date", "time", "timedelta", "timezone", "path", "pure_path"}
    | {"uuid", "test.handle", "nonsense"}
)


def tagged(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    payload = inner | st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    named = st.tuples(
        st.sampled_from([__name__, "os", "enum"]), st.sampled_from(["Colour", "Config", "Point"]), payload
    )
    return st.fixed_dictionaries({"$": st.sampled_from(TAGS), "v": payload | named.map(list)}) | payload


@settings(QUICK, max_examples=400)
@given(st.recursive(JSON_LIKE, tagged, max_leaves=12))
def test_decode_of_anything_raises_only_its_own_errors(data: Any) -> None:
    """Fuzz: any document is decoded, corrupt, or names a class that is not so here; nothing else escapes."""
    with contextlib.suppress(CorruptError, UnsupportedStateError):
        decode(data, extras=[HANDLES])


@settings(QUICK, max_examples=200)
@given(st.data())
def test_decode_of_altered_documents_raises_only_its_own_errors(data: Any) -> None:
    """Fuzz: bytes of real documents, altered in one place, give a value or an error of the tree."""
    raw = bytearray(dumps(encode(ZOO[data.draw(st.sampled_from(sorted(ZOO)))], "x")))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        document = json.loads(bytes(raw))
    except ValueError:
        return  # It is not JSON any more: it is refused before it is decoded.
    with contextlib.suppress(CorruptError, UnsupportedStateError):
        decode(document)
