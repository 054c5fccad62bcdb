"""Everything that a run keeps, damaged in every way: the bad is named and never loaded, the next best is taken."""

from __future__ import annotations

import itertools
from pathlib import Path

import evidence
import pytest
from damage import KINDS, copy_of, flip, swap
from machines import Machine, MakeMachine, Nursery

NEWEST = "00000005-g0002"
OLDER = "00000004-g0002"


def keys_of(run: Path, *prefixes: str) -> list[str]:
    return [key for key in evidence.of_directory(run) if key.startswith(prefixes)]


def quarantined(place: Machine) -> list[str]:
    return [event["object"] for event in place.events("quarantined")]


def try_to_open(place: Machine, **settings: object) -> tuple[int | None, str | None]:
    """The step gone on from, or why not: the agent's own error, or what every trainer was told."""
    agent = place.start(2, **settings)
    if agent.error is not None:
        return None, f"{agent.answer.get('kind')}: {agent.error}"
    answers = place.open()
    errors = {(answer.get("kind"), answer.get("error")) for answer in answers}
    if errors != {(None, None)}:
        ((kind, error),) = errors
        assert error is not None
        return None, f"{kind}: {error}"
    return place.went_on_from(answers), None


def check(nursery: Nursery, lived: Path, directory: Path, key: str, kind: str) -> None:
    run = copy_of(lived / "run", directory / "run")
    KINDS[kind](run / key)
    damaged = evidence.of_directory(run)
    with Machine(nursery, directory, str(run), "here") as place:
        step, why = try_to_open(place)
        names = quarantined(place)
        if key == "run.json" or key.startswith(("generations/", "plans/")):
            assert why is not None, f"{kind} {key}: went on from {step}"
            assert key in why, why
        elif key.startswith("commits/") and kind == "delete":
            # The acknowledgements are there: whoever starts commits it again.
            assert (step, names) == (5, [])
        elif NEWEST in key and not key.endswith(".ok.json"):
            assert (step, names) == (4, [key]), why
        else:
            assert (step, names) == (5, []), why
        after = evidence.of_directory(run)
        assert {key: after.get(key) for key in damaged} == damaged, "a start changed or removed what was there"
        if step is not None:
            place.saved(step + 1)
            assert (step + 1, 3) in checkpoints_but(run, key)


def checkpoints_but(run: Path, damaged_key: str) -> set[evidence.At]:
    """Visible checkpoints, without the step that was damaged by hand."""
    objects = evidence.of_directory(run)
    piece = damaged_key.split("/")[1].removesuffix(".json")
    commits = {f"commits/{piece}.json"}
    return set(evidence.checkpoints({key: data for key, data in objects.items() if key not in commits}))


def _chosen(run: Path, *, all_of_them: bool) -> list[str]:
    if all_of_them:
        return keys_of(run, "run.json", "generations/", "plans/", "commits/", "steps/")
    return [
        *keys_of(run, "run.json", "generations/", "plans/", f"commits/{NEWEST}", f"steps/{NEWEST}/rank-00001"),
        f"commits/{OLDER}.json",
    ]


@pytest.mark.holds("bad-copy-passed-over", "newest-cut-short")
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_object_is_named_and_never_loaded(
    nursery: Nursery, lived_run: Path, tmp_path: Path, kind: str
) -> None:
    """One object damaged: the previous step is taken, or the start refused with the object's name; nothing is lost."""
    for number, key in enumerate(_chosen(lived_run / "run", all_of_them=False)):
        check(nursery, lived_run, tmp_path / f"{number}", key, kind)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
def test_any_damaged_object_is_named_and_never_loaded(
    nursery: Nursery, lived_run: Path, tmp_path: Path, kind: str
) -> None:
    """The same for every object that the run keeps."""
    for number, key in enumerate(_chosen(lived_run / "run", all_of_them=True)):
        check(nursery, lived_run, tmp_path / f"{number}", key, kind)


