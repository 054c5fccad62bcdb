"""Documents: whole or refused."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from core_samples import json_values, raw_document
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.documents import FORMAT_VERSION, Fields, compact, digest, seal, unseal
from surefoot.errors import CorruptError, FormatError

_finite = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=9,
)


@given(st.dictionaries(st.text(max_size=6).filter(lambda key: key != "format"), _finite, max_size=4))
def test_what_was_sealed_is_unsealed_by_value(body: dict[str, Any]) -> None:
    """Any JSON object comes back with equal values and types, and the file as a whole is JSON."""
    data = seal(body)
    back = unseal(data, "x")
    assert back.pop("format") == FORMAT_VERSION
    assert json.dumps(back) == json.dumps(body)
    assert json.loads(data)["body"] == {"format": FORMAT_VERSION, **body}


@pytest.mark.holds("other-library-version")
def test_a_documents_bytes_stay_what_they_are() -> None:
    """The bytes that a run keeps are pinned: a change of them is a change of the format."""
    text = b'{"format":2,"a":[1,2.5,null],"b":"\\u00e9"}'
    expected = b'{"blake2b":"' + hashlib.blake2b(text, digest_size=16).hexdigest().encode() + b'","body":' + text
    assert seal({"a": [1, 2.5, None], "b": "é"}) == expected + b"}\n"
    assert digest(b"") == "cae66941d9efbd404e4d88758ea67670"


@pytest.mark.holds("changed-documents")
def test_every_changed_byte_is_noticed() -> None:
    """Each byte, changed to each of its 255 other values, makes the document corrupt."""
    data = seal({"step": 1200, "name": "é", "list": [1, {"x": None}]})
    for place, old in enumerate(data):
        for new in set(range(256)) - {old}:
            changed = data[:place] + bytes([new]) + data[place + 1 :]
            with pytest.raises(CorruptError, match="not a whole document"):
                unseal(changed, "plans/x.json")


def test_every_truncation_and_extension_is_noticed() -> None:
    """No prefix, no suffix, no repetition and no extension of a document is a document."""
    data = seal({"step": 1200})
    wrong = [data[:length] for length in range(len(data))] + [data[start:] for start in range(1, len(data) + 1)]
    for bad in [*wrong, data + b"\n", data + b"}\n", data + b"\0", data * 2, b"\n" + data]:
        with pytest.raises(CorruptError):
            unseal(bad, "x")


@pytest.mark.holds("other-library-version")
@pytest.mark.parametrize("other", [1, 3])
def test_another_format_is_refused_in_a_clear_sentence(other: int) -> None:
    """A document of another version is refused with both versions, its key and what to do."""
    with pytest.raises(FormatError) as caught:
        unseal(raw_document(b'{"format":%d,"step":1}' % other), "commits/00000001-g0001.json")
    assert str(caught.value) == (
        f"commits/00000001-g0001.json: written in format {other}, and this surefoot reads and writes format 2: "
        "go on with the version of surefoot that wrote it, or start a new run at another place"
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b'{"format":true}',
        b'{"format":1.0}',
        b'{"format":"1"}',
        b'{"format":0}',
        b'{"format":-1}',
        b'{"format":1',
        b'{"format":1}{"format":1}',
        b'{"format":1,"x":NaN}',
        b'{"format":1,"x":-Infinity}',
        b'{"format":1,"x":1e999}',
        b'{"format":1,"x":' + b"9" * 5000 + b"}",
        b'{"format":1,"x":"\xff"}',
        b'{"format":1,"x":' + b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'\xff\xfe{"format":1}',
    ],
    ids=lambda body: repr(body[:24]),
)
def test_a_body_that_is_no_document_is_corrupt_even_if_its_hash_fits(body: bytes) -> None:
    """Whatever stands under a matching hash, only `CorruptError` is raised, with the key."""
    with pytest.raises(CorruptError, match=r"^plans/x\.json: "):
        unseal(raw_document(body), "plans/x.json")


@given(st.binary(max_size=200))
def test_noise_is_corrupt(noise: bytes) -> None:
    """Random bytes are never a document, in a frame or out of it."""
    for data in (noise, raw_document(noise)):
        with pytest.raises(CorruptError):
            unseal(data, "x")


def test_numbers_that_json_does_not_have_are_not_written() -> None:
    """NaN and infinity are refused when a document is written, not when it is read back."""
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError):
            compact({"x": value})


_GOOD: list[tuple[str, Any, Any]] = [
    ("integer", 0, 0),
    ("integer", 2**70, 2**70),
    ("number", 3, 3.0),
    ("number", -0.5, -0.5),
    ("text", "", ""),
    ("optional_text", None, None),
    ("optional_text", "é", "é"),
    ("mapping", {}, {}),
    ("optional_mapping", None, None),
    ("optional_mapping", {"a": 1}, {"a": 1}),
    ("items", [], []),
    ("items", [1, "a"], [1, "a"]),
    ("integers", [], ()),
    ("integers", [0, 5], (0, 5)),
    ("raw", None, None),
    ("flag", True, True),
    ("flag", False, False),
]
_BAD: list[tuple[str, Any]] = [
    *[("integer", value) for value in (True, 1.0, "1", None, -1, [])],
    *[("number", value) for value in (True, "1", None, [], float("nan"), float("inf"), 10**400)],
    *[("text", value) for value in (1, None, [], {})],
    *[("optional_text", value) for value in (1, False, [], {})],
    *[("mapping", value) for value in ([], None, "x")],
    *[("optional_mapping", value) for value in ([], False, 0, "")],
    *[("items", value) for value in ({}, None, "abc")],
    *[("integers", value) for value in ([True], [1.0], [-1], ["1"], [None], {}, "12")],
    *[("flag", value) for value in (0, 1, None, "true", "")],
]


@pytest.mark.parametrize(("kind", "value", "expected"), _GOOD)
def test_a_field_of_the_right_type_is_handed_out(kind: str, value: Any, expected: Any) -> None:
    """Each accessor gives the value, typed."""
    got = getattr(Fields({"f": value}, "x"), kind)("f")
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(("kind", "value"), _BAD)
def test_a_field_of_another_type_is_corrupt(kind: str, value: Any) -> None:
    """Each accessor refuses what is not exactly its type (a bool is no integer) and names the field."""
    with pytest.raises(CorruptError, match=r"^run\.json: field 'f' is not "):
        getattr(Fields({"f": value}, "run.json"), kind)("f")


@pytest.mark.parametrize("kind", ["integer", "number", "text", "mapping", "items", "integers", "raw", "flag"])
@given(body=json_values)
def test_a_missing_field_is_corrupt_whatever_the_body_is(kind: str, body: Any) -> None:
    """Asked for a field that is not there, of any JSON value at all, the answer is `CorruptError`."""
    with pytest.raises(CorruptError, match="field 'not there' is missing"):
        getattr(Fields(body, "x"), kind)("not there")


def test_a_minimum_is_kept() -> None:
    """An integer below the asked minimum is refused with the minimum."""
    assert Fields({"f": 1}, "x").integer("f", 1) == 1
    with pytest.raises(CorruptError, match="an integer of at least 1"):
        Fields({"f": 0}, "x").integer("f", 1)
