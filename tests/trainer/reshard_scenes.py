"""What ranks do in the tests of resharding: save in one layout, load in every other, in the same few processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import fsdp_scenes as scenes
import torch
import torch.distributed as dist
from ranks import Place, registered
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from surefoot.core.image import Box
from surefoot.core.plan import Item, Plan, make_plan
from surefoot.core.ranges import Range, merged, region_ranges
from surefoot.errors import CorruptError
from surefoot.trainer.restore.fit import Fit, SavedTensor, Target
from surefoot.trainer.restore.reshard import planned
from surefoot.trainer.restore.restore import map_image
from surefoot.trainer.state.registry import Registry
from surefoot.trainer.state.report import report_of

_numbers = count()
PAGE = 4096


def in_world(directory: str, world_size: int, rank: int) -> bool:
    """Make the first ranks a world of their own, until the next; False for a rank that is not in it.

    All come together once for each world, in the same order: the number says which.
    """
    number = next(_numbers)
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank >= world_size:
        return False
    store = dist.FileStore(f"{directory}/world{number}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return True


def net(layout: str) -> nn.Module:
    """A model in a layout: plain, ddp, or one of `fsdp_scenes.net`'s; `wide-` before it for the one that divides."""
    kind = layout.removeprefix("wide-")
    if kind in ("plain", "ddp"):
        model: nn.Module = scenes.Wide() if layout != kind else scenes.Net()
        return DistributedDataParallel(model) if kind == "ddp" else model
    if layout == "wide-fsdp":
        return scenes._shard(scenes.Wide(), None)
    return scenes.net(kind)