def _shard(run: Path, at: str, rank: int) -> str:
    (key,) = (k for k in keys_of(run, f"steps/{at}/rank-{rank:05d}") if k.endswith(".safetensors"))
    return key


def test_objects_in_one_another_s_place_are_not_believed(machine: MakeMachine, lived_run: Path, tmp_path: Path) -> None:
    """Two shards or manifests swapped, between ranks and between steps: both steps concerned are passed over."""
    template = lived_run / "run"
    swaps = [
        (_shard(template, NEWEST, 0), _shard(template, NEWEST, 1), 4),
        (_shard(template, NEWEST, 0), _shard(template, OLDER, 0), 3),
        (f"commits/{NEWEST}.json", f"commits/{OLDER}.json", 3),
        (_shard(template, NEWEST, 0), f"commits/{NEWEST}.json", 4),
    ]
    for number, (one, other, expected) in enumerate(swaps):
        run = copy_of(template, tmp_path / f"{number}")
        swap(run / one, run / other)
        place = machine(run)
        assert try_to_open(place) == (expected, None)
        assert set(quarantined(place)) <= {one, other}
        assert quarantined(place)


def test_generation_records_in_one_another_s_place_are_refused(
    machine: MakeMachine, lived_run: Path, tmp_path: Path
) -> None:
    """Lineage is never guessed: swapped records are named and nobody trains."""
    run = copy_of(lived_run / "run", tmp_path / "run")
    swap(run / "generations/g0001.json", run / "generations/g0002.json")
    step, why = try_to_open(machine(run))
    assert step is None
    assert why is not None
    assert why.startswith("CorruptError: generations/g000")


@pytest.mark.holds("only-checkpoint-skipped")
def test_when_all_are_bad_all_are_named_and_nothing_is_deleted(
    machine: MakeMachine, lived_run: Path, tmp_path: Path
) -> None:
    """Every checkpoint damaged: the start is refused with every candidate, and only an explicit wish starts over."""
    run = copy_of(lived_run / "run", tmp_path / "run")
    shards = [key for key in keys_of(run, "steps/") if "rank-00000" in key and key.endswith(".safetensors")]
    for key in shards:
        flip(run / key)
    before = evidence.of_directory(run)
    place = machine(run)
    step, why = try_to_open(place)
    assert step is None
    assert why is not None
    assert why.startswith("RestoreError")
    assert [key for key in shards if key not in why] == []
    assert "--resume never" in why
    after = evidence.of_directory(run)
    assert {key: after.get(key) for key in before} == before
    place.kill()
    assert try_to_open(place, resume="never") == (None, None)
    place.saved(1)
    place.kill()
    assert try_to_open(place) == (1, None)


@pytest.mark.holds("generation-before-training")
def test_a_lost_record_of_the_newest_generation_is_no_rollback(
    machine: MakeMachine, lived_run: Path, tmp_path: Path
) -> None:
    """Records deleted by hand, one or all: steps that name them are there, so it is refused instead of guessed."""
    for lost in (("g0002",), ("g0001",), ("g0001", "g0002")):
        run = copy_of(lived_run / "run", tmp_path / "-".join(lost))
        for name in lost:
            (run / f"generations/{name}.json").unlink()
        step, why = try_to_open(machine(run))
        assert (step, why is not None) == (None, True)
        assert why is not None
        assert "generations/g000" in why or "generation " in why


@pytest.mark.holds("step-0-needs-answers", "only-checkpoint-skipped")
def test_history_that_lost_all_its_checkpoints_is_no_new_run(
    machine: MakeMachine, lived_run: Path, tmp_path: Path
) -> None:
    """commits/ and steps/ deleted by hand: the generations tell of a commit, so it does not start at step 0."""
    run = copy_of(lived_run / "run", tmp_path / "run")
    for key in keys_of(run, "commits/", "steps/"):
        (run / key).unlink()
    step, why = try_to_open(machine(run))
    assert step is None
    assert why is not None
    assert why.startswith("RestoreError")


