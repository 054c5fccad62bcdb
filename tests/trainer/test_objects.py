"""Modules, optimizers, schedulers and other objects through a slot and back, whatever is wrapped around them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from through_a_slot import bits, flatten, register, round_trip, stage
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from surefoot.errors import ConfigError, UnsupportedStateError


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1, store=None)
    yield
    dist.destroy_process_group()


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).pow(2).mean().backward()
        optimizer.step()


_WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "ddp": lambda module: DistributedDataParallel(module),
    "compiled": lambda module: torch.compile(module, backend="eager"),  # type: ignore[dict-item]
    "compiled_ddp": lambda module: torch.compile(DistributedDataParallel(module), backend="eager"),  # type: ignore[dict-item]
    "ddp_compiled": lambda module: DistributedDataParallel(torch.compile(module, backend="eager")),  # type: ignore[arg-type]
}


@pytest.mark.holds("wrapper-prefixes")
@pytest.mark.usefixtures("group")
def test_names_do_not_depend_on_wrappers() -> None:
    """Plain, under DDP, compiled, both in either order, inner layers too: one set of names, each loads into each."""
    made = {}
    for kind, wrap in _WRAPPERS.items():
        model = wrap(_net())
        optimizer = torch.optim.AdamW(model.parameters())
        _train(model, optimizer, 2)
        made[kind] = (model, optimizer)
    inner = _net()
    inner[0] = torch.compile(inner[0], backend="eager")  # type: ignore[operator]
    inner[2] = DistributedDataParallel(inner[2])  # type: ignore[operator]
    optimizer = torch.optim.AdamW(inner.parameters())
    _train(inner, optimizer, 2)
    made["inner"] = (inner, optimizer)

    staged = {kind: stage(register({"m": model, "o": optimizer})) for kind, (model, optimizer) in made.items()}
    assert len({one.plan.hash for one in staged.values()}) == 1
    names = [item.leaf for item in staged["plain"].plan.items]
    assert "m.0.weight" in names
    assert "o.state.m.0.weight.exp_avg" in names
    for source in staged.values():
        for model, optimizer in made.values():
            source.load_into(register({"m": model, "o": optimizer}))
            assert stage(register({"m": model, "o": optimizer})).image == source.image


def test_a_module_of_the_users_named_like_a_wrapper_keeps_its_name() -> None:
    """Only wrappers' marks are taken out of names, not what looks like them."""
    outer = nn.Module()
    outer.module = nn.Linear(2, 2)
    outer.my_orig_mod = nn.Linear(2, 2)
    names = [t.name for t in flatten(register({"m": outer})).tensors]
    assert names == ["m.module.weight", "m.module.bias", "m.my_orig_mod.weight", "m.my_orig_mod.bias"]


class _Assigning(nn.Linear):
    """Keeps the very tensors it is given."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *_rest: Any) -> None:
        self.weight = nn.Parameter(state_dict[prefix + "weight"])
        self.bias = nn.Parameter(state_dict[prefix + "bias"])


class _Extra(nn.Linear):
    """Has an extra state with a tensor in it, and keeps it."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra: Any = {"seen": torch.zeros(2000), "n": 3}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.holds("restored-is-copied")
@pytest.mark.parametrize("kind", [_Assigning, _Extra])
def test_modules_that_keep_what_they_are_given_own_it(kind: Callable[..., nn.Module]) -> None:
    """What is loaded never aliases the image, which is read-only and may be filled again: training on is safe."""
    saved = kind(50, 50) if kind is _Assigning else kind()
    if isinstance(saved, _Extra):
        saved.extra["seen"] += 1
    staged = stage(register({"m": saved}))
    before = staged.image
    fresh = kind(50, 50) if kind is _Assigning else kind()
    staged.load_into(register({"m": fresh}))
    assert bits(fresh.state_dict()) == bits(saved.state_dict())
    for tensor in fresh.parameters():
        tensor.data.add_(1.0)
    if isinstance(fresh, _Extra):
        fresh.extra["seen"].add_(1.0)
    assert staged.image == before
    # The other way round too: a later step in the same slot is not seen by what was loaded.
    after = bits(fresh.state_dict())
    staged.segment.padded_image(staged.slot)[:] = bytes(len(staged.segment.padded_image(staged.slot)))
    assert bits(fresh.state_dict()) == after


