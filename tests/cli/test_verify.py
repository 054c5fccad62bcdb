"""`surefoot verify`: every damage to every file of a real run is named, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cli_jobs import STEPS, Answer, Evicted, Finished, Killed
from run_files import commits, first, resealed, shard_of

from surefoot.core.documents import seal, unseal
from surefoot.core.layout import BoundaryId, commit_key, parse_plan
from surefoot.core.plan import Plan
from surefoot.errors import TierError
from surefoot.inspect.verify import verify
from surefoot.records.records import Records
from surefoot.tiers.disk import DiskTier

Command = Callable[..., Answer]
KINDS = {
    "run": "run.json",
    "generation": "generations/*.json",
    "plan": "plans/*.json",
    "manifest": "commits/*.json",
    "shard": "steps/*/*.safetensors",
    "ack": "steps/*/*.ok.json",
}


def problems(run: Path, wanted: BoundaryId | int | None = None) -> dict[str, str]:
    verdict = asyncio.run(verify(DiskTier(run), wanted))
    assert verdict.ok is (not verdict.problems)
    found = {problem.object: problem.what for problem in verdict.problems}
    assert len(found) == len(verdict.problems), verdict.problems
    return found


def files(run: Path, kind: str) -> Iterator[tuple[str, Path]]:
    """Each file of a kind, to be damaged; it is put right again afterwards."""
    paths = sorted(run.glob(KINDS[kind]))
    assert paths
    for path in paths:
        data = path.read_bytes()
        yield str(path.relative_to(run)), path
        path.write_bytes(data)
    assert problems(run) == {}


def test_a_whole_run_is_ok(surefoot: Command, finished: Finished) -> None:
    """Exit code 0, and the contract's JSON."""
    answer = surefoot("verify", finished.run, "--json")
    assert (answer.code, json.loads(answer.out)) == (0, {"ok": True, "problems": []})
    total = sum(path.stat().st_size for path in finished.run.glob("steps/*/*.safetensors"))
    assert (
        f"ok: {len(commits(finished.run))} checkpoints, {total / 1000:.1f} kB" in surefoot("verify", finished.run).out
    )


def test_every_kind_of_file_is_in_the_run(finished: Finished) -> None:
    """No file escapes the tests of damage below: what they go through, and the events, is all there is."""
    known = {path for pattern in (*KINDS.values(), "events/*") for path in finished.run.glob(pattern)}
    assert known == {path for path in finished.run.rglob("*") if path.is_file()}


