"""`surefoot bench`: what Surefoot costs and how fast it is, beside the machine itself and what people use today."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from surefoot.bench.save import METHODS, NOTHING, SETTINGS, Beside, Floor, Row, SaveBench, measure, to_json
from surefoot.cli import printing
from surefoot.cli.bench_many import agree, notice
from surefoot.errors import ConfigError

StateMb = Annotated[int, typer.Option(help="State of all ranks together, in MB.", min=1)]
Ranks = Annotated[int, typer.Option(help="Trainers.", min=1)]
Tensors = Annotated[int, typer.Option(help="Tensors of a rank's state.", min=1)]
_MB = 1_000_000

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]


def register(app: typer.Typer) -> None:
    bench = typer.Typer(help="Measurements, as ratios within one run.", no_args_is_help=True)
    for command in (save, restore, disk, link, scale, agree, notice):
        bench.command(command.__name__)(command)
    bench.command("all")(everything)
    bench.callback()(_leave_in_good_order)
    app.add_typer(bench, name="bench")


def _leave_in_good_order() -> None:
    # An ordinary way out, so that trainers, agents and files go with the command.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda caught, _frame: sys.exit(128 + caught))


def save(
    state_mb: StateMb = 1000,
    ranks: Ranks = 2,
    tensors: Annotated[str, typer.Option(help="Tensors of a rank's state, comma-separated.")] = "64,2000",
    saves: Annotated[int, typer.Option(help="Saves of each method.", min=1)] = 10,
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(METHODS),
    settings: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(SETTINGS),
    as_json: AsJson = False,
) -> None:
    """Stall, time to durable and slowdown of each way to save the same synthetic AdamW state."""
    chosen = _known(methods, METHODS)
    bench = SaveBench(
        state_bytes=state_mb * _MB,
        ranks=ranks,
        tensors=_counts(tensors),
        saves=saves,
        # People see how much of a figure is noise; programs get what they asked for and nothing else.
        methods=chosen if as_json else (*chosen, NOTHING),
        settings=_known(settings, SETTINGS),
    )
    if as_json:
        typer.echo(json.dumps(to_json(*measure(bench, lambda _row, _beside: None)), allow_nan=False))
        return
    _show_save(bench)


def restore(
    state_mb: StateMb = 1000,
    ranks: Ranks = 2,
    tensors: Tensors = 64,
    rounds: Annotated[int, typer.Option(help="Restarts.", min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """A restart from the agent's memory, beside memcpy of the same bytes."""
    from surefoot.bench import restore as bench

    wanted = bench.RestoreBench(state_bytes=state_mb * _MB, ranks=ranks, tensors=tensors, rounds=rounds)
    _show("restart out of memory", bench.to_json(bench.measure(wanted)), as_json=as_json)


def disk(
    state_mb: StateMb = 1000,
    ranks: Ranks = 2,
    tensors: Tensors = 64,
    rounds: Annotated[int, typer.Option(help="Writes of each kind.", min=1)] = 5,
    as_json: AsJson = False,
) -> None:
    """Bytes to disk through the whole pipeline, trainers idle, beside a raw direct write of as many."""
    from surefoot.bench import disk as bench

    wanted = bench.DiskBench(state_bytes=state_mb * _MB, ranks=ranks, tensors=tensors, rounds=rounds)
    _show("to disk", bench.to_json(bench.measure(wanted)), as_json=as_json)


def link(
    state_mb: StateMb = 2000,
    ranks: Ranks = 2,
    tensors: Tensors = 64,
    link_mb_per_s: Annotated[float, typer.Option(help="Speed of the way to the bucket.", min=0.001)] = 200.0,
    window_s: Annotated[float, typer.Option(help="Seconds from the notice to the end.", min=0.1)] = 30.0,
    as_json: AsJson = False,
) -> None:
    """An announced eviction behind a link of known speed, while compute goes on."""
    from surefoot.bench import link as bench

    wanted = bench.LinkBench(
        state_bytes=state_mb * _MB,
        ranks=ranks,
        tensors=tensors,
        link_bytes_per_s=link_mb_per_s * _MB,
        window_s=window_s,
    )
    _show("eviction behind a slow link", bench.to_json(bench.measure(wanted)), as_json=as_json)


