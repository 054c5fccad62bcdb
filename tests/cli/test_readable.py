"""Kept values in a readable form."""

from __future__ import annotations

import datetime as dt
from collections import OrderedDict, deque

import pytest

from surefoot.core.layout import BoundaryId, ShardId
from surefoot.core.manifest import Manifest, Shard
from surefoot.core.values import encode
from surefoot.inspect.checkpoints import Checkpoint
from surefoot.inspect.detail import StepDetail
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
    assert {path: readable(leaf) for path, leaf in leaves(encode(state, "value"), "optimizer")} == {
        "optimizer.groups[0].lr": "0.1",
        "optimizer.groups[0].betas": "(0.9, 0.99)",
        "optimizer.empty": "{}",
        "optimizer.odd": readable(encode(OrderedDict(a=1), "value")),
    }


def test_what_differs_between_ranks_is_shown_for_each() -> None:
    """Two long states whose beginnings are equal are two values; equal ones are one, of all ranks."""
    ends = [bytes(999) + b"a", bytes(999) + b"b"]
    shards = tuple(
        Shard(
            ShardId(BoundaryId(1, 1), rank, "abcd"),
            "0" * 32,
            0,
            "",
            {"rng": encode({"own": end, "common": bytes(1000)}, "rng")},
        )
        for rank, end in enumerate(ends)
    )
    manifest = Manifest(BoundaryId(1, 1), "0" * 32, 2, "periodic", None, {}, "launch", None, 1.0, shards)
    values = StepDetail(Checkpoint(BoundaryId(1, 1), "live"), manifest, None).values()
    assert [(value.rank, value.path) for value in values] == [(0, "rng.own"), (1, "rng.own"), (None, "rng.common")]
