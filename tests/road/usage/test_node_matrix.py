"""What one world of several nodes saved, another one restores: every layout, from memory, disk and bucket, by as many
ranks, fewer and more; also where the bytes lie on the nodes' own drives only."""

from __future__ import annotations

import json
import shutil
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_s3 import PlainS3
from safetensors.torch import load_file
from stage import Stage
from warm import Job, processes_with, until

from surefoot.core.documents import unseal
from surefoot.core.image import PAGE_BYTES
from surefoot.core.layout import parse_commit
from surefoot.core.manifest import Manifest
from surefoot.ipc.segment import open_segment_file
from surefoot.scenario.s3_server import S3Server

SCENES = Path(__file__).with_name("node_matrix_scenes.py")
SAVED_STEPS, TOTAL = 4, 6
NUM_TENSORS = 40


@dataclass(frozen=True)
class World:
    """Ranks of one layout on several nodes, as many on each."""

    layout: str
    nodes: int
    ranks: int = 1

    @property
    def size(self) -> int:
        return self.nodes * self.ranks

    @property
    def has_replicas(self) -> bool:
        """Every rank's state is another machine's too."""
        return self.nodes > 1 and self.layout != "fsdp"


SAVED = {"ddp": World("ddp", 2), "fsdp": World("fsdp", 2), "hsdp": World("hsdp", 2, 2)}
SMALLER = {"ddp": World("ddp", 1), "fsdp": World("fsdp", 1), "hsdp": World("fsdp", 3)}
LARGER = {"ddp": World("ddp", 3), "fsdp": World("fsdp", 3), "hsdp": World("hsdp", 3, 2)}
RESTORED = {"same": SAVED, "smaller": SMALLER, "larger": LARGER}


@dataclass(frozen=True)
class Told:
    """What the ranks of a launch said of its steps."""

    begun: int
    """Where all of them began."""
    losses: dict[tuple[int, int], list[str]]
    """By rank and step: loss and learning rate, every bit of them."""


