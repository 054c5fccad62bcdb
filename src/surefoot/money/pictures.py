"""The pictures of a plan: who saves what, cost against time, distributions, what matters, months."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from surefoot.money.hazards import Floats
from surefoot.money.planner import Plan, Point
from surefoot.money.results import SchemeResult
from surefoot.money.units import HOUR_S, show_share, show_usd
from surefoot.pages.svg import (
    LogScale,
    Scale,
    around,
    circle,
    line,
    log_around,
    path,
    picture,
    rect,
    spread_labels,
    text,
)

WIDTH = 920.0
LEFT = 190.0
RIGHT = 30.0
WORDS = 216.0
"""Room for words at the right."""
ROW = 34.0


def savings(plan: Plan) -> str:
    """Of each on-demand dollar: what the price saves, what the scheme saves, what is still paid."""
    rows = [result for result in plan.schemes if result.finishes]
    height = ROW * len(rows) + 60
    widest = max([1.0, *(1.0 - min(r.saving.net, r.saving.price) for r in rows)])
    x = Scale(0.0, min(widest, 3.0), LEFT, WIDTH - WORDS)
    parts = _vertical_grid(x, 30, height - 26, lambda share: show_share(share, 0))
    for index, result in enumerate(rows):
        parts += _saving_row(plan, result, x, 34 + index * ROW)
    parts.append(line(x(1), 26, x(1), height - 26, "base"))
    parts.append(text(x(1), 16, "on-demand", "note", "end"))
    parts.append(text(WIDTH - WORDS + 12, 16, "net = price + scheme", "note"))
    return picture(WIDTH, height, "who saves what, by scheme", parts)


def pareto(plan: Plan) -> str:
    """Expected cost against expected time to finish; the front is drawn."""
    points = [point for point in plan.points if np.isfinite(point.cost_usd) and np.isfinite(point.wall_s)]
    height = 460.0
    x = around([point.wall_s / HOUR_S for point in points], 70, WIDTH - RIGHT, 0.1)
    y = log_around([point.cost_usd for point in points], height - 50, 24)
    parts = _axes(x, y, height, "hours until done", "USD")
    front = sorted((point for point in points if point.on_front), key=lambda point: point.wall_s)
    parts.append(path(_stairs(front, x, y), "front"))
    taken: list[_Box] = [_box_at(x(p.wall_s / HOUR_S) - 5, y(p.cost_usd) + 5, 10, 10) for p in points]
    for together in sorted(_coinciding(points), key=lambda group: not group[0].on_front):
        parts += _labelled(together, x(together[0].wall_s / HOUR_S), y(together[0].cost_usd), taken)
    return picture(WIDTH, height, "cost against time to finish, with the Pareto front", parts)


def tornado(plan: Plan) -> str:
    """Cost of the recommended scheme with each input low and high."""
    bars = plan.bars
    base = plan.best.cost_usd
    height = ROW * len(bars) + 60
    values = [base, *(bar.low_usd for bar in bars), *(bar.high_usd for bar in bars)]
    x = around([value for value in values if np.isfinite(value)], LEFT + 40, WIDTH - WORDS)
    parts = _vertical_grid(x, 30, height - 26, show_usd)
    for index, bar in enumerate(bars):
        top = 34 + index * ROW
        parts.append(text(LEFT - 6, top + 15, bar.name, "label", "end"))
        ends = ((bar.low_usd, bar.low, bar.low_best), (bar.high_usd, bar.high, bar.high_best))
        # The longer one first; on the same side only it has words.
        for value, words, winner in sorted(ends, key=lambda end: -abs(end[0] - base)):
            flipped = "" if winner == plan.advice.scheme else f": {winner}"
            hidden = value != max(ends, key=lambda end: abs(end[0] - base))[0] and _same_side(ends, base)
            parts += _tornado_bar(x, base, value, top, f"{bar.name} {words}", "" if hidden else words + flipped)
    parts.append(line(x(base), 28, x(base), height - 26, "base"))
    parts.append(text(x(base), 18, f"{show_usd(base)} USD", "note", "middle"))
    return picture(WIDTH, height, "tornado: cost with each input low and high", parts)


def finishing(plan: Plan) -> str:
    """Distribution of finishing times of the simulated runs."""
    results = _shown(plan)
    deadline_s = plan.request.limits.deadline_s
    deadline = None if deadline_s is None else deadline_s / HOUR_S
    series = [(r.scheme.name, r.walls_s / HOUR_S) for r in results]
    return _distributions(series, "hours until done", plan.advice.scheme, deadline, "deadline")


def costs(plan: Plan) -> str:
    """Distribution of the cost of the simulated runs."""
    budget = plan.request.limits.budget_usd
    series = [(r.scheme.name, r.costs_usd) for r in _shown(plan)]
    return _distributions(series, "USD", plan.advice.scheme, budget, "budget")


def months(plan: Plan) -> str:
    """Money spent by each way to have the capacity, month by month."""
    ways, horizon = plan.months.ways, plan.months.need.months
    height, label_x = 420.0, WIDTH - 220
    spent = [way.cumulated_usd(horizon) for way in ways]
    x = Scale(0, horizon, 80, label_x - 40)
    y = Scale(0, max(amounts[-1] for amounts in spent) * 1.04 / 1e6, height - 46, 20)
    parts = _axes(x, y, height, "months", "million USD")
    places = spread_labels([y(amounts[-1] / 1e6) for amounts in spent], 18, 24, height - 50)
    for way, amounts, place in zip(ways, spent, places, strict=True):
        css = "way best" if way.name == "spot with Surefoot" else "way"
        end = (x(horizon), y(amounts[-1] / 1e6))
        parts.append(path([(x(m), y(a / 1e6)) for m, a in enumerate(amounts)], css, title=way.name))
        parts.append(line(*end, label_x - 6, place - 4, "leader"))
        words = f"{way.name}  {amounts[-1] / 1e6:.2f} M"
        parts.append(text(label_x, place, words, "label strong" if css == "way best" else "label"))
    return picture(WIDTH, height, "money spent over the months by each way", parts)


def _saving_row(plan: Plan, result: SchemeResult, x: Scale, top: float) -> list[str]:
    """Paid, from 0; what the scheme saves, up to the baseline's cost; what the price saves, up to on-demand."""
    saving = result.saving
    paid, baseline = (min(1.0 - share, x.high) for share in (saving.net, saving.price))
    strong = "label strong" if result.scheme.name == plan.advice.scheme else "label"
    sign = "−" if saving.scheme < 0 else "+"
    words = f"{show_share(saving.net)} = {show_share(saving.price)} {sign} {show_share(abs(saving.scheme))}"
    scheme = ("loss", baseline, paid) if saving.scheme < 0 else ("scheme", paid, baseline)
    price_start = max(paid, baseline)
    return [
        text(LEFT - 10, top + 16, result.scheme.name, strong, "end"),
        rect(x(0), top, x(min(paid, baseline) if saving.scheme < 0 else paid) - x(0), 22, "paid", "paid"),
        rect(x(scheme[1]), top, x(scheme[2]) - x(scheme[1]), 22, scheme[0], f"scheme: {show_share(saving.scheme)}"),
        rect(x(price_start), top, x(1) - x(price_start), 22, "price", f"price: {show_share(saving.price)}"),
        text(x(0) + 8, top + 15, f"{show_usd(result.cost_usd)} USD", "inbar"),
        text(WIDTH - WORDS + 12, top + 15, words, strong),
    ]