def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor whole, by name; gathered by torch."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    found = {f"model.{key}": value for key, value in inner.state_dict().items()}
    for name, parameter in inner.named_parameters():
        found |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return {name: _whole(value).detach().clone() for name, value in found.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save(layout: str, directory: str) -> tuple[Any, list[Any]]:
    """Train and save; the truth goes into a file beside."""
    torch.manual_seed(1)
    model = net(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scenes.train(model, optimizer, range(3), alike=True)
    Path(directory).mkdir(exist_ok=True)
    place = Place(Path(directory))
    plan = place.save(registered(model=model, optimizer=optimizer))
    truth = full(model, optimizer)
    scenes.train(model, optimizer, range(3, 4), alike=True)
    later = full(model, optimizer)
    if dist.get_rank() == 0:
        save_file(truth, f"{directory}/truth")
        save_file(later, f"{directory}/later")
    dist.barrier()
    return plan.body, place.values


def load(layout: str, directory: str, body: Any, values: list[Any], *, born: bool = False) -> dict[str, Any]:
    """Into fresh objects, from copies of the images in which everything that was not asked for is spoilt."""
    torch.manual_seed(2)
    model = net(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if born:
        scenes.train(model, optimizer, range(7, 8), alike=True)
    plan = Plan.from_body(body)
    registry = registered(model=model, optimizer=optimizer)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    of_rank = rank if rank < plan.world_size else 0
    found = registry.fit(plan, of_rank, world_size)
    asked = load_only(registry, found, values, Path(directory))
    loaded = full(model, optimizer)
    wrong = differing(loaded, load_file(f"{directory}/truth"))
    scenes.train(model, optimizer, range(3, 4), alike=True)
    far = far_from(full(model, optimizer), load_file(f"{directory}/later"))
    kinds = {type(value) for value in model.parameters()}
    return {
        "wrong": wrong,
        "far": far,
        "asked": asked,
        "as_saved": found.as_saved,
        "tensors": len(loaded),
        "kinds": kinds,
    }


def load_only(registry: Registry, found: Fit, values: list[Any], directory: Path) -> int:
    """Load from nothing but the regions that are asked for. Returns how many bytes they are."""
    plan = found.plan
    exact: dict[int, list[Range]] = {rank: [] for rank in range(plan.world_size)}
    joined: dict[int, list[Range]] = {rank: [] for rank in range(plan.world_size)}
    for number, region in found.regions():
        item = plan.items[number]
        starts = {box.name: start for box, start in plan.image(item.rank).places}
        exact[item.rank] += region_ranges(item.box, starts[item.box.name], region)
        joined[item.rank] += region_ranges(item.box, starts[item.box.name], region, PAGE)
    images = {}
    for rank in range(plan.world_size):
        data = (directory / f"rank-{rank:05d}-a3f2.safetensors").read_bytes()
        spoilt = bytearray(b"\xa5") * len(data)
        for start, stop in exact[rank]:
            spoilt[start:stop] = data[start:stop]
        fd = os.memfd_create("spoilt")
        os.write(fd, spoilt)
        images[rank] = map_image(rank, fd, 0, len(data), merged(joined[rank]))
    registry.load_state(found, values, images)
    return sum(stop - start for ranges in exact.values() for start, stop in merged(ranges))


def differing(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bits differ, and names that only one of them has."""
    both = found.keys() & truth.keys()
    return sorted((found.keys() ^ truth.keys()) | {name for name in both if not same(found[name], truth[name])})


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def far_from(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> list[str]:
    """Names whose values are no longer near: sums in another order differ in their last bits only."""
    return [name for name in truth if not torch.allclose(found[name], truth[name], rtol=1e-3, atol=1e-5)]


def matrix(directory: str, saves: Sequence[tuple[str, int]], loads: Sequence[tuple[str, int, str]]) -> list[Any]:
    """All saves, then all loads: (layout, ranks, name of the save), sorted by ranks. One rank's findings, by load."""
    rank = dist.get_rank()
    for layout, world_size in saves:
        if in_world(directory, world_size, rank):
            torch.save(save(layout, f"{directory}/{layout}{world_size}"), f"{directory}/{layout}{world_size}.plan")

    found = []
    for layout, world_size, name in loads:
        if in_world(directory, world_size, rank):
            body, values = torch.load(f"{directory}/{name}.plan")
            found.append(((layout, world_size, name), load(layout, f"{directory}/{name}", body, values)))

    in_world(directory, 4, rank)
    return found


def copies_that_differ(directory: str) -> dict[str, Any]:
    """Each rank keeps a tensor of its own; then it is one sharded tensor."""
    rank = dist.get_rank()
    place = Place(Path(directory))
    plan = place.save(registered(x={"t": torch.arange(15.0).view(5, 3) + 100 * rank}))
    tree = {"t": distribute_tensor(torch.zeros(5, 3), init_device_mesh("cpu", (2,)), [Shard(0)])}
    said: list[str] = []
    registry = Registry({"x": tree}, {}, said.append, print)
    registry.register()
    place.load(registry, plan)
    return {"whole": tree["t"].full_tensor().tolist(), "said": said}


def with_holes() -> list[str]:
    """What is said of images that lack a part, by one process."""
    x = {"a": torch.arange(2000.0), "b": torch.arange(3000.0)}
    flat = registered(x=x).flatten()
    plan = make_plan([report_of(flat, several=False)])
    image = plan.image(0)
    starts = {box.name: start for box, start in image.places}
    said = []
    for ranges in ([(starts["x.a"], starts["x.a"] + 8000)], [(0, starts["x.b"] + 11_999)], [(0, image.size_bytes)]):
        fd = os.memfd_create("holes")
        os.truncate(fd, image.size_bytes)
        images = {0: map_image(0, fd, 0, image.size_bytes, ranges)}
        try:
            registry = registered(x=x)
            registry.load_state(registry.fit(plan, 0, 1), flat.values, images)
            said.append("nothing")
        except CorruptError as error:
            said.append(str(error))
    return said


def planned_with_a_hole() -> str:
    """What the planning says if a saved block is not there."""
    items = tuple(Item(Box("t", "float32", (2, 3), (row, 0), (7, 3)), 0, "sharded", "t") for row in (0, 2, 5))
    saved = SavedTensor("t", "float32", (7, 3), items, (0, 1, 2), sharded=True, same_ranks=True)
    try:
        planned([Target(saved, (1, 0), (5, 3), None)])
    except CorruptError as error:
        return str(error)
    return "nothing"
