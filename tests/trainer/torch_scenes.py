"""What ranks do to learn how torch treats sharded tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fsdp_scenes as scenes
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from surefoot.errors import UnsupportedStateError
from surefoot.trainer.state.sharded import place_of


def _locals(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's part of everything that the optimizer owns."""
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        owned = {"parameter": parameter, **optimizer.state.get(parameter, {})}
        for name, tensor in owned.items():
            yield f"{number}.{name}", tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Boundary:
    """What a rank had at a boundary, and what became of it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._held = dict(_locals(optimizer))
        self._then = {name: (tensor.data_ptr(), tensor.detach().clone()) for name, tensor in self._held.items()}

    def written(self) -> list[str]:
        """Tensors held since then whose bytes are others now."""
        return [name for name, tensor in self._held.items() if not torch.equal(tensor, self._then[name][1])]

    def moved(self) -> list[str]:
        """What the optimizer owns now and lies elsewhere."""
        return [name for name, tensor in _locals(self._optimizer) if tensor.data_ptr() != self._then[name][0]]


def shards_through_three_steps(kind: str) -> dict[str, Any]:
    """Which local tensors were written or moved at each point between two boundaries; and what a module shows as its
    parameters after a forward."""
    torch.manual_seed(1)
    model = scenes.net(kind)
    optimizer = scenes.OPTIMIZERS["adamw"](model)
    scenes.train(model, optimizer, range(1))
    found: dict[str, Any] = {"before the step": [], "moved": [], "stepped": [], "kinds": set()}
    for step in range(1, 4):
        boundary = _Boundary(optimizer)
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        loss = model(torch.randint(0, 7, (5,), generator=generator)).pow(2).mean()
        found["before the step"] += boundary.written()
        found["moved"] += boundary.moved()
        found["kinds"] |= {type(parameter).__name__ for parameter in model.parameters()}
        loss.backward()
        found["before the step"] += boundary.written()
        found["moved"] += boundary.moved()
        optimizer.step()
        found["stepped"].append(len(boundary.written()))
        found["moved"] += boundary.moved()
    return found


def versions_over_a_step(kind: str) -> dict[str, Any]:
    """Version counters of a sharded parameter, of its moment, and of both local tensors, around one step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    fully_shard(model)
    optimizer = scenes.OPTIMIZERS[kind](model)

    def step() -> None:
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    parameter = optimizer.param_groups[0]["params"][0]
    moment = optimizer.state[parameter]["exp_avg"]
    local, local_moment = parameter._local_tensor, moment._local_tensor
    values = [local.detach().clone(), local_moment.detach().clone()]
    before = [one._version for one in (parameter, local, moment, local_moment)]
    step()
    after = [one._version for one in (parameter, local, moment, local_moment)]
    assert optimizer.param_groups[0]["params"][0]._local_tensor.data_ptr() == local.data_ptr()
    names = ("parameter", "its local tensor", "moment", "its local tensor's")
    return {
        "changed": [not torch.equal(local, values[0]), not torch.equal(local_moment, values[1])],
        "moved": [name for name, then, now in zip(names, before, after, strict=True) if then != now],
    }


def thirteen_rows_over_three_by_two() -> dict[str, Any]:
    """Tensor parallel by two, then fully sharded by three: which rows this rank has, and which it says it has."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Module()
    model.layer = nn.Linear(4, 13, bias=False)
    with torch.no_grad():
        model.layer.weight.copy_(torch.arange(13.0).unsqueeze(1).expand(13, 4))
    parallelize_module(model, mesh["tp"], {"layer": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    (weight,) = model.parameters()
    assert isinstance(weight, DTensor)
    rows = [int(row) for row in weight._local_tensor[:, 0]]
    whole = weight.full_tensor()[:, 0].tolist()
    try:
        place = place_of(weight, "layer.weight")
    except UnsupportedStateError as error:
        return {"rank": dist.get_rank(), "rows": rows, "whole": whole, "refused": str(error)}
    return {"rank": dist.get_rank(), "rows": rows, "whole": whole, "begins": place.offset[0]}