class Train:
    """The launches of one test's run."""

    def __init__(self, stage: Stage, bucket: S3Server | None = None, *, drives: bool = False) -> None:
        self._stage = stage
        self._bucket = bucket
        self._prefix = f"run-{uuid.uuid4().hex[:8]}"
        self._drives = stage.place / "drives"
        self._always: dict[str, Any] = {"drives": str(self._drives)} if drives else {}
        if bucket is not None:
            self._always |= {"to": bucket.url(self._prefix), "env": dict(bucket.env)}

    def play(self, world: World, dump: str, seed: int = 900, **options: Any) -> Told:
        """To the end."""
        jobs = self._start(world, dump, total=TOTAL, seed=seed, **options)
        for job in jobs:
            assert job.wait() == 0, _outputs(jobs)
        self._stage.until_quiet()
        return _told(jobs, world)

    def killed(self, world: World, save: tuple[int, ...]) -> None:
        """Stop after so many steps, the last of which is in memory, and copied to the drives if it is durable; then
        end everything at once: an agent that saw its trainers die would make their last step durable."""
        jobs = self._start(world, "saved", total=SAVED_STEPS, save=save, hang=True)
        for rank in range(world.size):
            jobs[rank // world.ranks].until_printed(f'["hangs", {rank}]')
            until(lambda rank=rank: self._is_sealed(rank), f"rank {rank}'s newest image")  # type: ignore[misc]
            if world.has_replicas:
                until(lambda rank=rank: self._is_told(rank), f"what rank {rank} has for itself")  # type: ignore[misc]
        if "drives" in self._always:
            until(lambda: all(path.exists() for path in self._copies(world)), "copies on the drives")
        pids = list(processes_with(str(self._stage.memory)))
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                Job.signal_of(pid, number)
        for job in jobs:
            job.signal_group(signal.SIGKILL)
        self._stage.until_quiet()

    def arrange(self, *order: int) -> None:
        """The machines come again in this order; the memory and the drives of the others are gone with them."""
        for place in (self._stage.memory, self._drives):
            before = place.rename(place.with_name(f"{place.name}-before")) if place.exists() else place
            place.mkdir(mode=0o700, exist_ok=True)
            for now, then in enumerate(order):
                if (before / f"node{then}").exists():
                    (before / f"node{then}").rename(place / f"node{now}")
            if before != place:
                shutil.rmtree(before)

    def forget(self, world: World) -> None:
        """The machines' memory is lost, not their drives."""
        for node in range(world.nodes):
            shutil.rmtree(self._stage.memory / f"node{node}")

    def spoil(self) -> None:
        """In the run's place the newest step's shards are gone, but for the first one, which is damaged."""
        first, *others = self._manifest().shards
        _flip(self._stage.run / first.key, first.size_bytes // 2)
        for shard in others:
            (self._stage.run / shard.key).unlink()

    def spoil_memory(self, rank: int) -> None:
        """A rank's image of the newest step is damaged."""
        ((path, middle),) = self._newest(rank)
        _flip(path, middle)

    def spoil_replicas(self) -> None:
        """Every second copy is damaged, of whichever step."""
        for path in self._stage.memory.glob("*/*/*.seg"):
            segment = open_segment_file(path)
            layout = segment.geometry
            for sealed in segment.all_sealed():
                if layout.replicas_bytes:
                    _flip(path, layout.replicas_offset(sealed.slot) + layout.replicas_bytes - PAGE_BYTES)

    def committed(self) -> list[int]:
        """Ascending."""
        found = PlainS3(self._bucket).keys(f"{self._prefix}/") if self._bucket is not None else _files(self._stage.run)
        keys = [key.removeprefix(f"{self._prefix}/") for key in found]
        return sorted(at.boundary for key in keys if (at := parse_commit(key)) is not None)

    def resumed(self, world: World) -> list[dict[str, Any]]:
        """What the nodes of the last launch say."""
        return self.events("resumed")[-world.nodes :]

    def events(self, kind: str) -> list[dict[str, Any]]:
        events = self._stage.history()
        if self._bucket is not None:
            plain = PlainS3(self._bucket)
            logs = [plain.read(key) or b"" for key in plain.keys(f"{self._prefix}/events/")]
            events = [json.loads(line) for log in logs for line in log.splitlines()]
            events.sort(key=lambda event: event["t"])
        return [event for event in events if event["event"] == kind]

    def assert_same_state(self, world: World, step: int, truth: Mapping[str, torch.Tensor]) -> None:
        """Tensor by tensor and byte by byte, on every rank of the last launch."""
        for rank in range(world.size):
            assert_same(load_file(self.dumped("loaded", step, rank)), truth)

    def dumped(self, dump: str, step: int, rank: int = 0) -> Path:
        return self._stage.place / f"{dump}-{step}-{rank}"

    def _start(self, world: World, dump: str, **options: Any) -> list[Job]:
        options = {"layout": world.layout, "dump": str(self._stage.place / dump), **self._always, **options}
        return self._stage.start_nodes("run", world.nodes, ranks=world.ranks, scenes=SCENES, **options)

    def _is_sealed(self, rank: int) -> bool:
        return bool(self._newest(rank))

    def _is_told(self, rank: int) -> bool:
        """Another machine has what it needs to make a rank's newest image whole."""
        for path in self._stage.memory.glob(f"*/*/rank-{rank:05d}-*.private_part"):
            try:
                step = unseal(path.read_bytes(), path.name)["step"]
            except FileNotFoundError:  # an older one, removed just now
                continue
            if step == SAVED_STEPS:
                return True
        return False

    def _newest(self, rank: int) -> list[tuple[Path, int]]:
        """A rank's image of the newest step in memory, once it is hashed: the file, and where in it the middle lies."""
        found = []
        for path in self._stage.memory.glob(f"*/*/rank-{rank:05d}-*.seg"):
            segment = open_segment_file(path)
            layout = segment.geometry
            newest = [sealed for sealed in segment.all_sealed() if sealed.at.boundary == SAVED_STEPS]
            # Bytes that are damaged before they are hashed would be taken for what the trainer staged.
            slots = [sealed.slot for sealed in newest if sealed.image_hash is not None]
            found += [(path, layout.image_offset(slot) + layout.image_bytes // 2) for slot in slots]
        return found

    def _manifest(self) -> Manifest:
        (path,) = self._stage.run.glob(f"commits/{SAVED_STEPS:08d}-*.json")
        return Manifest.from_bytes(path.read_bytes(), f"commits/{path.name}")

    def _copies(self, world: World) -> list[Path]:
        shards = self._manifest().shards
        return [self._drives / f"node{shard.id.rank // world.ranks}" / shard.key for shard in shards]


def _files(root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in root.rglob("*")]


def _outputs(jobs: list[Job]) -> str:
    return "\n".join(job.output for job in jobs)


def _told(jobs: list[Job], world: World) -> Told:
    lines = [json.loads(line) for line in _outputs(jobs).splitlines() if line.startswith('["')]
    begun = [line[2] for line in lines if line[0] == "begins"]
    assert len(begun) == world.size
    assert len(set(begun)) == 1
    return Told(begun[0], {(line[1], line[2]): line[3:] for line in lines if line[0] == "loss"})


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def assert_same(found: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == truth.keys()
    assert len(truth) == NUM_TENSORS, sorted(truth)
    for name, tensor in truth.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].numpy().tobytes() == tensor.numpy().tobytes(), name


@dataclass(frozen=True)
class Truth:
    """An undisturbed run."""

    losses: dict[tuple[int, int], list[str]]
    states: dict[int, dict[str, torch.Tensor]]
    """By the number of steps finished."""


Get = Callable[[Stage, World], Truth]


@pytest.fixture(scope="module")
def truth() -> Get:
    """What an undisturbed run of a world comes to; each is played once."""
    known: dict[World, Truth] = {}

    def get(stage: Stage, world: World) -> Truth:
        if world not in known:
            train = Train(stage)
            told = train.play(world, "straight", seed=100, to=str(stage.place / "straight"))
            assert told.begun == 0
            states = {step: load_file(train.dumped("straight", step)) for step in range(TOTAL + 1)}
            known[world] = Truth(told.losses, states)
        return known[world]

    return get


def _restore(train: Train, world: World, step: int) -> Told:
    """By another world or the same one: it begins with the state of that step, and trains to the end."""
    told = train.play(world, "loaded")
    assert told.begun == step
    train.assert_same_state(world, step, load_file(train.dumped("saved", step)))
    assert told.losses.keys() == {(rank, n) for rank in range(world.size) for n in range(step, TOTAL)}
    assert train.committed()[-1] == TOTAL
    return told


def _assert_goes_on(train: Train, told: Told, world: World, undisturbed: Truth) -> None:
    """As if nothing had been: every state and every loss has the bits of an undisturbed run of the same world."""
    for step in range(told.begun, TOTAL + 1):
        train.assert_same_state(world, step, undisturbed.states[step])
    assert told.losses == {key: loss for key, loss in undisturbed.losses.items() if key[1] >= told.begun}


def _cells(short: set[tuple[str, str, str]], tiers: Sequence[str]) -> list[Any]:
    """A few are played always, the others by `make soak`."""
    cells = [(kind, tier, size) for kind in SAVED for tier in tiers for size in RESTORED]
    return [pytest.param(*cell, marks=() if cell in short else pytest.mark.soak) for cell in cells]


@pytest.mark.holds("memory-of-others-lost")
@pytest.mark.parametrize(
    ("kind", "tier", "size"),
    _cells(
        {("fsdp", "memory", "same"), ("hsdp", "disk", "smaller"), ("ddp", "bucket", "larger")},
        ("memory", "disk", "bucket"),
    ),
)
def test_restored(stage: Stage, truth: Get, request: pytest.FixtureRequest, kind: str, tier: str, size: str) -> None:
    """What was saved by one world is what another one begins with. Memory that is left has the newest step, also if a
    machine's is gone with it, where replicas stand on another one; else it is the newest durable one."""
    saved, restored = SAVED[kind], RESTORED[size][kind]
    train = Train(stage, request.getfixturevalue("s3_server") if tier == "bucket" else None)
    train.killed(saved, save=(2,) if tier == "memory" else (2, SAVED_STEPS))
    if tier != "memory":
        train.forget(saved)
    train.arrange(*range(min(restored.nodes, saved.nodes)))
    durable = train.committed()[-1]
    assert (durable < SAVED_STEPS) == (tier == "memory")
    in_memory = tier == "memory" and (restored.nodes >= saved.nodes or saved.has_replicas)
    told = _restore(train, restored, SAVED_STEPS if in_memory else durable)
    if restored == saved:
        _assert_goes_on(train, told, restored, truth(stage, restored))
    where = "ram" if in_memory else "object" if tier == "bucket" else "disk"
    assert [event["tier"] for event in train.resumed(restored)] == [where] * restored.nodes


@pytest.mark.holds("memory-of-others-lost")
@pytest.mark.soak
@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        (World("ddp", 2, 2), World("ddp", 2)),
        (World("fsdp", 2, 2), World("fsdp", 2)),
        (World("fsdp", 2), World("ddp", 2)),
        (World("ddp", 2), World("fsdp", 3)),
    ],
    ids=str,
)
def test_from_memory_of_the_same_machines(stage: Stage, saved: World, restored: World) -> None:
    """Fewer ranks on the same machines, or another layout: nothing goes back further than the newest step."""
    train = Train(stage)
    train.killed(saved, save=(2,))
    _restore(train, restored, SAVED_STEPS)
    assert [event["tier"] for event in train.resumed(restored)] == ["ram"] * restored.nodes


@pytest.mark.holds("no-shared-files")
@pytest.mark.parametrize(("kind", "tier", "size"), _cells({("ddp", "drives", "same")}, ("drives",)))
def test_restored_from_drives_of_the_nodes_own(stage: Stage, truth: Get, kind: str, tier: str, size: str) -> None:
    """The newest step's bytes are good on the machines' own drives only: each reads there what it has, and the others
    tell it the rest. If a machine is gone with its drive, it is the step before, of which everything is there."""
    saved, restored = SAVED[kind], RESTORED[size][kind]
    train = Train(stage, drives=True)
    train.killed(saved, save=(2, SAVED_STEPS))
    train.forget(saved)
    train.spoil()
    train.arrange(*range(min(restored.nodes, saved.nodes)))
    gone = restored.nodes < saved.nodes
    *_, before, newest = train.committed()
    told = _restore(train, restored, before if gone else newest)
    if restored == saved:
        _assert_goes_on(train, told, restored, truth(stage, restored))
    places = {name for event in train.resumed(restored) for name in event["reads"]["by_place"]}
    # What the machine that is left has near of the step before, and the rest from the run's place.
    assert places == {"disk copy", "disk"} if gone else places >= {"disk copy"}


@pytest.mark.holds("no-shared-files")
@pytest.mark.soak
@pytest.mark.parametrize("drives", [False, True], ids=["memory", "drives"])
@pytest.mark.parametrize("kind", list(SAVED))
def test_machines_come_in_another_order(stage: Stage, truth: Get, kind: str, drives: bool) -> None:
    """What each machine's ranks need has another machine: it tells them, and the run goes on as if nothing had been."""
    world = SAVED[kind]
    train = Train(stage, drives=drives)
    train.killed(world, save=(2, SAVED_STEPS) if drives else (2,))
    if drives:
        train.forget(world)
        train.spoil()
    train.arrange(1, 0)
    told = _restore(train, world, SAVED_STEPS)
    _assert_goes_on(train, told, world, truth(stage, world))
    places = [set(event["reads"]["by_place"]) for event in train.resumed(world)]
    other = "peer disk" if drives else "peer"
    assert all(other in found for found in places), places


@pytest.mark.holds("ranks-load-different-steps")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "hsdp" else pytest.mark.soak) for kind in SAVED]
)
def test_the_machine_of_rank_0_is_gone(stage: Stage, kind: str) -> None:
    """With its memory: the one that is left goes on alone from the newest step, if it has all of it twice, and else
    from the newest durable one, not from its own part of a newer one."""
    saved = SAVED[kind]
    alone = World(saved.layout, 1, saved.ranks)
    train = Train(stage)
    train.killed(saved, save=(2,))
    train.arrange(1)
    durable = train.committed()[-1]
    assert durable < SAVED_STEPS
    _restore(train, alone, SAVED_STEPS if saved.has_replicas else durable)
    assert [event["tier"] for event in train.resumed(alone)] == ["ram" if saved.has_replicas else "disk"]


