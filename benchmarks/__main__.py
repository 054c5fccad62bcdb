"""`python -m benchmarks NAME`: figures that guide the work on Surefoot, each beside its reference in the same run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer

import benchmarks.agree
import benchmarks.disk
import benchmarks.link
import benchmarks.notice
import benchmarks.restore
import benchmarks.scale
from surefoot.cli import printing
from surefoot.cli.bench import MB, AsJson, Ranks, StateMb, counts, leave_in_good_order, save
from surefoot.errors import SurefootError
from surefoot.exits import leave

Tensors = Annotated[int, typer.Option(help="Tensors of a rank's state.", min=1)]


def restore(
    state_mb: StateMb = 1000,
    ranks: Ranks = 2,
    tensors: Tensors = 64,
    rounds: Annotated[int, typer.Option(help="Restarts.", min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """A restart from the agent's memory, beside memcpy of the same bytes."""
    bench = benchmarks.restore
    wanted = bench.RestoreBench(state_bytes=state_mb * MB, ranks=ranks, tensors=tensors, rounds=rounds)
    _figures("restart out of memory", bench.to_json(bench.measure(wanted)), as_json=as_json)


def disk(
    state_mb: StateMb = 1000,
    ranks: Ranks = 2,
    tensors: Tensors = 64,
    rounds: Annotated[int, typer.Option(help="Writes of each kind.", min=1)] = 5,
    as_json: AsJson = False,
) -> None:
    """Bytes to disk through the whole pipeline, trainers idle, beside a raw direct write of as many."""
    bench = benchmarks.disk
    wanted = bench.DiskBench(state_bytes=state_mb * MB, ranks=ranks, tensors=tensors, rounds=rounds)
    _figures("to disk", bench.to_json(bench.measure(wanted)), as_json=as_json)


def link(
    state_mb: StateMb = 2000,
    ranks: Ranks = 2,
    tensors: Tensors = 64,
    link_mb_per_s: Annotated[float, typer.Option(help="Speed of the way to the bucket.", min=0.001)] = 200.0,
    window_s: Annotated[float, typer.Option(help="Seconds from the notice to the end.", min=0.1)] = 30.0,
    as_json: AsJson = False,
) -> None:
    """An announced eviction behind a link of known speed, while compute goes on."""
    bench = benchmarks.link
    wanted = bench.LinkBench(
        state_bytes=state_mb * MB,
        ranks=ranks,
        tensors=tensors,
        link_bytes_per_s=link_mb_per_s * MB,
        window_s=window_s,
    )
    _figures("eviction behind a slow link", bench.to_json(bench.measure(wanted)), as_json=as_json)


def scale(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, comma-separated.")] = "8,64,512,4096",
    tensors: Annotated[str, typer.Option(help="Tensors of a rank's state, comma-separated.")] = "100,1000,10000,100000",
    largest_report: Annotated[int, typer.Option(help="Ranks times tensors up to which plans are made.")] = 100_000,
    rounds: Annotated[int, typer.Option(help="Counts of each figure; the quickest is taken.", min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """What planning, commit, listing, recovery choice and retention cost at many ranks and tensors; CPU time alone."""
    bench = benchmarks.scale
    wanted = bench.ScaleBench(
        ranks=counts("--ranks", ranks),
        tensors=counts("--tensors", tensors),
        largest_report=largest_report,
        rounds=rounds,
    )
    rows = bench.measure(wanted, lambda row: typer.echo(f"measured {row.what}, {row.ranks} ranks", err=True))
    cells = [(row.what, str(row.ranks), str(row.tensors or ""), f"{row.ms:.2f}") for row in rows]
    _table("decisions", bench.to_json(rows), ("decision", "ranks", "tensors", "ms"), cells, as_json=as_json)


def agree(
    ranks: Annotated[str, typer.Option(help="Trainers, comma-separated.")] = "2,4",
    rounds: Annotated[int, typer.Option(help="Turns of each form.", min=1)] = 40,
    as_json: AsJson = False,
) -> None:
    """What the agreement at each boundary adds to a step, beside an all-reduce that is read at once."""
    bench = benchmarks.agree
    rows = bench.measure(bench.AgreeBench(ranks=counts("--ranks", ranks, least=2), rounds=rounds))
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
    _table("what an agreement adds to a step: milliseconds", bench.to_json(rows), columns, cells, as_json=as_json)


def notice(
    nodes: Annotated[int, typer.Option(help="Nodes in one process.", min=2)] = 64,
    processes: Annotated[int, typer.Option(help="Nodes in a process each.", min=2)] = 8,
    notices: Annotated[int, typer.Option(help="Notices of each kind.", min=1)] = 200,
    as_json: AsJson = False,
) -> None:
    """How long a notice takes from one node's agent to all others, over loopback."""
    bench = benchmarks.notice
    rows = bench.measure(bench.NoticeBench(nodes=nodes, processes=processes, notices=notices))
    cells = [
        (str(row.nodes), str(row.processes), "TLS" if row.tls else "plain", str(row.p50_ms), str(row.p99_ms))
        for row in rows
    ]
    columns = ("nodes", "processes", "channel", "p50", "p99")
    _table("a notice to all nodes: milliseconds", bench.to_json(rows), columns, cells, as_json=as_json)


def everything() -> None:
    """`surefoot bench save` and all of these but scale, one after the other, at their usual sizes."""
    for measurement in (save, restore, disk, link, agree, notice):
        measurement()


def _figures(title: str, result: dict[str, object], *, as_json: bool) -> None:
    _table(title, result, ("figure", "value"), [(name, str(value)) for name, value in result.items()], as_json=as_json)


def _table(
    title: str, result: dict[str, object], columns: Sequence[str], cells: Sequence[Sequence[str]], *, as_json: bool
) -> None:
    if as_json:
        typer.echo(json.dumps(result, allow_nan=False))
        return
    printing.say(f"\n{title}")
    printing.print_table(columns, cells, right=columns[1:])


def main() -> None:
    app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    for measurement in (restore, disk, link, scale, agree, notice):
        app.command()(measurement)
    app.command("all")(everything)
    app.callback()(leave_in_good_order)
    try:
        app()
    except SurefootError as error:
        typer.echo(f"benchmarks: {error}", err=True)
        leave(2)
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else 0)


if __name__ == "__main__":
    main()
