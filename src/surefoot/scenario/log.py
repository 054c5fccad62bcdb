"""The training script's own log: one line of JSON per step, the only evidence that a verdict rests on.

    {"run", "attempt", "rank", "step", "samples": [ids], "loss_bits": hex, "t": seconds since the epoch}

`attempt` grows with each start of training, `step` counts from 0. A line is written when its optimizer step is done.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import CorruptError

DISTURBED = "disturbed"
UNDISTURBED = "undisturbed"


@dataclass(frozen=True, slots=True)
class Line:
    """A step that a rank has done."""

    run: str
    attempt: int
    rank: int
    step: int
    samples: tuple[int, ...]
    loss_bits: str
    t: float

    @classmethod
    def from_json(cls, text: str) -> Line:
        """Parse a line.

        Raises:
            CorruptError: it is not one.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            line = cls(
                str(data["run"]),
                int(data["attempt"]),
                int(data["rank"]),
                int(data["step"]),
                tuple(data["samples"]),
                str(data["loss_bits"]),
                float(data["t"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptError(
                f"not a line of a training log: {text[:200]!r} ({type(error).__name__}: {error})"
            ) from None
        return line


def gather(parts: Iterable[Path], into: Path) -> None:
    """Put what each process wrote into one file, by time. The line that a killed process did not end is left out."""
    texts = [text for part in sorted(parts) for text in part.read_text().split("\n")[:-1]]
    texts.sort(key=lambda text: Line.from_json(text).t)
    into.write_text("".join(f"{text}\n" for text in texts))


def read(path: Path) -> list[Line]:
    """All lines of a gathered log."""
    return [Line.from_json(text) for text in path.read_text().splitlines()]
