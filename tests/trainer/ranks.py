"""Several ranks over gloo, as short-lived processes forked from one that has torch loaded."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from surefoot.core.plan import Plan, Report, make_plan
from surefoot.trainer.restore.restore import MappedImage, map_image
from surefoot.trainer.state.registry import Registry
from surefoot.trainer.state.report import report_of
from surefoot.trainer.state.tensors import box_view, copy_all, memory_view

_context = multiprocessing.get_context("forkserver")
# Forked, not imported anew by each rank: what FSDP2 imports when it is first used, too.
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
)
_PATIENCE_S = 240.0


def on_ranks(world_size: int, scene: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `scene(*arguments)` gives on each rank of a gloo group. One that raises fails the test, with its text."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        ends = [_context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            _context.Process(target=_rank, args=(rank, world_size, directory, ends[rank][1], scene, arguments))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            answers = [_answer(reader) for reader, _writer in ends]
        finally:
            for process in processes:
                process.kill()
                process.join()
    failures = [f"rank {rank}: {why}" for rank, (good, why) in enumerate(answers) if not good]
    assert not failures, "\n".join(failures)
    return [answer for _good, answer in answers]


def _answer(reader: Connection) -> tuple[bool, Any]:
    if not reader.poll(_PATIENCE_S):
        return False, "gave no answer"
    answer: tuple[bool, Any] = reader.recv()
    return answer


def _rank(
    rank: int, world_size: int, directory: str, answer: Connection, scene: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(f"{directory}/store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        result = scene(*arguments)
        dist.barrier()
        answer.send((True, result))
    except BaseException:  # noqa: BLE001 - the test hears of it
        answer.send((False, traceback.format_exc()))
    answer.close()
    os._exit(0)


class Place:
    """A directory with one image a rank, and the plan: what a commit leaves, without an agent."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.values: list[Any] = []

    def save(self, registry: Registry) -> Plan:
        """This rank's part of a save, with what a boundary and the agent do between them."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        flat = registry.flatten()
        mine = report_of(flat, several=world_size > 1).to_json()
        reports: list[Any] = [None] * world_size
        dist.all_gather_object(reports, mine)
        plan = make_plan([Report.from_json(report) for report in reports])
        live = {named.name: named.tensor for named in flat.tensors}
        leaf_of = {item.box.name: item.leaf for item in plan.items if item.rank == rank}
        image = plan.image(rank)
        data = bytearray(image.size_bytes)
        data[: len(image.header)] = image.header
        memory = memory_view(memoryview(data))
        copy_all((box_view(memory, box, start), live[leaf_of[box.name]]) for box, start in image.places)
        self._path(rank).write_bytes(data)
        self.values = flat.values
        dist.barrier()
        return plan

    def load(self, registry: Registry, plan: Plan) -> None:
        """Into other objects of the same rank, from every rank's image."""
        images: dict[int, MappedImage] = {}
        for rank in range(plan.world_size):
            fd = os.open(self._path(rank), os.O_RDONLY)
            images[rank] = map_image(rank, fd, 0, self._path(rank).stat().st_size)
        rank = dist.get_rank()
        of_rank = rank if rank < plan.world_size else 0
        registry.load_state(registry.fit(plan, of_rank, dist.get_world_size()), self.values, images)

    def _path(self, rank: int) -> Path:
        return self._directory / f"rank-{rank:05d}-a3f2.safetensors"


def registered(**objects: Any) -> Registry:
    """A registry of these objects that must have nothing to say."""
    registry = Registry(objects, {}, _never, print)
    registry.register()
    return registry


def _never(what: str) -> None:
    raise AssertionError(what)
