"""The demo as one self-contained HTML page: no network, no script, no library; pictures are inline SVG.

Pure: lines, strikes and stalls in, text out. Every number on the page is computed from them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from surefoot.demo.methods.compare import Met, PeerResult, seconds_lost
from surefoot.demo.page_style import STYLE
from surefoot.demo.pictures import Curve, both, loss_picture, progress_picture, stall_picture
from surefoot.scenario.curves import losses, progress, quantile, step_times
from surefoot.scenario.events import Strike
from surefoot.scenario.log import DISTURBED, UNDISTURBED, Line
from surefoot.scenario.stalls import Stall
from surefoot.scenario.verdict import Recovery, Verdict, first_difference

_LEGEND = '<svg viewBox="0 0 34 10" aria-hidden="true"><path d="M1,5 L33,5" class="{css}"/></svg>'
_TOLD = {
    "evict": "SIGTERM, as a cloud's shutdown sends it",
    "kill_trainer": "SIGKILL to a trainer",
    "kill_group": "SIGKILL to every trainer",
    "kill_agent": "SIGKILL to the process that keeps the checkpoints",
    "kill_supervisor": "SIGKILL to the process that starts the others",
    "kill_all": "SIGKILL to every process of a machine, and its memory lost",
    "kill_job": "the same to every machine",
    "rot": "the same, and the newest durable step damaged",
    "pause": "every process of a machine stopped for a while",
    "cut": "a machine's link down for a while",
    "slow": "a machine's link slow for a while",
    "store_cut": "the store out of reach for a while",
    "store_slow": "the store's link slow for a while",
    "store_hang": "the store taking requests and answering none for a while",
    "full_disk": "the disk for copies full for a while",
    "clock": "a machine's clock wrong for a while",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What the page shows."""

    seed: int
    steps: int
    ranks: int
    lines: Sequence[Line]
    """Of both runs."""
    strikes: Sequence[Strike]
    verdict: Verdict
    stalls: Sequence[Stall]
    peers: Sequence[PeerResult]
    answer: dict[str, Any]
    """What `--json` prints, carried along."""

    def of(self, run: str) -> list[Line]:
        return [line for line in self.lines if line.run == run]


def demo_page(shown: Shown) -> str:
    """The page. Everything a browser needs is in the returned text."""
    answer = json.dumps(shown.answer, allow_nan=False).replace("<", "\\u003c")
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        '<meta name="color-scheme" content="light dark"/>',
        "<title>Surefoot demo</title>",
        # Without it a browser asks the network for an icon.
        '<link rel="icon" href="data:,"/>',
        f"<style>{STYLE}</style></head><body><main>",
        *_head(shown),
        *_losses(shown),
        *_events(shown),
        *_progress(shown),
        *_stalls(shown),
        *_peers(shown),
        "</main><footer>Written by <code>surefoot demo</code> from the training scripts' own logs.</footer>",
        f'<script type="application/json" id="demo">{answer}</script>',
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


# ---------------------------------------------------------------------- the verdict


def _head(shown: Shown) -> list[str]:
    verdict = shown.verdict
    lost_s = seconds_lost(verdict.recoveries)
    cards = [
        ("verdict", "PASS" if verdict.passed else "FAIL", "the verdict", verdict.passed),
        ("identical", "identical" if verdict.bit_identical else "different", "samples and loss bits", None),
        ("redone", str(sum(each.redone_steps for each in verdict.recoveries)), "finished steps trained again", None),
        ("lost", _seconds(lost_s), f"from {_count(len(shown.strikes), 'event')} to new steps, in all", None),
    ]
    return [
        f"<h1>Surefoot demo, seed {shown.seed}</h1>",
        f"<p class='lead'>{shown.steps} steps on {_count(shown.ranks, 'rank')}, trained twice: once through "
        f"{_count(len(shown.strikes), 'event')}, once undisturbed.</p>",
        '<div class="cards">',
        *(_card(*card) for card in cards),
        "</div>",
        f"<p>{_compared(shown)}</p>",
        _problems(verdict.problems),
    ]


