"""Three ways to train one model: alone, under DDP, sharded by FSDP2. What differs between them, and nothing else.

Annotations are evaluated here: DDP looks at those of a communication hook.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


class Plain:
    """One process, the module as it is."""

    def wrap(self, module: nn.Module, *, freezes: bool = False) -> nn.Module:
        """The module to train. `freezes`: some of its parameters will stop to be trained."""
        return module

    def shard(self, module: nn.Module) -> nn.Module:
        """A module beside the trained one, laid out like it."""
        return module

    @contextmanager
    def unsynchronised(self, model: nn.Module) -> Iterator[None]:
        """For all micro-batches of a step but the last."""
        yield

    def step_in_backward(self, model: nn.Module, optimizer_of: Mapping[nn.Parameter, Optimizer]) -> None:
        """Each parameter's optimizer steps as soon as its gradient is there, and the gradient goes."""

        def step(parameter: torch.Tensor) -> None:
            optimizer = optimizer_of[parameter]  # type: ignore[index]
            optimizer.step()
            optimizer.zero_grad()

        for parameter in optimizer_of:
            parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]


class Ddp(Plain):
    def wrap(self, module: nn.Module, *, freezes: bool = False) -> nn.Module:
        # Without it DDP waits for the gradients of what was frozen after the wrapping.
        return DistributedDataParallel(module, find_unused_parameters=freezes)

    @contextmanager
    def unsynchronised(self, model: nn.Module) -> Iterator[None]:
        assert isinstance(model, DistributedDataParallel)
        with model.no_sync():
            yield

    def step_in_backward(self, model: nn.Module, optimizer_of: Mapping[nn.Parameter, Optimizer]) -> None:
        """In the communication hook, which is where the summed gradient is there.

        A parameter's own hook fires before the sum. torch's own `_apply_optimizer_in_backward` does it for DDP in such
        a hook, but not on a CPU: "RuntimeError: Cannot access accelerator device when none is available".
        """
        assert isinstance(model, DistributedDataParallel)

        def sum_and_step(_state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            summed = allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]
            summed.wait()
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                parameter.grad = gradient
                optimizer_of[parameter].step()  # type: ignore[index]
            return summed

        model.register_comm_hook(None, sum_and_step)


class Fsdp2(Plain):
    def wrap(self, module: nn.Module, *, freezes: bool = False) -> nn.Module:
        return self.shard(module)

    def shard(self, module: nn.Module) -> nn.Module:
        """The wide layer in a group of its own, the rest in another; after a forward pass, too."""
        assert isinstance(module, nn.Sequential)
        fully_shard(module[3])
        fully_shard(module, reshard_after_forward=True)
        return module

    @contextmanager
    def unsynchronised(self, model: nn.Module) -> Iterator[None]:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


MODES: dict[str, tuple[type[Plain], int]] = {"plain": (Plain, 1), "ddp": (Ddp, 2), "fsdp2": (Fsdp2, 2)}
"""By name: the way, and its number of ranks."""
