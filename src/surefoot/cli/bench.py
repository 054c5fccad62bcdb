"""`surefoot bench`: what a save costs, beside what people use today."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from surefoot.bench.save import METHODS, SETTINGS, Row, SaveBench, measure, to_json
from surefoot.errors import ConfigError


def register(app: typer.Typer) -> None:
    bench = typer.Typer(help="Measurements, as ratios within one run.", no_args_is_help=True)
    bench.command("save")(save)
    # A group with one command would be taken for that command.
    bench.callback()(lambda: None)
    app.add_typer(bench, name="bench")


def save(
    state_mb: Annotated[int, typer.Option(help="State of all ranks together, in MB.", min=1)] = 1000,
    ranks: Annotated[int, typer.Option(help="Trainers.", min=1)] = 2,
    tensors: Annotated[str, typer.Option(help="Tensors of a rank's state, comma-separated.")] = "64,2000",
    saves: Annotated[int, typer.Option(help="Saves of each method.", min=2)] = 5,
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(METHODS),
    settings: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(SETTINGS),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
) -> None:
    """Stall, time to durable and slowdown of each way to save the same synthetic AdamW state."""
    chosen = SaveBench(
        state_bytes=state_mb * 1_000_000,
        ranks=ranks,
        tensors=tuple(int(count) for count in tensors.split(",")),
        saves=saves,
        methods=_known(methods, METHODS),
        settings=_known(settings, SETTINGS),
    )
    console = Console(stderr=True, quiet=as_json)
    rows, floor = measure(chosen, lambda row: console.print(f"{row.method} ({row.setting}, {row.tensors} tensors)"))
    if as_json:
        typer.echo(json.dumps(to_json(rows, floor)))
        return
    Console().print(_table(rows))
    Console().print(
        f"this machine, one thread: memcpy {floor.memcpy_gb_per_s} GB/s, "
        f"write and fsync {floor.write_fsync_gb_per_s} GB/s"
    )


def _known(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is not one of {', '.join(known)}")
    return names


def _table(rows: list[Row]) -> Table:
    table = Table(title="what a save costs the training (seconds; ratios within one run)")
    for column in ("method", "setting", "tensors", "first", "p50", "p95", "durable", "slowdown", "extra MB"):
        table.add_column(column, justify="left" if column in ("method", "setting") else "right")
    for row in rows:
        table.add_row(
            row.method,
            row.setting,
            str(row.tensors),
            f"{row.stall_first_s:.4f}",
            f"{row.stall_p50_s:.4f}",
            f"{row.stall_p95_s:.4f}",
            f"{row.durable_s:.2f}",
            f"{row.flush_slowdown:.2f}",
            f"{row.peak_extra_bytes / 1e6:.0f}",
        )
    return table
