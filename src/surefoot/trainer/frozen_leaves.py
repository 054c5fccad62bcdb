"""Frozen leaves: which of a trainer's tensors never change, what their bytes hash to, and whether they still do.

Frozen is a module's parameter without `requires_grad` that is in no registered optimizer. Nothing can prove that the
script does not write to it (an average of weights looks just like it), so it is watched: at every boundary one block,
each time another, and the first bytes of some leaves, each time others, are compared with their hashes; right after the
hashing, those of all. A leaf that changed is an ordinary one for good.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd

import torch

from surefoot.clock import boot_s
from surefoot.core.frozen import BLOCK_BYTES, MIN_FROZEN_BYTES
from surefoot.tensor_hash import TensorHash, block_hash
from surefoot.trainer.flatten import Flat, NamedTensor
from surefoot.trainer.frozen_bytes import beside_the_training, chunks, read

_HEAD_BYTES = 4096
"""An average of weights changes nearly everywhere, so a few bytes of it will do."""
_HEADS_AT_ONCE = 32
_TRIALS = 3
"""Boundaries after a hashing at which the heads of all leaves are compared."""
_BLOCKS_OF_A_SUSPECT = 4
"""Looked at in every other leaf once one has changed."""
_ACCELERATOR_EVERY_S = 1.0
"""Reading an accelerator's memory costs the training thread a wait."""


@dataclass(frozen=True, slots=True)
class Known:
    """What a leaf's bytes hash to."""

    digest: str
    blocks: array[int]
    head: int
    """Hash of the first bytes."""


class FrozenLeaves:
    """Called by the training thread, but for `hash` and `known`, which any thread may call."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._moving: set[str] = set()
        """Leaves that were seen to change."""
        self._suspects: set[str] = set()
        """Leaves of which another thread saw two different contents."""
        self._known: dict[str, Known] = {}
        self._lock = threading.Lock()
        self._rotation = Rotation()
        self._trials = 0
        self._turn = 0
        self._looked_s = 0.0
        self.live: dict[str, torch.Tensor] = {}
        """The frozen leaves as of the last boundary."""

    def mark(self, flat: Flat, resting: frozenset[int]) -> Flat:
        """The same state with its frozen leaves marked; watches those that have been hashed."""
        if not resting:
            self.live = {}
            return flat
        found = {
            named.name: named.tensor
            for named in flat.tensors
            if named.tensor.data_ptr() in resting and named.name not in self._moving
        }
        self.live = found = self._watch(found)
        if sum(tensor.nbytes for tensor in found.values()) < MIN_FROZEN_BYTES:
            self.live = {}
        if not self.live:
            return flat
        return replace(flat, tensors=[_frozen(one) if one.name in found else one for one in flat.tensors])

    def look_again(self) -> bool:
        """One more sample of what was marked. False if something changed: the marks are no longer right."""
        before = len(self.live)
        self.live = self._watch(self.live)
        return len(self.live) == before

    def hash(self, name: str, tensor: torch.Tensor, also: Callable[[memoryview], None] | None = None) -> Known:
        """Read a leaf through. A leaf that was hashed before, and differs now, is given up at the next boundary.

        Args:
            name: the leaf.
            tensor: its bytes.
            also: sees each piece too; what it raises ends the reading.
        """
        hashing = TensorHash()
        with beside_the_training(tensor):
            for chunk in chunks(tensor):
                hashing.update(chunk)
                if also is not None:
                    also(chunk)
        return self.learn(name, tensor, hashing)

    def learn(self, name: str, tensor: torch.Tensor, hashing: TensorHash, *, anew: bool = False) -> Known:
        """Take in a leaf's hash; `anew` if its bytes were just replaced on purpose."""
        known = Known(hashing.finish(), hashing.blocks, _head(tensor))
        with self._lock:
            self._trials = _TRIALS
            before = self._known.get(name)
            if before is not None and before.digest != known.digest and not anew:
                self._suspects.add(name)
            self._known[name] = known
        return known

    def known(self, name: str) -> Known | None:
        with self._lock:
            return self._known.get(name)

    def _watch(self, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of the leaves that have not changed, as far as was looked."""
        with self._lock:
            known = {name: self._known[name] for name in found if name in self._known}
            changed, self._suspects = self._suspects, set()
        fits = {name: one for name, one in known.items() if len(one.blocks) == _num_blocks(found[name])}
        changed |= known.keys() - fits.keys()
        place = self._rotation.next({name: len(one.blocks) for name, one in fits.items()})
        if place is not None and self._may_look(found[place[0]]):
            seen = {name for name in self._heads(list(fits)) if _head(found[name]) != fits[name].head}
            if not _is_same(found, fits, *place):
                seen.add(place[0])
            changed |= {*seen, *self._others_changed(found, fits)} if seen else set()
        if changed:
            self._thaw(changed)
        return {name: tensor for name, tensor in found.items() if name not in changed}

    def _heads(self, names: list[str]) -> list[str]:
        """Whose first bytes are looked at this time: all in the trial, else some, spread over the whole."""
        with self._lock:
            trial, self._trials = self._trials > 0, max(0, self._trials - 1)
        self._turn += 1
        stride = 1 if trial else max(1, -(-len(names) // _HEADS_AT_ONCE))
        return names[self._turn % stride :: stride]

    def _may_look(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type == "cpu":
            return True
        now_s = boot_s()
        due = now_s - self._looked_s >= _ACCELERATOR_EVERY_S
        if due:
            self._looked_s = now_s
        return due

    def _others_changed(self, found: Mapping[str, torch.Tensor], fits: Mapping[str, Known]) -> Iterator[str]:
        for name, one in fits.items():
            step = max(1, len(one.blocks) // _BLOCKS_OF_A_SUSPECT)
            if not all(_is_same(found, fits, name, number) for number in range(0, len(one.blocks), step)):
                yield name

    def _thaw(self, changed: set[str]) -> None:
        self._moving |= changed
        with self._lock:
            for name in changed:
                self._known.pop(name, None)
        for name in sorted(changed):
            self._warn(
                f"{name} is frozen (requires_grad is off, and no registered optimizer has it), but its bytes changed: "
                "from here on it is saved with every step"
            )


class Rotation:
    """Goes round all blocks of all leaves, far apart from one to the next, and begins again."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._total = 0
        self._step = 1
        self._position = 0

    def next(self, counts: dict[str, int]) -> tuple[str, int] | None:
        """A leaf and the number of one of its blocks; None if there are none."""
        if counts != self._counts:
            self._counts = counts
            self._total = sum(counts.values())
            # By the golden ratio, so that whatever stretch was changed is hit soon.
            self._step = next((s for s in range(int(0.618 * self._total), self._total) if gcd(s, self._total) == 1), 1)
        if not self._total:
            return None
        self._position = (self._position + self._step) % self._total
        number = self._position
        for name, count in counts.items():
            if number < count:
                return name, number
            number -= count
        return None


def _is_same(found: Mapping[str, torch.Tensor], known: Mapping[str, Known], name: str, number: int) -> bool:
    tensor, start = found[name], number * BLOCK_BYTES
    data = read(tensor, start, min(start + BLOCK_BYTES, tensor.nbytes))
    return block_hash(data) == known[name].blocks[number]


def _frozen(one: NamedTensor) -> NamedTensor:
    return NamedTensor(one.name, one.tensor, one.spread, one.place, frozen=True)


def _head(tensor: torch.Tensor) -> int:
    return block_hash(read(tensor, 0, min(_HEAD_BYTES, tensor.nbytes)))


def _num_blocks(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // BLOCK_BYTES)
