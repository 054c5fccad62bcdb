"""A plan as tables that a person understands."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from surefoot.money.planner import Plan
from surefoot.money.results import SchemeResult
from surefoot.money.units import HOUR_S, show_duration, show_share, show_usd


def print_plan(plan: Plan, console: Console) -> None:
    """Headline, schemes, capacity, months, what matters, warnings, assumptions."""
    console.print(
        Group(
            _headline(plan),
            "",
            _schemes(plan, wide=console.width >= WIDE),
            "",
            _capacity(plan),
            "",
            _policies(plan),
            "",
            _months(plan),
            "",
            _tornado(plan),
            "",
            _cautions(plan),
            "",
            _assumptions(plan),
        )
    )


def _headline(plan: Plan) -> RenderableType:
    best, advice = plan.best, plan.advice
    lines = [
        f"[bold]{best.scheme.title}[/bold] on spot: {show_usd(best.cost_usd)} USD expected, "
        f"{show_usd(best.cost.p50)} p50, {show_usd(best.cost.p95)} p95; "
        f"done in {best.expected.wall_s / HOUR_S:.1f} h ({best.wall_s.p50 / HOUR_S:.1f} p50, "
        f"{best.wall_s.p95 / HOUR_S:.1f} p95).",
        f"On-demand: {show_usd(plan.on_demand_usd)} USD. Net saving {show_share(best.saving.net)}: "
        f"{show_share(best.saving.price)} is the price, {show_share(best.saving.scheme)} the scheme.",
        f"Do: durable save every {show_duration(advice.interval_s)}; tiers {', '.join(advice.tiers)}; "
        f"{advice.replicas} replica(s); {advice.standby} standby node(s). Next best: {advice.next_best}.",
        f"Why: {advice.reason}. Spot is worth it above a goodput of {advice.least_goodput:.3f}.",
        _emergency(plan),
    ]
    return Text.from_markup("\n".join(lines))


def _emergency(plan: Plan) -> str:
    window = plan.window
    if window.needed_s == float("inf"):
        return f"An emergency saves nothing with this scheme; the window is {show_duration(window.window_s)}."
    return (
        f"An emergency needs {show_duration(window.needed_s)} of the eviction window of "
        f"{show_duration(window.window_s)} ({show_share(window.share, 0)})."
    )


def _schemes(plan: Plan, *, wide: bool) -> Table:
    shown = [column for column in _COLUMNS if wide or column in _NARROW]
    table = _table("schemes on spot", shown)
    table.columns[0].no_wrap = True
    for result in plan.schemes:
        cells = _scheme_cells(result)
        style = "bold" if result.scheme.name == plan.advice.scheme else None
        table.add_row(*(cells[column] for column in shown), style=style)
    return table


def _scheme_cells(result: SchemeResult) -> dict[str, str]:
    outcome, saving = result.expected, result.saving
    least = "" if result.finishes else "≥ "  # runs that were cut
    values = (
        result.scheme.name,
        show_duration(result.timing.interval_s),
        f"{outcome.goodput:.3f}",
        show_share(saving.net),
        show_share(saving.price),
        show_share(saving.scheme),
        f"{outcome.lost_steps:,.0f}",
        f"{outcome.lost_work_s / HOUR_S:.2f}",
        least + show_usd(result.cost_usd),
        least + show_usd(result.cost.p95),
        f"{outcome.wall_s / HOUR_S:.1f}",
        f"{result.wall_s.p95 / HOUR_S:.1f}",
    )
    return dict(zip(_COLUMNS, values, strict=True))


WIDE = 120
"""Columns of a terminal that hold the whole table of schemes."""
_COLUMNS = (
    "scheme",
    "interval",
    "goodput",
    "net",
    "by price",
    "by scheme",
    "lost steps",
    "redone h",
    "USD",
    "p95 USD",
    "hours",
    "p95 h",
)
_NARROW = ("scheme", "goodput", "net", "by price", "by scheme", "USD", "p95 USD", "p95 h")


def _capacity(plan: Plan) -> Table:
    table = _table("capacity", ("kind", "USD", "p50", "p95", "hours", "p50", "p95", "on time", "what"), last_left=True)
    for row in plan.capacity:
        cost, wall = row.cost, row.wall_s
        amounts = [show_usd(value) for value in (cost.mean, cost.p50, cost.p95)]
        hours = [f"{value / HOUR_S:.1f}" for value in (wall.mean, wall.p50, wall.p95)]
        table.add_row(row.name, *amounts, *hours, show_share(row.on_time_share, 0), row.detail)
    if plan.mix is None:
        table.caption = f"no mix: {plan.mix_note}"
    else:
        found = plan.mix.mix
        table.caption = (
            f"mix solved to {show_usd(found.objective_usd)} USD, bound {show_usd(found.bound_usd)}, "
            f"gap {show_share(found.gap, 2)}; availability: {plan.mix.offer.name}"
        )
    return table


def _policies(plan: Plan) -> RenderableType:
    if not plan.trials:
        return Text("no deadline given: the deadline policies are not compared")
    restart = show_duration(plan.best.timing.restart_s)
    table = _table("meeting the deadline", ("policy", f"USD, restart {restart}", "late", "USD, restart 600 s", "late"))
    for quick, slow in zip(plan.trials, plan.slow_trials, strict=True):
        table.add_row(
            quick.policy,
            show_usd(float(quick.cost_usd.mean())),
            show_share(quick.late_share, 0),
            show_usd(float(slow.cost_usd.mean())),
            show_share(slow.late_share, 0),
        )
    return table


def _months(plan: Plan) -> Table:
    months = plan.months
    horizon = months.need.months
    table = _table(f"over {horizon} months", ("way", "upfront USD", "USD a month", f"USD after {horizon} months"))
    for way in months.ways:
        amounts = (way.upfront_usd, way.monthly_usd, way.cumulated_usd(horizon)[-1])
        table.add_row(way.name, *(show_usd(amount) for amount in amounts))
    table.caption = "\n".join(_payback_lines(plan))
    return table


def _payback_lines(plan: Plan) -> list[str]:
    months = plan.months
    lines = [f"{way} pays back against {other}: {_in_months(value)}" for way, other, value in months.paybacks]
    if months.break_even_utilisation is not None:
        lines.append(f"reserving beats spot above a utilisation of {show_share(months.break_even_utilisation, 0)}")
    lines.append(f"adopting Surefoot pays back: {_in_months(months.adoption_months)}")
    facts = plan.advice.standby_facts
    lines.append(
        f"a warm standby pays below {show_duration(facts.break_even_gap_s)} between evictions, or when an hour of "
        f"delay is worth {show_usd(facts.break_even_delay_usd_per_h)} USD"
    )
    lines.append(_break_even(plan))
    return lines


def _break_even(plan: Plan) -> str:
    facts, base = plan.break_even, plan.request.baseline

    def rate(gap_s: float) -> str:
        return "at every rate looked at" if gap_s == 0 else f"down to one eviction in {show_duration(gap_s)}"

    return f"spot is cheaper than on-demand {rate(facts.best_gap_s)} (with {base}: {rate(facts.baseline_gap_s)})"


def _in_months(value: float) -> str:
    return "never" if value == float("inf") else f"{value:.1f} months"


def _tornado(plan: Plan) -> Table:
    table = _table(
        "what matters most", ("input", "low", "high", "USD low", "USD high", "swing", "cheapest low", "high")
    )
    for bar in plan.bars:
        amounts = (bar.low_usd, bar.high_usd, bar.swing_usd)
        table.add_row(bar.name, bar.low, bar.high, *(show_usd(a) for a in amounts), bar.low_best, bar.high_best)
    return table


def _cautions(plan: Plan) -> RenderableType:
    if not plan.cautions:
        return Text("no warnings")
    return Text("\n".join(f"! {caution.text}" for caution in plan.cautions), style="yellow")


def _assumptions(plan: Plan) -> Table:
    table = _table("assumptions", ("what", "value", "unit", "source"), last_left=True)
    for note in plan.request.assumptions:
        value = note.value if isinstance(note.value, str) else f"{note.value:,.4g}"
        source = f"{note.source} ({note.as_of})" if note.as_of else note.source
        table.add_row(note.name, value, note.unit, source)
    return table


def _table(title: str, columns: Sequence[str], *, last_left: bool = False) -> Table:
    table = Table(
        box=None,
        title=title,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        pad_edge=False,
        header_style="dim",
    )
    for index, column in enumerate(columns):
        left = index == 0 or (last_left and index == len(columns) - 1)
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    return table
