"""The witness: checks whether leaves that are copied behind the training stood still until their copy was complete.

A copy is torn only by a write between the boundary and the copy's end. Three things can show such a write:

* a tensor's version counter, which ordinary in-place operations move (but not fused optimizers, `.data`, NumPy views);
* samples: a few elements of every leaf, read at the boundary and compared with what arrived in the slot;
* sums: of every 4 KiB in a rotating part of all bytes, taken at the boundary and again when the copy is complete. A
  small state is summed whole, each time.

All three look at the copy's whole time, from the boundary on. A comparison of slot and source alone, however late,
would take a write that came before the copy for the state at the boundary.

Whether the user's code leaves the leaves alone is found out once: they are on *trial* until all their bytes, a part at
each step, were summed at a boundary and had the same sums when an optimizer was about to change them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

SUMMED_BYTES = 16 * 1024 * 1024
"""Bytes that are summed at each save: a few milliseconds of the training's time."""
TRIED_BYTES = {"cpu": 64 * 1024 * 1024}
"""Bytes that are summed at each step of a trial, by kind of device: about ten milliseconds, twice per step."""
_TRIED_ELSEWHERE_BYTES = 1024 * 1024 * 1024
_WORDS = 512
"""Eight-byte words in one sum."""
_SAMPLE = 16
"""Elements at the beginning, in the middle and at the end of each leaf."""
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Block = tuple[int, torch.Tensor]
"""A leaf's number, and a view of a part of it."""
_Kind = tuple[torch.device, int]
"""Device and element size: blocks that agree in both can be joined into one tensor."""


def can_witness(tensor: torch.Tensor) -> bool:
    """False for leaves whose bytes cannot be looked at in place."""
    plain = not tensor.is_conj() and not tensor.is_neg() and not tensor.is_inference()
    return plain and tensor.element_size() in _INTEGER


class Samples:
    """Some elements of some leaves: the same ones in every set of leaves of the same shapes."""

    def __init__(self, leaves: Sequence[torch.Tensor], kinds: Sequence[_Kind]) -> None:
        self._leaf_of: dict[_Kind, list[int]] = defaultdict(list)
        self._views: dict[_Kind, list[torch.Tensor]] = defaultdict(list)
        for number, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
            for view in _spans(_as_integers(leaf)):
                self._views[kind].append(view)
                self._leaf_of[kind].append(number)

    def read(self) -> dict[_Kind, torch.Tensor]:
        """Their values. From an accelerator they are on their way to the host, in the order of its stream."""
        return {kind: _to_host(torch.cat(views)) for kind, views in self._views.items()}

    def first_difference(self, then: dict[_Kind, torch.Tensor]) -> int | None:
        """Number of a leaf whose elements have changed; None if there is none."""
        for kind, now in self.read().items():
            if not torch.equal(now, then[kind]):
                where = int((now != then[kind]).nonzero()[0])
                ends = torch.tensor([view.numel() for view in self._views[kind]]).cumsum(0)
                return self._leaf_of[kind][int(torch.searchsorted(ends, where, right=True))]
        return None


def kinds(leaves: Sequence[torch.Tensor]) -> list[_Kind]:
    return [(leaf.device, leaf.element_size()) for leaf in leaves]


class Blocks:
    """Chooses the blocks that are summed next, round and round over all bytes."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        """About how many bytes are given at a time."""
        self._leaf = 0
        self._row = 0
        self.round_ends = False
        """True if the blocks given last completed another round over every byte."""

    def next(self, leaves: Sequence[torch.Tensor]) -> list[Block]:
        """The next blocks, to the end of a round at most."""
        blocks: list[Block] = []
        left_bytes = self._size_bytes
        if self._leaf >= len(leaves):
            self._leaf, self._row = 0, 0
        while left_bytes > 0 and self._leaf < len(leaves):
            block = self._rows(_as_integers(leaves[self._leaf]), left_bytes)
            blocks.append((self._leaf, block))
            left_bytes -= block.nbytes
            if self._row:
                break
            self._leaf += 1
        self.round_ends = self._leaf >= len(leaves)
        return blocks

    def _rows(self, leaf: torch.Tensor, at_most_bytes: int) -> torch.Tensor:
        """The rows after those of last time; all of a leaf that has no rows to part it by."""
        rows = leaf.shape[0] if leaf.dim() else 1
        start = self._row if self._row < rows else 0
        row_bytes = max(1, leaf.nbytes // max(1, rows))
        end = min(rows, start + max(1, at_most_bytes // row_bytes))
        self._row = 0 if end >= rows else end
        return leaf[start:end] if leaf.dim() else leaf


Summed = tuple[int, torch.Tensor, torch.Tensor]
"""A block, and its sums."""


def sum_blocks(blocks: Sequence[Block]) -> list[Summed]:
    """In the order of the blocks' current streams."""
    return [(number, block, _sums(block)) for number, block in blocks]


