"""Defines the orders that the node of rank 0 gives the other nodes at a start, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from surefoot.core.documents import Fields
from surefoot.core.layout import generation_key
from surefoot.core.manifest import Generation
from surefoot.core.recovery import Source
from surefoot.errors import CorruptError
from surefoot.ipc.wire import Body


@dataclass(frozen=True, slots=True)
class Try:
    """Load this for your trainers, and report whether they could be given it."""

    source: Source

    def to_json(self) -> Body:
        return {"do": "try", "source": self.source.to_json()}


@dataclass(frozen=True, slots=True)
class Begin:
    """Train, from what you have loaded if it is what this generation starts from."""

    generation: Generation

    def to_json(self) -> Body:
        return {"do": "begin", "number": self.generation.number, "record": self.generation.to_bytes().decode("ascii")}


@dataclass(frozen=True, slots=True)
class GiveUp:
    """There is no start."""

    why: str
    superseded: bool = False

    def to_json(self) -> Body:
        return {"do": "give up", "why": self.why, "superseded": self.superseded}


StartOrder = Try | Begin | GiveUp


def order_from_json(data: Any) -> StartOrder:
    """An order as it came.

    Raises:
        CorruptError: it is not one of these.
    """
    fields = Fields(data, "order")
    match fields.text("do"):
        case "try":
            return Try(Source.from_json(fields.mapping("source")))
        case "begin":
            key = generation_key(fields.integer("number", 1))
            return Begin(Generation.from_bytes(fields.text("record").encode("ascii"), key))
        case "give up":
            return GiveUp(fields.text("why"), fields.flag("superseded"))
        case other:
            raise CorruptError(f"order: {other!r} is not known")