@pytest.mark.holds("readers-do-not-verify")
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_is_named(run_copy: Path, kind: str) -> None:
    """In the first, the middle and the last byte of every file."""
    for key, path in files(run_copy, kind):
        whole = path.read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            assert set(problems(run_copy)) == {key}, place


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_named(run_copy: Path, kind: str) -> None:
    """Cut to nothing, to a half, and by one byte; and one byte too long."""
    for key, path in files(run_copy, kind):
        whole = path.read_bytes()
        for data in (b"", whole[: len(whole) // 2], whole[:-1], whole + b"\n"):
            path.write_bytes(data)
            assert set(problems(run_copy)) == {key}, len(data)


@pytest.mark.holds("readers-do-not-verify")
@pytest.mark.parametrize("kind", KINDS)
def test_a_deleted_file_is_named(run_copy: Path, kind: str) -> None:
    """As missing, also a manifest, of which only the events tell."""
    for key, path in files(run_copy, kind):
        path.unlink()
        found = problems(run_copy)
        assert set(found) == {key}
        assert found[key].startswith("is missing")


@pytest.mark.parametrize("kind", ["manifest", "shard", "ack"])
def test_swapped_files_are_named(run_copy: Path, kind: str) -> None:
    """Two whole files of two steps, each under the other's name."""
    paths = sorted(run_copy.glob(KINDS[kind]))
    for one, other in pairwise(paths):
        swap(one, other)
        assert set(problems(run_copy)) == {str(path.relative_to(run_copy)) for path in (one, other)}
        swap(one, other)
    assert problems(run_copy) == {}


def swap(one: Path, other: Path) -> None:
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


@pytest.mark.parametrize("kind", ["run", "generation", "plan"])
def test_another_whole_document_is_named(run_copy: Path, kind: str) -> None:
    """A sound document that is not the one that belongs there."""
    foreign = run_copy / ("generations/g0001.json" if kind == "run" else "run.json")
    for key, path in files(run_copy, kind):
        path.write_bytes(foreign.read_bytes())
        assert set(problems(run_copy)) == {key}


def test_a_torn_event_is_named(run_copy: Path) -> None:
    """The ledger's input breaks off within a line."""
    events = first(run_copy, "events/*")
    events.write_bytes(events.read_bytes()[:-20])
    assert set(problems(run_copy)) == {str(events.relative_to(run_copy))}


def test_a_header_that_the_plan_does_not_give_is_named(run_copy: Path) -> None:
    """Bytes and manifest agree, but the file's header is another one: not what a reader of the plan expects."""
    shard = shard_of(run_copy, STEPS)
    data = shard.read_bytes()
    renamed = data.replace(b'"model.weight"', b'"model.thgiew"', 1)
    assert renamed != data
    shard.write_bytes(renamed)
    asyncio.run(rehash(run_copy, BoundaryId(STEPS, 1), renamed))
    assert problems(run_copy) == {str(shard.relative_to(run_copy)): "its header is not the one that its plan gives"}


async def rehash(run: Path, at: BoundaryId, data: bytes) -> None:
    from dataclasses import replace

    import xxhash

    records = Records(DiskTier(run))
    manifest = await records.manifest(at)
    assert manifest is not None
    (shard,) = manifest.shards
    shard = replace(shard, xxh3_128=xxhash.xxh3_128_hexdigest(data), size_bytes=len(data))
    await records.rewrite_manifest(replace(manifest, shards=(shard,)))
    await records.tier.put(shard.ack, shard.ack_bytes())


def test_sums_of_blocks_that_are_not_its_own_are_named(run_copy: Path) -> None:
    """A sound shard whose documents have the sum of another block: no part of it could be verified by itself."""
    shard = shard_of(run_copy, STEPS)
    asyncio.run(_spoil_sums(run_copy, BoundaryId(STEPS, 1)))
    what = "the sums of its blocks that stand in its documents are not those of its bytes"
    assert problems(run_copy) == {str(shard.relative_to(run_copy)): what}


async def _spoil_sums(run: Path, at: BoundaryId) -> None:
    from dataclasses import replace

    records = Records(DiskTier(run))
    manifest = await records.manifest(at)
    assert manifest is not None
    (shard,) = manifest.shards
    assert shard.blocks is not None
    shard = replace(shard, blocks=replace(shard.blocks, sums=(shard.blocks.sums[0] ^ 1, *shard.blocks.sums[1:])))
    await records.rewrite_manifest(replace(manifest, shards=(shard,)))
    await records.tier.put(shard.ack, shard.ack_bytes())


def test_a_plan_with_a_hole_is_named(run_copy: Path) -> None:
    """A plan that forgets a tensor, sealed and consistently named by manifests: no exact cover."""
    path = first(run_copy, "plans/*.json")
    body = unseal(path.read_bytes(), "plan")
    body.pop("format")
    body["items"] = [item for item in body["items"] if item[0] != "model.bias"]
    path.write_bytes(seal(body))
    key = str(path.relative_to(run_copy))
    assert problems(run_copy) == {key: "no rank keeps 'model.bias' of rank 0"}


def test_a_plan_under_another_hash_is_named(run_copy: Path) -> None:
    """A sound plan, but not the one whose hash the file bears."""
    path = first(run_copy, "plans/*.json")
    whole = Plan.from_body(unseal(path.read_bytes(), "plan"))
    other = run_copy / f"plans/{'0' * 32}.json"
    shutil.copy(path, other)
    assert parse_plan(str(other.relative_to(run_copy)))
    assert problems(run_copy) == {f"plans/{'0' * 32}.json": f"holds the plan {whole.hash}"}


def test_one_checkpoint_of_many(surefoot: Command, run_copy: Path) -> None:
    """With STEP only that checkpoint is read, by number or by full name."""
    shard = shard_of(run_copy, STEPS)
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    for good in ("3", str(BoundaryId(3, 1))):
        assert surefoot("verify", run_copy, good).code == 0
    answer = surefoot("verify", run_copy, STEPS, "--json")
    assert answer.code == 1
    assert json.loads(answer.out) == {
        "ok": False,
        "problems": [{"object": str(shard.relative_to(run_copy)), "what": "its bytes do not match their hash"}],
    }


def test_a_checkpoint_that_is_not_there_is_a_problem(surefoot: Command, run_copy: Path) -> None:
    """Asked for by number or by name: exit code 1, and it is named."""
    for wanted, named in (("7", "step 7"), (str(BoundaryId(7, 1)), commit_key(BoundaryId(7, 1)))):
        answer = surefoot("verify", run_copy, wanted, "--json")
        assert answer.code == 1
        assert [problem["object"] for problem in json.loads(answer.out)["problems"]] == [named]


def test_nothing_at_all_is_no_run(surefoot: Command, tmp_path: Path) -> None:
    """An empty place is not a good run."""
    answer = surefoot("verify", tmp_path, "--json")
    assert answer.code == 1
    assert json.loads(answer.out) == {"ok": False, "problems": [{"object": str(tmp_path), "what": "no run here"}]}


def test_what_was_given_up_is_not_read(run_copy: Path) -> None:
    """Shards of a retired checkpoint may be gone; the parent's key must not be."""
    asyncio.run(retire(run_copy, BoundaryId(3, 1)))
    shutil.rmtree(run_copy / "steps" / str(BoundaryId(3, 1)))
    assert problems(run_copy) == {}
    assert problems(run_copy, 3) == {commit_key(BoundaryId(3, 1)): "was given up: it is not a checkpoint any more"}


async def retire(run: Path, at: BoundaryId) -> None:
    records = Records(DiskTier(run))
    manifest = await records.manifest(at)
    assert manifest is not None
    await records.rewrite_manifest(manifest.retire(1.0))


def test_a_checkpoint_given_up_meanwhile_is_no_problem(run_copy: Path) -> None:
    """Retention deletes the shards between the survey and the reading."""

    class Retiring(DiskTier):
        async def size(self, key: str) -> int:
            if str(BoundaryId(3, 1)) in key and key.endswith(".safetensors"):
                await retire(run_copy, BoundaryId(3, 1))
                shutil.rmtree(run_copy / "steps" / str(BoundaryId(3, 1)))
            return await super().size(key)

    assert asyncio.run(verify(Retiring(run_copy))).ok


def test_the_lineage_is_checked(killed: Killed, tmp_path: Path) -> None:
    """A run of two generations is whole; without the parent's manifest or its record, that is named."""
    run = tmp_path / "run"
    shutil.copytree(killed.run, run)
    assert problems(run) == {}
    parent = commit_key(BoundaryId(STEPS, 1))
    kept = (run / parent).read_bytes()
    (run / parent).unlink()
    assert problems(run) == {parent: "is missing, but generation 2 started from it"}
    (run / parent).write_bytes(kept)
    (run / "generations/g0001.json").unlink()
    assert problems(run) == {"generations/g0001.json": "is missing"}


def test_a_gap_between_generations_is_named(run_copy: Path) -> None:
    """Numbers have no gaps: a record in between was deleted."""
    resealed(run_copy, 3, parent_step=3)
    assert problems(run_copy) == {"generations/g0002.json": "is missing"}


def test_a_bucket_is_verified_too(surefoot: Command, evicted: Evicted, s3_env: object) -> None:
    """The evicted run on the S3 server is whole; one flipped byte there is named."""
    assert surefoot("verify", evicted.uri).code == 0
    from surefoot.tiers.open import open_tier

    async def damaged() -> tuple[str, dict[str, str]]:
        tier = open_tier(evicted.uri)
        key = next(e.key for e in await tier.list("steps/") if e.key.endswith(".safetensors"))
        whole = await tier.get(key)
        await tier.put(key, whole[:-1] + bytes([whole[-1] ^ 1]))
        try:
            return key, {p.object: p.what for p in (await verify(tier)).problems}
        finally:
            await tier.put(key, whole)
            await tier.close()

    key, found = asyncio.run(damaged())
    assert found == {key: "its bytes do not match their hash"}


@pytest.mark.parametrize("kind", KINDS)
def test_unreadable_is_not_absent(run_copy: Path, kind: str) -> None:
    """A tier that fails to read a file is named as failing, never the file as missing."""

    class Failing(DiskTier):
        key = ""

        def _fail(self, key: str) -> None:
            if key == self.key:
                raise TierError("the drive is on fire")

        async def get(self, key: str) -> bytes:
            self._fail(key)
            return await super().get(key)

        async def size(self, key: str) -> int:
            self._fail(key)
            return await super().size(key)

    for path in sorted(run_copy.glob(KINDS[kind])):
        tier = Failing(run_copy)
        tier.key = str(path.relative_to(run_copy))
        verdict = asyncio.run(verify(tier))
        assert [(p.object, p.what, p.fault) for p in verdict.problems] == [
            (tier.key, "cannot be read: the drive is on fire", True)
        ]


def test_a_directory_that_cannot_be_listed_is_said(surefoot: Command, run_copy: Path) -> None:
    """A link to itself lies where the manifests were: exit code 1, and nothing is called missing."""
    shutil.rmtree(run_copy / "commits")
    (run_copy / "commits").symlink_to("commits")
    answer = surefoot("verify", run_copy, "--json")
    assert answer.code == 1
    (problem,) = json.loads(answer.out)["problems"]
    assert problem["object"] == "commits/"
    assert problem["what"].startswith("cannot be listed: ")


def test_a_listing_that_fails_hides_nothing(run_copy: Path) -> None:
    """When the manifests cannot be listed, that alone is said: nothing is called missing."""

    class Failing(DiskTier):
        async def list(self, prefix: str) -> list[Any]:
            if prefix == "commits/":
                raise TierError("the drive is on fire")
            return await super().list(prefix)

    verdict = asyncio.run(verify(Failing(run_copy)))
    assert [(p.object, p.what) for p in verdict.problems] == [("commits/", "cannot be listed: the drive is on fire")]


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A shard of 200 MB is read through with two buffers of 8 MiB."""
    import tracemalloc

    import xxhash

    from surefoot.core.layout import ShardId, shard_key
    from surefoot.core.manifest import Shard
    from surefoot.inspect.progress import Silent
    from surefoot.inspect.shards import CHUNK_BYTES, check_shard

    shard_id = ShardId(BoundaryId(1, 1), 0, "abcd")
    path = tmp_path / shard_key(shard_id)
    path.parent.mkdir(parents=True)
    data = os.urandom(1_000_000)
    with path.open("wb") as file:
        for _ in range(200):
            file.write(data)
    digest = xxhash.xxh3_128_hexdigest(data * 200)
    shard = Shard(shard_id, "0" * 32, path.stat().st_size, digest, {})
    tracemalloc.start()
    asyncio.run(check_shard(DiskTier(tmp_path), shard, None, Silent()))
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * CHUNK_BYTES
