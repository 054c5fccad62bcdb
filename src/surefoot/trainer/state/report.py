"""Makes the report: one rank's leaves and structure, which the agent needs to make the plan."""

from __future__ import annotations

from collections.abc import Callable

from surefoot.core.plan import Leaf, Report
from surefoot.trainer.state import tensors
from surefoot.trainer.state.flatten import Flat, NamedTensor, dtype_name

_Digest = Callable[[NamedTensor], str]


def _digest(named: NamedTensor) -> str:
    return tensors.digest(named.tensor)


def report_of(flat: Flat, *, several: bool, digest: _Digest = _digest) -> Report:
    """A rank's report.

    Args:
        flat: its state.
        several: there are other ranks, so digests must show that tensors which all are to have are the same.
        digest: hash of a tensor's bytes.
    """
    return Report(tuple(_leaf(named, digest if several else None) for named in flat.tensors), flat.structure)


def _leaf(named: NamedTensor, digest: _Digest | None) -> Leaf:
    place = named.place
    claimed = named.spread == "replicated" or (place is not None and place.shared)
    return Leaf(
        named.name,
        dtype_name(named.tensor.dtype),
        tuple(named.tensor.shape),
        named.spread,
        digest(named) if digest is not None and claimed else "",
        place.offset if place is not None else (),
        place.whole if place is not None else (),
        named.frozen,
    )
