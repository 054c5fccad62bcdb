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
