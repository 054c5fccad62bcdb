"""What is done with optimizers: read without a step, restored without an alias, fenced without being in their way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_overlap import Watched
from through_a_slot import bits, flatten, register, stage
from torch import nn

import surefoot
from surefoot.trainer.stage.copying import HostLane
from surefoot.trainer.stage.fence import Fences


def _model(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


def _train(model: nn.Module, optimizer: Any, width: int = 4) -> None:
    model.zero_grad()
    model(torch.randn(8, width)).square().mean().backward()
    optimizer.step()


def _kept(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"model.{name}": parameter for name, parameter in model.named_parameters()}


def _raw(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Every byte that is trained; for tensors too large to be walked element by element."""
    state = [value for values in optimizer.state.values() for value in values.values()]
    return [tensor.detach().numpy().tobytes() for tensor in [*model.parameters(), *state]]


class _Restless(torch.optim.Optimizer):
    """Its step changes parameters whatever the learning rate and the gradients are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("seen", torch.zeros_like(p)).add_(1)
                p += 1


@pytest.mark.holds("reading-runs-no-step")
def test_an_optimizer_without_state_is_read_and_restored_without_a_step() -> None:
    """Neither walking it, nor saving it, nor loading born state into it runs the user's step."""
    models = [_model(), _model()]
    saved, fresh = (_Restless(model.parameters()) for model in models)
    before = bits(models[1].state_dict())
    flatten(register({"m": models[1], "o": fresh}))
    empty = stage(register({"m": models[1], "o": fresh}))
    assert (fresh.steps, dict(fresh.state)) == (0, {})
    assert bits(models[1].state_dict()) == before
    empty.load_into(register({"m": models[1], "o": fresh}))
    assert (fresh.steps, dict(fresh.state)) == (0, {})
    saved.step()
    stage(register({"m": models[0], "o": saved})).load_into(register({"m": models[1], "o": fresh}))
    assert fresh.steps == 0
    assert bits(models[1].state_dict()) == bits(models[0].state_dict())
    assert bits(fresh.state_dict()["state"]) == bits(saved.state_dict()["state"])


@pytest.mark.holds("restored-is-copied")
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"amsgrad": True}])
def test_restored_optimizer_state_is_the_optimizer_s_own(options: dict[str, bool]) -> None:
    """A fresh optimizer trains on without a byte of the slot changing, and a slot that is filled again changes
    nothing in it: torch itself would have kept the very tensors that it was given."""
    models = [_model(), _model()]
    saved, fresh = (torch.optim.AdamW(model.parameters(), lr=0.1, **options) for model in models)  # type: ignore[arg-type]
    _train(models[0], saved)
    staged = stage(register({"m": models[0], "o": saved}))
    before = staged.image
    staged.load_into(register({"m": models[1], "o": fresh}))
    _train(models[1], fresh)
    assert staged.image == before
    after = bits([models[1].state_dict(), fresh.state_dict()])
    memory = staged.segment.padded_image(staged.slot)
    memory[:] = b"\xff" * len(memory)
    assert bits([models[1].state_dict(), fresh.state_dict()]) == after


@pytest.mark.holds("hooks-in-nobodys-way")
def test_an_optimizer_in_a_run_can_be_copied_and_pickled(tmp_path: Path) -> None:
    """With the fence's hook in it; and what a copy does is not taken for the optimizer's own step."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    watched = Watched(tmp_path / "run", model=model, optimizer=optimizer)
    for step in watched.steps(5, lambda: _kept(model)):
        _train(model, optimizer)
        if step > 1:
            assert optimizer._optimizer_step_pre_hooks
            fired = set(watched.boundary._taker._fences._fired)
            for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
                assert bits(other.state_dict()) == bits(optimizer.state_dict())
                assert not other._optimizer_step_pre_hooks
                other.step()
            assert watched.boundary._taker._fences._fired == fired
    assert watched.sealed >= {1, 2, 3, 4}


class _Ducky:
    """Gradient descent by somebody who never heard of torch's class."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.moment = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    @torch.no_grad()
    def step(self) -> None:
        for name, p in self._model.named_parameters():
            assert p.grad is not None
            self.moment[name].mul_(0.9).add_(p.grad)
            p -= 0.1 * self.moment[name]

    def state_dict(self) -> dict[str, Any]:
        return dict(self.moment)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in state.items():
            self.moment[name].copy_(tensor)


@pytest.mark.holds("no-hook-no-overlap")
def test_what_an_optimizer_without_a_hook_changes_is_copied_at_the_boundary(tmp_path: Path) -> None:
    """A class of the user's own that steps and tells nobody: nothing is copied behind it, and each image is right."""
    model = _model(512)
    optimizer = _Ducky(model)
    watched = Watched(tmp_path / "run", model=model, optimizer=optimizer)
    for _step in watched.steps(6, lambda: _kept(model)):
        assert watched.boundary._taker.overlapped_bytes == 0
        _train(model, optimizer, 512)
    assert watched.sealed >= {1, 2, 3, 4, 5}


