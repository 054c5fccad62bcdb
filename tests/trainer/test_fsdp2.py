"""Sharded state on real ranks: every rank keeps its own blocks, and gets every bit back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_scenes as scenes
import pytest
from ranks import on_ranks


def _check(answers: list[dict[str, Any]]) -> None:
    for rank, answer in enumerate(answers):
        assert answer["loaded"] == answer["saved"], f"rank {rank}: loaded bits differ"
        assert answer["resumed"] == answer["straight"], f"rank {rank}: the resumed run is another one"
        assert answer["saved"] != answer["straight"]
        assert answer["mismatched"] == ()


@pytest.mark.parametrize("optimizer", ["adamw", "fused", "loop", "sgd"])
def test_two_ranks(tmp_path: Path, optimizer: str) -> None:
    """Uneven, empty and tied blocks: fresh objects get the same bits and go on to the same bits."""
    answers = on_ranks(2, scenes.there_and_back, "fsdp", optimizer, str(tmp_path))
    _check(answers)
    items = answers[0]["items"]
    places = {(leaf, rank): (offset, shape) for leaf, rank, _s, _n, offset, shape in items}
    assert places["model.words.weight", 0] == ((0, 0), (4, 6))
    assert places["model.words.weight", 1] == ((4, 0), (3, 6))
    # One row: rank 1 has nothing of it. The tied weight is kept once.
    assert [rank for leaf, rank, *_ in items if leaf == "model.one.weight"] == [0]
    assert "model.head.weight" not in {leaf for leaf, *_ in items}
    assert {spread for leaf, _r, spread, *_ in items if leaf.endswith(("weight", "exp_avg"))} == {"sharded"}


def test_state_of_a_wider_type_than_its_parameters(tmp_path: Path) -> None:
    """Moments in float32 beside parameters in bfloat16: no bit of either is lost, into an optimizer without state."""
    answers = on_ranks(2, scenes.there_and_back, "narrow", "wider", str(tmp_path))
    _check(answers)
    types = {leaf: (spread, dtype) for leaf, dtype, spread in answers[0]["types"]}
    assert types["model.inner.weight"] == ("sharded", "bfloat16")
    assert types["optimizer.state.model.inner.weight.average"] == ("sharded", "float32")


def test_replicas_share_the_keeping(tmp_path: Path) -> None:
    """Two copies of two parts on four ranks: every block once, the bytes even, every rank's bits back."""
    answers = on_ranks(4, scenes.there_and_back, "hsdp", "adamw", str(tmp_path))
    _check(answers)
    sharded = [(name, offset) for _l, _r, spread, name, offset, _shape in answers[0]["items"] if spread == "sharded"]
    assert len(set(sharded)) == len(sharded)
    owners = {rank for _l, rank, spread, *_ in answers[0]["items"] if spread == "sharded"}
    assert owners == {0, 1, 2, 3}
    sizes = answers[0]["bytes"]
    assert max(sizes) < 1.5 * min(sizes)


def test_only_replicas(tmp_path: Path) -> None:
    """A mesh that shards nothing: each tensor is one block, kept by one of the two ranks."""
    answers = on_ranks(2, scenes.there_and_back, "replicated", "adamw", str(tmp_path))
    _check(answers)
    kept = [leaf for leaf, _r, spread, *_ in answers[0]["items"] if spread == "sharded"]
    assert len(set(kept)) == len(kept)


def test_sharded_in_two_ways_at_once(tmp_path: Path) -> None:
    """Tensor parallel and fully sharded: blocks of blocks, which make up the whole."""
    answers = on_ranks(4, scenes.there_and_back, "tp", "adamw", str(tmp_path))
    _check(answers)
    blocks = {
        rank: (offset, shape) for leaf, rank, _s, _n, offset, shape in answers[0]["items"] if leaf == "model.up.weight"
    }
    assert sorted(blocks.values()) == [((0, 0), (4, 8)), ((4, 0), (4, 8)), ((8, 0), (4, 8)), ((12, 0), (4, 8))]


@pytest.mark.holds("fsdp2-shards-stand-still")
def test_a_save_while_the_parameters_are_gathered(tmp_path: Path) -> None:
    """The sharded parameters are taken under their names, and training goes on to the same bits."""
    for answer in on_ranks(2, scenes.saved_while_whole, str(tmp_path)):
        assert answer["whole"], "the scene must have gathered parameters at its boundary"
        assert "optimizer.state.model.words.weight.exp_avg" in answer["names"]
        assert not [name for name in answer["names"] if ".param" in name]
        assert answer["ends"][0] == answer["ends"][1]


@pytest.mark.holds("replan-together")
def test_sharded_state_is_walked_only_when_it_may_have_changed() -> None:
    """Steps change values only; optimizer state born, and parameters gathered for an evaluation, are seen."""
    for answer in on_ranks(2, scenes.looked_at_each_step):
        assert answer["equal"] == [True] * 6
        assert answer["walked"][1:4] == [[], [], []]
        assert "model" in answer["walked"][4]


def test_replicas_that_differ_are_kept_by_each_rank(tmp_path: Path) -> None:
    """A copy that is not one is named, and nobody's bits are lost."""
    for answer in on_ranks(4, scenes.replicas_that_differ, str(tmp_path)):
        assert answer["mismatched"] == ("model.inner.bias",)
        assert answer["loaded"] == answer["saved"]
        assert answer["otherwise"].startswith("ConfigError: model.inner.bias: when it was saved, ranks that should")


@pytest.mark.holds("uneven-lengths")
def test_sharded_tensors_outside_of_modules(tmp_path: Path) -> None:
    """In a dict, alone, by columns, whole on every rank, without elements: the bits, and sharded as before."""
    first, second = on_ranks(2, scenes.other_objects, str(tmp_path))
    assert first["saved"] == second["saved"]
    for answer in (first, second):
        assert answer["equal"]
        assert answer["sharded"]
    spread = {leaf: spread for leaf, _rank, spread, _name in first["items"]}
    assert set(spread.values()) == {"sharded"}
    assert sorted(name for leaf, _r, _s, name in first["items"] if leaf == "tree.columns.0") == [
        "tree.columns.0@rank00000",
        "tree.columns.0@rank00001",
    ]


def test_what_does_not_fit_is_said_by_path(tmp_path: Path) -> None:
    """Unfinished sums at registration; nothing to load into, other lengths and other types at the restore."""
    for said in on_ranks(2, scenes.refusals, str(tmp_path)):
        partial, nothing, shorter, narrow = said
        assert partial.startswith("UnsupportedStateError: deep.sum.0: a DTensor placed")
        assert nothing.startswith("ConfigError: x.t: the checkpoint has a sharded tensor")
        assert shorter.startswith("ConfigError: x.t: the checkpoint has a tensor of shape [8], here it is sharded")
        assert narrow.startswith("ConfigError: x.t: the checkpoint has torch.float16, here it is torch.float32")
