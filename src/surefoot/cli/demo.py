"""`surefoot demo`: see it survive, on this machine, in about two minutes."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated, Self

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from surefoot.demo.demo import MIN_STEPS, DemoConfig, DemoResult, run_demo
from surefoot.demo.methods.compare import PeerResult
from surefoot.demo.methods.methods import METHODS
from surefoot.scenario.engine import View
from surefoot.scenario.events import LASTING, Event, Strike
from surefoot.scenario.network import isolate
from surefoot.scenario.verdict import Recovery

_LEAVE_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    seed: Annotated[int, typer.Option(help="Moves the events and the training.")] = 0,
    steps: Annotated[int, typer.Option(help="Training steps.", min=MIN_STEPS)] = 200,
    ranks: Annotated[
        int | None, typer.Option(help="Trainers of each machine (default: 2 on one, 1 on each of several).", min=1)
    ] = None,
    nodes: Annotated[
        int, typer.Option(help="Machines: network namespaces, where that is allowed, else process trees.", min=1)
    ] = 1,
    store: Annotated[
        Path | None, typer.Option(help="Train into this directory instead of an S3 server of the demo's own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
    keep: Annotated[bool, typer.Option(help="Keep the runs and the events too, not only the logs.")] = False,
    page: Annotated[
        Path | None, typer.Option(help="Write the HTML page there instead of beside the log.", dir_okay=False)
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Let what people write by hand go through the same events. Takes longer.")
    ] = False,
) -> None:
    """Train a small model, evict it, kill a trainer, the agent, everything; compare with undisturbed training."""
    config = DemoConfig(
        seed=seed,
        steps=steps,
        nodes=nodes,
        ranks=ranks or (2 if nodes == 1 else 1),
        store=store,
        keep=keep,
        page=page,
        peers=METHODS if peers else (),
    )
    if nodes > 1:
        # Becomes the same command, in a network of its own, where that is allowed.
        isolate([sys.executable, "-m", "surefoot.cli.main", *sys.argv[1:]])
    for number in _LEAVE_ON:
        signal.signal(number, _leave)
    with _Screen(config, quiet=as_json) as screen:
        result = run_demo(config, screen.look_on)
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    else:
        _show(result)
    raise typer.Exit(0 if result.verdict.passed else 1)


def _leave(number: int, _frame: FrameType | None) -> None:
    # An ordinary way out, so that nothing is left behind; a second signal must not cut it short.
    for other in _LEAVE_ON:
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


class _Screen:
    """A live table on a terminal, one line per event elsewhere, nothing if quiet."""

    def __init__(self, config: DemoConfig, *, quiet: bool) -> None:
        self._config = config
        self._quiet = quiet
        self._console = Console()
        self._said: list[str] = []
        terminal = self._console.is_terminal and not quiet
        self._live = Live(console=self._console, refresh_per_second=8, transient=True) if terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
            self._live.update("starting the store …")
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def look_on(self, name: str, view: View) -> None:
        if self._live is not None:
            self._live.update(_table(name, view, self._config))
        elif not self._quiet:
            self._say(name, view)

    def _say(self, name: str, view: View) -> None:
        for line in [f"{name} training", *(_sentence(strike) for strike in view.strikes)]:
            if line not in self._said:
                self._said.append(line)
                self._console.print(line)


def _table(name: str, view: View, config: DemoConfig) -> Table:
    table = Table(title=f"surefoot demo, seed {config.seed}: {name} training", show_header=False, min_width=72)
    table.add_row("step", f"{view.step} of {config.steps}")
    table.add_row("trainers", ", ".join(view.trainers))
    table.add_row("agents" if len(view.agents) > 1 else "agent", ", ".join(view.agents))
    table.add_row("newest durable", _durable(view))
    for strike in view.strikes:
        table.add_row("event", _sentence(strike))
    if view.next_event is not None:
        table.add_row("next", _announcement(view.next_event))
    return table


def _durable(view: View) -> str:
    if view.durable is None:
        return "none yet"
    age = "" if view.durable_age_s is None else f", {view.durable_age_s:.1f} s old"
    return f"step {view.durable}{age}"


def _sentence(strike: Strike) -> str:
    where = f" on node {strike.event.node}" if strike.event.node else ""
    lasts = f" for {strike.event.lasts_s:g} s" if strike.event.kind in LASTING else ""
    who = _who(strike.event)
    return f"{strike.event.kind}{where}{lasts} at step {strike.at_step} while {who} was {strike.struck_in}"


def _announcement(event: Event) -> str:
    return f"{event.kind} from step {event.step} on, when {_who(event)} is {event.phase}"


def _who(event: Event) -> str:
    return "the agent" if event.of_agent else f"rank {event.rank}"


def _show(result: DemoResult) -> None:
    console = Console()
    table = Table("event", "struck in", "at step", "resumed from", "redone steps", "seconds to a new step")
    for strike, recovery in zip(result.strikes, result.verdict.recoveries, strict=True):
        table.add_row(str(recovery.event), strike.struck_in, str(strike.at_step), *_cells(recovery))
    console.print(table)
    same = "bit-identical to" if result.verdict.bit_identical else "NOT the same as"
    console.print(f"{result.steps} steps, samples and losses {same} undisturbed training")
    for problem in result.verdict.problems:
        console.print(f"problem: {problem}", markup=False)
    if result.output_tail:
        console.print(result.output_tail, markup=False)
    if result.peers:
        console.print(_peer_table(result.peers))
    console.print(f"log: {result.log}", markup=False, soft_wrap=True)
    console.print(f"page: {result.page}", markup=False, soft_wrap=True)
    console.print("[bold green]PASS" if result.verdict.passed else "[bold red]FAIL")


def _cells(recovery: Recovery) -> list[str]:
    seconds = recovery.seconds_to_new_step
    return [
        "never" if recovery.resumed_from is None else str(recovery.resumed_from),
        str(recovery.redone_steps),
        "-" if seconds is None else f"{seconds:.1f}",
    ]


def _peer_table(peers: Sequence[PeerResult]) -> Table:
    table = Table("way", "redone steps", "first difference", "seconds lost", "problems")
    for peer in peers:
        first = "none" if peer.first_difference is None else f"step {peer.first_difference}"
        lost = "-" if peer.seconds_lost is None else f"{peer.seconds_lost:.1f}"
        table.add_row(peer.method.title, str(peer.redone_steps), first, lost, str(len(peer.problems)))
    return table
