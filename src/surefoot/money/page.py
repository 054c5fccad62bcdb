"""A plan as one self-contained HTML page: no network, no library, inline SVG and a few lines of script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from surefoot.money import pictures
from surefoot.money.as_json import plan_json
from surefoot.money.planner import Plan
from surefoot.money.units import HOUR_S, show_duration, show_share, show_usd

_STYLE = """
:root{--ink:#1c2430;--soft:#5d6a7a;--rule:#e3e7ec;--paper:#fff;--price:#a9c1de;--onprice:#14304f;--scheme:#e0822f;--paid:#3c4d63;
--loss:#b3261e;--less:#2f7d6b;--more:#b3562f;--ridge:#c9d5e3;--strong:#e0822f;--card:#f6f8fa}
@media(prefers-color-scheme:dark){:root{--ink:#e7ebf0;--soft:#9aa7b6;--rule:#2c3642;--paper:#12171d;--price:#4c6a91;--onprice:#fff;
--scheme:#e0822f;--paid:#8195ae;--loss:#e5675f;--less:#4fa891;--more:#d9804f;--ridge:#34465a;--card:#1a2129}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1000px;padding:40px 28px 80px;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:30px;margin:0 0 6px;letter-spacing:-.01em}h2{font-size:20px;margin:52px 0 4px}
p{margin:6px 0;max-width:75ch}.lead{color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:12px;margin:22px 0}
.card{background:var(--card);border-radius:10px;padding:14px 16px}.card b{display:block;font-size:25px;line-height:1.25}
.card span{color:var(--soft);font-size:14px}
svg{width:100%;height:auto;display:block;margin:14px 0}
svg text{fill:var(--ink);font-size:13px}.tick,.note{fill:var(--soft)!important;font-size:12px!important}
.strong{font-weight:650}.inbar{fill:#fff!important;font-size:12px!important}
.onprice{fill:var(--onprice)!important;font-size:12px!important}
.grid{stroke:var(--rule)}.leader{stroke:var(--rule)}.base{stroke:var(--ink);stroke-width:1.4}
.limit{stroke:var(--loss);stroke-dasharray:4 4;stroke-width:1.4}
.paid{fill:var(--paid)}.price{fill:var(--price)}.scheme{fill:var(--scheme)}.loss{fill:var(--loss)}
.less{fill:var(--less)}.more{fill:var(--more)}
.point{fill:var(--soft)}.front-point{fill:var(--scheme)}.front{fill:none;stroke:var(--scheme);stroke-width:1.8}
.ridge{fill:var(--ridge)}.strong-ridge{fill:var(--strong)}.band{stroke:var(--ink);stroke-width:2}.median{fill:var(--ink)}
.way{fill:none;stroke:var(--soft);stroke-width:1.4}.way.best{stroke:var(--scheme);stroke-width:3}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:14px;color:var(--soft)}
.key i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13.5px;margin:12px 0}
th,td{padding:6px 6px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th{color:var(--soft);font-weight:500}th:first-child,td:first-child,.words td{text-align:left}
.words td{white-space:normal}
table.last-words td:last-child,table.last-words th:last-child{text-align:left;white-space:normal}
tr.chosen td{font-weight:650}tr.lit td{background:var(--card)}
ul{padding-left:20px}li{margin:5px 0}footer{margin-top:48px;color:var(--soft);font-size:14px}
"""

_SCRIPT = """
document.querySelectorAll("table.sortable").forEach(function(table){
  table.querySelectorAll("th").forEach(function(head,column){
    head.style.cursor="pointer";
    head.addEventListener("click",function(){
      var body=table.tBodies[0],rows=Array.from(body.rows),up=head.dataset.up!=="1";
      head.dataset.up=up?"1":"0";
      rows.sort(function(a,b){
        var x=a.cells[column].dataset.value||a.cells[column].textContent;
        var y=b.cells[column].dataset.value||b.cells[column].textContent;
        var d=(isNaN(x)||isNaN(y))?x.localeCompare(y):x-y;
        return up?d:-d;});
      rows.forEach(function(row){body.appendChild(row);});
    });
  });
});
"""


def plan_page(plan: Plan) -> str:
    """The page. Everything a browser needs is in the returned text."""
    data = json.dumps(plan_json(plan), allow_nan=False).replace("<", "\\u003c")
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f"<title>Surefoot plan: {escape(plan.request.name)}</title>",
        # Without it a browser asks the network for an icon.
        '<link rel="icon" href="data:,"/>',
        f"<style>{_STYLE}</style></head><body>",
        *_body(plan),
        f'<script type="application/json" id="plan">{data}</script>',
        f"<script>{_SCRIPT}</script>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _body(plan: Plan) -> list[str]:
    return [
        *_head(plan),
        *_section("Who saves what", _SAVINGS, pictures.savings(plan), _KEY),
        *_section("Cost against time", _PARETO, pictures.pareto(plan)),
        *_section("When it is done", _FINISH, pictures.finishing(plan)),
        *_section("What it costs", _COST, pictures.costs(plan)),
        *_section("What matters most", _TORNADO, pictures.tornado(plan)),
        *_section("Over months", _MONTHS, pictures.months(plan)),
        "<h2>Schemes on spot</h2>",
        _scheme_table(plan),
        "<h2>Kinds of capacity</h2>",
        _capacity_table(plan),
        f"<p class='lead'>Mix: {escape(plan.mix_note)}.{_bound(plan)}</p>",
        "<h2>Warnings</h2>",
        _warnings(plan),
        "<h2>Assumptions</h2>",
        _assumptions(plan),
        "<footer>A forecast, not a bill. Written by surefoot plan; this page carries the same answer as JSON.</footer>",
    ]


_SAVINGS = "Of each dollar on demand. The price saving is what any spot user has with the baseline scheme."
_PARETO = "Expected values. Orange: no other option is both cheaper and sooner. Hover a mark for its name."
_FINISH = "Simulated runs, each curve at its own height. A narrow curve is a promise that can be kept."
_COST = "The same runs in dollars."
_TORNADO = "The recommended scheme, one input changed at a time. A name: the scheme that would then be cheapest."
_MONTHS = "The same GPUs, busy as long each month."
_KEY = (
    '<div class="key"><span><i class="paid" style="background:var(--paid)"></i>paid</span>'
    '<span><i style="background:var(--scheme)"></i>saved by the scheme</span>'
    '<span><i style="background:var(--price)"></i>saved by the price</span>'
    '<span><i style="background:var(--loss)"></i>lost by the scheme</span></div>'
)


def _section(title: str, words: str, drawing: str, key: str = "") -> list[str]:
    return [f"<h2>{escape(title)}</h2>", f"<p class='lead'>{escape(words)}</p>", key, drawing]


def _head(plan: Plan) -> list[str]:
    best, advice, window = plan.best, plan.advice, plan.window
    cards = [
        (f"{show_usd(best.cost_usd)} USD", f"expected; p95 {show_usd(best.cost.p95)}"),
        (f"{best.expected.wall_s / HOUR_S:.1f} h", f"until done; p95 {best.wall_s.p95 / HOUR_S:.1f} h"),
        (show_share(best.saving.net), f"saved of {show_usd(plan.on_demand_usd)} USD on-demand"),
        (
            show_share(best.saving.scheme),
            f"of it by the scheme, {show_share(best.saving.price)} by the price",
        ),
    ]
    emergency = (
        f"An emergency needs {show_duration(window.needed_s)} of a {show_duration(window.window_s)} window."
        if window.fits
        else f"The eviction window of {show_duration(window.window_s)} is too short for it."
    )
    words = (
        f"{best.scheme.title}: durable save every {show_duration(advice.interval_s)}, {advice.replicas} replica(s), "
        f"{advice.standby} standby node(s). {emergency}"
    )
    return [
        f"<h1>{escape(plan.request.name)}: what it will cost</h1>",
        f"<p class='lead'>{escape(words)}</p>",
        '<div class="cards">',
        *(f"<div class='card'><b>{escape(big)}</b><span>{escape(small)}</span></div>" for big, small in cards),
        "</div>",
    ]


_SCHEME_COLUMNS = (
    "scheme",
    "interval",
    "goodput",
    "net saving",
    "by price",
    "by scheme",
    "lost steps",
    "redone h",
    "USD",
    "p95 USD",
    "hours",
    "p95 hours",
)


def _scheme_table(plan: Plan) -> str:
    rows = []
    for result in plan.schemes:
        outcome, saving = result.expected, result.saving
        least = "" if result.finishes else "≥ "  # runs that were cut
        cells = [
            (result.scheme.name, None),
            (show_duration(result.timing.interval_s), result.timing.interval_s),
            (f"{outcome.goodput:.3f}", outcome.goodput),
            (show_share(saving.net), saving.net),
            (show_share(saving.price), saving.price),
            (show_share(saving.scheme), saving.scheme),
            (f"{outcome.lost_steps:,.0f}", outcome.lost_steps),
            (f"{outcome.lost_work_s / HOUR_S:.2f}", outcome.lost_work_s),
            (least + show_usd(result.cost_usd), result.cost_usd),
            (least + show_usd(result.cost.p95), result.cost.p95),
            (f"{outcome.wall_s / HOUR_S:.1f}", outcome.wall_s),
            (f"{result.wall_s.p95 / HOUR_S:.1f}", result.wall_s.p95),
        ]
        chosen = ' class="chosen"' if result.scheme.name == plan.advice.scheme else ""
        rows.append(f"<tr{chosen}>{''.join(_cell(words, value) for words, value in cells)}</tr>")
    return _table(_SCHEME_COLUMNS, rows, "sortable")


def _capacity_table(plan: Plan) -> str:
    rows = []
    for row in plan.capacity:
        money = [show_usd(value) for value in (row.cost.mean, row.cost.p50, row.cost.p95)]
        hours = [f"{value / HOUR_S:.1f}" for value in (row.wall_s.mean, row.wall_s.p50, row.wall_s.p95)]
        cells = [row.name, *money, *hours, show_share(row.on_time_share, 0), row.detail]
        rows.append("<tr>" + "".join(_cell(words, None) for words in cells) + "</tr>")
    return _table(("kind", "USD", "p50", "p95", "hours", "p50", "p95", "on time", "what"), rows, "last-words")


def _bound(plan: Plan) -> str:
    if plan.mix is None:
        return ""
    found = plan.mix.mix
    gap = show_share(found.gap, 2)
    return f" Solver: {show_usd(found.objective_usd)} USD, bound {show_usd(found.bound_usd)}, gap {gap}."


def _warnings(plan: Plan) -> str:
    if not plan.cautions:
        return "<p>None.</p>"
    return "<ul>" + "".join(f"<li>{escape(caution.text)}</li>" for caution in plan.cautions) + "</ul>"


def _assumptions(plan: Plan) -> str:
    rows = []
    for note in plan.request.assumptions:
        value = note.value if isinstance(note.value, str) else f"{note.value:,.4g}"
        source = f"{note.source} ({note.as_of})" if note.as_of else note.source
        cells = (note.name, f"{value} {note.unit}".strip(), source)
        rows.append("<tr>" + "".join(_cell(words, None) for words in cells) + "</tr>")
    return _table(("what", "value", "source"), rows, "words")


def _cell(words: str, value: float | None) -> str:
    data = "" if value is None else f' data-value="{value:.6g}"'
    return f"<td{data}>{escape(words)}</td>"


def _table(columns: Sequence[str], rows: Sequence[str], css: str = "") -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(rows)
    return f'<div class="scroll"><table class="{css}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
