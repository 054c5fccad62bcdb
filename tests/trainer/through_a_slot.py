"""State through a real segment and back, without an agent: register, plan, stage into a slot, map read-only, load."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surefoot.core.plan import Leaf, Plan, Report, make_plan
from surefoot.ipc.segment import Segment, create_segment
from surefoot.trainer.restore.fit import fit
from surefoot.trainer.restore.restore import load, map_image
from surefoot.trainer.stage.copying import copy_groups
from surefoot.trainer.stage.slots import Stager
from surefoot.trainer.state.flatten import Flat, Flattener, dtype_name
from surefoot.trainer.state.objects import Kept, KeptModule, keep


@dataclass(frozen=True)
class Staged:
    """One rank's state in a slot."""

    plan: Plan
    flat: Flat
    segment: Segment
    slot: int

    @property
    def image(self) -> bytes:
        return bytes(self.segment.image(self.slot))

    def load_into(self, kept: Mapping[str, Kept]) -> tuple[list[str], list[str]]:
        """Restore into registered objects; answers what is only here and what is only in the checkpoint."""
        geometry = self.segment.geometry
        mapped = map_image(0, os.dup(self.segment.fd), geometry.image_offset(self.slot), geometry.image_bytes)
        found = fit({name: one.outline() for name, one in kept.items()}, self.plan, 0, 1)
        return load(kept, found, {0: mapped}, self.flat.values)


def register(objects: Mapping[str, Any], state: dict[str, Any] | None = None) -> dict[str, Kept]:
    """The way to keep each object, as a run has it."""
    kept: dict[str, Kept] = {}
    state = {} if state is None else state

    def names() -> dict[int, str]:
        found: dict[int, str] = {}
        for one in kept.values():
            if isinstance(one, KeptModule):
                found |= {id(parameter): name for parameter, name in one.parameter_names()}
        return found

    for name, value in objects.items():
        kept[name] = keep(name, value, state, names)
    return kept


def flatten(kept: Mapping[str, Kept]) -> Flat:
    return Flattener(frozenset()).flatten({name: one.tree() for name, one in kept.items()})


def report(flat: Flat) -> Report:
    leaves = (Leaf(t.name, dtype_name(t.tensor.dtype), tuple(t.tensor.shape), t.spread) for t in flat.tensors)
    return Report(tuple(leaves), flat.structure)


def stage(kept: Mapping[str, Kept]) -> Staged:
    """What a boundary does: the state as it is now, into a slot of a segment of its own."""
    flat = flatten(kept)
    plan = make_plan([report(flat)])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        segment = create_segment(
            Path(directory),
            "s.seg",
            run="test",
            rank=0,
            plan=plan,
            image=plan.image(0),
            num_slots=2,
            record_capacity=4096,
        )
    stager = Stager(segment, plan, 0, [], flat.tensors)
    slot = stager.take(-1)
    assert slot is not None
    copy_groups(stager.pairs(slot, flat.tensors))
    return Staged(plan, flat, segment, slot)


def round_trip(saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """Save some objects, restore into others; returns `run.state` as the second script sees it."""
    staged = stage(register(saved))
    state: dict[str, Any] = {}
    missing, unexpected = staged.load_into(register(fresh, state))
    assert (missing, unexpected) == ([], [])
    return state


def bits(value: Any) -> Any:
    """A value in a form in which equal means: same types, same bits, same shapes, same nesting and order."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg()
        return (str(value.dtype), tuple(value.shape), _raw(plain))
    if isinstance(value, dict):
        return (type(value).__name__, [(key, bits(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [bits(item) for item in value])
    if isinstance(value, (set, frozenset)):
        # What a set is iterated in differs from process to process, and with the order in which it was filled.
        return (type(value).__name__, sorted((bits(item) for item in value), key=repr))
    return (type(value).__name__, repr(value))


def _raw(tensor: torch.Tensor) -> bytes:
    # Element by element through indexing, so that strides are read by other code than the one under test.

    if tensor.numel():
        storage = tensor.untyped_storage()
        size = tensor.element_size()
        raw = bytes(storage)
        places = [0]
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            places = [place + index * stride for place in places for index in range(length)]
        start = tensor.storage_offset()
        return b"".join(raw[(start + place) * size : (start + place + 1) * size] for place in places)

    return b""


def bits_of(objects: Sequence[torch.Tensor]) -> list[Any]:
    return [bits(one) for one in objects]
