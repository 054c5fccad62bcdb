"""Flattens the state, but walks only the objects that may have changed since the last time.

Its result is that of a full walk: every tree that is taken over is proven (see `surefoot.trainer.state.proofs`), and is
taken over only if all trees before it had the same result as the last time, because names and ties depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from surefoot.trainer.state.flatten import Flat, Flattener, LastSignature, Segment, join
from surefoot.trainer.state.objects import Kept
from surefoot.trainer.state.proofs import Proof


@dataclass(frozen=True, slots=True)
class Replicated:
    """The tensors that are equal on all ranks by construction."""

    addresses: frozenset[int]
    names: Sequence[str]
    """Names of objects."""


@dataclass(frozen=True, slots=True)
class _Past:
    """The last result of one tree."""

    segment: Segment
    proof: Proof | None


class Shortcut:
    """Flattens the same objects again and again."""

    def __init__(self) -> None:
        self._past: dict[str, _Past] = {}
        self._order: list[str] = []
        self._structure = ""
        self._last = LastSignature()
        self._naming: Mapping[int, str] = {}
        self.walked: list[str] = []
        """Objects that had to be walked the last time."""

    def flatten(
        self, kept: Mapping[str, Kept], replicated: Callable[[], Replicated], naming: Callable[[], Mapping[int, str]]
    ) -> Flat:
        """All state as of now.

        Args:
            kept: the objects, by name.
            replicated: asked if anything has to be walked.
            naming: names of parameters, by identity; asked if a module has to be walked.

        Raises:
            UnsupportedStateError: a value cannot be checkpointed; the message names its path.
        """
        past, self._past = self._past, {}
        one_pass = _Pass(past if list(kept) == self._order else {}, replicated, naming, self._naming)
        for name in sorted(kept, key=lambda name: kept[name].turn):
            one_pass.take(name, kept[name])
        self._past, self._order, self._naming = one_pass.now, list(kept), one_pass.named
        self.walked = one_pass.walked
        if not one_pass.is_same:
            self._structure = join({name: one_pass.now[name].segment.node for name in kept})
            self._last = LastSignature()
        return one_pass.flattener.flat(self._structure, self._last)


class _Pass:
    """One pass."""

    def __init__(
        self,
        past: Mapping[str, _Past],
        replicated: Callable[[], Replicated],
        naming: Callable[[], Mapping[int, str]],
        named: Mapping[int, str],
    ) -> None:
        self.flattener = Flattener(frozenset())
        self.now: dict[str, _Past] = {}
        self.named = named
        """Names of parameters, by identity, as they were when a module was last walked."""
        self.is_same = bool(past)
        """True as long as structure, names and kinds are those of the last time."""
        self.walked: list[str] = []
        self._past = past
        self._replicated = replicated
        self._naming = naming
        self._ready = False
        self._walked_module = False
        self._intact = bool(past)
        """True as long as the results so far are those of the last time, including each tensor's place in memory."""

    def take(self, name: str, one: Kept) -> None:
        past = self._past.get(name)
        if one.turn > 0:
            self._check_naming()
        if past is not None and self._intact and past.proof is not None and self._replay(past.segment, past.proof):
            self.now[name] = past
        else:
            self._walk(name, one, past)

    def _replay(self, segment: Segment, proof: Proof) -> bool:
        tensors = proof.tensors()
        values = proof.values() if tensors is not None else None
        if tensors is None or values is None or len(values) != segment.values:
            return False
        self.flattener.replay(segment, tensors, values)
        return True

    def _walk(self, name: str, one: Kept, past: _Past | None) -> None:
        self.walked.append(name)
        if not self._ready:
            self._ready = True
            replicated = self._replicated()
            self.flattener.believe(replicated.names, replicated.addresses)
        tensors, values = len(self.flattener.tensors), len(self.flattener.values)
        segment = self.flattener.walk(name, one.tree())
        self._walked_module |= one.turn == 0
        self._intact = self._intact and past is not None and segment == past.segment
        self.is_same = self.is_same and past is not None and _is_alike(segment, past.segment)
        proof = one.proof()
        fits = proof is not None and _fits(
            proof, segment, [named.tensor for named in self.flattener.tensors[tensors:]], self.flattener.values[values:]
        )
        self.now[name] = _Past(segment, proof if fits else None)

    def _check_naming(self) -> None:
        """Optimizers know their parameters by the modules' names for them."""
        if self._walked_module:
            self._walked_module = False
            named = dict(self._naming())
            self._intact = self._intact and named == self.named
            self.named = named


def _is_alike(one: Segment, other: Segment) -> bool:
    return (one.node, one.heads, one.kinds) == (other.node, other.heads, other.kinds)


def _fits(proof: Proof, segment: Segment, walked: Sequence[torch.Tensor], values: Sequence[Any]) -> bool:
    """True if the proof finds, here and now, just what the walk found."""
    found = proof.tensors()
    if found is None or len(found) != segment.met or proof.values() != values:
        return False
    return all(_is_one(found[head.number], one) for head, one in zip(segment.heads, walked, strict=True))


def _is_one(found: torch.Tensor, walked: torch.Tensor) -> bool:
    same = (found.dtype, found.shape, found.stride()) == (walked.dtype, walked.shape, walked.stride())
    return same and found.data_ptr() == walked.data_ptr()