def _card(key: str, big: str, small: str, good: bool | None) -> str:
    css = "" if good is None else f' class="{"good" if good else "bad"}"'
    return f'<div class="card"><b{css} data-name="{key}">{escape(big)}</b><span>{escape(small)}</span></div>'


def _compared(shown: Shown) -> str:
    """What "identical" means, in numbers."""
    wanted = {(line.rank, line.step): line for line in shown.of(UNDISTURBED)}
    pairs = [(line, wanted[line.rank, line.step]) for line in shown.of(DISTURBED) if (line.rank, line.step) in wanted]
    same = sum((a.samples, a.loss_bits) == (b.samples, b.loss_bits) for a, b in pairs)
    ids = sum(len(a.samples) for a, _ in pairs)
    return (
        f"Compared: each line of the disturbed run's log, steps trained twice included, with the undisturbed run's "
        f"line of the same rank and step. {same} of {len(pairs)} lines have the same sample ids ({ids} ids) and the "
        "same loss, to the last bit."
    )


def _problems(problems: Sequence[str]) -> str:
    return _list("ul", problems) if problems else ""


# ---------------------------------------------------------------------- losses


def _losses(shown: Shown) -> list[str]:
    calm, disturbed = losses(shown.of(UNDISTURBED)), losses(shown.of(DISTURBED))
    head = ["<h2>Loss, one run over the other</h2>"]
    if not calm or not disturbed:
        return [*head, "<p>There are no two runs to draw.</p>"]
    marks = [(strike.at_step, str(number)) for number, strike in enumerate(shown.strikes, start=1)]
    label = "loss over steps: the disturbed run drawn on the undisturbed one"
    return [
        *head,
        "<p class='lead'>Mean over the ranks. Where the thin line leaves the wide one, training differs. Dashed: the "
        "events of the table below, at the step that all ranks had finished.</p>",
        _key([("calm", "undisturbed"), ("disturbed", "disturbed")]),
        both(lambda width_px: loss_picture(width_px, calm, disturbed, marks, label)),
    ]


def _key(entries: Sequence[tuple[str, str]]) -> str:
    drawn = (f"<span>{_LEGEND.format(css=css)}{escape(title)}</span>" for css, title in entries)
    return f'<div class="key">{"".join(drawn)}</div>'


# ---------------------------------------------------------------------- events


def _events(shown: Shown) -> list[str]:
    names = ("event", "resumed from", "redone steps", "seconds to a new step")
    pairs = zip(shown.strikes, shown.verdict.recoveries, strict=True)
    rows = [
        _row(f"{number}. {recovery.event}", _cost(recovery), f"at step {strike.at_step}, while {_who(strike)}")
        for number, (strike, recovery) in enumerate(pairs, start=1)
    ]
    kinds = dict.fromkeys(str(strike.event.kind) for strike in shown.strikes)
    return [
        "<h2>What each event cost</h2>",
        _table("events", "Redone: finished by all ranks before the event, and trained again after it.", names, rows),
        _list("ul", [f"{kind}: {_TOLD[kind]}" for kind in kinds]),
    ]


def _who(strike: Strike) -> str:
    who = "the agent" if strike.event.of_agent else f"rank {strike.event.rank}"
    where = f" on node {strike.event.node}" if strike.event.node else ""
    lasts = f", for {strike.event.lasts_s:g} s" if strike.event.lasts_s else ""
    return f"{who}{where} was {strike.struck_in}{lasts}"


def _cost(recovery: Recovery) -> list[str]:
    return [_cell(recovery.resumed_from), _cell(recovery.redone_steps), _cell(recovery.seconds_to_new_step, ".1f")]


# ---------------------------------------------------------------------- progress and stalls