class _Hoarder(nn.Linear):
    """Puts what it is given where nobody can find it."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.hoard = [state_dict[prefix + "weight"]]


@pytest.mark.holds("restored-is-copied")
def test_a_module_that_hides_what_it_is_given_is_refused() -> None:
    """A view of the image that survives loading is an error that names the module, not a crash hours later."""
    with pytest.raises(ConfigError, match=r"^m: .*copy"):
        round_trip({"m": _Hoarder(50, 50)}, {"m": _Hoarder(50, 50)})


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.AdamW(p, fused=True),
    lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.Adafactor(p),
    lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    lambda p: torch.optim.Adagrad(p),
    lambda p: torch.optim.NAdam(p),
    lambda p: torch.optim.RAdam(p),
    lambda p: torch.optim.Rprop(p),
    lambda p: torch.optim.ASGD(p),
    lambda p: torch.optim.Adadelta(p),
    lambda p: torch.optim.Adamax(p),
    lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
])  # fmt: skip
def test_optimizers_go_on_bit_for_bit(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Five more steps after a restore into fresh objects: the same bits as without."""
    torch.manual_seed(3)
    model, fresh = _net(), _net()
    optimizer, other = make(model.parameters()), make(fresh.parameters())
    _train(model, optimizer, 3)
    round_trip({"m": model, "o": optimizer}, {"m": fresh, "o": other})
    seed = torch.get_rng_state()
    _train(model, optimizer, 5)
    torch.set_rng_state(seed)
    _train(fresh, other, 5)
    assert bits(fresh.state_dict()) == bits(model.state_dict())
    assert bits(other.state_dict()) == bits(optimizer.state_dict())


def test_lbfgs_keeps_its_history() -> None:
    """Its state is lists of tensors, one of them None, under one parameter."""
    models = [nn.Linear(4, 2), nn.Linear(4, 2)]
    optimizers = [torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=4) for model in models]
    x = torch.randn(16, 4)

    def step(which: int) -> None:
        def closure() -> torch.Tensor:
            optimizers[which].zero_grad()
            loss = (models[which](x).pow(2) + models[which](x).cos()).sum()
            loss.backward()
            return loss

        optimizers[which].step(closure)

    step(0)
    step(0)
    round_trip({"m": models[0], "o": optimizers[0]}, {"m": models[1], "o": optimizers[1]})
    step(0)
    step(1)
    assert bits(models[1].state_dict()) == bits(models[0].state_dict())


