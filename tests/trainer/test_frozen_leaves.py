"""Which leaves are frozen, and that one that moves is found, named and given up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from surefoot.core.frozen import MIN_FROZEN_BYTES
from surefoot.trainer.frozen.leaves import FrozenLeaves, Resting, resting_addresses, stamp
from surefoot.trainer.state.flatten import Flat, Flattener

SIDE = 2304
"""A square of so many 4-byte elements is larger than what is worth a file of its own."""


def _flat(**tensors: torch.Tensor) -> Flat:
    return Flattener(frozenset()).flatten({"m": dict(tensors)})


def _addresses(*tensors: torch.Tensor) -> frozenset[int]:
    return frozenset(tensor.data_ptr() for tensor in tensors)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4)
        self.tied = nn.Parameter(self.head.weight.data, requires_grad=False)
        self.base.requires_grad_(False)


def test_frozen_is_what_nothing_registered_changes() -> None:
    """Parameters without gradients are; not trained ones, buffers, what shares their memory, or what is optimized."""
    net = _Net()
    weight, bias = net.base.weight, net.base.bias
    assert resting_addresses([net], [], []) == _addresses(weight, bias)
    optimizer = torch.optim.SGD([{"params": [bias.requires_grad_()]}], lr=0.1)
    bias.requires_grad_(False)
    assert resting_addresses([net], [optimizer], []) == _addresses(weight)
    assert resting_addresses([net], [optimizer], [weight.data[1:]]) == frozenset()
    weight.requires_grad_(True)
    assert resting_addresses([net], [], []) == _addresses(bias)


def test_what_rests_is_found_anew_when_it_may_have_changed() -> None:
    """A flag that is turned, a group that is added, a module that was walked: each is seen, and nothing else asked."""
    net = _Net()
    weight, bias = net.base.weight, net.base.bias
    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.1)
    resting = Resting()

    def addresses(*walked: str) -> frozenset[int]:
        return resting.addresses({"net": net}, walked, [optimizer], [])

    assert addresses("net") == addresses() == _addresses(weight, bias)
    weight.requires_grad_(True)
    assert addresses() == _addresses(bias)
    optimizer.add_param_group({"params": [bias]})
    assert addresses() == frozenset()
    net.base = nn.Linear(4, 4).requires_grad_(False)
    assert addresses("net") == _addresses(net.base.weight, net.base.bias)


def test_small_ones_stay_ordinary() -> None:
    """Below the threshold nothing is marked, at it everything is, and marking changes the plan's signature."""
    big = torch.zeros(MIN_FROZEN_BYTES - 4, dtype=torch.uint8)
    small = torch.zeros(4, dtype=torch.uint8)
    flat = _flat(big=big, small=small)
    marked = FrozenLeaves(_never).mark(flat, _addresses(big))
    assert [named.frozen for named in marked.tensors] == [False, False]
    marked = FrozenLeaves(_never).mark(flat, _addresses(big, small))
    assert [named.frozen for named in marked.tensors] == [True, True]
    assert marked.signature() != flat.signature()


def _never(what: str) -> None:
    raise AssertionError(what)


def _watched(**tensors: torch.Tensor) -> tuple[FrozenLeaves, Callable[[], list[str]], list[str]]:
    """Leaves that were looked at once, a look that tells which are frozen now, and what was warned of."""
    said: list[str] = []
    leaves = FrozenLeaves(said.append)

    def look() -> list[str]:
        marked = leaves.mark(_flat(**tensors), _addresses(*tensors.values()))
        return [named.name for named in marked.tensors if named.frozen]

    assert look() == [f"m.{name}" for name in tensors]
    return leaves, look, said


_WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda tensor: tensor.mul_(1.01),
    "one element": lambda tensor: tensor.view(-1)[123_456].add_(1),
    "of a detached alias": lambda tensor: tensor.detach().zero_(),
    "foreach": lambda tensor: torch._foreach_mul_([tensor], 0.5),
    "from another place": lambda tensor: setattr(tensor, "data", tensor.data.clone()),
}


@pytest.mark.parametrize("write", _WRITES)
def test_what_moves_is_given_up_at_the_next_look(write: str) -> None:
    """A leaf that was written to by any ordinary operation, or lies elsewhere, is named and ordinary for good."""
    still, moving = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    leaves, look, said = _watched(still=still, moving=moving)
    assert look() == ["m.still", "m.moving"]
    then = {name: stamp(tensor) for name, tensor in leaves.live.items()}
    assert leaves.stand(then)
    _WRITES[write](moving)
    assert not leaves.stand(then)
    assert look() == ["m.still"]
    assert not leaves.stand(then)
    assert said == [
        "m.moving is frozen (requires_grad is off, and no registered optimizer has it), but it was written to: "
        "from here on it is saved with every step"
    ]
    assert look() == ["m.still"]
    assert len(said) == 1


def test_a_suspect_is_given_up_at_the_next_look() -> None:
    """A leaf that was found changed otherwise is treated like one whose counter moved."""
    still, other = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    leaves, look, said = _watched(still=still, other=other)
    leaves.suspect("m.other")
    assert look() == look() == ["m.still"]
    assert len(said) == 1


def test_what_was_trained_in_between_is_seen_anew() -> None:
    """A leaf that was no candidate for a while may have changed then; so may all that was loaded."""
    still, other = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    leaves = FrozenLeaves(_never)
    flat = _flat(still=still, other=other)
    leaves.mark(flat, _addresses(still, other))
    leaves.mark(flat, _addresses(still))
    other.add_(1)
    leaves.mark(flat, _addresses(still, other))
    assert sorted(leaves.live) == ["m.other", "m.still"]
    still.add_(1)
    leaves.forget()
    leaves.mark(flat, _addresses(still, other))
    assert sorted(leaves.live) == ["m.other", "m.still"]
