"""A checkpoint in another layout: every tensor against the whole one, and nothing read that was not asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reshard_scenes as scenes
from ranks import on_ranks

SAVES = [("plain", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4)]
LOADS = [
    ("plain", 1, "fsdp2"),
    ("plain", 1, "hsdp4"),
    ("plain", 1, "ddp2"),
    ("fsdp", 1, "plain1"),
    ("fsdp", 2, "ddp2"),
    ("fsdp", 2, "plain1"),
    ("fsdp", 2, "fsdp4"),
    ("fsdp", 2, "fsdp2"),
    ("ddp", 2, "fsdp2"),
    ("ddp", 2, "hsdp4"),
    ("fsdp", 3, "fsdp2"),
    ("fsdp", 3, "fsdp4"),
    ("fsdp", 3, "hsdp4"),
    ("fsdp", 3, "ddp2"),
    ("ddp", 3, "fsdp4"),
    ("fsdp", 4, "hsdp4"),
    ("hsdp", 4, "fsdp4"),
    ("hsdp", 4, "fsdp2"),
    ("hsdp", 4, "plain1"),
]
WIDE_SAVES = [("wide-tp", 4), ("wide-ddp", 2), ("wide-fsdp", 2)]
WIDE_LOADS = [
    ("wide-plain", 1, "wide-tp4"),
    ("wide-fsdp", 3, "wide-tp4"),
    ("wide-ddp", 2, "wide-tp4"),
    ("wide-tp", 4, "wide-ddp2"),
    ("wide-tp", 4, "wide-fsdp2"),
    ("wide-tp", 4, "wide-tp4"),
]


@pytest.mark.holds("any-layout", "uneven-lengths")
@pytest.mark.parametrize(("saves", "loads"), [(SAVES, LOADS), (WIDE_SAVES, WIDE_LOADS)], ids=["uneven", "even"])
def test_every_layout_into_every_other(tmp_path: Path, saves: list[Any], loads: list[Any]) -> None:
    """Parameters, buffers and moments bit by bit, from images in which only what was asked for is right; and the next
    step comes out like the next step of those who saved."""
    answers = on_ranks(4, scenes.matrix, str(tmp_path), saves, loads)
    seen = [(case, rank) for rank, found in enumerate(answers) for case, _ in found]
    assert sorted(seen) == sorted((load, rank) for load in loads for rank in range(load[1]))
    for rank, found in enumerate(answers):
        for (layout, world_size, name), one in found:
            what = f"rank {rank} of {world_size}, {layout} from {name}"
            assert one["wrong"] == [], what
            assert one["far"] == [], what
            assert one["tensors"] > 10, what
            assert one["as_saved"] or f"{layout}{world_size}" != name, what


def test_of_copies_that_differ_all_take_the_first_rank_s(tmp_path: Path) -> None:
    """A sharded tensor is never put together of different ranks' own tensors; and it is said."""
    for answer in on_ranks(2, scenes.copies_that_differ, str(tmp_path)):
        assert answer["whole"] == [[3.0 * row, 3.0 * row + 1, 3.0 * row + 2] for row in range(5)]
        assert answer["said"] == [
            "x.t: each rank had saved its own; now it is sharded, and made from the first rank's",
        ]


@pytest.mark.holds("any-layout")
def test_what_did_not_arrive_is_never_taken_for_zeros() -> None:
    """A tensor of which a byte is not there is named, with the bytes; what is there is loaded."""
    without_b, without_its_end, whole = scenes.with_holes()
    assert without_b.startswith("x.b: bytes ")
    assert without_its_end.startswith("x.b: bytes ")
    assert without_b.endswith(" of rank 0 did not arrive")
    assert whole == "nothing"


def test_a_part_that_was_not_saved_is_named() -> None:
    """One row between two saved blocks: the tensor, what is wanted of it, and how much of that there is."""
    assert scenes.planned_with_a_hole() == "t at [1, 0] of shape [5, 3]: the checkpoint has 12 of 15 elements"