_Box = tuple[float, float, float, float]


def _box_at(x: float, y: float, width: float, height: float) -> _Box:
    """Left, top, right, bottom of a mark whose lower left corner is at x, y."""
    return x, y - height, x + width, y


def _coinciding(points: Sequence[Point]) -> list[list[Point]]:
    """Points that the eye cannot tell apart, together; those of the front first."""
    groups: list[list[Point]] = []
    for point in sorted(points, key=lambda p: not p.on_front):
        for group in groups:
            first = group[0]
            if abs(point.cost_usd / first.cost_usd - 1) < 0.004 and abs(point.wall_s / first.wall_s - 1) < 0.004:
                group.append(point)
                break
        else:
            groups.append([point])
    return groups


def _labelled(together: Sequence[Point], at_x: float, at_y: float, taken: list[_Box]) -> list[str]:
    """A mark and, where there is room near it, its name. Without room the name is in the mark's tooltip."""
    first = together[0]
    names = " = ".join(point.name for point in together)
    css = "point front-point" if first.on_front else "point"
    title = f"{names}: {show_usd(first.cost_usd)} USD, {first.wall_s / HOUR_S:.1f} h"
    parts = [circle(at_x, at_y, 5.5 if first.on_front else 4, css, title)]
    words = f"{names}  {show_usd(first.cost_usd)}"
    width = 7.2 * len(words)
    for dx, dy in ((11, 4), (11, 20), (11, -12), (11, 36), (11, -28), (-width - 11, 4)):
        box = _box_at(at_x + dx, at_y + dy, width, 14)
        inside = box[2] < WIDTH and box[0] > 60
        if inside and not any(_overlap(box, other) for other in taken):
            taken.append(box)
            parts.append(text(at_x + dx, at_y + dy, words, "label strong" if first.on_front else "label"))
            break
    return parts


