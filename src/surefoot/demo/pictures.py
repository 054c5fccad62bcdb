"""The page's pictures. Each is drawn twice, for a wide column and for a narrow one, so that words stay readable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from surefoot.pages.svg import Scale, around, circle, line, path, picture, text
from surefoot.scenario.curves import Points

WIDE_PX, NARROW_PX = 880.0, 340.0
_LEFT_PX, _RIGHT_PX, _TOP_PX, _BOTTOM_PX = 46.0, 12.0, 26.0, 40.0
Marks = Sequence[tuple[float, str]]
"""(place on the x axis, label) of events."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One way's steps over time."""

    css: str
    parts: list[Points]
    """One an attempt."""


def both(draw: Callable[[float], str]) -> str:
    """A picture for wide and one for narrow columns; the style sheet shows one of them."""
    return draw(WIDE_PX) + draw(NARROW_PX)


def loss_picture(width_px: float, calm: list[Points], disturbed: list[Points], marks: Marks, label: str) -> str:
    """Undisturbed: wide and light; disturbed: thin and dark, on top; events: dashed."""
    every = [point for part in (*calm, *disturbed) for point in part]
    height_px = 320.0 if width_px > NARROW_PX else 260.0
    x = Scale(0, max(step for step, _ in every), _LEFT_PX, width_px - _RIGHT_PX)
    y = around([loss for _, loss in every], height_px - _BOTTOM_PX, _TOP_PX)
    parts = [*_frame(x, y, width_px, height_px, "steps finished", "loss"), *_marks(x, marks, height_px)]
    parts += [path(_at(part, x, y), "calm") for part in calm if part]
    parts += [path(_at(part, x, y), "disturbed") for part in disturbed if part]
    return _picture(width_px, height_px, label, parts)


def progress_picture(width_px: float, curves: Sequence[Curve], label: str) -> str:
    """Steps over seconds: flat where nothing was trained, down where steps are trained again."""
    height_px = 340.0 if width_px > NARROW_PX else 280.0
    every = [point for curve in curves for part in curve.parts for point in part]
    x = Scale(0, max(at for at, _ in every), _LEFT_PX, width_px - _RIGHT_PX)
    y = Scale(0, max(step for _, step in every), height_px - _BOTTOM_PX, _TOP_PX)
    parts = _frame(x, y, width_px, height_px, "seconds", "steps finished")
    for curve in curves:
        parts.append(path(_at(_joined(curve.parts), x, y), f"way {curve.css}"))
    return _picture(width_px, height_px, label, parts)


def stall_picture(width_px: float, rows: Sequence[tuple[str, list[float]]], step_s: float, label: str) -> str:
    """A dot a boundary, in milliseconds, beside what a step takes."""
    height_px = _TOP_PX + _BOTTOM_PX + 46.0 * len(rows)
    high_ms = max([step_s, *(value for _, values in rows for value in values)]) * 1e3
    x = Scale(0, high_ms * 1.05, 16.0, width_px - _RIGHT_PX)
    bottom_px = height_px - _BOTTOM_PX
    parts = [*_x_axis(x, width_px, bottom_px, "milliseconds")]
    parts += [line(x(step_s * 1e3), _TOP_PX - 6, x(step_s * 1e3), bottom_px, "mark")]
    parts += [text(x(step_s * 1e3) - 4, _TOP_PX - 10, "a step", "note", "end")]
    for number, (title, values) in enumerate(rows):
        top_px = _TOP_PX + 46.0 * number
        parts.append(text(16, top_px + 14, title, "note"))
        # Up and down in turn, so that equal ones are seen to be several.
        parts += [
            circle(x(value * 1e3), top_px + 24 + 4 * (index % 4), 3, "stall") for index, value in enumerate(values)
        ]
    return _picture(width_px, height_px, label, parts)


# ---------------------------------------------------------------------- parts


def _picture(width_px: float, height_px: float, label: str, parts: Sequence[str]) -> str:
    return picture(width_px, height_px, label, parts, "wide" if width_px > NARROW_PX else "narrow")


def _at(points: Points, x: Scale, y: Scale) -> Points:
    return [(x(across), y(up)) for across, up in points]


def _joined(parts: list[Points]) -> Points:
    """One line: level from the end of an attempt to the first step of the next."""
    points: Points = []
    for part in parts:
        if points and part:
            points.append((part[0][0], points[-1][1]))
        points += part
    return points


def _frame(x: Scale, y: Scale, width_px: float, height_px: float, across: str, up: str) -> list[str]:
    parts = _x_axis(x, width_px, height_px - _BOTTOM_PX, across)
    for value in y.ticks(5):
        parts.append(line(_LEFT_PX, y(value), width_px - _RIGHT_PX, y(value), "grid"))
        parts.append(text(_LEFT_PX - 6, y(value) + 4, f"{value:g}", "tick", "end"))
    return [*parts, text(4, 12, up, "tick")]


def _x_axis(x: Scale, width_px: float, bottom_px: float, across: str) -> list[str]:
    parts = [line(x.start_px, bottom_px, x.end_px, bottom_px, "base")]
    for value in x.ticks(10 if width_px > NARROW_PX else 5):
        parts.append(text(x(value), bottom_px + 16, f"{value:g}", "tick", "middle"))
    return [*parts, text(x.end_px, bottom_px + 33, across, "tick", "end")]


def _marks(x: Scale, marks: Marks, height_px: float) -> list[str]:
    parts = []
    for at, label in marks:
        parts.append(line(x(at), _TOP_PX - 8, x(at), height_px - _BOTTOM_PX, "mark"))
        parts.append(text(x(at), _TOP_PX - 12, label, "strong", "middle"))
    return parts