class _Wide(torch.optim.Optimizer):
    """Keeps its state in float32 beside bfloat16 parameters, as many do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("master", p.float() + 1e-4)
                state.setdefault("history", [torch.full((3,), 1 / 3, dtype=torch.float64)])
                state["master"] -= group["lr"] * p.grad.float()
                p.copy_(state["master"])


def test_state_wider_than_its_parameter_keeps_its_bits() -> None:
    """torch's own load casts floating-point state to the parameter's type; what is kept comes back as it was."""
    models = [nn.Linear(4, 2).to(torch.bfloat16), nn.Linear(4, 2).to(torch.bfloat16)]
    optimizers = [_Wide(model.parameters()) for model in models]
    models[0](torch.randn(3, 4, dtype=torch.bfloat16)).sum().backward()
    optimizers[0].step()
    round_trip({"m": models[0], "o": optimizers[0]}, {"m": models[1], "o": optimizers[1]})
    assert bits(optimizers[1].state_dict()["state"]) == bits(optimizers[0].state_dict()["state"])


@pytest.mark.holds("frozen-parameters")
def test_state_of_frozen_and_late_parameters() -> None:
    """(a) frozen after training: its state stays; (b) trained late: absent state stays absent; (c) a later group."""
    for case in "abc":
        torch.manual_seed(0)
        saved, fresh = _net(), _net()
        first = [saved[0].parameters(), fresh[0].parameters()]
        both = [saved[2].parameters(), fresh[2].parameters()]
        if case == "c":
            optimizers = [torch.optim.AdamW(first[i], lr=0.1) for i in (0, 1)]
            _train(saved, optimizers[0], 3)
            for i in (0, 1):
                optimizers[i].add_param_group({"params": both[i], "lr": 0.5, "note": (1, 2)})
            _train(saved, optimizers[0], 2)
        else:
            optimizers = [
                torch.optim.AdamW([{"params": first[i], "lr": 0.2}, {"params": both[i], "lr": 0.3}]) for i in (0, 1)
            ]
            saved[0].requires_grad_(case == "a")
            _train(saved, optimizers[0], 2)
            saved[0].requires_grad_(case == "b")
        round_trip({"m": saved, "o": optimizers[0]}, {"m": fresh, "o": optimizers[1]})
        assert bits(optimizers[1].state_dict()) == bits(optimizers[0].state_dict())
        fresh[0].requires_grad_(saved[0].weight.requires_grad)  # type: ignore[union-attr, operator]
        seed = torch.get_rng_state()
        _train(saved, optimizers[0], 2)
        torch.set_rng_state(seed)
        _train(fresh, optimizers[1], 2)
        assert bits(fresh.state_dict()) == bits(saved.state_dict())


def test_several_optimizers_and_unregistered_parameters() -> None:
    """Each optimizer has its own; parameters of a module that is not registered are told apart by number."""
    saved, fresh = [nn.Linear(2, 2) for _ in range(3)], [nn.Linear(2, 2) for _ in range(3)]
    kept: list[dict[str, Any]] = []
    for models in (saved, fresh):
        optimizers = {
            "a": torch.optim.Adam(models[0].parameters()),
            "b": torch.optim.SGD([*models[1].parameters(), *models[2].parameters()], lr=0.1, momentum=0.9),
        }
        for optimizer in optimizers.values():
            sum(model(torch.randn(3, 2)).sum() for model in models).backward()
            optimizer.step()
        kept.append({"m0": models[0], "m1": models[1], **optimizers})
    round_trip(*kept)
    for name in ("a", "b"):
        assert bits(kept[1][name].state_dict()) == bits(kept[0][name].state_dict())


def test_another_order_of_parameters_is_put_right_by_name() -> None:
    """An optimizer that lists the same parameters in another order gets each its own state."""
    saved, fresh = nn.Linear(3, 3), nn.Linear(3, 3)
    one = torch.optim.Adam([saved.weight, saved.bias])
    two = torch.optim.Adam([fresh.bias, fresh.weight])
    saved(torch.randn(2, 3)).sum().backward()
    one.step()
    round_trip({"m": saved, "o": one}, {"m": fresh, "o": two})
    assert bits(two.state[fresh.weight]) == bits(one.state[saved.weight])
    assert bits(two.state[fresh.bias]) == bits(one.state[saved.bias])


_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "warm_restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 12),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 9)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def _rates(optimizer: Any, scheduler: Any, steps: int, at: int) -> list[float]:
    rates = []
    for step in range(at, at + steps):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(math.cos(step))
        else:
            scheduler.step()
    return rates


@pytest.mark.holds("rate-jumps")
@pytest.mark.parametrize("kind", _SCHEDULERS)
@pytest.mark.parametrize("scheduler_first", [False, True])
def test_learning_rates_go_on(kind: str, scheduler_first: bool) -> None:
    """The rate after a restore, and the next ones, equal the straight run's, in whatever order things are named."""
    objects = []
    for _ in range(2):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = _SCHEDULERS[kind](optimizer)
        named = {"o": optimizer, "s": scheduler}
        objects.append(dict(reversed(named.items())) if scheduler_first else named)
    saved, fresh = objects
    _rates(saved["o"], saved["s"], 4, 0)
    round_trip(saved, fresh)
    assert _rates(fresh["o"], fresh["s"], 6, 4) == _rates(saved["o"], saved["s"], 6, 4)


