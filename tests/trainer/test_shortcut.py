"""The shortcut gives what a full walk gives, whatever was done to the objects since the last time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from through_a_slot import bits
from torch import nn

from surefoot.trainer.state.flatten import Flat, NamedTensor
from surefoot.trainer.state.objects import Kept, KeptEntry, KeptModule, keep
from surefoot.trainer.state.shortcut import Replicated, Shortcut


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_parameter("none", None)
        self.other = nn.Linear(3, 3, bias=False)
        self.other.weight = self.linear.weight


class World:
    """Objects of each kind, registered in an order in which they are not walked."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model: Any = nn.Sequential(_Block(), nn.Linear(3, 2))
        parameters = list(self.model.parameters())
        self.adamw = torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:5], "lr": 0.5}])
        self.sgd = torch.optim.SGD([*parameters[5:], torch.ones(2, requires_grad=True)], lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.adamw, 1)
        self.tensor = torch.arange(4.0)
        self.state: dict[str, Any] = {}
        self.tree: dict[str, Any] = {"shared": self.model[1].weight.detach(), "n": 1, "own": torch.ones(2)}
        objects = {
            "tree": self.tree,
            "rng": torch.Generator(),
            "adamw": self.adamw,
            "tensor": self.tensor,
            "sgd": self.sgd,
            "count": 0,
            "scheduler": self.scheduler,
            "model": self.model,
        }
        self.kept: dict[str, Kept] = {}
        for name, value in objects.items():
            self.kept[name] = keep(name, value, self.state, self.names)
        self.state["late"] = 1
        self.kept["late"] = KeptEntry("late", self.state, self.names)
        self.shortcut = Shortcut()

    def names(self) -> dict[int, str]:
        kept = [one for one in self.kept.values() if isinstance(one, KeptModule)]
        return {id(parameter): name for one in kept for parameter, name in one.parameter_names()}

    def flatten(self, shortcut: Shortcut | None = None) -> Flat:
        return (shortcut or self.shortcut).flatten(self.kept, lambda: Replicated(frozenset(), ()), self.names)

    def step(self) -> None:
        for optimizer in (self.adamw, self.sgd):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        self.scheduler.step()


def _shown(flat: Flat) -> Any:
    """All that can be seen of a flat state, down to addresses (a generator's state has a new one each time)."""
    tensors = [
        (
            t.name,
            t.spread,
            t.place,
            _address(t),
            t.tensor.stride(),
            t.tensor.requires_grad,
            bits(t.tensor),
        )
        for t in flat.tensors
    ]
    return tensors, flat.values, flat.structure, flat.signature()


def _address(named: NamedTensor) -> int:
    return 0 if named.name == "rng" else named.tensor.data_ptr()


def _new_weight(world: World) -> None:
    world.model[1].weight = nn.Parameter(torch.randn(2, 3))


def _same_memory(world: World) -> None:
    world.model[1].bias = nn.Parameter(world.model[1].bias.data)


def _replaced(world: World) -> None:
    world.model[1] = nn.Linear(3, 2)


def _transposed(world: World) -> None:
    world.model[0].linear.weight.data = world.model[0].linear.weight.data.t()


def _set(path: str, value: Callable[[], Any]) -> Callable[[World], None]:
    owner, _, name = path.rpartition(".")

    def deed(world: World) -> None:
        setattr(eval(f"world.{owner}", {"world": world}), name, value())

    return deed


def _deleted(world: World) -> None:
    world.model[0].norm = nn.Identity()


def _reordered(world: World) -> None:
    first = world.model._modules.pop("0")
    world.model._modules["0"] = first


def _instance_code(world: World) -> None:
    world.model[1]._save_to_state_dict = lambda state, prefix, _keep: state.update({f"{prefix}x": 7})


def _unflattened(world: World) -> None:
    world.model[1].register_state_dict_pre_hook(lambda *_: None)


