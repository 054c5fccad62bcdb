"""What ranks do in the tests of sharded state: train, save, train on; the same again from what was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import Place, registered
from safetensors.torch import save_file
from through_a_slot import bits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from surefoot.errors import SurefootError
from surefoot.trainer.state.flatten import Flat


class Net(nn.Module):
    """Rows that do not divide, a layer with fewer rows than ranks, a tied weight, a buffer of each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.norm = nn.BatchNorm1d(6)
        self.inner = nn.Linear(6, 5)
        self.back = nn.Linear(5, 6)
        self.one = nn.Linear(6, 1)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(words))
        x = x + self.back(torch.relu(self.inner(x)))
        return self.head(x).logsumexp(1) + self.one(x).squeeze(1)


class Wide(nn.Module):
    """Every length divides, for two kinds of parallelism at once."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(words, 8).float()
        return self.down(torch.relu(self.up(x))).sum(1)


def net(kind: str) -> nn.Module:
    """A model, sharded as `kind` says."""
    model: nn.Module = Wide() if kind == "tp" else Net()
    if kind == "hsdp":
        return _shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts")))
    if kind == "tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return _shard(model, mesh["dp"])
    if kind == "narrow":
        model.to(torch.bfloat16)
    if kind == "replicated":
        return _shard(model, init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "parts")))
    return _shard(model, None, keep_whole=kind == "unsharded")


def _shard(model: nn.Module, mesh: DeviceMesh | None, *, keep_whole: bool = False) -> nn.Module:
    if isinstance(model, Net):
        fully_shard([model.inner, model.back], mesh=mesh, reshard_after_forward=not keep_whole)
    fully_shard(model, mesh=mesh, reshard_after_forward=not keep_whole)
    return model


class Wider(torch.optim.Optimizer):
    """Keeps an average of the gradients in float32, whatever type the parameters have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter, dtype=torch.float32))
                average.lerp_(parameter.grad.float(), 0.3)
                parameter.sub_((average * group["lr"]).to(parameter.dtype))


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, amsgrad=True),
    "loop": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "wider": lambda model: Wider(model.parameters(), {"lr": 0.1}),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, alike: bool = False) -> None:
    """Steps whose batches depend on the step and, unless `alike`, on the rank."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + (0 if alike else dist.get_rank()))
        optimizer.zero_grad()
        model(torch.randint(0, 7, (5,), generator=generator)).pow(2).mean().backward()
        optimizer.step()


def local_bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Every bit that this rank has, by torch's own accessors."""
    state = {key: _local(value) for key, value in model.state_dict().items()}
    return bits([state, _local(optimizer.state_dict())])


def _local(tree: Any) -> Any:
    if isinstance(tree, DTensor):
        return tree.to_local().detach().clone()
    if isinstance(tree, dict):
        return {key: _local(value) for key, value in tree.items()}
    return [_local(item) for item in tree] if isinstance(tree, list) else tree


def _full(tree: Any) -> Any:
    if isinstance(tree, DTensor):
        return tree.full_tensor().detach().clone()
    if isinstance(tree, dict):
        return {key: _full(value) for key, value in tree.items()}
    return [_full(item) for item in tree] if isinstance(tree, list) else tree


def there_and_back(kind: str, optimizer_kind: str, directory: str) -> dict[str, Any]:
    """Train, save, train on; then fresh objects from the save, trained on. Everything that a test compares."""
    torch.manual_seed(1)
    model = net(kind)
    optimizer = OPTIMIZERS[optimizer_kind](model)
    train(model, optimizer, range(3))
    place = Place(Path(directory))
    plan = place.save(registered(model=model, optimizer=optimizer))
    saved = local_bits(model, optimizer)
    train(model, optimizer, range(3, 5))
    straight = local_bits(model, optimizer)

    torch.manual_seed(2)
    model = net(kind)
    optimizer = OPTIMIZERS[optimizer_kind](model)
    if optimizer_kind == "fused":
        # Into an optimizer that has state already, after a forward that set up its hooks.
        train(model, optimizer, range(1))
    place.load(registered(model=model, optimizer=optimizer), plan)
    loaded = local_bits(model, optimizer)
    train(model, optimizer, range(3, 5))
    return {
        "saved": saved,
        "loaded": loaded,
        "straight": straight,
        "resumed": local_bits(model, optimizer),
        "items": [(i.leaf, i.rank, i.spread, i.box.name, i.box.offset, i.box.shape) for i in plan.items],
        "types": [(i.leaf, i.box.dtype, i.spread) for i in plan.items],
        "bytes": [sum(i.box.size_bytes for i in plan.items if i.rank == rank) for rank in range(plan.world_size)],
        "mismatched": plan.mismatched,
    }


def saved_while_whole(directory: str) -> dict[str, Any]:
    """A save after an evaluation that left the parameters gathered: what is taken, and whether training notices."""
    ends = []
    for save in (True, False):
        torch.manual_seed(1)
        model = net("unsharded")
        optimizer = OPTIMIZERS["adamw"](model)
        train(model, optimizer, range(2))
        model.eval()
        with torch.no_grad():
            model(torch.arange(5))
        model.train()
        if save:
            whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
            # The optimizer first: its parameters must be named although the module holds others now.
            plan = Place(Path(directory)).save(registered(optimizer=optimizer, model=model))
        train(model, optimizer, range(2, 4))
        ends.append(local_bits(model, optimizer))
    return {"whole": whole, "names": sorted({item.leaf for item in plan.items}), "ends": ends}


