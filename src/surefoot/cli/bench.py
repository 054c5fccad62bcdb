"""`surefoot bench save`: the cost of a save on this machine, Surefoot's beside the ways that people use today."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from surefoot.bench.save import METHODS, NOTHING, REFERENCES, SETTINGS, Beside, Row, SaveBench, measure, to_json
from surefoot.cli import printing
from surefoot.errors import ConfigError

StateMb = Annotated[int, typer.Option(help="State of all ranks together, in MB.", min=1)]
Ranks = Annotated[int, typer.Option(help="Trainers.", min=1)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
MB = 1_000_000


def register(app: typer.Typer) -> None:
    bench = typer.Typer(help="Measurements, as ratios within one run.", no_args_is_help=True)
    bench.command("save")(save)
    bench.callback()(leave_in_good_order)
    app.add_typer(bench, name="bench")


def leave_in_good_order() -> None:
    # An ordinary way out, so that trainers, agents and files go with the command.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda caught, _frame: sys.exit(128 + caught))


def save(
    state_mb: StateMb = 1000,
    ranks: Ranks = 2,
    tensors: Annotated[str, typer.Option(help="Tensors of a rank's state, comma-separated.")] = "64,2000",
    saves: Annotated[int, typer.Option(help="Saves of each method.", min=1)] = 10,
    methods: Annotated[
        str, typer.Option(help=f"Comma-separated; {' and '.join(REFERENCES)} are known, too, and keep nothing.")
    ] = ",".join(METHODS),
    settings: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(SETTINGS),
    as_json: AsJson = False,
) -> None:
    """Stall, time to durable and slowdown of each way to save the same synthetic AdamW state."""
    chosen = _known(methods, (*METHODS, *REFERENCES))
    # People see how much of a figure is noise; programs get what they asked for and nothing else.
    noise = () if as_json or NOTHING in chosen else (NOTHING,)
    bench = SaveBench(
        state_bytes=state_mb * MB,
        ranks=ranks,
        tensors=counts("--tensors", tensors),
        saves=saves,
        methods=(*chosen, *noise),
        settings=_known(settings, SETTINGS),
    )
    if as_json:
        typer.echo(json.dumps(to_json(*measure(bench, lambda _row, _beside: None)), allow_nan=False))
        return
    _show(bench)


def counts(option: str, text: str, least: int = 1) -> tuple[int, ...]:
    """The numbers in an option's text.

    Raises:
        ConfigError: the text is not numbers, or one is too small; the message names the option.
    """
    try:
        numbers = tuple(int(number) for number in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < least:
        raise ConfigError(f"{option} is {text!r}: give numbers of at least {least}, comma-separated, like 2,64")
    return numbers


def _known(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is not one of {', '.join(known)}")
    return names


def _show(bench: SaveBench) -> None:
    beside: list[Beside] = []

    def on_row(row: Row, more: Beside) -> None:
        beside.append(more)
        typer.echo(f"measured {row.method}, {row.setting}, {row.tensors} tensors", err=True)

    rows, floor = measure(bench, on_row)
    _print_rows(rows, beside)
    printing.say(
        f"this machine, one thread: memcpy {floor.memcpy_gb_per_s} GB/s, "
        f"write and fsync {floor.write_fsync_gb_per_s} GB/s"
    )


def _print_rows(rows: Sequence[Row], beside: Sequence[Beside]) -> None:
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
