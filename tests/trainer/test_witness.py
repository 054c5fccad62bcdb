"""The witness: what is written while leaves are copied does not escape it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from surefoot.trainer.witness import (
    FIRST_SUMMED_BYTES,
    SUMMED_BYTES,
    Blocks,
    Samples,
    Witness,
    can_witness,
    kinds,
)

_HOST = torch.device("cpu")


def _leaves() -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [
        torch.randn(300, 70),
        torch.randn(5, 6, 7).to(torch.bfloat16),
        torch.randn(()),
        torch.empty(0, 4),
        torch.randn(40, 30).t(),
        torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
        torch.arange(1000, dtype=torch.int64),
        torch.randn(600, 100, dtype=torch.float64)[::3, 5:50],
    ]


def _watch(leaves: list[torch.Tensor], blocks: Blocks) -> tuple[Witness, list[torch.Tensor], Samples]:
    copies = [torch.empty_like(leaf) for leaf in leaves]
    known = kinds(leaves)
    return Witness(leaves, Samples(leaves, known), blocks.next(leaves)), copies, Samples(copies, known)


def _copy(leaves: list[torch.Tensor], copies: list[torch.Tensor]) -> None:
    for copy, leaf in zip(copies, leaves, strict=True):
        copy.copy_(leaf)


def test_what_stands_still_is_let_pass() -> None:
    """Leaves of every layout, NaN and negative zero among them, copied and not written: nothing moved."""
    leaves = _leaves()
    leaves[0][3, 4] = float("nan")
    leaves[0][3, 5] = -0.0
    witness, copies, arrived = _watch(leaves, Blocks())
    _copy(leaves, copies)
    witness.compare(_HOST)
    assert witness.moved(arrived) is None


def _in_place(leaf: torch.Tensor) -> None:
    leaf.add_(1)


def _through_data(leaf: torch.Tensor) -> None:
    leaf.data.add_(1)


def _one_through_data(leaf: torch.Tensor) -> None:
    leaf.data.view(-1)[leaf.numel() // 3].add_(1) if leaf.is_contiguous() else leaf.data[(0,) * leaf.dim()].add_(1)


@pytest.mark.parametrize("write", [_in_place, _through_data, _one_through_data])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("number", [0, 1, 2, 4, 5, 6, 7])
def test_a_write_before_or_while_copying_is_named(
    write: Callable[[torch.Tensor], None], before: bool, number: int
) -> None:
    """Whether the copy got the value before the write or after it: the leaf's own number."""
    leaves = _leaves()
    witness, copies, arrived = _watch(leaves, Blocks())
    if before:
        write(leaves[number])
    _copy(leaves, copies)
    if not before:
        write(leaves[number])
    witness.compare(_HOST)
    assert witness.moved(arrived) == number


def test_a_swap_of_rows_is_no_equal_sum() -> None:
    """Two rows that change places, behind the version counter: seen."""
    leaves = [torch.randn(64, 2048)]
    witness, copies, arrived = _watch(leaves, Blocks())
    leaves[0].data[[20, 40]] = leaves[0].data[[40, 20]].clone()
    _copy(leaves, copies)
    witness.compare(_HOST)
    assert witness.moved(arrived) == 0


def test_blocks_go_round_all_bytes() -> None:
    """Each round gives every row of every leaf once; the first one in larger pieces than the next."""
    leaves = [torch.empty(1000, 64 * 1024), torch.empty(3), torch.empty(300, 64 * 1024), torch.empty(())]
    total_bytes = sum(leaf.nbytes for leaf in leaves)
    blocks = Blocks()
    seen_bytes, calls = 0, 0
    while not blocks.round_ends:
        given = blocks.next(leaves)
        assert len({number for number, _ in given}) == len(given)
        seen_bytes += sum(block.nbytes for _, block in given)
        calls += 1
    assert (seen_bytes, calls) == (total_bytes, -(-total_bytes // FIRST_SUMMED_BYTES))
    seen: dict[int, set[int]] = {number: set() for number in range(len(leaves))}
    for _ in range(2 * total_bytes // SUMMED_BYTES):
        for number, block in blocks.next(leaves):
            first = block.storage_offset() // max(1, leaves[number].stride(0) if leaves[number].dim() else 1)
            seen[number] |= set(range(first, first + (block.shape[0] if block.dim() else 1)))
    assert {number: len(rows) for number, rows in seen.items()} == {0: 1000, 1: 3, 2: 300, 3: 1}


def test_what_cannot_be_looked_at_in_place_is_refused() -> None:
    """Conjugate and negative views, inference tensors, sixteen-byte elements: they are copied at the boundary."""
    complex_ = torch.randn(4, dtype=torch.complex64)
    with torch.inference_mode():
        inferred = torch.ones(2)
    assert not any(map(can_witness, [complex_.conj(), inferred, torch.zeros(2, dtype=torch.complex128)]))
    assert all(map(can_witness, [complex_, torch.ones(2, dtype=torch.bool), torch.ones(2).to(torch.float8_e4m3fn)]))