def _hooked(world: World) -> None:
    world.model._register_state_dict_hook(lambda _m, state, _prefix, _meta: state.update(extra=world.tensor))


def _optimizer_hook(world: World) -> None:
    world.adamw.register_state_dict_post_hook(lambda _o, state: {**state, "more": 1})


def _group_added(world: World) -> None:
    world.adamw.add_param_group({"params": [torch.ones(1, requires_grad=True)], "lr": 0.25})


def _state_gone(world: World) -> None:
    world.adamw.state.clear()


def _state_value(value: Any) -> Callable[[World], None]:
    def deed(world: World) -> None:
        for state in world.sgd.state.values():
            state["extra"] = value() if callable(value) else value

    return deed


def _state_reordered(world: World) -> None:
    for state in world.adamw.state.values():
        state["step"] = state.pop("step")


def _swapped_state(world: World) -> None:
    states = [state for state in world.adamw.state.values() if "exp_avg" in state]
    for state in states:
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def _lr_tensor(world: World) -> None:
    world.adamw.param_groups[0]["lr"] = torch.tensor(0.125)


def _odd_group(world: World) -> None:
    world.adamw.param_groups[1]["note"] = {"deep": [1, (2,)], "$": 1}


def _params_swapped(world: World) -> None:
    params = world.adamw.param_groups[0]["params"]
    params[0], params[1] = params[1], params[0]


def _tied_elsewhere(world: World) -> None:
    world.tree["shared"] = world.model[0].linear.weight.detach()


def _plain_to_complex(world: World) -> None:
    world.model[0].norm.running_mean = torch.ones(3, dtype=torch.complex64).conj()


def _negative(world: World) -> None:
    pair = torch.ones(3, dtype=torch.complex64)
    world.model[1].register_buffer("b", pair.imag)
    world.flatten()
    world.model[1].b.data = pair.conj().imag


def _resized(world: World) -> None:
    world.tensor.resize_(2)


def _class_code(world: World) -> None:
    world.model[1].__class__ = type("Own", (nn.Linear,), {"get_extra_state": lambda self: self.weight.detach()[0, :1]})


_DEEDS: dict[str, Callable[[World], Any]] = {
    "step": World.step,
    "new weight": _new_weight,
    "new parameter, same memory": _same_memory,
    "submodule replaced": _replaced,
    "data swapped": lambda world: setattr(world.model[1].bias, "data", torch.ones(2)),
    "data of another type": lambda world: world.model[1].double(),
    "data transposed": _transposed,
    "buffer added": lambda world: world.model[0].register_buffer("late", torch.ones(2)),
    "passing buffer added": lambda world: world.model[0].register_buffer("late", torch.ones(2), persistent=False),
    "buffer made passing": lambda world: world.model[0].norm._non_persistent_buffers_set.add("running_mean"),
    "buffer replaced": _set("model[0].norm.running_mean", lambda: torch.ones(3)),
    "buffer gone": _set("model[0].norm.running_var", lambda: None),
    "parameter for none": _set("model[0].none", lambda: nn.Parameter(torch.ones(1))),
    "parameter gone": _set("model[1].bias", lambda: None),
    "submodule gone": _deleted,
    "submodules reordered": _reordered,
    "untied": _set("model[0].other.weight", lambda: nn.Parameter(torch.ones(3, 3))),
    "code on an instance": _instance_code,
    "code in a class": _class_code,
    "pre-hook": _unflattened,
    "hook": _hooked,
    "optimizer hook": _optimizer_hook,
    "group added": _group_added,
    "state gone": _state_gone,
    "state reordered": _state_reordered,
    "states swapped": _swapped_state,
    "state with a number": _state_value(3),
    "state with another number": _state_value(2.5),
    "state with a tensor": _state_value(lambda: torch.ones(2)),
    "state with a list": _state_value(lambda: [1, torch.ones(1)]),
    "rate changed": lambda world: world.adamw.param_groups[0].update(lr=0.75),
    "rate a tensor": _lr_tensor,
    "rate a number again": lambda world: world.adamw.param_groups[0].update(lr=0.5),
    "odd value in a group": _odd_group,
    "parameters of a group swapped": _params_swapped,
    "value in a tree": lambda world: world.tree.update(n=[2]),
    "tensor in a tree": lambda world: world.tree.update(more=torch.ones(3)),
    "tree tied elsewhere": _tied_elsewhere,
    "plain value": lambda world: world.state.update(late={"a": 1}),
    "tensor for a plain value": lambda world: world.state.update(late=torch.ones(1)),
    "module for a plain value": lambda world: world.state.update(late=nn.Linear(1, 1)),
    "complex buffer": _plain_to_complex,
    "negative view": _negative,
    "resized": _resized,
    "filled in place": lambda world: world.model[1].weight.data.fill_(7),
    "gradients off": lambda world: world.model[1].requires_grad_(False),
    "unregistered and registered in another order": lambda world: world.kept.update(tensor=world.kept.pop("tensor")),
}


