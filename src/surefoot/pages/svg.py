"""Inline SVG from numbers: scales, axes and marks. Strings only; every text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from values to pixels."""

    low: float
    high: float
    start_px: float
    end_px: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.start_px + (value - self.low) / span * (self.end_px - self.start_px)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside the scale."""
        step = _round_step((self.high - self.low) / max(1, count))
        first, last = ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class LogScale:
    """A logarithmic map from positive values to pixels."""

    low: float
    high: float
    start_px: float
    end_px: float

    def __call__(self, value: float) -> float:
        share = log10(value / self.low) / log10(self.high / self.low)
        return self.start_px + share * (self.end_px - self.start_px)

    def ticks(self, count: int = 5) -> list[float]:
        """1, 1.5, 2, 3, 5 and 7 in each decade."""
        decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        every = [factor * 10.0**decade for decade in decades for factor in (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)]
        return [value for value in every if self.low <= value <= self.high]


def log_around(values: Sequence[float], start_px: float, end_px: float, margin: float = 0.1) -> LogScale:
    """A logarithmic scale that shows all values with some room."""
    low, high = min(values), max(values)
    room = (high / low) ** margin if high > low else 1.2
    return LogScale(low / room, high * room, start_px, end_px)


def around(values: Sequence[float], start_px: float, end_px: float, margin: float = 0.06) -> Scale:
    """A scale that shows all values with some room."""
    low, high = min(values), max(values)
    room = (high - low or abs(high) or 1.0) * margin
    return Scale(low - room, high + room, start_px, end_px)


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def rect(x: float, y: float, width: float, height: float, css: str, title: str = "") -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}" class="{css}"'
    return f"<rect {box}>{_title(title)}</rect>"


def circle(x: float, y: float, radius: float, css: str, title: str = "") -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{css}">{_title(title)}</circle>'


def text(x: float, y: float, words: str, css: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(words)}</text>'


def path(points: Sequence[tuple[float, float]], css: str, *, closed: bool = False, title: str = "") -> str:
    steps = " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<path d="M{steps}{"Z" if closed else ""}" class="{css}">{_title(title)}</path>'


def picture(width: float, height: float, label: str, parts: Sequence[str], css: str = "") -> str:
    """A figure that scales with its column and says what it shows."""
    head = f'<svg viewBox="0 0 {width:g} {height:g}" class="{css}" role="img" aria-label="{escape(label)}">'
    return head + "".join(parts) + "</svg>"


def spread_labels(wanted: Sequence[float], least_gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones, in their order, at least ``least_gap`` apart and within [low, high]."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = [0.0] * len(wanted)
    edge = low - least_gap
    for index in order:
        edge = placed[index] = max(wanted[index], edge + least_gap)
    edge = high + least_gap
    for index in reversed(order):
        edge = placed[index] = min(placed[index], edge - least_gap)
    return placed


def _round_step(rough: float) -> float:
    power = 10.0 ** floor(log10(rough)) if rough > 0 else 1.0
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))


def _title(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""