def _progress(shown: Shown) -> list[str]:
    ways = [("still", "undisturbed", shown.of(UNDISTURBED)), ("surefoot", "Surefoot", shown.of(DISTURBED))]
    ways += [(peer.method.name, peer.method.title, list(peer.lines)) for peer in shown.peers]
    ways = [way for way in ways if way[2]]
    if not ways:
        return []
    curves = [Curve(css, progress(lines)) for css, _, lines in ways]
    rows = [_row(title, _pace(lines)) for _, title, lines in ways]
    return [
        "<h2>Steps over time</h2>",
        "<p class='lead'>From each run's own first step. Flat: nothing trains. Down: finished steps are trained "
        "again.</p>",
        _key([(f"way {css}", title) for css, title, _ in ways]),
        both(lambda width_px: progress_picture(width_px, curves, "finished steps over seconds, for each way")),
        _table(
            "pace",
            "Milliseconds from one step to the next within an attempt, saving included; steps done, and seconds in "
            "all. The runs follow one another: whatever else the machine does meanwhile is in every time on this page.",
            ("run", "steps", "median", "p95", "max", "in all"),
            rows,
        ),
    ]


def _pace(lines: Sequence[Line]) -> list[str]:
    times = step_times(lines)
    done = len({(line.attempt, line.step) for line in lines})
    whole_s = max(line.t for line in lines) - min(line.t for line in lines)
    spread = [quantile(times, share) * 1e3 for share in (0.5, 0.95, 1.0)] if times else [None] * 3
    return [_cell(done), *(_cell(value, ".0f") for value in spread), _cell(whole_s, ".1f")]


def _stalls(shown: Shown) -> list[str]:
    times = step_times(shown.of(UNDISTURBED))
    rows = [(run, [stall.stall_s for stall in shown.stalls if stall.run == run]) for run in (DISTURBED, UNDISTURBED)]
    rows = [row for row in rows if row[1]]
    if not rows or not times:
        return []
    step_s = quantile(times, 0.5)
    label = "stall at each boundary that was written down, in milliseconds"
    return [
        "<h2>Stalls</h2>",
        "<p class='lead'>What training waits for at the end of a step while Surefoot takes the state. A boundary a "
        "second and rank is written down; the first after a start also lays out the memory.</p>",
        both(lambda width_px: stall_picture(width_px, rows, step_s, label)),
        _table(
            "stalls",
            "Milliseconds; the median also as a share of the undisturbed run's median step.",
            ("run", "number", "median", "p95", "max", "% of a step"),
            [_row(run, _stall_cells(values, step_s)) for run, values in rows],
        ),
    ]


def _stall_cells(values: Sequence[float], step_s: float) -> list[str]:
    spread = [quantile(values, share) * 1e3 for share in (0.5, 0.95, 1.0)]
    return [
        _cell(len(values)),
        *(_cell(value, ".1f") for value in spread),
        _cell(quantile(values, 0.5) / step_s * 100, ".1f"),
    ]


# ---------------------------------------------------------------------- the other ways


def _peers(shown: Shown) -> list[str]:
    if not shown.peers:
        return []
    return [
        "<h2>Beside what people write by hand</h2>",
        "<p class='lead'>The same task, seed and events, started again by the same hand. Surefoot saves to the demo's "
        f"store, these to a local directory that no event touches, every {shown.peers[0].save_every} "
        "steps: about as often as Surefoot, by the undisturbed run's pace.</p>",
        _list("ul", [f"{peer.method.title}: {peer.method.what}" for peer in shown.peers]),
        _summary(shown),
        _side_by_side(shown),
        *(part for peer in shown.peers for part in _peer_losses(shown, peer)),
    ]


def _summary(shown: Shown) -> str:
    names = ("way", "redone steps", "differs from", "seconds lost", "whole / torn saves")
    # Only what befell the others too.
    common = {met.event for peer in shown.peers for met in peer.met if met.strike is not None}
    pairs = zip(shown.strikes, shown.verdict.recoveries, strict=True)
    recoveries = [recovery for strike, recovery in pairs if strike.event in common]
    ours = [_cell(sum(each.redone_steps for each in recoveries)), _difference(first_difference(shown.lines))]
    rows = [_row("Surefoot", [*ours, _cell(seconds_lost(recoveries), ".1f"), _cell(None)])]
    rows += [_row(peer.method.title, _peer_cells(peer)) for peer in shown.peers]
    words = (
        "Over the events that all went through. Differs from: the first step whose samples or loss are not those of "
        "undisturbed training. Torn: left behind without its mark of completion."
    )
    return _table("peers", words, names, rows)