def looked_at_each_step() -> dict[str, Any]:
    """A state looked at after each step, by one registry and by a new one each time; evaluated in between."""
    torch.manual_seed(1)
    model = net("unsharded")
    optimizer = OPTIMIZERS["adamw"](model)
    registry = registered(model=model, optimizer=optimizer)
    walked, equal = [], []
    for step in range(6):
        train(model, optimizer, range(step, step + 1))
        if step == 4:
            with torch.no_grad():
                model(torch.arange(5))
        flat = registry.flatten()
        walked.append(list(registry._shortcut.walked))
        fresh = registered(model=model, optimizer=optimizer).flatten()
        equal.append(_seen(flat) == _seen(fresh))
    return {"walked": walked, "equal": equal}


def _seen(flat: Flat) -> Any:
    tensors = [
        (t.name, t.spread, t.place, t.tensor.data_ptr(), t.tensor.stride(), bits(t.tensor)) for t in flat.tensors
    ]
    return tensors, flat.values, flat.structure, flat.signature()


def replicas_that_differ(directory: str) -> dict[str, Any]:
    """One rank's copy of a replicated part is changed behind everybody's back."""
    torch.manual_seed(1)
    model = net("hsdp")
    optimizer = OPTIMIZERS["sgd"](model)
    if dist.get_rank() == 3:
        with torch.no_grad():
            model.get_parameter("inner.bias")._local_tensor.add_(1)  # type: ignore[attr-defined]
    place = Place(Path(directory))
    plan = place.save(registered(model=model, optimizer=optimizer))
    saved = local_bits(model, optimizer)
    model = net("hsdp")
    optimizer = OPTIMIZERS["sgd"](model)
    place.load(registered(model=model, optimizer=optimizer), plan)
    loaded = local_bits(model, optimizer)
    model = net("fsdp")
    others = registered(model=model, optimizer=OPTIMIZERS["sgd"](model))
    said = _said(lambda: place.load(others, plan))
    return {"mismatched": plan.mismatched, "saved": saved, "loaded": loaded, "otherwise": said}


def other_objects(directory: str) -> dict[str, Any]:
    """Sharded tensors outside of modules: a value in a dict, a tensor of its own, whole copies, an empty one."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(15.0).view(5, 3)
    tree = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": [distribute_tensor(whole.to(torch.complex128), mesh, [Shard(1)])],
        "everywhere": distribute_tensor(whole.clone(), mesh, [Replicate()]),
        "scalar": distribute_tensor(torch.tensor(2.5), mesh, [Replicate()]),
        "empty": distribute_tensor(torch.empty(0, 3), mesh, [Shard(0)]),
    }
    alone = distribute_tensor(whole + 1, mesh, [Shard(0)])
    place = Place(Path(directory))
    plan = place.save(registered(tree=tree, alone=alone))
    fresh = {key: _zeroed(value) for key, value in tree.items()}
    fresh_alone = torch.zeros_like(alone)
    place.load(registered(tree=fresh, alone=fresh_alone), plan)
    return {
        "saved": bits(_full([tree[key] for key in tree if key != "columns"])),
        "items": [(i.leaf, i.rank, i.spread, i.box.name) for i in plan.items],
        "equal": bits(_local([*tree.values(), alone])) == bits(_local([*fresh.values(), fresh_alone])),
        "sharded": all(isinstance(value, DTensor) for value in (fresh["rows"], *fresh["columns"], fresh_alone)),
    }


def _zeroed(value: Any) -> Any:
    return [_zeroed(item) for item in value] if isinstance(value, list) else torch.zeros_like(value)


def refusals(directory: str) -> list[str]:
    """What is said of a sum that is not made yet, of a checkpoint without shards, and of other shards."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0)
    rows = {"t": distribute_tensor(whole, mesh, [Shard(0)])}
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    said = [_said(lambda: registered(deep={"sum": [partial]}))]
    place = Place(Path(directory))
    plan = place.save(registered(x=rows))
    said.append(_said(lambda: place.load(registered(x={}), plan)))
    shorter = {"t": distribute_tensor(whole[:6], mesh, [Shard(0)])}
    said.append(_said(lambda: place.load(registered(x=shorter), plan)))
    narrow = place.save(registered(x={"t": distribute_tensor(whole.half(), mesh, [Shard(0)])}))
    said.append(_said(lambda: place.load(registered(x=rows), narrow)))
    return said


def _said(deed: Callable[[], Any]) -> str:
    try:
        deed()
    except SurefootError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def alone(kind: str, path: str) -> None:
    """The truth at world size 1: the same training, of a plain model, by the names that the run gives; as a file."""
    torch.manual_seed(1)
    model = Net()
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer, range(3), alike=True)
    parameters = dict(model.named_parameters())
    truth = {f"model.{name}": tensor.detach() for name, tensor in parameters.items()}
    truth |= {f"model.{name}": tensor for name, tensor in model.named_buffers()}
    for name, parameter in parameters.items():
        truth |= {f"optimizer.state.model.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    save_file({name: tensor.clone() for name, tensor in truth.items()}, path)
