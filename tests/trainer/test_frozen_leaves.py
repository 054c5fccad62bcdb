"""Which leaves are frozen, what their bytes hash to, and that a change is found and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

from surefoot.core.frozen import BLOCK_BYTES, MIN_FROZEN_BYTES
from surefoot.core.image import Box, build_image
from surefoot.tensor_hash import FileHash, TensorHash
from surefoot.trainer.flatten import Flat, Flattener
from surefoot.trainer.frozen_bytes import chunks, read, write
from surefoot.trainer.frozen_leaves import FrozenLeaves, Rotation
from surefoot.trainer.resting import Resting, resting_addresses

SIDE = 2304
"""A square of so many 4-byte elements is larger than what is worth a file of its own."""


def _flat(**tensors: torch.Tensor) -> Flat:
    return Flattener(frozenset()).flatten({"m": dict(tensors)})


def _addresses(*tensors: torch.Tensor) -> frozenset[int]:
    return frozenset(tensor.data_ptr() for tensor in tensors)


def _raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def _digest(data: bytes) -> str:
    blocks = [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]
    return xxhash.xxh3_128_hexdigest(b"".join(xxhash.xxh3_64_digest(block) for block in blocks))


@pytest.mark.parametrize("pieces", [1, 7, 1000, BLOCK_BYTES - 1, BLOCK_BYTES, 10 * BLOCK_BYTES])
def test_a_tensor_hash_does_not_depend_on_the_pieces(pieces: int) -> None:
    """The digest is that of the blocks of the whole, however the bytes arrive."""
    size = 1500 if pieces == 1 else 3 * BLOCK_BYTES + 17
    data = bytes(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).numpy())
    hashing = TensorHash()
    for start in range(0, size, pieces):
        hashing.update(memoryview(data)[start : start + pieces])
    assert hashing.finish() == _digest(data)


@pytest.mark.parametrize("pieces", [5, 4096, 100_000, 1 << 30])
def test_a_file_hash_gives_each_tensor_its_own(pieces: int) -> None:
    """From a file's bytes in any pieces: the hash of all, and of each tensor, empty ones too."""
    shapes = [(5000,), (0,), (70_000,), (3,), (0, 4)] if pieces > 5 else [(50,), (0,), (3,)]
    boxes = [Box(f"t{n}", "float32", shape, (0,) * len(shape), shape) for n, shape in enumerate(shapes)]
    image = build_image(boxes, None, 0)
    body = bytes(torch.randn((image.size_bytes - len(image.header)) // 4).view(torch.uint8).numpy())
    data = memoryview(image.header + body)
    hashing = FileHash(image)
    for start in range(0, len(data), pieces):
        hashing.update(data[start : start + pieces])
    whole, digests = hashing.finish()
    assert whole == xxhash.xxh3_128_hexdigest(data)
    assert digests == tuple(_digest(bytes(data[start : start + box.size_bytes])) for box, start in image.places)


_STRIDED: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(7, 5, dtype=torch.bfloat16),
    "transposed": lambda: torch.randn(5, 7).t(),
    "permuted": lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    "bool": lambda: torch.randint(0, 2, (40,)).bool(),
    "fp8": lambda: torch.randn(4, 6).to(torch.float8_e4m3fn),
    "every other row": lambda: torch.randn(12, 3)[::2],
}


@pytest.mark.parametrize("kind", _STRIDED)
def test_bytes_are_read_and_written_in_place(kind: str) -> None:
    """Any stretch of a tensor of any strides reads as its row-major bytes, and what is written is read again."""
    tensor = _STRIDED[kind]()
    raw = _raw(tensor)
    assert b"".join(bytes(chunk) for chunk in chunks(tensor)) == raw
    for start, stop in ((0, len(raw)), (1, 3), (5, 9), (len(raw) - 1, len(raw))):
        assert bytes(read(tensor, start, stop)) == raw[start:stop]
    write(tensor, 3, memoryview(bytearray(b"\1\0\1\0")))
    assert _raw(tensor) == raw[:3] + b"\1\0\1\0" + raw[7:]


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
    """Leaves that are frozen and hashed, a look that tells which still are, and what was warned of."""
    said: list[str] = []
    leaves = FrozenLeaves(said.append)

    def look() -> list[str]:
        marked = leaves.mark(_flat(**tensors), _addresses(*tensors.values()))
        return [named.name for named in marked.tensors if named.frozen]

    look()
    for name, tensor in leaves.live.items():
        leaves.hash(name, tensor)
    return leaves, look, said


def test_an_average_is_found_out_at_the_next_look() -> None:
    """Of many leaves, those that change everywhere are named at once, all of them, and the others stay."""
    still = {f"w{number}": torch.randn(SIDE, 20) for number in range(100)}
    moving = {f"z{number}": torch.randn(SIDE, 20) for number in range(9)}
    _leaves, look, said = _watched(**still, **moving)
    for _ in range(10):
        assert len(look()) == 109
    for tensor in moving.values():
        tensor.mul_(1.01)
    assert look() == [f"m.w{number}" for number in range(100)]
    assert sorted(what.split(" ")[0] for what in said) == [f"m.z{number}" for number in range(9)]
    assert len(look()) == 100, "given up for good, and only these"


def test_a_change_in_one_place_is_found_by_and_by() -> None:
    """One changed element, anywhere, is found within as many looks as there are blocks."""
    for place in (0, 123_456, SIDE * SIDE - 1):
        weight = torch.randn(SIDE, SIDE)
        _leaves, look, said = _watched(weight=weight)
        weight.view(-1)[place] += 1
        blocks = -(-weight.nbytes // BLOCK_BYTES)
        looks = next(number for number in range(1, blocks + 1) if look() == [])
        assert 1 <= looks <= blocks
        assert said == [
            "m.weight is frozen (requires_grad is off, and no registered optimizer has it), but its bytes changed: "
            "from here on it is saved with every step"
        ]


def test_two_readings_that_differ_give_a_leaf_up() -> None:
    """A leaf that was read twice with two results is no longer marked, even if no sample would show it."""
    weight = torch.randn(SIDE, SIDE)
    leaves, look, said = _watched(weight=weight)
    weight[7, 7] += 1
    leaves.hash("m.weight", weight)
    assert look() == []
    assert len(said) == 1


def test_a_leaf_that_was_loaded_anew_is_not_suspected() -> None:
    """Bytes that are replaced on purpose are the leaf's bytes from then on."""
    weight = torch.randn(SIDE, SIDE)
    leaves, look, said = _watched(weight=weight)
    weight.normal_()
    hashing = TensorHash()
    for chunk in chunks(weight):
        hashing.update(chunk)
    leaves.learn("m.weight", weight, hashing, anew=True)
    for _ in range(5):
        assert look() == ["m.weight"]
    assert said == []


def test_the_rotation_meets_every_block_once_a_round() -> None:
    """Whatever the sizes, each block of each leaf is met exactly once in as many turns as there are blocks."""
    for counts in ({"a": 1}, {"a": 5, "b": 1, "c": 30}, {"a": 2, "b": 2}, {f"l{n}": n for n in range(1, 12)}):
        rotation = Rotation()
        total = sum(counts.values())
        met: list[Any] = [rotation.next(dict(counts)) for _ in range(total)]
        assert sorted(met) == sorted((name, number) for name, count in counts.items() for number in range(count))
    assert Rotation().next({}) is None
