"""`surefoot plan`: what will it cost, when is it done, how sure is that."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli.printing import print_json, say

if TYPE_CHECKING:
    from surefoot.money.planner import Plan

_JOB, _COSTS, _PRICES, _LIMITS, _MONTHS, _OUT = (
    "the job",
    "what saving and restarting take (measured is better than assumed)",
    "prices and storage",
    "limits",
    "months",
    "output",
)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("plan")(plan)


def plan(
    example: Annotated[str, typer.Option(help="a built-in example: brief", rich_help_panel=_JOB)] = "",
    params: Annotated[str | None, typer.Option(help="model size: 70B", rich_help_panel=_JOB)] = None,
    bytes_per_param: Annotated[float, typer.Option(help="12: FP32 master, AdamW", rich_help_panel=_JOB)] = 12.0,
    state: Annotated[str | None, typer.Option(help="or the state itself: '840 GB'", rich_help_panel=_JOB)] = None,
    work: Annotated[str | None, typer.Option(help="compute at full speed: '72 h'", rich_help_panel=_JOB)] = None,
    step: Annotated[str | None, typer.Option(help="a step: '12 s'", rich_help_panel=_JOB)] = None,
    gpus: Annotated[int, typer.Option(rich_help_panel=_JOB)] = 0,
    gpus_per_node: Annotated[int, typer.Option(rich_help_panel=_JOB)] = 8,
    min_nodes: Annotated[int, typer.Option(help="fewer cannot hold the state", rich_help_panel=_JOB)] = 1,
    world_sizes: Annotated[str, typer.Option(help="allowed numbers of nodes: 8,7,6,4", rich_help_panel=_JOB)] = "",
    throughput: Annotated[str, typer.Option(help="share of full speed: 7:0.86,6:0.7", rich_help_panel=_JOB)] = "",
    evictions: Annotated[
        str | None,
        typer.Option(
            help="'4.5 h', 'weibull:0.5:4.5 h', 'lomax:1.5:4.5 h', trace:bamboo-a100, trace:FILE, advisor, log",
            rich_help_panel=_JOB,
        ),
    ] = None,
    loss_sizes: Annotated[str, typer.Option(help="nodes lost together: 1:0.7,2:0.3", rich_help_panel=_JOB)] = "",
    announced: Annotated[str | None, typer.Option(help="share with a notice: '80 %'", rich_help_panel=_JOB)] = None,
    window: Annotated[str | None, typer.Option(help="notice to end: '30 s'", rich_help_panel=_JOB)] = None,
    events: Annotated[
        list[Path] | None, typer.Option(help="event logs of a run: measured figures", rich_help_panel=_COSTS)
    ] = None,
    copy: Annotated[str | None, typer.Option(help="standstill for a copy: '0.85 s'", rich_help_panel=_COSTS)] = None,
    bucket_bandwidth: Annotated[str | None, typer.Option(help="a node's: '3.1 GB/s'", rich_help_panel=_COSTS)] = None,
    peer_bandwidth: Annotated[str | None, typer.Option(help="a node's: '12 GB/s'", rich_help_panel=_COSTS)] = None,
    restart: Annotated[str | None, typer.Option(help="state in memory: '18 s'", rich_help_panel=_COSTS)] = None,
    cold_restart: Annotated[str | None, typer.Option(help="new processes: '120 s'", rich_help_panel=_COSTS)] = None,
    rejoin: Annotated[str | None, typer.Option(help="growing back: '18 s'", rich_help_panel=_COSTS)] = None,
    replacement: Annotated[str | None, typer.Option(help="wait for a node: '6 min'", rich_help_panel=_COSTS)] = None,
    instance: Annotated[str | None, typer.Option(help="a type of the catalogue", rich_help_panel=_PRICES)] = None,
    region: Annotated[str, typer.Option(rich_help_panel=_PRICES)] = "",
    on_demand_price: Annotated[str | None, typer.Option(help="'9.80 USD/gpu-h'", rich_help_panel=_PRICES)] = None,
    spot_price: Annotated[str | None, typer.Option(help="'3.10 USD/gpu-h'", rich_help_panel=_PRICES)] = None,
    reserved_price: Annotated[str | None, typer.Option(rich_help_panel=_PRICES)] = None,
    standby_price: Annotated[str | None, typer.Option(help="default: spot", rich_help_panel=_PRICES)] = None,
    prices: Annotated[Path | None, typer.Option(help="your own catalogue", rich_help_panel=_PRICES)] = None,
    store: Annotated[str | None, typer.Option(help="aws, azure, gcp, oci, r2", rich_help_panel=_PRICES)] = None,
    route: Annotated[
        str, typer.Option(help="same-region, nat, cross-zone, cross-region, internet", rich_help_panel=_PRICES)
    ] = "same-region",
    keep: Annotated[int, typer.Option(help="checkpoints kept", rich_help_panel=_PRICES)] = 3,
    cross_zones: Annotated[bool, typer.Option(help="replicas cross zones", rich_help_panel=_PRICES)] = False,
    schemes: Annotated[Path | None, typer.Option(help="your own schemes (TOML)", rich_help_panel=_COSTS)] = None,
    only: Annotated[list[str] | None, typer.Option(help="only these schemes", rich_help_panel=_COSTS)] = None,
    baseline: Annotated[str, typer.Option(help="what a user has anyway", rich_help_panel=_COSTS)] = "naive-tuned",
    on_demand_goodput: Annotated[str | None, typer.Option(help="else: hardware fails", rich_help_panel=_PRICES)] = None,
    deadline: Annotated[str | None, typer.Option(help="'80 h'", rich_help_panel=_LIMITS)] = None,
    budget: Annotated[str | None, typer.Option(help="'25000 USD', also at p95", rich_help_panel=_LIMITS)] = None,
    miss: Annotated[str | None, typer.Option(help="deadline may be missed: '5 %'", rich_help_panel=_LIMITS)] = None,
    core_nodes: Annotated[int, typer.Option(help="nodes that are not spot", rich_help_panel=_LIMITS)] = 0,
    data_in: Annotated[
        list[str] | None, typer.Option(help="regions where the data may lie: 'eu-*'", rich_help_panel=_LIMITS)
    ] = None,
    availability: Annotated[str | None, typer.Option(help="trace of spot offers", rich_help_panel=_LIMITS)] = None,
    delay_value: Annotated[str | None, typer.Option(help="delay: '150 USD/h'", rich_help_panel=_LIMITS)] = None,
    tail_weight: Annotated[float, typer.Option(help="of the dearest tenth, in the mix", rich_help_panel=_LIMITS)] = 0.0,
    months: Annotated[int, typer.Option(rich_help_panel=_MONTHS)] = 36,
    month: Annotated[str | None, typer.Option(help="hours of a month: '720 h'", rich_help_panel=_MONTHS)] = None,
    utilisation: Annotated[str | None, typer.Option(help="GPUs are busy: '60 %'", rich_help_panel=_MONTHS)] = None,
    buy_price: Annotated[str | None, typer.Option(help="a GPU: '40000 USD'", rich_help_panel=_MONTHS)] = None,
    opex: Annotated[str | None, typer.Option(help="of an owned GPU a month", rich_help_panel=_MONTHS)] = None,
    residual: Annotated[str | None, typer.Option(help="worth of a GPU at the end", rich_help_panel=_MONTHS)] = None,
    engineer_hours: Annotated[float, typer.Option(help="to adopt", rich_help_panel=_MONTHS)] = 0.0,
    engineer_price: Annotated[str | None, typer.Option(help="'125 USD/h'", rich_help_panel=_MONTHS)] = None,
    runs: Annotated[int, typer.Option(help="simulated runs of each scheme", rich_help_panel=_OUT)] = 2000,
    seed: Annotated[int, typer.Option(rich_help_panel=_OUT)] = 1,
    as_json: Annotated[bool, typer.Option("--json", rich_help_panel=_OUT)] = False,
    html: Annotated[Path | None, typer.Option(help="write one self-contained page", rich_help_panel=_OUT)] = None,
) -> None:
    """What a run costs on on-demand, reserved and spot nodes and on the best mix, and which checkpointing pays."""
    # Imported here: other commands should not wait for numpy and the planner.
    from surefoot.money.form import Form, example_options, request_of
    from surefoot.money.planner import make_plan

    given = {name: value for name, value in locals().items() if name in Form.__dataclass_fields__ and value is not None}
    if example:
        given = {**example_options(example), "runs": runs, "seed": seed}
    answer = make_plan(request_of(Form(**given)))
    if html is not None:
        _write_page(answer, html)
    _print(answer, as_json, html)


def _write_page(answer: Plan, path: Path) -> None:
    from surefoot.money.page import plan_page

    path.write_text(plan_page(answer), encoding="utf-8")


def _print(answer: Plan, as_json: bool, html: Path | None) -> None:
    from rich.console import Console

    from surefoot.money.as_json import plan_json
    from surefoot.money.as_text import print_plan

    if as_json:
        print_json(plan_json(answer))
        return
    # Into a pipe nothing is wrapped: one row stays one line.
    print_plan(answer, Console(highlight=False, width=None if sys.stdout.isatty() else 200))
    if html is not None:
        say(f"written: {html}")
