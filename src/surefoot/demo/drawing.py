"""A few marks of SVG, as text. Every word is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear map from values to pixels."""

    low: float
    high: float
    start_px: float
    end_px: float

    def __call__(self, value: float) -> float:
        return self.start_px + (value - self.low) / (self.high - self.low or 1.0) * (self.end_px - self.start_px)

    def ticks(self, at_most: int) -> list[float]:
        """Round values on the axis."""
        rough = (self.high - self.low) / at_most or 1.0
        power = 10.0 ** floor(log10(rough))
        step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))
        numbers = range(ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9) + 1)
        return [number * step for number in numbers]


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def text(x: float, y: float, words: str, css: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(words)}</text>'


def dot(x: float, y: float, radius: float, css: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{css}"/>'


def path(points: Sequence[tuple[float, float]], css: str) -> str:
    steps = " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<path d="M{steps}" class="{css}"/>'


def picture(width: float, height: float, label: str, css: str, parts: Sequence[str]) -> str:
    """A figure as wide as its column, which says what it shows."""
    head = f'<svg viewBox="0 0 {width:g} {height:g}" class="{css}" role="img" aria-label="{escape(label)}">'
    return "".join([head, *parts, "</svg>"])
