"""Run record, generation records, acknowledgements and manifests: round trips, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from core_samples import PLAN_A, damaged, generation, manifest, raw_document, shard
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.documents import seal, unseal
from surefoot.core.layout import BoundaryId, commit_key
from surefoot.core.manifest import (
    Generation,
    Manifest,
    Parent,
    RunRecord,
    Shard,
    is_tombstone,
    tombstone_bytes,
)
from surefoot.errors import CorruptError

_AT = BoundaryId(1200, 7)
_TEXTS = ["", "é", "a\nb", "😀", "\ud800", "x" * 400, 'quote"', "\0"]
_numbers = st.floats(0, 2e9)


def _full() -> Manifest:
    shards = tuple(shard(_AT, rank, record={"trigger": "manual", "rng": [1, {"x": None}]}) for rank in range(2))
    parent = Parent(6, 1100, False)
    return Manifest(_AT, PLAN_A, 2, "manual", "best", {"loss": 0.25}, "launch-x", parent, 17.5, shards, None)


@given(st.from_regex(r"[a-zA-Z0-9]{8,64}", fullmatch=True), _numbers)
def test_a_run_record_comes_back(run: str, created: float) -> None:
    """A run record is read back by value."""
    record = RunRecord(run, created)
    assert RunRecord.from_bytes(record.to_bytes()) == record


@pytest.mark.parametrize(
    "run", ["", "short", "x" * 65, "with space", "dash-dash", "..", "élèveélève", "١٢٣٤٥٦٧٨", "a" * 9 + "\n"]
)
def test_a_run_id_that_cannot_be_a_name_is_refused(run: str) -> None:
    """A run id names files and stands in ASCII headers: anything but 8 to 64 ASCII letters and digits is refused."""
    with pytest.raises(CorruptError, match=r"run\.json: run id "):
        RunRecord.from_bytes(seal({"run": run, "created": 1.0}))


@given(
    st.integers(2, 10**9),
    st.sampled_from(_TEXTS),
    st.none() | st.tuples(st.integers(0, 2**60), st.booleans()),
    st.integers(1, 10**6),
    _numbers,
)
def test_a_generation_comes_back(
    number: int, text: str, parent: tuple[int, bool] | None, world_size: int, created: float
) -> None:
    """A generation record is read back by value, with and without a parent, whatever its texts are."""
    origin = None if parent is None else Parent(number - 1, *parent)
    made = Generation(number, text, origin, world_size, text, created)
    assert Generation.from_bytes(made.to_bytes(), made.key) == made


@pytest.mark.parametrize("parent", [7, 8, 100])
def test_a_generation_cannot_come_from_itself_or_later(parent: int) -> None:
    """A parent that is not older is refused: a walk along the lineage must end."""
    made = generation(7, (parent, 5))
    with pytest.raises(CorruptError, match=f"generation 7 names generation {parent} as its parent"):
        Generation.from_bytes(made.to_bytes(), made.key)


@pytest.mark.holds("changed-documents")
def test_a_record_under_another_ones_key_is_refused() -> None:
    """Whole documents that were swapped are noticed: each says whose it is."""
    for data, read, wrong in [
        (generation(7).to_bytes(), Generation.from_bytes, generation(6).key),
        (shard(_AT, 0).ack_bytes(), Shard.from_ack, shard(_AT, 1).ack),
        (shard(_AT, 0).ack_bytes(), Shard.from_ack, shard(BoundaryId(1200, 6), 0).ack),
        (shard(_AT, 0).ack_bytes(), Shard.from_ack, shard(_AT, 0, attempt="bbbb").ack),
        (manifest(_AT).to_bytes(), Manifest.from_bytes, commit_key(BoundaryId(1201, 7))),
        (tombstone_bytes(_AT, 1.0), is_tombstone, commit_key(BoundaryId(1201, 7))),
    ]:
        with pytest.raises(CorruptError, match=f"^{wrong}: "):
            read(data, wrong)


@given(
    st.integers(0, 2**60),
    st.integers(0, 99999),
    st.from_regex(r"[0-9a-f]{4,16}", fullmatch=True),
    st.sampled_from(_TEXTS),
)
def test_an_acknowledgement_comes_back(step: int, rank: int, attempt: str, text: str) -> None:
    """An acknowledgement is read back by value, its record included."""
    made = shard(BoundaryId(step, 3), rank, attempt=attempt, record={text: [text, {"n": 2**70}]})
    assert Shard.from_ack(made.ack_bytes(), made.ack) == made


@pytest.mark.parametrize("retired", [None, 5.25])
@pytest.mark.parametrize("text", _TEXTS)
def test_a_manifest_comes_back(retired: float | None, text: str) -> None:
    """A manifest is read back by value, given up or not, whatever its texts are."""
    made = replace(_full(), tag=text, launch=text, metrics={text: [1.5, text]}, retired=retired)
    assert Manifest.from_bytes(made.to_bytes(), made.key) == made
    assert made.size_bytes == 4096 + 4097


def test_giving_up_changes_the_time_alone() -> None:
    """`retire` leaves everything but the time as it was."""
    made = _full()
    assert replace(made.retire(9.5), retired=None) == made
    assert Manifest.from_bytes(made.retire(9.5).to_bytes(), made.key).retired == 9.5


@pytest.mark.holds("tombstones")
def test_a_tombstone_is_no_manifest_and_a_manifest_no_tombstone() -> None:
    """The two things that may lie at a manifest's key are told apart, and neither is taken for the other."""
    key = commit_key(_AT)
    assert is_tombstone(tombstone_bytes(_AT, 1.0), key)
    assert not is_tombstone(_full().to_bytes(), key)
    with pytest.raises(CorruptError):
        Manifest.from_bytes(tombstone_bytes(_AT, 1.0), key)


