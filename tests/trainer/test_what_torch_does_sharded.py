"""Facts about FSDP2 and sharded tensors on which staging stands; and what is made of those that cannot be trusted."""

from __future__ import annotations

import pytest
import torch
import torch_scenes as scenes
from ranks import on_ranks
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from surefoot.core.cover import cover_flaw
from surefoot.core.image import Box
from surefoot.trainer.state.sharded import _block


@pytest.mark.holds("fsdp2-shards-stand-still")
@pytest.mark.parametrize(("kind", "shown"), [("fsdp", {"DTensor"}), ("unsharded", {"Parameter"})])
def test_local_shards_stand_still_until_the_optimizer_steps(kind: str, shown: set[str]) -> None:
    """Through forward and backward neither bytes nor addresses of any rank's parts change; a step changes every one
    in place. The module's own parameters may be exchanged meanwhile for gathered ones, so it is never walked while a
    copy is under way."""
    for answer in on_ranks(2, scenes.shards_through_three_steps, kind):
        assert answer["before the step"] == []
        assert answer["moved"] == []
        assert min(answer["stepped"]) > 10
        assert answer["kinds"] == shown


@pytest.mark.holds("version-counters-miss-writes")
@pytest.mark.parametrize(
    ("kind", "moved"),
    [("adamw", {"parameter", "moment"}), ("loop", {"parameter", "moment"}), ("fused", set())],
)
def test_steps_of_sharded_parameters_are_unseen_in_the_local_tensors(kind: str, moved: set[str]) -> None:
    """Their values change and their version counters do not, whatever the optimizer; by a fused one, nothing moves."""
    (answer,) = on_ranks(1, scenes.versions_over_a_step, kind)
    assert answer["changed"] == [True, True]
    assert set(answer["moved"]) <= moved


def _rows(length: int, parts: int, of: torch.Tensor | None = None) -> list[torch.Tensor]:
    """What `torch.chunk` gives, with empty parts at the end."""
    chunks = list((torch.arange(length) if of is None else of).chunk(parts))
    return chunks + [torch.arange(0)] * (parts - len(chunks))


_FSDP_TP = [(2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (3, 3)]


def _placements(tp: int) -> tuple[_StridedShard, Shard]:
    return _StridedShard(0, split_factor=tp), Shard(0)


def _flaw_of_torch_s_boxes(rows: int, mesh: tuple[int, int]) -> str | None:
    boxes = []
    for coordinate in [(d, t) for d in range(mesh[0]) for t in range(mesh[1])]:
        shape, offset = _compute_local_shape_and_global_offset((rows,), mesh, list(coordinate), _placements(mesh[1]))
        if shape[0]:
            boxes.append(Box("x", "int64", tuple(shape), tuple(offset), (rows,)))
    return cover_flaw(boxes)


@pytest.mark.holds("wrong-strides-refused")
def test_torch_s_own_boxes_of_thirteen_rows_are_no_cover() -> None:
    """Over a mesh of three by two, as FSDP2 over tensor parallelism lays it out: so every cover is checked."""
    assert _flaw_of_torch_s_boxes(13, (3, 2)) is not None
    assert _flaw_of_torch_s_boxes(12, (3, 2)) is None


@pytest.mark.holds("wrong-strides-refused")
@pytest.mark.parametrize("mesh", _FSDP_TP)
def test_what_is_not_refused_is_where_the_rows_are(mesh: tuple[int, int]) -> None:
    """One to 39 rows: each rank's block is exactly the rows that two rounds of chunks give it, or it is refused; and
    where all divides it is taken."""
    refused = []
    for rows in range(1, 40):
        for tp, part in enumerate(_rows(rows, mesh[1])):
            for dp, mine in enumerate(_rows(0, mesh[0], part)):
                block = _block((rows,), mesh, (dp, tp), _placements(mesh[1]))
                if block is None or block[0] != (len(mine),):
                    # A block of another length than the local tensor's is refused by `place_of`.
                    refused.append(rows)
                elif len(mine):
                    assert block[1] == (int(mine[0]),), f"{rows} rows at {dp}, {tp}"
    assert not [rows for rows in refused if rows % (mesh[0] * mesh[1]) == 0]


@pytest.mark.holds("wrong-strides-refused")
def test_thirteen_rows_are_kept_where_they_are_or_refused() -> None:
    """The same on six ranks with a real model: whoever is not refused has the rows that it says, and nothing that
    torch itself puts together is wrong."""
    answers = on_ranks(6, scenes.thirteen_rows_over_three_by_two)
    assert sorted(row for answer in answers for row in answer["rows"]) == list(range(13))
    for answer in answers:
        assert answer["whole"] == list(range(13))
        if "refused" in answer:
            assert answer["refused"].startswith("layer.weight: sharded as")
        elif answer["rows"]:
            assert answer["rows"] == list(range(answer["begins"], answer["begins"] + len(answer["rows"])))
    assert [answer for answer in answers if "refused" in answer]
