"""On an accelerator: copies by a side stream, sealed by their event, fenced in the stream and not in the program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_overlap import Watched
from torch import nn

from surefoot.trainer.stage.streams import register, unregister
from surefoot.trainer.state.rng import capture, restore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

_STEPS = 12


def _model(width: int = 2048) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(6)]).cuda()


def _train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    loss = model(torch.randn(256, 2048, device="cuda")).square().mean()
    model.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def _kept(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"model.{name}": parameter for name, parameter in model.named_parameters()}


@pytest.mark.holds("sealed-on-device")
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"capturable": True}])
def test_each_image_is_its_boundary(options: dict[str, bool], tmp_path: Path) -> None:
    """The program runs ahead of the device, and each sealed image is byte for byte the state at its boundary."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    watched = Watched(tmp_path / "run", model=model, optimizer=optimizer)
    for step in watched.steps(_STEPS, lambda: _kept(model)):
        if step > 2:
            assert watched.boundary._taker.overlapped_bytes >= 0.95 * 3 * sum(p.nbytes for p in model.parameters())
            stager = watched.boundary._stager
            assert stager is not None
            assert stager.segment.num_slots == 4
        _train(model, optimizer)
    assert watched.sealed >= set(range(1, _STEPS))


@pytest.mark.holds("sealed-on-device")
def test_the_optimizer_does_not_overtake_a_slow_copy(tmp_path: Path) -> None:
    """Copies that wait behind a long kernel on their own stream: the optimizer's change waits for them, unseen by the
    program."""
    from surefoot.trainer.stage.streams import _side_stream

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    watched = Watched(tmp_path / "run", model=model, optimizer=optimizer)
    for _step in watched.steps(_STEPS, lambda: _kept(model)):
        with torch.cuda.stream(_side_stream(torch.device("cuda", 0))):
            torch.cuda._sleep(50_000_000)
        _train(model, optimizer)
    assert watched.changing == set()


def _scaled(weight: nn.Parameter) -> None:
    weight.data.mul_(1.001)


def _one_element(weight: nn.Parameter) -> None:
    weight.data[300, 177] += 1


@pytest.mark.parametrize("write", [_scaled, _one_element])
def test_a_parameter_changed_behind_the_optimizer(write: Callable[[nn.Parameter], None], tmp_path: Path) -> None:
    """Named, copied at the boundary from then on; no sealed image has a byte that is not its step's."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    watched = Watched(tmp_path / "run", model=model, optimizer=optimizer)
    for _step in watched.steps(_STEPS, lambda: _kept(model)):
        write(model.get_parameter("1.weight"))
        _train(model, optimizer)
    assert watched.changing == {"model.1.weight"}


@pytest.mark.holds("trust-for-one-step")
def test_a_replayed_graph(tmp_path: Path) -> None:
    """A whole step captured in a CUDA graph fires no hook when it is replayed: its leaves are boundary leaves."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    data = torch.randn(256, 2048, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(data).square().mean().backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    watched = Watched(tmp_path / "run", model=model, optimizer=optimizer)
    for number in watched.steps(_STEPS, lambda: _kept(model)):
        if number > 2:
            assert watched.boundary._taker.overlapped_bytes == 0
        graph.replay()
    assert watched.sealed >= set(range(2, _STEPS - 1))


@pytest.mark.holds("pinned-without-cuda")
def test_registration_and_its_refusal() -> None:
    """Ordinary memory is registered once and given back; what cannot be registered is said, and no error."""
    said: list[str] = []
    torch.zeros(1, device="cuda")
    memory = torch.zeros(1 << 22, dtype=torch.uint8)
    assert register(memory, said.append)
    assert memory.is_pinned()
    assert not register(memory, said.append)
    unregister(memory)
    assert not memory.is_pinned()
    assert len(said) == 1


def test_device_generators_come_back() -> None:
    """The states of each device's generator are kept and put back: the same draws again."""
    torch.cuda.manual_seed(5)
    torch.randn(7, device="cuda")
    state = capture()
    first = torch.randn(1000, device="cuda")
    restore(state)
    assert torch.equal(first, torch.randn(1000, device="cuda"))