@pytest.mark.holds("two-machines-hold-it")
@pytest.mark.parametrize("kind", ["ddp", pytest.param("hsdp", marks=pytest.mark.soak)])
@pytest.mark.parametrize("left", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_new_machine_in_the_place_of_a_lost_one(stage: Stage, truth: Get, kind: str, left: int) -> None:
    """Nothing but its empty place comes again: its ranks go on from the newest step, with every bit that they had,
    their own random states among them."""
    world = SAVED[kind]
    train = Train(stage)
    train.killed(world, save=(2,))
    train.arrange(*([0] if left == 0 else [9, 1]))
    told = _restore(train, world, SAVED_STEPS)
    _assert_goes_on(train, told, world, truth(stage, world))
    assert [event["tier"] for event in train.resumed(world)] == ["ram"] * 2


def test_a_second_copy_that_is_damaged(stage: Stage) -> None:
    """A machine is lost, and what stands twice has changed where it is left: it is not taken for the lost machine's,
    and the run goes back to what is durable."""
    saved = SAVED["ddp"]
    train = Train(stage)
    train.killed(saved, save=(2,))
    train.spoil_replicas()
    train.arrange(0)
    durable = train.committed()[-1]
    alone = World("ddp", 1)
    _restore(train, alone, durable)
    assert [event["tier"] for event in train.resumed(alone)] == ["disk"]
    warnings = [event["what"] for event in train.events("warning")]
    assert any("put together on node" in what and "does not match its hash" in what for what in warnings), warnings


@pytest.mark.holds("ranks-disagree-on-files")
@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("durable", [False, True], ids=["only-in-memory", "durable-too"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_machines_image_is_damaged(stage: Stage, truth: Get, kind: str, durable: bool, rank: int) -> None:
    """Whichever machine's it is, all take the same: that step, if another machine has all of it too, or the run's place
    has; or else the one before, which is whole in their memory."""
    world = SAVED[kind]
    train = Train(stage)
    train.killed(world, save=(2, SAVED_STEPS) if durable else (2,))
    train.spoil_memory(rank)
    assert (train.committed()[-1] == SAVED_STEPS) == durable
    told = _restore(train, world, SAVED_STEPS if durable or world.has_replicas else SAVED_STEPS - 1)
    _assert_goes_on(train, told, world, truth(stage, world))
    in_memory = world.has_replicas or not durable
    assert [event["tier"] for event in train.resumed(world)] == ["ram" if in_memory else "disk"] * 2
