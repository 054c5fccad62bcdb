"""Facts about torch on which staging and restoring stand. A release that breaks one is to be noticed here."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_BUILT_IN: dict[str, Make] = {
    **{
        f"{name} {kind}": (lambda p, name=name, options=options: getattr(torch.optim, name)(p, lr=0.1, **options))
        for name in ("AdamW", "Adam", "SGD", "Adagrad")
        for kind, options in {
            "": {},
            "foreach": {"foreach": True},
            "loop": {"foreach": False},
            "fused": {"fused": True},
        }.items()
    },
    **{
        name: (lambda p, name=name: getattr(torch.optim, name)(p))
        for name in ("Adafactor", "RMSprop", "NAdam", "RAdam", "Rprop", "Adadelta", "Adamax", "ASGD")
    },
    "Muon": lambda p: torch.optim.Muon([one for one in p if one.dim() == 2]),
}


class _Own(torch.optim.Optimizer):
    """A user's: plain gradient descent with a step of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _backward(model: nn.Module) -> torch.Tensor:
    model.zero_grad()
    loss: torch.Tensor = model(torch.randn(8, 4)).square().sum()
    loss.backward()
    return loss


class _Listener:
    """Hears an optimizer's hook, and keeps what the parameters were at that moment."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.heard: list[list[torch.Tensor]] = []
        self._handles = [optimizer.register_step_pre_hook(self._hear) for optimizer in optimizers]

    def _hear(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self.heard.append(_parameters(optimizer))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


def _equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---------------------------------------------------------------------- the hook


@pytest.mark.holds("hook-fires-once")
@pytest.mark.parametrize("name", [*_BUILT_IN, "a user's own"])
def test_the_hook_fires_once_before_an_optimizer_changes_anything(name: str) -> None:
    """One call a step, in which every parameter still is what backward saw; afterwards they differ."""
    model = _model()
    optimizer = _Own(model.parameters()) if name == "a user's own" else _BUILT_IN[name](list(model.parameters()))
    listener = _Listener(optimizer)
    for step in range(2):
        _backward(model)
        before = _parameters(optimizer)
        optimizer.step()
        assert len(listener.heard) == step + 1
        assert _equal(listener.heard[-1], before)
        assert not _equal(_parameters(optimizer), before)


@pytest.mark.holds("hook-fires-once")
def test_the_hook_fires_once_before_an_optimizer_that_evaluates_by_itself() -> None:
    """LBFGS calls its closure several times in one step: the hook comes before the first, and not again."""
    model = _model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    listener = _Listener(optimizer)
    evaluations: list[int] = []

    def closure() -> torch.Tensor:
        evaluations.append(len(listener.heard))
        return _backward(model)

    before = _parameters(optimizer)
    optimizer.step(closure)  # type: ignore[arg-type]
    assert len(listener.heard) == 1
    assert _equal(listener.heard[0], before)
    assert len(evaluations) > 1
    assert set(evaluations) == {1}


@pytest.mark.holds("hook-fires-once")
def test_the_hook_fires_under_a_scheduler_and_a_scaler() -> None:
    """Both wrap an optimizer's step, and neither goes past its hook."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    listener = _Listener(optimizer)
    for _step in range(2):
        model.zero_grad()
        scaler.scale(model(torch.randn(8, 4)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    assert len(listener.heard) == 2


@pytest.mark.holds("skipped-step-is-fenced")
def test_a_scaler_with_infinite_gradients_never_reaches_the_hook() -> None:
    """The step is left out, so the fence never closes: the next boundary must be one too."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    listener = _Listener(optimizer)
    before = _parameters(optimizer)
    scaler.scale(model(torch.full((8, 4), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert listener.heard == []
    assert _equal(_parameters(optimizer), before)


@pytest.mark.holds("hook-fires-once")
def test_the_hook_fires_inside_backward() -> None:
    """An optimizer a parameter, each run once its gradient is there: one call for each, before `backward` ends."""
    model = _model()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    listener = _Listener(*optimizers.values())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())  # type: ignore[index, arg-type]
    model(torch.randn(8, 4)).square().sum().backward()
    assert len(listener.heard) == len(optimizers)


@pytest.mark.holds("hook-fires-once")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_hook_fires_in_a_compiled_step(backend: str) -> None:
    """Each call of a compiled function that steps is heard, the first and the later ones."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    heard: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: heard.append(1))
    torch._dynamo.reset()
    compiled = torch.compile(lambda: optimizer.step(), backend=backend)
    for step in range(4):
        model(torch.ones(2, 3)).sum().backward()
        compiled()
        assert len(heard) == step + 1
    torch._dynamo.reset()


_COMPILED_FIRST = """
import torch
model = torch.compile(torch.nn.Linear(3, 3), backend="eager")
model(torch.ones(2, 3))
heard = []
for make in (torch.optim.AdamW, torch.optim.SGD):
    optimizer = make(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: heard.append(1))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
print(len(heard))
"""


@pytest.mark.holds("hook-fires-once")
def test_the_hook_fires_for_optimizers_made_after_a_compilation() -> None:
    """In a process of its own, since a class gets its hooks with its first optimizer: compiling changes classes."""
    done = subprocess.run([sys.executable, "-c", _COMPILED_FIRST], capture_output=True, check=True)
    assert done.stdout.split() == [b"2"]


@pytest.mark.holds("copy-errors-reach-training")
def test_what_a_hook_raises_comes_out_of_the_step() -> None:
    """So a copy that failed is heard of where the training is, and nothing was changed."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())

    def refuse(*_: Any) -> None:
        raise OSError("the copy failed")

    optimizer.register_step_pre_hook(refuse)
    _backward(model)
    before = _parameters(optimizer)
    with pytest.raises(OSError, match="the copy failed"):
        optimizer.step()
    assert _equal(_parameters(optimizer), before)


@pytest.mark.holds("hooks-in-nobodys-way")
def test_a_hook_stays_behind_when_its_optimizer_is_copied_or_pickled() -> None:
    """What a hook refers to (threads, locks) is neither copied nor pickled, and a copy's step is nobody's business."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    heard: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: heard.append(1))
    _backward(model)
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        other.step()
    assert heard == [1]


@pytest.mark.holds("loading-replaces-tensors")
def test_loading_gives_an_optimizer_other_tensors() -> None:
    """Whoever held the state's tensors from before a `load_state_dict` holds what is no state any more."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    _backward(model)
    optimizer.step()
    moment = optimizer.state[model[0].weight]["exp_avg"]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[model[0].weight]["exp_avg"] is not moment


@pytest.mark.holds("reading-runs-no-step")
def test_reading_an_empty_optimizer_s_state_steps_it() -> None:
    """`get_optimizer_state_dict` runs a real step, hook and all, on one that has no state: never call it."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    listener = _Listener(optimizer)
    assert not optimizer.state
    get_optimizer_state_dict(model, optimizer)
    assert len(listener.heard) == 1
    assert optimizer.state


# ---------------------------------------------------------------------- version counters


def _data_add(p: nn.Parameter) -> None:
    p.data.add_(1)


def _data_copy(p: nn.Parameter) -> None:
    p.data.copy_(p.data + 1)


def _data_foreach(p: nn.Parameter) -> None:
    torch._foreach_add_([p.data], 1)


def _numpy_view(p: nn.Parameter) -> None:
    p.detach().numpy()[...] += 1


def _preserved(p: nn.Parameter) -> None:
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(p):
        p.add_(1)


@pytest.mark.holds("version-counters-miss-writes")
@pytest.mark.parametrize("write", [_data_add, _data_copy, _data_foreach, _numpy_view, _preserved])
def test_these_writes_are_unseen_by_the_version_counter(write: Callable[[nn.Parameter], None]) -> None:
    """In place, at the same address, another value, the same version: it is no proof that a tensor stood still."""
    p = nn.Parameter(torch.zeros(4))
    version, address = p._version, p.data_ptr()
    write(p)
    assert p.tolist() == [1.0] * 4
    assert (p._version, p.data_ptr()) == (version, address)


def _assign(p: nn.Parameter) -> None:
    p.data = torch.ones(4)


def _vector(p: nn.Parameter) -> None:
    vector_to_parameters(parameters_to_vector([p]) + 1, [p])


@pytest.mark.holds("version-counters-miss-writes")
@pytest.mark.parametrize("write", [_assign, _vector])
def test_these_writes_are_seen_by_the_address_alone(write: Callable[[nn.Parameter], None]) -> None:
    """Another storage in the same parameter: the version stays."""
    p = nn.Parameter(torch.zeros(4))
    version, address = p._version, p.data_ptr()
    write(p)
    assert p.tolist() == [1.0] * 4
    assert p._version == version
    assert p.data_ptr() != address


def _in_place(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.add_(1)


def _detached(p: nn.Parameter) -> None:
    p.detach().add_(1)


def _initialised(p: nn.Parameter) -> None:
    nn.init.ones_(p)


@pytest.mark.holds("version-counters-see-writes")
@pytest.mark.parametrize("write", [_in_place, _detached, _initialised])
def test_ordinary_writes_move_the_version_counter(write: Callable[[nn.Parameter], None]) -> None:
    """What the witness may rely on for a write that hides from nobody."""
    p = nn.Parameter(torch.zeros(4))
    version = p._version
    write(p)
    assert p.tolist() == [1.0] * 4
    assert p._version > version


@pytest.mark.holds("version-counters-miss-writes")
def test_fused_optimizers_and_running_statistics_move_no_version() -> None:
    """The commonest writes of all: parameters and moments by a fused step, buffers by a forward."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    _backward(model)
    optimizer.step()
    watched = {
        "weight": model[0].weight,
        "moment": optimizer.state[model[0].weight]["exp_avg"],
        "mean": model[1].running_mean,
        "variance": model[1].running_var,
    }
    before = {name: (tensor._version, tensor.detach().clone()) for name, tensor in watched.items()}
    _backward(model)
    optimizer.step()
    for name, tensor in watched.items():
        version, value = before[name]
        assert not torch.equal(tensor, value), name
        assert tensor._version == version, name


# ---------------------------------------------------------------------- what stands still behind the next step


def _leaves(model: nn.Module, optimizer: torch.optim.Optimizer, average: AveragedModel) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
    for number, state in enumerate(optimizer.state.values()):
        yield from ((f"state.{number}.{name}", value) for name, value in state.items())
    yield from ((f"average.{name}", value) for name, value in average.named_parameters())


@pytest.mark.holds("optimizer-owns-what-stands-still")
def test_what_an_optimizer_owns_stands_still_until_it_steps_and_nothing_else_does() -> None:
    """A copy taken any time before the next step is that of the boundary, but for buffers and for an average that is
    updated after the optimizer: so those are copied at the boundary."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    average = AveragedModel(model)
    for _step in range(3):
        _backward(model)
        optimizer.step()
    boundary = {name: leaf.detach().clone() for name, leaf in _leaves(model, optimizer, average)}
    average.update_parameters(model)
    _backward(model)
    moved = {name for name, leaf in _leaves(model, optimizer, average) if not torch.equal(leaf, boundary[name])}
    buffers = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert moved == buffers | {f"average.module.{name}" for name, _parameter in model.named_parameters()}


# ---------------------------------------------------------------------- what loading keeps


@pytest.mark.holds("restored-is-copied")
def test_loading_an_optimizer_keeps_the_very_tensors_it_is_given() -> None:
    """So state that is read straight out of a slot would be trained on in the slot: it must be copied."""
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    saved, fresh = (torch.optim.AdamW(model.parameters(), lr=0.1) for model in models)
    models[0](torch.ones(1, 2)).sum().backward()
    saved.step()
    slot = bytearray(4096)
    view = torch.frombuffer(slot, dtype=torch.float32)[:4].view(2, 2)
    state = saved.state_dict()
    view.copy_(state["state"][0]["exp_avg"])
    state["state"][0]["exp_avg"] = view
    fresh.load_state_dict(state)
    before = bytes(slot)
    models[1](torch.ones(1, 2)).square().sum().backward()
    fresh.step()
    assert bytes(slot) != before


@pytest.mark.holds("restored-is-copied")
def test_loading_a_module_keeps_tensors_only_if_told_to_assign() -> None:
    """The default copies; `assign=True` takes over what it is given."""
    given = nn.Linear(2, 2).state_dict()
    copied, assigned = nn.Linear(2, 2), nn.Linear(2, 2)
    copied.load_state_dict(given)
    assigned.load_state_dict(given, assign=True)
    assert torch.equal(copied.weight, given["weight"])
    assert copied.weight.data_ptr() != given["weight"].data_ptr()
    assert assigned.weight.data_ptr() == given["weight"].data_ptr()


@pytest.mark.holds("sources-are-held")
def test_a_tensor_that_is_held_keeps_its_bytes() -> None:
    """Whatever becomes of the parameter that it was taken from: so sources are held until their copy is complete."""
    p = nn.Parameter(torch.full((4,), 3.0))
    held = p.detach()
    p.data = torch.zeros(4)
    del p
    assert held.tolist() == [3.0] * 4
