"""`surefoot status`: what the runs on this machine are doing."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from surefoot.cli import printing
from surefoot.cli.arguments import AsJson


def register(app: typer.Typer) -> None:
    app.command("status")(status)


def status(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run's URI, directory or id; default: all that run here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask the agents of this machine what they and their trainers are doing. `--json`: a list, one entry per run."""
    answers = _ask(run)
    if as_json:
        printing.print_json(answers)
    elif not answers:
        printing.say("no run of yours trains on this machine")
    else:
        for answer in answers:
            _tell(answer)


def _ask(run: str | None) -> list[dict[str, Any]]:
    from surefoot.inspect.machine import ask, find_live, live_runs, statuses

    if run is None:
        return statuses(live_runs())
    return [ask(asyncio.run(find_live(run)), {"op": "status"})]


def _tell(answer: dict[str, Any]) -> None:
    if "error" in answer:
        printing.say(f"run {answer['run']}: {answer['error']}")
        return
    printing.say(f"run {answer['run']} at {answer['uri']}: generation {answer['generation']}")
    printing.say(f"  {_durable(answer)}")
    if answer["notice"]:
        printing.say(f"  eviction announced: {printing.span(max(0.0, answer['deadline_in_s']))} left")
    for step, trigger, attempt in answer["under_way"]:
        again = f", attempt {attempt}" if attempt > 1 else ""
        printing.say(f"  under way: step {step} ({trigger}{again}), {printing.size(answer['bytes_per_s'])}/s at last")
    ranks = [(str(r["rank"]), str(r["pid"]), str(r["finished"]), r["phase"]) for r in answer["ranks"]]
    if ranks:
        printing.print_table(("rank", "pid", "steps finished", "phase"), ranks, right=("rank", "pid", "steps finished"))


def _durable(answer: dict[str, Any]) -> str:
    age_s = answer["durable_age_s"]
    if age_s is None:
        return "no durable checkpoint by this agent yet"
    return f"newest durable: step {answer['committed']} on {answer['tier']}, {printing.span(age_s)} old"
