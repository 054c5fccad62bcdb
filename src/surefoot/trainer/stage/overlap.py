"""Decides which leaves are copied behind the next step, and what is looked at to know that they stood still."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from surefoot.trainer.stage.copying import Pair
from surefoot.trainer.stage.fence import owned_addresses
from surefoot.trainer.stage.streams import accelerators
from surefoot.trainer.stage.witness import SUMMED_BYTES, Blocks, Samples, Trial, Witness, can_witness, kinds, sum_blocks

_WORTH_BYTES = 1024 * 1024
"""Fewer bytes than this take less time to copy than to hand over."""
_SPLITS = 4
"""Optimizers that take turns fire in few combinations."""


class Split:
    """The leaves of a plan in two classes, as long as they lie where they lie."""

    def __init__(self, addresses: list[int], pairs: Sequence[Pair], overlapped: list[int]) -> None:
        leaves = self._leaves = [pairs[number][1] for number in overlapped]
        self.addresses = addresses
        self.devices = accelerators(source for _view, source in pairs)
        """All devices on which a leaf lies."""
        self.overlapped = overlapped
        """Numbers of the overlapped leaves, in the plan's order; the others are boundary leaves."""
        late = set(overlapped)
        self.boundary = [number for number in range(len(addresses)) if number not in late]
        self.size_bytes = sum(leaf.nbytes for leaf in leaves)
        self._kinds = kinds(leaves)
        self.samples = Samples(leaves, self._kinds)
        self._arrived: dict[int, Samples] = {}
        self.trial = Trial(leaves)
        self._blocks = Blocks(SUMMED_BYTES)

    def witness(self, *, due: bool) -> Witness | None:
        """A witness of the overlapped leaves as they are now. A step that is not due is seldom copied, so nothing is
        summed for it."""
        if not self.overlapped:
            return None
        summed = self.trial.summed
        if self.trial.passed and due:
            summed = sum_blocks(self._blocks.next(self._leaves))
        return Witness(self._leaves, self.samples, summed)

    def arrived(self, slot: int, views: Sequence[torch.Tensor]) -> Samples:
        """The sampled elements in a slot."""
        if slot not in self._arrived:
            self._arrived[slot] = Samples(views, self._kinds)
        return self._arrived[slot]


class Overlap:
    """Sorts the leaves of one plan."""

    def __init__(self, names: Sequence[str], changing: set[str]) -> None:
        self._names = names
        self._changing = changing
        """Leaves that were seen to change behind the optimizer's back, in any plan of this run."""
        self._splits: dict[frozenset[int], Split] = {}

    def split(self, pairs: Sequence[Pair], fired: Sequence[Optimizer]) -> Split:
        """Sort, given the optimizers whose hook fired in the step just finished."""
        key = frozenset(id(optimizer) for optimizer in fired)
        addresses = [source.data_ptr() for _view, source in pairs]
        known = self._splits.get(key)
        if known is not None and known.addresses == addresses:
            return known
        if len(self._splits) >= _SPLITS:
            self._splits.clear()
        split = self._splits[key] = self._sort(addresses, pairs, owned_addresses(fired))
        return split

    def demote(self, number: int) -> tuple[str, bool]:
        """Make a leaf that changed before its optimizer's step a boundary leaf from here on.

        Returns its name, and whether that was known.
        """
        name = self._names[number]
        known = name in self._changing
        self._changing.add(name)
        # The trial so far proves nothing about the other leaves: all are tried again.
        self._splits.clear()
        return name, known

    def _sort(self, addresses: list[int], pairs: Sequence[Pair], owned: set[int]) -> Split:
        late = [
            number
            for number, (_view, source) in enumerate(pairs)
            if addresses[number] in owned and self._names[number] not in self._changing and can_witness(source)
        ]
        if sum(pairs[number][1].nbytes for number in late) < _WORTH_BYTES:
            late = []
        return Split(addresses, pairs, late)
