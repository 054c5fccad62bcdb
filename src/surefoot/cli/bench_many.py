"""The measurements of `surefoot bench` that are about ranks and nodes together: agreement and notices."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from surefoot.cli import printing
from surefoot.errors import ConfigError

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]


def agree(
    ranks: Annotated[str, typer.Option(help="Trainers, comma-separated.")] = "2,4",
    rounds: Annotated[int, typer.Option(help="Turns of each form.", min=1)] = 40,
    as_json: AsJson = False,
) -> None:
    """What the agreement at each boundary adds to a step, beside an all-reduce that is read at once."""
    from surefoot.bench import agree as bench

    rows = bench.measure(bench.AgreeBench(ranks=_ranks(ranks), rounds=rounds))
    if as_json:
        typer.echo(json.dumps(bench.to_json(rows), allow_nan=False))
        return
    printing.say("\nwhat an agreement adds to a step: milliseconds")
    cells = [
        (
            "(neither: noise)" if row.form == bench.NOTHING else row.form,
            str(row.ranks),
            f"{row.p50_ms:.3f}",
            f"{row.p95_ms:.3f}",
            f"{row.longer_ms:.3f}",
        )
        for row in rows
    ]
    columns = ("form", "ranks", "p50", "p95", "step longer by")
    printing.print_table(columns, cells, right=columns[1:])


def notice(
    nodes: Annotated[int, typer.Option(help="Nodes in one process.", min=2)] = 64,
    processes: Annotated[int, typer.Option(help="Nodes in a process each.", min=2)] = 8,
    notices: Annotated[int, typer.Option(help="Notices of each kind.", min=1)] = 200,
    as_json: AsJson = False,
) -> None:
    """How long a notice takes from one node's agent to all others, over loopback."""
    from surefoot.bench import notice as bench

    rows = bench.measure(bench.NoticeBench(nodes=nodes, processes=processes, notices=notices))
    if as_json:
        typer.echo(json.dumps(bench.to_json(rows), allow_nan=False))
        return
    printing.say("\na notice to all nodes: milliseconds")
    cells = [
        (str(row.nodes), str(row.processes), "TLS" if row.tls else "plain", str(row.p50_ms), str(row.p99_ms))
        for row in rows
    ]
    columns = ("nodes", "processes", "channel", "p50", "p99")
    printing.print_table(columns, cells, right=("nodes", "processes", "p50", "p99"))


def _ranks(text: str) -> tuple[int, ...]:
    try:
        ranks = tuple(int(number) for number in text.split(","))
    except ValueError:
        ranks = (0,)
    if min(ranks) < 2:
        raise ConfigError(f"--ranks is {text!r}: give numbers of at least 2, comma-separated, like 2,4")
    return ranks
