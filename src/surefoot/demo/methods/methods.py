"""The other ways, in words and files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Method:
    """A way to survive that needs no Surefoot."""

    name: str
    title: str
    script: Path
    what: str
    """What it does, in a sentence for a person."""
    complete: str
    """Pattern of what marks a whole checkpoint, in its directory."""
    any: str
    """Pattern of all that it leaves there, whole or not."""


METHODS = (
    Method(
        "hand_written",
        "flag + async_save",
        _HERE / "hand_written.py",
        "The pattern written by hand: a SIGTERM flag, agreed on by a MAX all-reduce each step; DefaultStager and "
        "dcp.async_save; random states of each rank; the newest complete checkpoint at the start.",
        complete="step_*/.metadata",
        any="step_*",
    ),
    Method(
        "torch_save_on_sigterm",
        "torch.save on SIGTERM",
        _HERE / "torch_save_on_sigterm.py",
        "The plain loop: rank 0 writes model, optimizer, schedule and step by torch.save, every so many steps and on "
        "SIGTERM; no random states, no agreement between ranks.",
        complete="step_*.pt",
        any="step_*",
    ),
)
