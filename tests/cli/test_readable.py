"""Kept values in a readable form."""

from __future__ import annotations

import datetime as dt
from collections import OrderedDict, deque

import pytest

from surefoot.core.values import encode
from surefoot.inspect.readable import leaves, readable


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (3, "3"),
        (2**70, str(2**70)),
        (0.25, "0.25"),
        (float("inf"), "inf"),
        ("word", "'word'"),
        (b"\x00\x01", "b'\\x00\\x01'"),
        ((1,), "(1,)"),
        ((1, "a"), "(1, 'a')"),
        ([], "[]"),
        ({}, "{}"),
        ({1: "a"}, "{1: 'a'}"),
        ({3, 1}, "{1, 3}"),
        (deque([1, 2], maxlen=5), "[1, 2]"),
        (list(range(100)), "[0, 1, 2, 3, 4, 5, 6, 7, … 92 more]"),
        (dt.timedelta(seconds=5), "datetime.timedelta(seconds=5)"),
    ],
)
def test_values_read_like_python(value: object, text: str) -> None:
    """Short values as Python shows them, long ones cut, with what was cut."""
    assert readable(encode(value, "value")) == text


def test_long_bytes_are_told_by_their_length() -> None:
    """A generator's state is no reading matter."""
    assert readable(encode(bytes(5000), "value")).startswith("<5000 bytes 00 00 ")


def test_an_unknown_form_is_named() -> None:
    """What only another library could rebuild is shown by its tag."""
    assert readable({"$": "np.array", "v": ["<f4", [2]]}) == "<np.array ['<f4', [2]]>"


@pytest.mark.parametrize("payload", [None, 1, "x", [], [1], {"a": 1}, [["u4", "!"]]])
@pytest.mark.parametrize(
    "tag", ["ints", "tuple", "set", "deque", "dict", "int", "float", "bytes", "date", "ordered_dict", "nonsense"]
)
def test_no_document_is_too_broken_to_be_shown(tag: str, payload: object) -> None:
    """Text comes out, whatever goes in."""
    assert readable({"$": tag, "v": payload})


def test_mappings_are_taken_apart() -> None:
    """One leaf a line, named by its path."""
    state = {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "empty": {}, "odd": OrderedDict(a=1)}
    assert dict(leaves(encode(state, "value"), "optimizer")) == {
        "optimizer.groups[0].lr": "0.1",
        "optimizer.groups[0].betas": "(0.9, 0.99)",
        "optimizer.empty": "{}",
        "optimizer.odd": dict(leaves(encode(OrderedDict(a=1), "value"), "x"))["x"],
    }