def _overlap(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _stairs(front: Sequence[Point], x: Scale, y: Scale | LogScale) -> list[tuple[float, float]]:
    """Between two points of a front nothing better is known: the line goes along, then down."""
    corners: list[tuple[float, float]] = []
    for point in front:
        at = (x(point.wall_s / HOUR_S), y(point.cost_usd))
        if corners:
            corners.append((at[0], corners[-1][1]))
        corners.append(at)
    return corners or [(x(x.low), y(y.low))]


def _same_side(ends: Sequence[tuple[float, str, str]], base: float) -> bool:
    return (ends[0][0] > base) == (ends[1][0] > base)


def _tornado_bar(x: Scale, base: float, value: float, top: float, title: str, words: str) -> list[str]:
    if not np.isfinite(value):
        return [text(WIDTH - WORDS + 10, top + 15, f"{words}: never ends", "note")]
    left, right = sorted((x(base), x(value)))
    css = "more" if value > base else "less"
    bar = rect(left, top, right - left, 20, css, f"{title}: {show_usd(value)} USD")
    if right - left < 6:
        return [bar]
    if value > base:
        return [bar, text(right + 6, top + 15, words, "note")]
    return [bar, text(left - 6, top + 15, words, "note", "end")]


def _shown(plan: Plan) -> list[SchemeResult]:
    """Schemes whose spread can be compared on one axis."""
    return [result for result in plan.schemes if result.finishes]


def _distributions(
    series: Sequence[tuple[str, Floats]], unit: str, strong: str, limit: float | None, limit_name: str
) -> str:
    step, top = 46.0, 40.0
    height = top + step * len(series) + 40
    edges = [float(q) for _, values in series for q in np.percentile(values, (0.5, 99))]
    x = around([*edges, *([limit] if limit is not None else [])], LEFT, WIDTH - RIGHT, 0.03)
    parts = _vertical_grid(x, top - 8, height - 30, show_usd if unit == "USD" else lambda v: f"{v:g}")
    for index, (name, values) in enumerate(series):
        parts += _ridge(x, values, top + step * (index + 1) - 8, step * 0.82, name, name == strong)
    if limit is not None:
        parts.append(line(x(limit), top - 14, x(limit), height - 30, "limit"))
        parts.append(text(x(limit) + 6, height - 36, limit_name, "note"))
    parts.append(text(LEFT, 14, f"{unit}; the line is p5 to p95, the dot the median", "note"))
    return picture(WIDTH, height, f"distribution of {unit}", parts)


def _ridge(x: Scale, values: Floats, floor_y: float, room: float, name: str, strong: bool) -> list[str]:
    edge_low, edge_high = (float(q) for q in np.percentile(values, (0.3, 99.7)))
    room_x = max((edge_high - edge_low) * 0.08, (x.high - x.low) * 0.002)
    bins = np.linspace(edge_low - room_x, edge_high + room_x, 56)
    counts, _ = np.histogram(values, bins)
    smooth = np.convolve(counts, np.array([1, 2, 3, 2, 1]) / 9.0, mode="same")
    tall = smooth.max() or 1.0
    middles = (bins[:-1] + bins[1:]) / 2
    curve = [(x(float(m)), floor_y - room * float(c) / float(tall)) for m, c in zip(middles, smooth, strict=True)]
    outline = [(curve[0][0], floor_y), *curve, (curve[-1][0], floor_y)]
    low, middle, high = (float(q) for q in np.percentile(values, (5, 50, 95)))
    return [
        path(outline, "ridge strong-ridge" if strong else "ridge", closed=True, title=name),
        line(x(low), floor_y, x(high), floor_y, "band"),
        circle(x(middle), floor_y, 3.6, "median", f"{name}: p5 {low:,.4g}, median {middle:,.4g}, p95 {high:,.4g}"),
        text(LEFT - 10, floor_y - 3, name, "label strong" if strong else "label", "end"),
    ]


def _vertical_grid(x: Scale, top: float, bottom: float, words: object) -> list[str]:
    parts = []
    for tick in x.ticks():
        parts.append(line(x(tick), top, x(tick), bottom, "grid"))
        parts.append(text(x(tick), bottom + 17, words(tick), "tick", "middle"))  # type: ignore[operator]
    return parts


def _axes(x: Scale, y: Scale | LogScale, height: float, x_name: str, y_name: str) -> list[str]:
    right = x.end_px
    parts = []
    for tick in x.ticks(6):
        parts.append(line(x(tick), 16, x(tick), height - 46, "grid"))
        parts.append(text(x(tick), height - 29, f"{tick:g}", "tick", "middle"))
    for tick in y.ticks(5):
        parts.append(line(x.start_px, y(tick), right, y(tick), "grid"))
        parts.append(text(x.start_px - 8, y(tick) + 4, show_usd(tick) if tick >= 100 else f"{tick:g}", "tick", "end"))
    parts.append(text((x.start_px + right) / 2, height - 8, x_name, "note", "middle"))
    parts.append(text(x.start_px - 8, 12, y_name, "note", "end"))
    return parts
