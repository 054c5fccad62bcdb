"""A run that is resumed by another number of ranks, or in another layout: from memory, disk, bucket, and a mix."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_s3 import PlainS3
from safetensors.torch import load_file
from stage import Stage
from warm import processes_with, until

from surefoot.core.block_sums import SUM_BLOCK_BYTES
from surefoot.core.documents import unseal
from surefoot.core.image import Image
from surefoot.core.layout import parse_shard
from surefoot.core.manifest import Manifest
from surefoot.core.plan import Plan
from surefoot.core.ranges import Range, in_blocks, total_bytes
from surefoot.ipc.segment import Sealed, Segment, open_segment_file
from surefoot.scenario.s3_server import S3Server

SCENES = Path(__file__).with_name("reshard_road_scenes.py")


class Job:
    """Launches of one run."""

    def __init__(self, stage: Stage, env: dict[str, str] | None = None, **always: Any) -> None:
        self._stage = stage
        self._env = env
        self._always = always

    def play(self, layout: str, ranks: int, total: int, dump: str, **options: Any) -> None:
        """To its end."""
        options = {"layout": layout, "total": total, "dump": str(self._stage.place / dump), **self._always, **options}
        job = self._stage.start("run", ranks=ranks, scenes=SCENES, env=self._env, **options)
        assert job.wait() == 0, job.output
        self._stage.until_quiet()

    def killed(self, layout: str, ranks: int, total: int, dump: str) -> None:
        """In the last step, with everything that belongs to it; only the memory is left."""
        stage = self._stage
        options = {"layout": layout, "total": total, "dump": str(stage.place / dump), "hang": True, **self._always}
        job = stage.start("run", ranks=ranks, scenes=SCENES, **options)
        for rank in range(ranks):
            job.until_printed(f"hangs {rank}\n")
            until(lambda rank=rank: newest(stage, rank, total - 1) is not None, f"rank {rank}'s newest image")  # type: ignore[misc]
        agents = list(processes_with(str(stage.memory)))
        # In one go: an agent that saw its trainers die would make their last step durable.
        for pid in agents:
            os.kill(pid, signal.SIGSTOP)
        job.signal_group(signal.SIGKILL)
        for pid in agents:
            os.kill(pid, signal.SIGKILL)
        stage.until_quiet()


def newest(stage: Stage, rank: int, step: int) -> tuple[Path, Segment, Sealed] | None:
    """A rank's hashed image of a step in memory."""
    for path in stage.memory.glob(f"*/rank-{rank:05d}-*.seg"):
        segment = open_segment_file(path)
        for sealed in segment.all_sealed():
            if sealed.at.boundary == step and sealed.image_hash is not None:
                return path, segment, sealed
    return None


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def assert_same(found: Path, truth: Path) -> None:
    """Tensor by tensor, bit by bit."""
    mine, its = load_file(found), load_file(truth)
    assert mine.keys() == its.keys()
    assert len(its) == 24, sorted(its)
    for name, tensor in its.items():
        assert torch.equal(mine[name], tensor), name
        assert mine[name].dtype == tensor.dtype, name


def last_resumed(events: list[dict[str, Any]]) -> dict[str, Any]:
    return [event for event in events if event["event"] == "resumed"][-1]


def images(run: Path, step: int) -> tuple[Manifest, Plan, Mapping[int, Image]]:
    (path,) = run.glob(f"commits/{step:08d}-*.json")
    manifest = Manifest.from_bytes(path.read_bytes(), f"commits/{path.name}")
    plan = Plan.from_body(unseal((run / f"plans/{manifest.plan}.json").read_bytes(), "plan"))
    return manifest, plan, {rank: plan.image(rank) for rank in range(plan.world_size)}


def tensors(image: Image, prefix: str) -> list[Range]:
    return [(start, start + box.size_bytes) for box, start in image.places if box.name.startswith(prefix)]


@pytest.mark.holds("memory-outlives-trainers", "flat-parts")
@pytest.mark.soak
def test_from_memory(stage: Stage) -> None:
    """Two copies of two parts on four ranks, all killed: three ranks find everything in memory, and read nothing."""
    job = Job(stage)
    job.killed("hsdp", 4, 3, "saved")
    job.play("fsdp", 3, 2, "loaded")
    assert_same(stage.place / "loaded.begun", stage.place / "saved.2")
    resumed = last_resumed(stage.history())
    assert (resumed["from_step"], resumed["tier"], resumed["reads"]) == (2, "ram", None)


