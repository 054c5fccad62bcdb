"""Copies behind the next step: every image that is sealed is the state at its boundary, whatever happens meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot
from surefoot.core.plan import Plan
from surefoot.ipc.segment import Segment
from surefoot.trainer.boundary.boundary import Boundary
from surefoot.trainer.stage.copying import HostLane
from surefoot.trainer.stage.slots import Stager

_STEPS = 9


class Watched:
    """A run whose sealed slots are compared, byte by byte, with what the state was at their boundaries."""

    def __init__(self, place: Path, **objects: Any) -> None:
        # One save at the beginning: an agent that is slow to let go of a second slot would have steps left out.
        # Each step is looked for, also where a slow machine would leave some out.
        self.run = surefoot.Run(place, interval_s=600, **{"stage": 1, **objects})
        self._truth: dict[int, dict[str, torch.Tensor]] = {}
        self.sealed: set[int] = set()
        self.changing: set[str] = set()

    @property
    def boundary(self) -> Boundary:
        assert self.run._session is not None
        assert self.run._session._boundary is not None
        return self.run._session._boundary

    def steps(self, total: int, tensors: Callable[[], dict[str, torch.Tensor]]) -> Iterator[int]:
        """The run's steps; `tensors` gives what is kept, by the names it has there."""
        with self.run as run:
            for step in run.steps(total):
                yield step
                # The body is over, so the optimizer's hook has waited for what the last boundary left in flight.
                if step:
                    self._compare()
                self._truth[step + 1] = {name: tensor.detach().clone() for name, tensor in tensors().items()}

    def land(self) -> None:
        """Wait until nothing is being copied."""
        for flight in list(self.boundary._taker._flights):
            assert flight.ended.wait(60)

    def _compare(self) -> None:
        self.land()
        self.changing = set(self.boundary._taker._changing)
        stager = self.boundary._stager
        assert stager is not None
        for sealed in stager.segment.all_sealed():
            truth = self._truth[sealed.at.boundary]
            for name, view in zip(stager.names, stager._views[sealed.slot], strict=True):
                if name in truth and stager.segment.seq(sealed.slot) == sealed.seq:
                    same = torch.equal(view.view(-1).view(torch.uint8), truth[name].reshape(-1).view(torch.uint8))
                    assert same, f"step {sealed.at.boundary}: {name} is not what it was at the boundary"
            self.sealed.add(sealed.at.boundary)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])


def _train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    loss = model(torch.randn(8, 512)).square().mean()
    model.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def _kept(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"model.{name}": parameter for name, parameter in model.named_parameters()}


_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.holds("optimizer-owns-what-stands-still", "save-sees-later-values")
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_each_image_is_its_boundary(name: str, tmp_path: Path) -> None:
    """Whatever the optimizer, at least 95 % of its bytes are copied behind the next step, and each image is right."""
    model = _model()
    optimizer = _OPTIMIZERS[name](list(model.parameters()))
    watched = Watched(tmp_path / "run", model=model, optimizer=optimizer)
    for step in watched.steps(_STEPS, lambda: _kept(model)):
        if step > 2:
            state = [value for state in optimizer.state.values() for value in state.values()]
            tensors = [*model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]
            total_bytes = sum(tensor.nbytes for tensor in tensors)
            assert watched.boundary._taker.overlapped_bytes >= 0.95 * total_bytes
        _train(model, optimizer)
    assert watched.sealed >= set(range(1, _STEPS))


def _scaled(weight: nn.Parameter) -> None:
    weight.data.mul_(1.001)


def _one_element(weight: nn.Parameter) -> None:
    weight.data[300, 177] += 1


def _in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[3] += 1


def _by_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[511, 5] = 7


@pytest.mark.holds("bytes-are-compared")
@pytest.mark.parametrize("write", [_scaled, _one_element, _in_place, _by_numpy])
@pytest.mark.parametrize("when", ["at once", "when copied"])
def test_a_parameter_changed_behind_the_optimizer(
    write: Callable[[nn.Parameter], None], when: str, tmp_path: Path
) -> None:
    """Named, copied at the boundary from then on, and no sealed image has a byte of it that is not its step's."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    watched = Watched(tmp_path / "run", model=model, optimizer=optimizer)
    weight = model.get_parameter("1.weight")
    for step in watched.steps(_STEPS, lambda: _kept(model)):
        if when == "when copied" and step:
            watched.land()
        write(weight)
        _train(model, optimizer)
        # A write after the copy is complete tears nothing.
        assert watched.changing <= {"model.1.weight"}
    if when == "at once":
        assert watched.changing == {"model.1.weight"}
    assert max(watched.sealed) == _STEPS - 1


@pytest.mark.holds("skipped-step-is-fenced")
def test_an_optimizer_that_is_skipped(tmp_path: Path) -> None:
    """A step in which the optimizer did not run: the next boundary is the fence."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    watched = Watched(tmp_path / "run", model=model, optimizer=optimizer)
    for step in watched.steps(_STEPS, lambda: _kept(model)):
        _train(model, *([optimizer] if step % 3 else []))
    assert watched.sealed >= set(range(1, _STEPS))