def test_a_run_whose_records_are_gone_is_no_new_run(machine: MakeMachine, lived_run: Path, tmp_path: Path) -> None:
    """run.json and generations/ deleted by hand, checkpoints still there: refused."""
    run = copy_of(lived_run / "run", tmp_path / "run")
    for key in keys_of(run, "run.json", "generations/"):
        (run / key).unlink()
    agent = machine(run).start(1)
    assert agent.error is not None
    assert "run.json" in agent.error


def test_a_damaged_plan_is_put_right_by_the_next_save_under_it(
    machine: MakeMachine, lived_run: Path, tmp_path: Path
) -> None:
    """A plan's name is its hash: a start over with the same structure must not be blocked by its damaged object."""
    run = copy_of(lived_run / "run", tmp_path / "run")
    (plan,) = keys_of(run, "plans/")
    flip(run / plan)
    place = machine(run)
    assert try_to_open(place, resume="never") == (None, None)
    place.saved(1)
    assert (run / plan).read_bytes() == (lived_run / "run" / plan).read_bytes()
    place.kill()
    assert try_to_open(place) == (1, None)


# ------------------------------------------------------------------ copies on local drives


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_copy_gives_way_to_the_run_s_own_shard(
    machine: MakeMachine, lived_run: Path, tmp_path: Path, kind: str
) -> None:
    """A local copy is a short cut: bad, it is named and dropped, and the step comes from the run."""
    run, copies = copy_of(lived_run / "run", tmp_path / "run"), copy_of(lived_run / "copies", tmp_path / "copies")
    key = _shard(copies, NEWEST, 0)
    KINDS[kind](copies / key)
    place = machine(run, disks=(str(copies),))
    assert try_to_open(place) == (5, None)
    assert quarantined(place) == ([] if kind == "delete" else [key])
    assert not (copies / key).exists()
    assert (run / key).exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_shard_of_the_run_is_replaced_by_its_copy(
    machine: MakeMachine, lived_run: Path, tmp_path: Path, kind: str
) -> None:
    """The run's own shard is bad, the copy is good: no step is lost."""
    run, copies = copy_of(lived_run / "run", tmp_path / "run"), copy_of(lived_run / "copies", tmp_path / "copies")
    KINDS[kind](run / _shard(run, NEWEST, 0))
    place = machine(run, disks=(str(copies),))
    assert try_to_open(place) == (5, None)


def test_bad_copies_and_bad_shards_of_different_ranks_still_make_a_step(
    machine: MakeMachine, lived_run: Path, tmp_path: Path
) -> None:
    """Rank 0 is bad in the copy, rank 1 in the run: together every shard is there once, verified."""
    run, copies = copy_of(lived_run / "run", tmp_path / "run"), copy_of(lived_run / "copies", tmp_path / "copies")
    flip(copies / _shard(copies, NEWEST, 0))
    flip(run / _shard(run, NEWEST, 1))
    assert try_to_open(machine(run, disks=(str(copies),))) == (5, None)


def test_a_copy_that_cannot_be_read_or_dropped_does_not_stop_a_start(
    machine: MakeMachine, lived_run: Path, tmp_path: Path
) -> None:
    """The drive of the copies is broken (a link where a file belongs): the run's own shard is taken, and it is said."""
    run, copies = copy_of(lived_run / "run", tmp_path / "run"), copy_of(lived_run / "copies", tmp_path / "copies")
    for key in itertools.chain(keys_of(copies, f"steps/{NEWEST}/")):
        (copies / key).unlink()
        (copies / key).symlink_to(run / key)
    place = machine(run, disks=(str(copies),))
    assert try_to_open(place) == (5, None)
    assert place.events("quarantined") or place.events("warning")