class Trial:
    """Finds out whether leaves stand still from each boundary to the fence after it. All in the training thread."""

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        self._leaves = leaves
        kind = leaves[0].device.type if leaves else "cpu"
        self._blocks = Blocks(TRIED_BYTES.get(kind, _TRIED_ELSEWHERE_BYTES))
        self.summed: list[Summed] = []
        """The sums at the boundary just passed."""
        self._moved: list[tuple[int, torch.Tensor]] = []
        self.passed = not leaves
        """True once every byte was looked at, and stood still."""

    def begin(self) -> None:
        """At a boundary: sum the next blocks."""
        self.summed = sum_blocks(self._blocks.next(self._leaves))

    def end(self) -> None:
        """At the fence: the leaves are about to change. Only the first fence after a boundary counts."""
        self._moved += [(number, _to_host((_sums(block) != then).any())) for number, block, then in self.summed]
        self.summed = []

    def moved(self) -> int | None:
        """At the next boundary: number of a leaf that did not stand still. Waits until an accelerator has looked."""
        for device in {leaf.device for leaf in self._leaves if leaf.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        found = next((number for number, moved in self._moved if bool(moved)), None)
        self.passed = found is None and (self.passed or self._blocks.round_ends)
        self._moved = []
        return found


class Witness:
    """The overlapped leaves as they were at a boundary. Made in the training thread, in the order of its streams."""

    def __init__(self, leaves: Sequence[torch.Tensor], samples: Samples, summed: Sequence[Summed]) -> None:
        self._leaves = leaves
        self._versions = [leaf._version for leaf in leaves]
        self._samples = samples.read()
        self._summed = summed
        self._moved: list[tuple[int, torch.Tensor]] = []

    def compare(self, device: torch.device) -> None:
        """Sum the blocks of a device again, in the order of its current stream."""
        for number, block, then in self._summed:
            if block.device == device:
                self._moved.append((number, _to_host((_sums(block) != then).any())))

    def moved(self, arrived: Samples) -> int | None:
        """Number of a leaf that was written while it was copied; None if all stood still.

        Args:
            arrived: the same elements in the slot. The copy, and the comparisons that were ordered, are complete.
        """
        for number, (leaf, version) in enumerate(zip(self._leaves, self._versions, strict=True)):
            if leaf._version != version:
                return number
        sampled = arrived.first_difference(self._samples)
        return sampled if sampled is not None else next((number for number, moved in self._moved if bool(moved)), None)


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: compared by bits, so that NaN equals itself and 0 is not -0."""
    return tensor.view(_INTEGER[tensor.element_size()])


def _sums(block: torch.Tensor) -> torch.Tensor:
    """One sum for every `_WORDS` words, then the remaining words; the bytes themselves where there are no words."""
    size = block.element_size()
    if not block.is_contiguous() or block.storage_offset() * size % 8:
        return block.clone()
    flat = block.view(-1)
    summed = flat.numel() - flat.numel() % (8 * _WORDS // size)
    sums = flat[:summed].view(torch.int64).view(-1, _WORDS).sum(1)
    return torch.cat([sums, flat[summed:].to(torch.int64)])


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _spans(leaf: torch.Tensor) -> list[torch.Tensor]:
    """One-dimensional views of the first, middle and last elements, in logical order along the last dimension."""
    if leaf.dim() == 0:
        return [leaf.view(1)]
    if leaf.numel() == 0:
        return []
    if leaf.dim() == 1 and leaf.numel() <= 3 * _SAMPLE:
        return [leaf]
    length = leaf.shape[-1]
    take = min(length, _SAMPLE)
    places = ([0] * (leaf.dim() - 1), [n // 2 for n in leaf.shape[:-1]], [n - 1 for n in leaf.shape[:-1]])
    strides, base = leaf.stride(), leaf.storage_offset()
    offsets = [
        base + sum(i * s for i, s in zip(place, strides, strict=False)) + start * strides[-1]
        for place, start in zip(places, (0, (length - take) // 2, length - take), strict=True)
    ]
    return [leaf.as_strided((take,), (strides[-1],), offset) for offset in offsets]