@pytest.mark.holds("trust-for-one-step")
def test_a_step_that_no_hook_announces(tmp_path: Path) -> None:
    """Parameters changed as by a replayed graph, past the optimizer's hooks: right, and copied at the boundary."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    watched = Watched(tmp_path / "run", model=model, optimizer=optimizer)
    for step in watched.steps(_STEPS, lambda: _kept(model)):
        if step < 4:
            _train(model, optimizer)
            continue
        if step > 5:
            assert watched.boundary._taker.overlapped_bytes == 0
        for parameter in model.parameters():
            parameter.data.mul_(0.99)
    assert watched.sealed >= {1, 2, 3, 6, 7, 8}


@pytest.mark.holds("trust-for-one-step")
def test_two_optimizers_in_turn(tmp_path: Path) -> None:
    """Each step one of two optimizers runs: what the other one owns is copied at the boundary."""
    model = _model()
    first = torch.optim.AdamW(model[:2].parameters())
    second = torch.optim.SGD(model[2:].parameters(), lr=0.1, momentum=0.9)
    watched = Watched(tmp_path / "run", model=model, first=first, second=second)
    for step in watched.steps(_STEPS, lambda: _kept(model)):
        _train(model, (first, second)[step % 2])
    assert watched.sealed >= set(range(1, _STEPS))


@pytest.mark.holds("sources-are-held")
def test_storages_replaced_and_tensors_grown(tmp_path: Path) -> None:
    """A parameter's storage is exchanged in the middle of a copy, and one tensor grows: still each image is right."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    watched = Watched(tmp_path / "run", model=model, optimizer=optimizer, extra={"t": torch.zeros(3)})
    weight = model.get_parameter("2.weight")
    for step in watched.steps(_STEPS, lambda: _kept(model)):
        weight.data = weight.data.clone().mul_(1.5)
        if step == 5:
            watched.run.state["extra"]["t"] = torch.ones(700)
        _train(model, optimizer)
    assert watched.sealed >= {1, 2, 3, 4, 8}
    assert watched.changing == set()


def test_nothing_is_copied_behind_when_told_so(tmp_path: Path) -> None:
    """`overlap=False`: every leaf is a boundary leaf."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    watched = Watched(tmp_path / "run", model=model, optimizer=optimizer, overlap=False)
    for _step in watched.steps(4, lambda: _kept(model)):
        assert watched.boundary._taker.overlapped_bytes == 0
        _train(model, optimizer)
    assert watched.sealed >= {1, 2, 3}


@pytest.mark.holds("hooks-in-nobodys-way")
def test_saving_leaves_no_hook_and_no_thread(tmp_path: Path) -> None:
    """After the run the optimizer has no hook of ours, and the process none of our threads."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    watched = Watched(tmp_path / "run", model=model, optimizer=optimizer)
    for _step in watched.steps(4, lambda: _kept(model)):
        _train(model, optimizer)
    assert optimizer._optimizer_step_pre_hooks == {}
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("surefoot")] == []


def test_the_training_thread_helps_a_copier_that_gets_no_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copier stands still before its first group: the fence copies everything, and each image is its boundary."""
    waiting = threading.Event()
    helped: list[int] = []
    copy_left, help_ = HostLane._copy_what_is_left, HostLane.help

    def slowly(lane: HostLane) -> None:
        if threading.current_thread().name == "surefoot-copier":
            waiting.set()
            helped_before = len(helped)
            # Nobody helps any more once the patches are gone, which may be while this copy is under way.
            while len(helped) == helped_before and HostLane.help is help_and_say:
                time.sleep(0.001)
        copy_left(lane)

    def help_and_say(lane: HostLane) -> None:
        if not lane._left:
            return
        assert waiting.wait(60)
        help_(lane)
        assert not lane._left
        helped.append(1)

    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    watched = Watched(tmp_path / "run", model=model, optimizer=optimizer)
    for step in watched.steps(_STEPS, lambda: _kept(model)):
        if step == 4:
            monkeypatch.setattr(HostLane, "_copy_what_is_left", slowly)
            monkeypatch.setattr(HostLane, "help", help_and_say)
        if step == 7:
            monkeypatch.undo()
        _train(model, optimizer)
    assert len(helped) >= 2
    assert watched.sealed >= set(range(1, _STEPS))


def test_a_slot_let_go_before_the_plan_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent names a pinned slot with a plan, and lets it go before the training thread has taken the plan up."""
    made: list[Stager] = []

    class Slow(Stager):
        def __init__(self, segment: Segment, plan: Plan, rank: int, pinned: Sequence[int], tensors: Any) -> None:
            super().__init__(segment, plan, rank, [*pinned, 1], tensors)
            made.append(self)
            watched.boundary.pushed({"op": "unpin", "plan": plan.hash, "slot": 1, "seq": segment.seq(1)})

    monkeypatch.setattr("surefoot.trainer.boundary.boundary.Stager", Slow)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    watched = Watched(tmp_path / "run", model=model, optimizer=optimizer)
    for _step in watched.steps(5, lambda: _kept(model)):
        _train(model, optimizer)
        if made:
            assert 1 not in [slot for slot, told in made[-1]._pinned.items() if told is None]
    assert watched.sealed >= {2, 3, 4}