class _Average:
    """An exponential average with a plain counter and a copied model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        self.updates = 0

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"], assign=True)
        self.updates = state["updates"]


@pytest.mark.holds("averaged-weights-saved", "best-score-forgotten")
def test_other_objects() -> None:
    """A gradient scaler, averages of one's own and torch's, a generator, an early-stopping record."""

    def scaler(scale: float, tracker: int) -> torch.amp.GradScaler:
        made = torch.amp.GradScaler("cpu")
        made.load_state_dict({**made.state_dict(), "scale": scale, "_growth_tracker": tracker})
        return made

    saved: dict[str, Any] = {
        "scaler": scaler(256.0, 7),
        "average": _Average(_net()),
        "swa": torch.optim.swa_utils.AveragedModel(_net()),
        "generator": torch.Generator().manual_seed(5),
    }
    saved["average"].updates = 9
    saved["swa"].update_parameters(_net())
    torch.rand(3, generator=saved["generator"])
    fresh: dict[str, Any] = {
        "scaler": scaler(65536.0, 0),
        "average": _Average(_net()),
        "swa": torch.optim.swa_utils.AveragedModel(_net()),
        "generator": torch.Generator(),
    }
    staged = stage(register(saved))
    before = staged.image
    staged.load_into(register(fresh))
    for name in ("scaler", "average", "swa"):
        assert bits(fresh[name].state_dict()) == bits(saved[name].state_dict()), name
    assert bits(torch.rand(9, generator=fresh["generator"])) == bits(torch.rand(9, generator=saved["generator"]))
    # It took what it was given for its own (assign=True), and may go on to change it.
    for parameter in fresh["average"].model.parameters():
        parameter.data.zero_()
    assert staged.image == before


class _Growing:
    """An object whose plain state grows with every step, beside a tensor that does not."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"losses": [], "best": {}, "t": torch.zeros(2)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.holds("planned-each-time")
def test_growing_values_are_no_new_structure() -> None:
    """A list of losses is one value, however long: the plan stays."""
    growing = _Growing()
    before = flatten(register({"x": growing})).signature()
    growing.state["losses"] += [0.5, 0.25]
    growing.state["best"][3] = "acc"
    assert flatten(register({"x": growing})).signature() == before
    growing.state["t"] = torch.zeros(3)
    assert flatten(register({"x": growing})).signature() != before


@pytest.mark.holds("part-not-loaded")
def test_what_is_missing_or_unexpected_inside_an_object_is_an_error() -> None:
    """Lazily created state, renamed layers, another shape or type: never a partial load."""
    small, big = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    for saved, fresh, says in (
        (big, small, r"only in the checkpoint: \['bias'\]"),
        (small, big, r"not in the checkpoint: \['bias'\]"),
        (nn.Linear(2, 2), nn.Linear(2, 2).double(), r"m.weight: the checkpoint has torch.float32, here"),
        (nn.Linear(2, 3), nn.Linear(2, 2), r"size mismatch for weight"),
    ):
        with pytest.raises((ConfigError, RuntimeError), match=says):
            round_trip({"m": saved}, {"m": fresh})
    one, two = torch.optim.SGD(small.parameters(), lr=0.1), torch.optim.SGD(big.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"^o: the checkpoint does not fit"):
        round_trip({"m": small, "o": one}, {"o": two, "m": nn.Linear(2, 2, bias=False)})
    split = torch.optim.SGD([{"params": [big.weight]}, {"params": [big.bias]}], lr=0.1)
    with pytest.raises(ConfigError, match=r"^o: its parameter groups"):
        round_trip({"m": big, "o": two}, {"m": big, "o": split})


def test_whole_objects_missing_or_unexpected_are_reported() -> None:
    """What the checkpoint does not have starts fresh, what is not registered is left, and both are named."""
    staged = stage(register({"a": nn.Linear(1, 1), "b": 1}))
    assert staged.load_into(register({"a": nn.Linear(1, 1), "c": torch.ones(1)})) == (["c"], ["b"])


def test_an_object_that_can_only_be_saved_is_refused() -> None:
    """state_dict() without load_state_dict() would be found out at the first restore; a class is no object."""

    class Half:
        def state_dict(self) -> dict[str, int]:
            return {}

    with pytest.raises(UnsupportedStateError, match=r"^x: Half has state_dict\(\), but no load_state_dict\(\)"):
        register({"x": Half()})
    with pytest.raises(UnsupportedStateError, match=r"^x"):
        flatten(register({"x": nn.Linear}))
