"""The worked example as a page of Markdown; run as a script, writes `docs/builders/worked-example.md`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from brief_figures import figures, replica_survival_of_eight

from surefoot.money.closed_form import goodput
from surefoot.money.form import Form, example_options, request_of
from surefoot.money.hazards import from_trace, mean_survival
from surefoot.money.planner import Plan, make_plan
from surefoot.money.request import Request
from surefoot.money.results import SchemeResult, timing_for
from surefoot.money.schemes import by_name
from surefoot.money.simulate import simulate
from surefoot.money.survival import group_survival
from surefoot.money.traces import load_trace
from surefoot.money.units import HOUR_S, show_duration, show_share, show_usd

_TRACES = ("bamboo-a100", "bamboo-v100", "bamboo-p3", "bamboo-g4dn")
_ON_TRACES = ("naive-tuned", "sharded-sync", "two-tier-shrink", "two-tier-standby")


def worked_example(plan: Plan) -> str:
    """Markdown, the same for the same seed."""
    parts = [
        _intro(plan),
        _answer(plan),
        _figures(plan),
        _simple(plan),
        _traces(plan),
        _money(plan),
        _assumed(plan),
    ]
    return "\n".join(parts)


def _intro(plan: Plan) -> str:
    return f"""# The worked example: 70B parameters on 64 spot H100

Written by `python docs/builders/worked_example/write_page.py` from the plan of `surefoot plan --example brief` (seed
{plan.request.seed}, {plan.request.runs} simulated runs of each scheme); do not edit by hand. "The brief" is the pair of
articles that this project set out from; its premises are inputs here, its conclusions are computed again. How the
figures are made: [money.md](../guides/money.md). A forecast, not a bill, and nothing here was measured on a GPU.
"""


def _answer(plan: Plan) -> str:
    best, advice = plan.best, plan.advice
    rows = [_scheme_row(result) for result in plan.schemes]
    head = (
        "scheme",
        "interval",
        "goodput",
        "net saving",
        "by price",
        "by scheme",
        "lost steps",
        "re-done h",
        "USD",
        "p95 USD",
        "hours",
        "p95 hours",
    )
    saving, hours = best.saving, best.expected.wall_s / HOUR_S
    return f"""## The answer

**{show_usd(best.cost_usd)} USD and {hours:.1f} h with {best.scheme.title}** (p95 {show_usd(best.cost.p95)} USD and
{best.wall_s.p95 / HOUR_S:.1f} h), against {show_usd(plan.on_demand_usd)} USD on demand.
Net {show_share(saving.net, 2)}:
{show_share(saving.price, 2)} is the price, which any spot user has with `{plan.request.baseline}`;
{show_share(saving.scheme, 2)} is the scheme. Warm standby nodes: {advice.standby}. An emergency needs
{plan.window.needed_s:.2f} s of the {plan.window.window_s:.0f} s window.

{_markdown(head, rows)}
Lost steps are finished steps that had to be done again; the step in flight counts in the re-done hours only.
Means are exact (closed form), percentiles simulated.
"""


def _scheme_row(result: SchemeResult) -> tuple[str, ...]:
    outcome, saving = result.expected, result.saving
    return (
        result.scheme.title,
        show_duration(result.timing.interval_s),
        f"{outcome.goodput:.3f}",
        show_share(saving.net),
        show_share(saving.price),
        show_share(saving.scheme),
        f"{outcome.lost_steps:,.0f}",
        f"{outcome.lost_work_s / HOUR_S:.2f}",
        show_usd(result.cost_usd),
        show_usd(result.cost.p95),
        f"{outcome.wall_s / HOUR_S:.1f}",
        f"{result.wall_s.p95 / HOUR_S:.1f}",
    )


def _figures(plan: Plan) -> str:
    rows = [(f.claim, f.computed, f"**{f.verdict}**{': ' + f.why if f.why else ''}") for f in figures(plan)]
    return f"""## Every figure of the brief

{_markdown(("the brief", "computed", "verdict"), rows)}"""


def _simple(plan: Plan) -> str:
    rows = []
    for result in plan.schemes:
        simple = simple_goodput(plan.request, result)
        if simple is None:
            continue
        exact, simulated = result.closed.goodput, result.simulated.goodput
        long_run = goodput(plan.request.job, result.timing, plan.request.hazard, plan.request.announced)
        rows.append((result.scheme.name, f"{simple:.4f}", f"{long_run:.4f}", f"{exact:.4f}", f"{simulated:.4f}"))
    return f"""## Against the usual formula

The usual estimate for background saves is g = (1 − s/(τ+s)) / (1 + E/M), with E = lost + stop + wait (wait ÷ N when the
others go on; lost = (τ+s)/2 + upload without a replica, nothing with one). For this job, blocking saves left out (their
exact form is the usual one):

