"""More kinds of state through a slot and back: optimizers stepped in backward, averages, scalers, wrapped tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from through_a_slot import bits, flatten, register, round_trip, stage
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import return_and_correct_aliasing

from surefoot.errors import ConfigError, UnsupportedStateError


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


# ---------------------------------------------------------------------- optimizers stepped in backward


def _in_backward(model: nn.Module, kind: str) -> Any:
    """One optimizer a parameter, stepped by a hook as soon as the gradient is there."""
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=0.05) for parameter in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(hook)
    if kind == "by parameter":
        return optimizers
    if kind == "by name":
        names = {parameter: name for name, parameter in model.named_parameters()}
        return {names[parameter]: one for parameter, one in optimizers.items()}
    return list(optimizers.values()) if kind == "list" else tuple(optimizers.values())


def _backward(model: nn.Module, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(6, 4, generator=generator)).pow(2).mean().backward()


@pytest.mark.parametrize("kind", ["list", "tuple", "by name", "by parameter"])
def test_optimizers_stepped_in_backward_go_on_bit_for_bit(kind: str) -> None:
    """One optimizer a parameter, in a list or dict: state by parameter name, and the same bits three steps on."""
    models = [_net(), _net()]
    several = [_in_backward(model, kind) for model in models]
    _backward(models[0], range(3))
    staged = stage(register({"o": several[0], "m": models[0]}))
    name = {"by name": "0.weight", "by parameter": "m.0.weight"}.get(kind, "0")
    assert f"o.{name}.state.m.0.weight.exp_avg" in [item.leaf for item in staged.plan.items]
    staged.load_into(register({"o": several[1], "m": models[1]}))
    for model in models:
        _backward(model, range(3, 6))
    assert bits(models[1].state_dict()) == bits(models[0].state_dict())
    lists = [list(one.values()) if isinstance(one, dict) else one for one in several]
    assert [bits(o.state_dict()) for o in lists[1]] == [bits(o.state_dict()) for o in lists[0]]


def test_optimizers_of_one_dict_are_found_by_key_in_any_order() -> None:
    """Keys, not positions, say which is which; another set of keys is refused by name."""
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    first = {"w": torch.optim.Adam([models[0].weight]), "b": torch.optim.SGD([models[0].bias], lr=0.5, momentum=0.5)}
    second = {"b": torch.optim.SGD([models[1].bias], lr=0.1, momentum=0.5), "w": torch.optim.Adam([models[1].weight])}
    models[0](torch.ones(1, 2)).sum().backward()
    for optimizer in first.values():
        optimizer.step()
    round_trip({"m": models[0], "o": first}, {"m": models[1], "o": second})
    for key in first:
        assert bits(second[key].state_dict()) == bits(first[key].state_dict())
    with pytest.raises(ConfigError, match=r"^o: the checkpoint does not fit: .*'w'"):
        round_trip({"m": models[0], "o": first}, {"m": models[1], "o": {"b": second["b"]}})


def test_a_dict_of_optimizers_by_a_tensor_without_a_name_is_refused() -> None:
    """A key that no registered module has a name for could not be found again."""
    weight = torch.ones(2, requires_grad=True)
    with pytest.raises(UnsupportedStateError, match=r"^o: a key is a tensor"):
        flatten(register({"o": {weight: torch.optim.SGD([weight], lr=0.1)}}))


# ---------------------------------------------------------------------- averages, scalers, accumulation


@pytest.mark.holds("averaged-weights-saved")
@pytest.mark.parametrize("kind", ["mean", "ema", "ema with buffers"])
def test_an_averaged_model_goes_on(kind: str) -> None:
    """`AveragedModel`: its parameters, its count and its buffers, and the next average."""

    def make() -> tuple[nn.Module, AveragedModel]:
        model = _net()
        if kind == "mean":
            return model, AveragedModel(model)
        return model, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers="buffers" in kind)

    (model, average), (fresh, other) = make(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        _backward(model, range(step, step + 1))
        optimizer.step()
        average.update_parameters(model)
    round_trip({"m": model, "ema": average}, {"m": fresh, "ema": other})
    assert bits(other.state_dict()) == bits(average.state_dict())
    assert int(other.n_averaged) == 3
    for one, its in ((average, model), (other, fresh)):
        one.update_parameters(its)
    assert bits(other.state_dict()) == bits(average.state_dict())


@pytest.mark.holds("scaler-begins-anew")
def test_a_scaler_that_skips_goes_on() -> None:
    """`GradScaler` after steps taken and skipped: its scale, its growth, and which steps it takes next."""
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        runs.append((model, optimizer, torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)))

    def train(which: int, steps: range) -> list[float]:
        model, optimizer, scaler = runs[which]
        scales = []
        for step in steps:
            optimizer.zero_grad()
            loss = model(torch.full((2, 3), float(step + 1))).sum()
            scaler.scale(loss * (float("inf") if step in (2, 6) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    assert len(set(train(0, range(4)))) > 1
    names = ("m", "o", "scaler")
    round_trip(dict(zip(names, runs[0], strict=True)), dict(zip(names, runs[1], strict=True)))
    assert train(1, range(4, 9)) == train(0, range(4, 9))
    assert bits(runs[1][0].state_dict()) == bits(runs[0][0].state_dict())
    assert bits(runs[1][1].state_dict()) == bits(runs[0][1].state_dict())


# ---------------------------------------------------------------------- wrapped tensors


class Scaled(torch.Tensor):
    """Small integers and a scale; copies from nothing, so that only its inner tensors can be copied into."""

    small: torch.Tensor
    scale: torch.Tensor
    note: Any

    @staticmethod
    def __new__(cls, small: torch.Tensor, scale: torch.Tensor, note: Any) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(cls, small.shape, dtype=torch.float32)
        assert isinstance(made, Scaled)
        return made

    def __init__(self, small: torch.Tensor, scale: torch.Tensor, note: Any) -> None:
        self.small, self.scale, self.note = small, scale, note

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["small", "scale"], (self.note,)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, _size: Any, _stride: Any) -> Scaled:
        return Scaled(inner["small"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            deed = torch.Tensor.detach if func is aten.detach.default else torch.Tensor.clone
            copied = Scaled(deed(args[0].small), deed(args[0].scale), args[0].note)
            return return_and_correct_aliasing(func, args, kwargs or {}, copied)
        raise NotImplementedError(f"Scaled has no {func}")


def _scaled(seed: int, note: Any = "q", rows: int = 3) -> Scaled:
    generator = torch.Generator().manual_seed(seed)
    small = torch.randint(-128, 128, (rows, 4), generator=generator, dtype=torch.int8)
    return Scaled(small, torch.rand(rows, 1, generator=generator), note)


def _inner(tensor: Any) -> Any:
    assert type(tensor) is Scaled
    return bits([tensor.small, tensor.scale, tensor.note])


class _Quantized(nn.Module):
    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(_scaled(seed, **options), requires_grad=False)
        self.bias = nn.Parameter(torch.full((4,), float(seed)))


def test_a_wrapped_parameter_is_copied_into_the_live_one() -> None:
    """The inner tensors are named, kept at their own size, and copied into the very ones that are there."""
    saved, fresh = _Quantized(1), _Quantized(2)
    staged = stage(register({"m": saved}))
    assert {item.leaf for item in staged.plan.items} == {"m.weight.small", "m.weight.scale", "m.bias"}
    assert sum(item.box.size_bytes for item in staged.plan.items) == 12 + 12 + 16
    live = fresh.weight
    addresses = [live.small.data_ptr(), live.scale.data_ptr()]
    staged.load_into(register({"m": fresh}))
    assert fresh.weight is live
    assert [live.small.data_ptr(), live.scale.data_ptr()] == addresses
    assert _inner(live) == _inner(saved.weight)
    assert bits(fresh.bias) == bits(saved.bias)
    before = staged.image
    live.small.add_(1)
    assert staged.image == before


def test_a_wrapped_tensor_alone_and_in_a_tree() -> None:
    """Registered by itself it is loaded in place; in a tree without a live one it is made anew by its own class."""
    alone, tree = _scaled(1), {"deep": [_scaled(2, note=("a", 2))]}
    fresh = _scaled(3)
    state = round_trip({"alone": alone, "tree": tree}, {"alone": fresh, "tree": {}})
    assert _inner(fresh) == _inner(alone)
    assert _inner(state["tree"]["deep"][0]) == _inner(tree["deep"][0])


class _Small(torch.optim.Optimizer):
    """Keeps its state wrapped."""

    def __init__(self, params: Any, seed: int) -> None:
        super().__init__(params, {"lr": 0.1})
        self._seed = seed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["moment"] = _scaled(self._seed, rows=p.shape[0])


@pytest.mark.parametrize("has_state", [False, True])
def test_wrapped_optimizer_state(has_state: bool) -> None:
    """Into an optimizer that has such state, and into a fresh one that has none."""
    models = [nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)]
    optimizers = [_Small(model.parameters(), seed) for seed, model in enumerate(models)]
    optimizers[0].step()
    if has_state:
        optimizers[1].step()
    round_trip({"m": models[0], "o": optimizers[0]}, {"m": models[1], "o": optimizers[1]})
    (state,) = optimizers[1].state.values()
    assert _inner(state["moment"]) == _inner(_scaled(0))


_OTHER: dict[str, tuple[Callable[[], Any], str]] = {
    "context": (lambda: _Quantized(2, note="other"), "made with other settings"),
    "shape": (lambda: _Quantized(2, rows=5), r"of shape \[3, 4\] made of"),
    "plain": (lambda: nn.Linear(4, 4), "the checkpoint has a Scaled, here it is a Parameter"),
}


@pytest.mark.parametrize("kind", _OTHER)
def test_a_live_tensor_that_is_made_otherwise_is_refused(kind: str) -> None:
    """By path, before anything of it is changed."""
    make, says = _OTHER[kind]
    fresh = make()
    with pytest.raises(ConfigError, match=rf"^m\.weight: .*{says}"):
        round_trip({"m": _Quantized(1)}, {"m": fresh})
    if kind != "plain":
        assert _inner(fresh.weight) == _inner(make().weight)


def test_a_plain_tensor_for_a_wrapped_one_is_refused() -> None:
    """The other way round."""
    with pytest.raises(ConfigError, match=r"^m\.weight: the checkpoint has a plain tensor, here it is a Scaled"):
        round_trip({"m": nn.Linear(4, 4)}, {"m": _Quantized(1)})


def test_a_class_that_is_not_imported_is_not_imported() -> None:
    """Where there is no live tensor and the class is not there, that is said; nothing is imported for it."""
    module = ModuleType("passing_module")
    passing = type("Passing", (Scaled,), {"__module__": "passing_module"})
    passing.__tensor_unflatten__ = staticmethod(lambda inner, context, _s, _t: passing(*inner.values(), *context))
    module.Passing = passing  # type: ignore[attr-defined]
    sys.modules["passing_module"] = module
    try:
        staged = stage(register({"x": {"t": passing(torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 1), 1)}}))
    finally:
        del sys.modules["passing_module"]
    with pytest.raises(ConfigError, match=r"^x\.t: .*passing_module\.Passing there: import its module"):
        staged.load_into(register({"x": {}}))
    assert "passing_module" not in sys.modules


def test_a_context_that_cannot_be_kept_is_refused_by_path() -> None:
    """What the class needs besides its tensors must be a plain value."""
    with pytest.raises(UnsupportedStateError, match=r"^m\.weight \(the context of its class\)"):
        flatten(register({"m": _Quantized(1, note=object())}))


class _Opaque(nn.Parameter):
    """As quantized weights often are: bytes whose meaning is in attributes that nobody else knows."""


def test_an_opaque_parameter_class_is_refused_by_path() -> None:
    """A class of parameter that does not say what it is made of could not be put back."""
    model = nn.Linear(2, 2)
    model.weight = _Opaque(torch.ones(2, 2, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(UnsupportedStateError, match=r"^m\.weight: tensors of class _Opaque"):
        flatten(register({"m": model}))