@pytest.mark.holds("loading-replaces-tensors")
@pytest.mark.parametrize("deed", _DEEDS)
@pytest.mark.parametrize("started", [False, True], ids=["fresh", "trained"])
def test_each_change_is_seen(deed: str, started: bool) -> None:
    """After one change, and after a step behind it: names, addresses, bits, values and structure of a full walk."""
    world = World()
    if started:
        world.step()
    world.flatten()
    world.flatten()
    _DEEDS[deed](world)
    assert _shown(world.flatten()) == _shown(world.flatten(Shortcut()))
    for optimizer in (world.adamw, world.sgd):
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[key] = value.clone()
    assert _shown(world.flatten()) == _shown(world.flatten(Shortcut()))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(sorted(_DEEDS)), min_size=1, max_size=6))
def test_changes_in_any_order_are_seen(deeds: list[str]) -> None:
    """Any few changes one after another, looked at after each."""
    world = World()
    world.flatten()
    for deed in deeds:
        try:
            _DEEDS[deed](world)
        except (AttributeError, RuntimeError, TypeError, KeyError, ValueError):
            # What an earlier change made impossible.
            return
        assert _shown(world.flatten()) == _shown(world.flatten(Shortcut()))


@pytest.mark.holds("saves-slow-training")
def test_only_what_has_no_proof_is_walked() -> None:
    """While training changes values only, modules, optimizers and tensors are not walked again."""
    world = World()
    world.step()
    world.flatten()
    signature = world.flatten().signature()
    for _ in range(3):
        world.step()
        flat = world.flatten()
        assert world.shortcut.walked == ["tree", "rng", "count", "scheduler", "late"]
        assert flat.signature() is signature


def test_other_tensors_put_into_a_flat_state_have_their_own_signature() -> None:
    """The shared signature is of the tensors that it was made of."""
    world = World()
    flat = world.flatten()
    other = copy.copy(flat.tensors)
    other.pop()
    assert Flat(other, flat.values, flat.structure, flat.signed).signature() != flat.signature()


@pytest.mark.holds("sources-are-held")
def test_no_memory_is_held_between_two_looks() -> None:
    """A weight, a buffer, a state or a module that the script drops is gone at once."""
    import weakref

    world = World()
    world.step()
    world.flatten()
    world.flatten()
    gone = [
        weakref.ref(world.model[1].weight.untyped_storage()),
        weakref.ref(world.model[0].norm),
        weakref.ref(next(iter(world.adamw.state.values()))["exp_avg"]),
    ]
    moments = [state["exp_avg"].untyped_storage() for state in world.adamw.state.values()]
    references = [weakref.ref(moment) for moment in moments]
    del moments
    world.adamw.state.clear()
    world.model[0].norm = nn.Identity()
    assert [one() for one in gone[1:]] == [None, None]
    assert not [one for one in references if one() is not None]