def _change(made: Manifest, **fields: Any) -> bytes:
    body = unseal(made.to_bytes(), "x")
    return seal({**body, **fields})


def test_a_manifest_without_one_shard_a_rank_is_refused() -> None:
    """Missing, repeated, foreign and re-ordered shards are refused; so is a world size that they do not make up."""
    shards = [each.to_json() for each in _full().shards]
    third = shard(_AT, 2).to_json()
    for wrong in ([], shards[:1], shards[::-1], [shards[0]] * 2, [*shards, third], [shards[0], third]):
        with pytest.raises(CorruptError, match="does not name one shard for each of 2 ranks"):
            Manifest.from_bytes(_change(_full(), shards=wrong), commit_key(_AT))
    for size in (1, 3, 10**12):
        with pytest.raises(CorruptError, match=f"for each of {size} ranks"):
            Manifest.from_bytes(_change(_full(), world_size=size), commit_key(_AT))


@pytest.mark.holds("keys-stay-in-prefix")
@pytest.mark.parametrize(
    "attempt", ["..", "a/../b", "x/y", "../../../run", "", "A3F2", "a3f", "a3f2\n", "é" * 4, "a" * 17]
)
def test_an_attempt_that_would_make_a_foreign_key_is_refused(attempt: str) -> None:
    """A shard's key is built from its attempt: one that is not our own kind never becomes a path."""
    data = {**shard(_AT, 0).to_json(), "attempt": attempt}
    data["path"] = f"steps/{_AT}/rank-00000-{attempt}.safetensors"
    with pytest.raises(CorruptError, match="shard path"):
        Shard.from_json(data, _AT, PLAN_A, "x")


@pytest.mark.parametrize("path", ["steps/00001200-g0007/rank-00001-aaaa.safetensors", "/etc/passwd", "", "../x"])
def test_a_shard_under_another_path_is_refused(path: str) -> None:
    """The path in a document must be the one that its own fields make."""
    with pytest.raises(CorruptError, match="shard path"):
        Shard.from_json({**shard(_AT, 0).to_json(), "path": path}, _AT, PLAN_A, "x")


@pytest.mark.parametrize("plan", ["", "../x", "A" * 32, "a" * 31, "a" * 32 + "\n", "plans/" + "a" * 32])
def test_a_plan_hash_that_would_make_a_foreign_key_is_refused(plan: str) -> None:
    """A plan's key is built from its hash: what is no hash never becomes a path."""
    with pytest.raises(CorruptError, match="plan"):
        Manifest.from_bytes(_change(_full(), plan=plan), commit_key(_AT))
    body = unseal(shard(_AT, 0).ack_bytes(), "x")
    with pytest.raises(CorruptError, match="plan"):
        Shard.from_ack(seal({**body, "plan": plan}), shard(_AT, 0).ack)


@pytest.mark.parametrize("trigger", ["", "Periodic", "cron", "agent "])
def test_an_unknown_trigger_is_refused(trigger: str) -> None:
    """A trigger that this version does not know is named."""
    with pytest.raises(CorruptError, match=f"trigger {trigger!r} is unknown"):
        Manifest.from_bytes(_change(_full(), trigger=trigger), commit_key(_AT))


@pytest.mark.parametrize("committed", [0, 1, None, "false", []])
def test_committed_is_true_or_false_and_nothing_like_it(committed: Any) -> None:
    """A parent's `committed` is a bool: the text "false" must not become true."""
    parent = {"generation": 6, "boundary": 1, "committed": committed, "step": 1}
    with pytest.raises(CorruptError, match="'committed' is not true or false"):
        Manifest.from_bytes(_change(_full(), parent=parent), commit_key(_AT))
    body = unseal(generation(7, (6, 1)).to_bytes(), "x")
    with pytest.raises(CorruptError, match="'committed' is not true or false"):
        Generation.from_bytes(seal({**body, "parent": parent}), generation(7).key)


_DOCUMENTS: dict[str, tuple[bytes, Callable[[bytes], Any]]] = {
    "run": (RunRecord("a" * 16, 1.5).to_bytes(), RunRecord.from_bytes),
    "generation": (
        generation(7, (6, 3)).to_bytes(),
        lambda data: Generation.from_bytes(data, generation(7).key),
    ),
    "ack": (shard(_AT, 0).ack_bytes(), lambda data: Shard.from_ack(data, shard(_AT, 0).ack)),
    "manifest": (_full().to_bytes(), lambda data: Manifest.from_bytes(data, commit_key(_AT))),
    "tombstone": (tombstone_bytes(_AT, 1.0), lambda data: is_tombstone(data, commit_key(_AT))),
}


@pytest.mark.parametrize("kind", _DOCUMENTS)
@given(data=st.data())
def test_a_damaged_document_is_corrupt_or_can_be_written_again(kind: str, data: st.DataObject) -> None:
    """Any one field of any document, replaced by any JSON, ends in `CorruptError` or in a value that can be kept."""
    whole, read = _DOCUMENTS[kind]
    body = unseal(whole, "x")
    text = json.dumps(data.draw(damaged(body))).encode()
    try:
        value = read(raw_document(text))
    except CorruptError:
        return
    if isinstance(value, Shard):
        assert read(value.ack_bytes()) == value
    elif not isinstance(value, bool):
        assert read(value.to_bytes()) == value