def test_from_memory_and_disk_together(stage: Stage) -> None:
    """Of two ranks' images in memory one is damaged: what it held is read from the disk, the rest is not."""
    job = Job(stage)
    job.killed("ddp", 2, 3, "saved")
    found = newest(stage, 1, 2)
    assert found is not None
    path, segment, sealed = found
    flip(path, segment.geometry.image_offset(sealed.slot) + segment.geometry.image_bytes // 2)
    job.play("fsdp", 3, 2, "loaded")
    assert_same(stage.place / "loaded.begun", stage.place / "saved.2")
    resumed = last_resumed(stage.history())
    sizes = [shard.size_bytes for shard in images(stage.run, 2)[0].shards]
    assert (resumed["from_step"], resumed["tier"]) == (2, "disk")
    assert resumed["reads"]["by_place"] == {"ram": sizes[0], "disk": sizes[1]}
    bad = [event for event in stage.history() if event["event"] == "quarantined"]
    assert {event["tier"] for event in bad} == {"ram"}


def test_from_disk_and_past_what_is_damaged(stage: Stage) -> None:
    """A block that is bad in a copy is named and taken from the run's place; one that is bad there ends its checkpoint,
    and the one before is taken. Read is what the length of a block makes of what is needed."""
    copies = stage.place / "copies"
    job = Job(stage)
    job.play("fsdp", 2, 3, "saved", disk=str(copies))
    manifest, _plan, layouts = images(stage.run, 3)
    first = manifest.shards[0]
    flip(copies / first.key, SUM_BLOCK_BYTES + 5)
    job.play("fsdp", 3, 3, "loaded", disk=str(copies))
    assert_same(stage.place / "loaded.begun", stage.place / "saved.3")
    reads = last_resumed(stage.history())["reads"]
    assert reads["by_place"] == {"disk copy": manifest.size_bytes, "disk": SUM_BLOCK_BYTES}
    assert reads["needed_bytes"] == sum(total_bytes(tensors(image, "")) for image in layouts.values())
    (bad,) = [event for event in stage.history() if event["event"] == "quarantined"]
    assert (bad["object"], bad["tier"]) == (first.key, "disk copy")
    assert f"bytes {SUM_BLOCK_BYTES} to {2 * SUM_BLOCK_BYTES} do not match" in bad["why"]

    job.play("plain", 1, 3, "part", parts="model")
    reads = last_resumed(stage.history())["reads"]
    needed = {rank: tensors(image, "model.") for rank, image in layouts.items()}
    blocks = {
        shard.id.rank: in_blocks(needed[shard.id.rank], SUM_BLOCK_BYTES, shard.size_bytes) for shard in manifest.shards
    }
    assert reads["needed_bytes"] == sum(map(total_bytes, needed.values()))
    assert reads["read_bytes"] == sum(map(total_bytes, blocks.values())) < manifest.size_bytes
    assert reads["amplification"] == round(reads["read_bytes"] / reads["needed_bytes"], 4) > 1

    (shard,) = stage.run.glob("steps/00000003-*/rank-00001-*.safetensors")
    flip(shard, shard.stat().st_size // 2)
    job.play("ddp", 2, 2, "older")
    assert last_resumed(stage.history())["from_step"] == 2
    assert_same(stage.place / "older.begun", stage.place / "saved.2")
    bad = [event for event in stage.history() if event["event"] == "quarantined"][-1]
    assert parse_shard(bad["object"]) == manifest.shards[1].id
    assert bad["tier"] == "disk"
    assert "do not match the sum of their block" in bad["why"]


@pytest.mark.soak
def test_from_a_bucket(stage: Stage, s3_server: S3Server) -> None:
    """What two replicas saved: into three shards, and from there into one plain process."""
    prefix = f"run-{uuid.uuid4().hex[:8]}"
    job = Job(stage, env=dict(s3_server.env), to=s3_server.url(prefix))
    job.play("ddp", 2, 2, "saved")
    job.play("fsdp", 3, 3, "loaded")
    job.play("plain", 1, 3, "last")
    assert_same(stage.place / "loaded.begun", stage.place / "saved.2")
    assert_same(stage.place / "last.begun", stage.place / "loaded.3")
    plain = PlainS3(s3_server)
    lines = [line for key in plain.keys(f"{prefix}/events/") for line in (plain.read(key) or b"").splitlines()]
    events = sorted(map(json.loads, lines), key=lambda event: event["t"])
    resumed = [event for event in events if event["event"] == "resumed"]
    assert [(event["from_step"], event["tier"]) for event in resumed] == [(None, None), (2, "object"), (3, "object")]
    assert all(set(event["reads"]["by_place"]) == {"object"} for event in resumed[1:])