@pytest.mark.holds("hook-fires-once")
@pytest.mark.parametrize("with_model", [True, False])
def test_a_compiled_step_is_fenced_like_any_other(tmp_path: Path, with_model: bool) -> None:
    """Copied behind the next step, each image right; and the compiler is given nothing of what the fence does."""
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        compiled.extend(node.stack_trace or "" for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    model = _model(512)
    optimizer = torch.optim.AdamW(model.parameters())
    called = torch.compile(model, backend=backend) if with_model else model
    step_compiled = torch.compile(lambda: optimizer.step(), backend=backend)
    watched = Watched(tmp_path / "run", model=called, optimizer=optimizer)
    for step in watched.steps(8, lambda: _kept(model)):
        if step > 2:
            assert watched.boundary._taker.overlapped_bytes > 2**22
        model.zero_grad()
        called(torch.randn(8, 512)).square().mean().backward()
        step_compiled()
    torch._dynamo.reset()
    assert watched.sealed >= {1, 2, 3, 4, 5, 6, 7}
    assert watched.changing == set()
    assert [trace for trace in compiled if "torch/optim" in trace]
    assert [trace for trace in compiled if "surefoot/trainer" in trace] == []


class _Wrapper(torch.optim.Optimizer):
    """As libraries make them: an optimizer by name, which passes everything on and never calls the base's own init."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class _Nothing(_Wrapper):
    """Holds its optimizer where nobody looks, and steps it past every hook."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.parts = [optimizer]

    @property
    def optimizer(self) -> torch.optim.Optimizer:  # type: ignore[override]
        return self.parts[0]


@pytest.mark.holds("wrapped-optimizers")
@pytest.mark.parametrize("wrap", [_Wrapper, lambda optimizer: _Wrapper(_Wrapper(optimizer)), _Nothing])
def test_an_optimizer_in_a_wrapper_is_heard_or_copied_at_the_boundary(tmp_path: Path, wrap: Any) -> None:
    """An optimizer by name only has no hook of its own: the one that it holds is heard in its place, and if none is
    found, nothing is copied behind it. Each image is right, and the wrapped one goes on where it was."""
    made = [_model(512) for _ in range(3)]
    optimizers = [wrap(torch.optim.AdamW(model.parameters(), lr=0.01)) for model in made]

    def train(which: int, step: int) -> None:
        torch.manual_seed(step)
        _train(made[which], optimizers[which], 512)

    watched = Watched(tmp_path / "run", model=made[0], optimizer=optimizers[0])
    for step in watched.steps(5, lambda: _kept(made[0])):
        if step == 4:
            assert (watched.boundary._taker.overlapped_bytes == 0) == (wrap is _Nothing)
        train(0, step)
    with surefoot.Run(tmp_path / "run", stage=1, interval_s=600, model=made[1], optimizer=optimizers[1]) as run:
        assert run.step == 5
        for step in run.steps(7):
            train(1, step)
    for step in range(7):
        train(2, step)
    ends = [_raw(made[which], optimizers[which]) for which in range(3)]
    assert ends[1] == ends[2]
    assert ends[0] != ends[1]


@pytest.mark.holds("hook-fires-once")
def test_optimizers_that_step_inside_backward_are_fenced_there(tmp_path: Path) -> None:
    """One optimizer a parameter, run as soon as its gradient is there: the first of them waits for the copy, and each
    image is the state at its boundary."""
    model = _model(512)
    optimizers = [torch.optim.AdamW([parameter]) for parameter in model.parameters()]
    for parameter, optimizer in zip(model.parameters(), optimizers, strict=True):
        parameter.register_post_accumulate_grad_hook(lambda _p, optimizer=optimizer: optimizer.step())  # type: ignore[misc]
    watched = Watched(tmp_path / "run", model=model, optimizers=optimizers)
    for step in watched.steps(7, lambda: _kept(model)):
        if step > 2:
            assert watched.boundary._taker.overlapped_bytes > 2**22
        model.zero_grad()
        model(torch.randn(8, 512)).square().mean().backward()
    assert watched.sealed >= {1, 2, 3, 4, 5, 6}
    assert watched.changing == set()


def _ticks(fences: Fences, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[bool]:
    for _step in range(3):
        _train(model, optimizer)
        yield fences.take_fired() == (optimizer,)


@pytest.mark.holds("trust-for-one-step")
def test_a_fence_counts_for_one_step_only() -> None:
    """An optimizer is trusted for the step after one in which it was heard, for no other; let go, it is silent."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    heard: list[int] = []
    fences = Fences(lambda: heard.append(1))
    fences.watch([optimizer])
    fences.watch([optimizer])
    assert all(_ticks(fences, model, optimizer))
    assert len(heard) == 3
    assert fences.take_fired() == ()
    fences.watch([])
    _train(model, optimizer)
    assert (len(heard), fences.take_fired()) == (3, ())
    fences.close()


@pytest.mark.holds("slots-needed")
@pytest.mark.parametrize(("strict", "slots"), [(None, 3), (True, 3), (False, 4)])
def test_a_run_has_the_slots_that_its_fence_needs(tmp_path: Path, strict: bool | None, slots: int) -> None:
    """Strict, as it is without an accelerator: two and one for an upload. Waiting for the own copy only: one more."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    watched = Watched(tmp_path / "run", model=model, optimizer=optimizer, strict=strict)
    for step in watched.steps(3, lambda: _kept(model)):
        _train(model, optimizer)
        if step:
            stager = watched.boundary._stager
            assert stager is not None
            assert stager.segment.num_slots == slots
            assert watched.boundary._taker.strict == (strict is not False)


@pytest.mark.holds("copy-errors-reach-training")
def test_a_copy_that_fails_is_heard_of_in_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the step nobody would hear of it: the optimizer's next step, or the next boundary, raises it."""

    def fail(*_: Any) -> None:
        raise OSError("the memory is gone")

    model = _model(512)
    optimizer = torch.optim.AdamW(model.parameters())
    reached = []
    with pytest.raises(OSError, match="the memory is gone"):
        with surefoot.Run(tmp_path / "run", stage=1, interval_s=600, model=model, optimizer=optimizer) as run:
            for step in run.steps(9):
                if step == 4:
                    assert run._session is not None
                    assert run._session._boundary is not None
                    assert run._session._boundary._taker.overlapped_bytes > 0
                    monkeypatch.setattr(HostLane, "behind", fail)
                reached.append(step)
                _train(model, optimizer, 512)
    assert reached[-1] in (4, 5)