{_markdown(("scheme", "usual formula", "exact, endless job", "exact, this job", "simulated"), rows)}
Where they differ: the usual formula lets the load go undisturbed (an eviction during it starts it again), forgets the
step in flight (6 s), and forgets that growing back is a second stop (18 s). This job also waits once for its last
upload: 34 s to 271 s in 72 h.
"""


def simple_goodput(request: Request, result: SchemeResult) -> float | None:
    """The usual formula for background saves; None for blocking ones, whose exact form is used everywhere."""
    timing, job = result.timing, request.job
    if result.scheme.save == "blocking":
        return None
    hot = sum(timing.hot_shares(1, request.announced))
    lost_s = (1.0 - hot) * (timing.period_s / 2.0 + timing.lag_s)
    stop_s = timing.restart_s if hot else timing.load_s + timing.restart_s
    wait_s = timing.replacement_s / (job.nodes if timing.shrink else 1)
    if timing.standby:
        wait_s = 0.0
    stalled = timing.stall_s / timing.period_s
    return (1.0 - stalled) / (1.0 + (lost_s + stop_s + wait_s) / request.hazard.mean_gap_s)


def _traces(plan: Plan) -> str:
    rows = [_trace_row(plan, name) for name in _TRACES]
    pairs = [(str(k), show_share(two), show_share(four)) for k, two, four in replica_survival_of_eight()]
    head = ("trace", "node MTBF", "hits job each", "of ≥ 2 nodes", "pairs outlive", "fours outlive", *_ON_TRACES)
    return f"""## The same job with evictions as in public traces

No public trace has H100s; the newest GPU is the A100 of 2021. Each trace is replayed from random starts with its own
clusters of losses; the job's 8 nodes are a random draw from the fleet. No notice is used, so that only replicas help.
Goodput, simulated:

{_markdown(head, rows)}
Eight nodes, k lost at once, P(every image keeps a copy):

{_markdown(("k", "pairs", "groups of four"), pairs)}"""


def _trace_row(plan: Plan, name: str) -> tuple[str, ...]:
    trace = load_trace(name)
    nodes = plan.request.job.nodes
    hazard = from_trace(trace, nodes)
    request = replace(plan.request, hazard=hazard, announced=0.0)
    sizes = hazard.sizes
    lived = [mean_survival(sizes, {k: group_survival(nodes, group, k) for k in sizes}) for group in (2, 4)]
    cells = [f"{_replayed(request, scheme):.3f}" for scheme in _ON_TRACES]
    return (
        trace.note,
        f"{trace.node_mtbf_s / HOUR_S:.1f} h",
        show_duration(hazard.mean_gap_s),
        show_share(1.0 - sizes.get(1, 0.0), 0),
        *(show_share(share) for share in lived),
        *cells,
    )


def _replayed(request: Request, scheme: str) -> float:
    timing = timing_for(request, by_name(request.schemes, scheme))
    runs = simulate(request.job, timing, request.hazard, runs=300, seed=request.seed)
    return runs.mean().goodput


def _money(plan: Plan) -> str:
    months, best = plan.months, plan.best
    horizon = months.need.months
    ways = [
        (way.name, show_usd(way.upfront_usd), show_usd(way.monthly_usd), show_usd(way.cumulated_usd(horizon)[-1]))
        for way in months.ways
    ]
    traps = [
        (trap.title, show_usd(trap.run_usd), show_usd(trap.month_usd), show_share(trap.share_of_compute, 0))
        for trap in plan.traps
    ]
    lines = [
        (line.name, f"{line.quantity:,.2f} {line.unit}s", f"{line.usd_per_unit:,.4g}", f"{line.cost_usd:,.2f}")
        for line in best.lines
    ]
    lines.append(("**total**", "", "", f"**{best.cost_usd:,.2f}**"))
    paybacks = "\n".join(f"- {way} against {other}: {_months(value)}" for way, other, value in months.paybacks)
    return f"""## Where the money goes

{_markdown(("component", "quantity", "USD each", "USD"), lines)}
The way to the bucket, a full checkpoint each {show_duration(best.timing.interval_s)}:

{_markdown(("way", "USD this run", "USD a month", "of the GPUs' cost"), traps)}
## Over {horizon} months

{_markdown(("way", "upfront USD", "USD a month", f"USD after {horizon} months"), ways)}
Payback:

{paybacks}
- adopting the scheme (the engineers' hours below): {_months(months.adoption_months)}
"""


def _months(value: float) -> str:
    return "never within its term" if value == float("inf") else f"{value:.1f} months"


def _assumed(plan: Plan) -> str:
    rows = [(note.name, f"{_value(note.value)} {note.unit}", note.source) for note in plan.request.assumptions]
    warned = "\n".join(f"- {caution.text}" for caution in plan.cautions)
    return f"""## What the planner warns of

{warned}

## Assumptions

{_markdown(("what", "value", "source"), rows)}"""


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}"


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    brief = make_plan(request_of(Form(**example_options("brief"))))
    (Path(__file__).parents[1] / "worked-example.md").write_text(worked_example(brief), encoding="utf-8")