def _peer_cells(peer: PeerResult) -> list[str]:
    return [
        _cell(peer.redone_steps),
        _difference(peer.first_difference),
        _cell(peer.seconds_lost, ".1f"),
        f"<td>{peer.checkpoints} / {len(peer.unusable)}</td>",
    ]


def _difference(step: int | None) -> str:
    return '<td class="good">none</td>' if step is None else f'<td class="bad">step {step}</td>'


def _side_by_side(shown: Shown) -> str:
    titles = ["Surefoot", *(peer.method.title for peer in shown.peers)]
    rows = []
    for number, recovery in enumerate(shown.verdict.recoveries):
        cells = [_words(_told(recovery)), *(_words(_told_met(peer.met[number])) for peer in shown.peers)]
        rows.append(_row(f"{number + 1}. {recovery.event}", cells))
    return _table("side-by-side", "What each event cost each way.", ("event", *titles), rows, left=True)


def _told_met(met: Met) -> str:
    return met.skipped or "" if met.recovery is None else _told(met.recovery)


def _told(recovery: Recovery) -> str:
    if recovery.resumed_from is None:
        return "never went on"
    again = f"{recovery.redone_steps} redone, from step {recovery.resumed_from}"
    return f"{again}; {_seconds(recovery.seconds_to_new_step)}"


def _peer_losses(shown: Shown, peer: PeerResult) -> list[str]:
    calm, disturbed = losses(shown.of(UNDISTURBED)), losses(peer.lines)
    marks = [(met.strike.at_step, str(n)) for n, met in enumerate(peer.met, start=1) if met.strike is not None]
    head = [f"<h3>{escape(peer.method.title)}</h3>", _problems(peer.problems)]
    if not calm or not disturbed:
        return head
    verdict = (
        "The same samples and losses as undisturbed training, to the last bit."
        if peer.bit_identical
        else f"Samples or losses differ from step {peer.first_difference} on."
        if peer.first_difference is not None
        else "No line differs, but the run is not whole."
    )
    label = f"loss over steps: {peer.method.title} under the events, drawn on the undisturbed run"
    return [
        *head,
        f"<p class='lead'>{verdict}</p>",
        both(lambda width_px: loss_picture(width_px, calm, disturbed, marks, label)),
    ]


# ---------------------------------------------------------------------- tables and words


def _table(name: str, words: str, heads: Sequence[str], rows: Sequence[str], *, left: bool = False) -> str:
    css = ' class="words"' if left else ""
    columns = "".join(f'<th scope="col"{css}>{escape(head)}</th>' for head in heads)
    caption = f"<caption>{escape(words)}</caption>" if words else ""
    body = "".join(rows)
    return (
        f'<div class="scroll"><table id="{name}">{caption}<thead><tr>{columns}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _row(head: str, cells: Sequence[str], below: str = "") -> str:
    small = f"<small>{escape(below)}</small>" if below else ""
    return f'<tr><th scope="row">{escape(head)}{small}</th>{"".join(cells)}</tr>'


def _cell(value: float | None, form: str = "") -> str:
    return '<td class="none">–</td>' if value is None else f"<td>{value:{form}}</td>"


def _words(words: str) -> str:
    return f'<td class="words">{escape(words)}</td>'


def _list(tag: str, entries: Sequence[str]) -> str:
    return f"<{tag}>{''.join(f'<li>{escape(entry)}</li>' for entry in entries)}</{tag}>"


def _seconds(value: float | None) -> str:
    return "no new step" if value is None else f"{value:.1f} s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
