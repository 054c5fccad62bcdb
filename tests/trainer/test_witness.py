"""The witness: what is written while leaves are copied does not escape it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from surefoot.trainer.stage.witness import (
    SUMMED_BYTES,
    TRIED_BYTES,
    Blocks,
    Samples,
    Trial,
    Witness,
    can_witness,
    kinds,
    sum_blocks,
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
    witness = Witness(leaves, Samples(leaves, known), sum_blocks(blocks.next(leaves)))
    return witness, copies, Samples(copies, known)


def _copy(leaves: list[torch.Tensor], copies: list[torch.Tensor]) -> None:
    for copy, leaf in zip(copies, leaves, strict=True):
        copy.copy_(leaf)


def test_what_stands_still_is_let_pass() -> None:
    """Leaves of every layout, NaN and negative zero among them, copied and not written: nothing moved."""
    leaves = _leaves()
    leaves[0][3, 4] = float("nan")
    leaves[0][3, 5] = -0.0
    witness, copies, arrived = _watch(leaves, Blocks(SUMMED_BYTES))
    _copy(leaves, copies)
    witness.compare(_HOST)
    assert witness.moved(arrived) is None


def _in_place(leaf: torch.Tensor) -> None:
    leaf.add_(1)


def _through_data(leaf: torch.Tensor) -> None:
    leaf.data.add_(1)


def _one_through_data(leaf: torch.Tensor) -> None:
    leaf.data.view(-1)[leaf.numel() // 3].add_(1) if leaf.is_contiguous() else leaf.data[(0,) * leaf.dim()].add_(1)


@pytest.mark.holds("bytes-are-compared")
@pytest.mark.parametrize("write", [_in_place, _through_data, _one_through_data])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("number", [0, 1, 2, 4, 5, 6, 7])
def test_a_write_before_or_while_copying_is_named(
    write: Callable[[torch.Tensor], None], before: bool, number: int
) -> None:
    """Whether the copy got the value before the write or after it: the leaf's own number."""
    leaves = _leaves()
    witness, copies, arrived = _watch(leaves, Blocks(SUMMED_BYTES))
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
    witness, copies, arrived = _watch(leaves, Blocks(SUMMED_BYTES))
    leaves[0].data[[20, 40]] = leaves[0].data[[40, 20]].clone()
    _copy(leaves, copies)
    witness.compare(_HOST)
    assert witness.moved(arrived) == 0


@pytest.mark.holds("bytes-are-compared")
def test_blocks_go_round_all_bytes() -> None:
    """Each round gives every row of every leaf once."""
    leaves = [torch.empty(1000, 64 * 1024), torch.empty(3), torch.empty(300, 64 * 1024), torch.empty(())]
    total_bytes = sum(leaf.nbytes for leaf in leaves)
    blocks = Blocks(SUMMED_BYTES)
    for _ in range(2):
        seen: dict[int, list[int]] = {number: [] for number in range(len(leaves))}
        seen_bytes, calls = 0, 0
        while not calls or not blocks.round_ends:
            given = blocks.next(leaves)
            calls += 1
            for number, block in given:
                first = block.storage_offset() // max(1, leaves[number].stride(0) if leaves[number].dim() else 1)
                seen[number] += range(first, first + (block.shape[0] if block.dim() else 1))
            size_bytes = sum(block.nbytes for _, block in given)
            assert size_bytes <= SUMMED_BYTES
            seen_bytes += size_bytes
        assert seen == {0: list(range(1000)), 1: [0, 1, 2], 2: list(range(300)), 3: [0]}
        assert seen_bytes == total_bytes


def _large() -> list[torch.Tensor]:
    return [torch.ones(3), torch.ones(2 * TRIED_BYTES["cpu"] // 4096 + 100, 1024), torch.ones(2, 2)]


@pytest.mark.holds("trial-before-trust")
def test_a_trial_ends_when_every_byte_was_looked_at() -> None:
    """As many steps as there are parts; fences that come twice change nothing."""
    trial = Trial(_large())
    steps = 0
    while not trial.passed:
        trial.begin()
        for _ in range(steps % 3):
            trial.end()
        trial.end()
        assert trial.moved() is None
        steps += 1
    assert steps == 3


@pytest.mark.holds("trial-before-trust")
@pytest.mark.parametrize("row", [5, -5])
def test_a_trial_names_what_does_not_stand_still(row: int) -> None:
    """One element, written at each step past every counter: found when its part is looked at, before the trial ends."""
    leaves = _large()
    trial = Trial(leaves)
    found = None
    while found is None:
        assert not trial.passed
        trial.begin()
        leaves[1].data[row, 7] += 1
        trial.end()
        # What the optimizer does is no fault.
        for leaf in leaves:
            leaf.add_(1)
        found = trial.moved()
    assert found == 1
    assert not trial.passed


def test_what_cannot_be_looked_at_in_place_is_refused() -> None:
    """Conjugate and negative views, inference tensors, sixteen-byte elements: they are copied at the boundary."""
    complex_ = torch.randn(4, dtype=torch.complex64)
    with torch.inference_mode():
        inferred = torch.ones(2)
    assert not any(map(can_witness, [complex_.conj(), inferred, torch.zeros(2, dtype=torch.complex128)]))
    assert all(map(can_witness, [complex_, torch.ones(2, dtype=torch.bool), torch.ones(2).to(torch.float8_e4m3fn)]))