def scale(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, comma-separated.")] = "8,64,512,4096",
    tensors: Annotated[str, typer.Option(help="Tensors of a rank's state, comma-separated.")] = "100,1000,10000,100000",
    largest_report: Annotated[int, typer.Option(help="Ranks times tensors up to which plans are made.")] = 100_000,
    rounds: Annotated[int, typer.Option(help="Counts of each figure; the quickest is taken.", min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """What planning, commit, listing, recovery choice and retention cost at many ranks and tensors; CPU time alone."""
    from surefoot.bench import scale as bench

    wanted = bench.ScaleBench(
        ranks=_counts(ranks, "--ranks"), tensors=_counts(tensors), largest_report=largest_report, rounds=rounds
    )
    rows = bench.measure(wanted, lambda row: typer.echo(f"measured {row.what}, {row.ranks} ranks", err=True))
    if as_json:
        typer.echo(json.dumps(bench.to_json(rows), allow_nan=False))
        return
    cells = [(row.what, str(row.ranks), str(row.tensors or ""), f"{row.ms:.2f}") for row in rows]
    printing.print_table(("decision", "ranks", "tensors", "ms"), cells, right=("ranks", "tensors", "ms"))


def everything() -> None:
    """All of these, one after the other, at their usual sizes."""
    _show_save(SaveBench(methods=(*METHODS, NOTHING)))
    restore()
    disk()
    link()
    agree()
    notice()


def _show(title: str, result: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result, allow_nan=False))
        return
    printing.say(f"\n{title}")
    printing.print_table(("figure", "value"), [(name, str(value)) for name, value in result.items()], right=("value",))


def _show_save(bench: SaveBench) -> None:
    beside: list[Beside] = []

    def on_row(row: Row, more: Beside) -> None:
        beside.append(more)
        typer.echo(f"measured {row.method}, {row.setting}, {row.tensors} tensors", err=True)

    rows, floor = measure(bench, on_row)
    _print_save(rows, beside)
    printing.say(_floor_line(floor))


def _floor_line(floor: Floor) -> str:
    return (
        f"this machine, one thread: memcpy {floor.memcpy_gb_per_s} GB/s, "
        f"write and fsync {floor.write_fsync_gb_per_s} GB/s"
    )


def _counts(text: str, option: str = "--tensors") -> tuple[int, ...]:
    try:
        counts = tuple(int(count) for count in text.split(","))
    except ValueError:
        counts = (0,)
    if min(counts) < 1:
        raise ConfigError(f"{option} is {text!r}: give counts, comma-separated, like 64,2000")
    return counts


def _known(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is not one of {', '.join(known)}")
    return names


def _print_save(rows: Sequence[Row], beside: Sequence[Beside]) -> None:
    columns = ("method", "setting", "tensors", "first", "p50", "p95", "durable", "slowdown", "extra", "setup", "step")
    cells = [
        (
            "(no save: noise)" if row.method == NOTHING else row.method,
            row.setting,
            str(row.tensors),
            f"{row.stall_first_s:.4f}",
            f"{row.stall_p50_s:.4f}",
            f"{row.stall_p95_s:.4f}",
            f"{row.durable_s:.2f}",
            f"{row.flush_slowdown:.2f}",
            printing.size(row.peak_extra_bytes),
            f"{more.setup_s:.3f}",
            f"{more.step_s:.3f}",
        )
        for row, more in zip(rows, beside, strict=True)
    ]
    printing.say("what a save costs the training: seconds, and ratios within one run")
    printing.print_table(columns, cells, right=columns[2:])
