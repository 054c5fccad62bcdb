"""`surefoot run`: train under a supervisor."""

from __future__ import annotations

import secrets
import socket
from typing import Annotated

import typer

from surefoot.errors import ConfigError
from surefoot.launch.config import DEFAULT_GRACE_S, AgentConfig, Options
from surefoot.launch.supervisor import LaunchConfig, Supervisor


def register(app: typer.Typer) -> None:
    app.command("run", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(run)


def run(
    script: Annotated[list[str], typer.Argument(help="Script (or -m module) and its arguments.")],
    to: Annotated[
        str | None, typer.Option(help="Where the run lives: s3://bucket/prefix, or a directory.", show_default=False)
    ] = None,
    nproc: Annotated[int, typer.Option(help="Trainers on this machine.", min=1)] = 1,
    nnodes: Annotated[int, typer.Option(help="Machines; start the same command on each.", min=1)] = 1,
    rdzv: Annotated[
        str | None, typer.Option(help="HOST:PORT of one of several machines, where all of them meet.")
    ] = None,
    job: Annotated[str | None, typer.Option(help="Name of the job, the same on all machines.")] = None,
    disk: Annotated[list[str] | None, typer.Option(help="Directory on a local drive for copies; repeatable.")] = None,
    interval_s: Annotated[
        float | None, typer.Option(help="Seconds between durable saves (default: continuous if quick, else 300).")
    ] = None,
    max_bytes_per_s: Annotated[float | None, typer.Option(help="Bound on an upload's bandwidth, like 200e6.")] = None,
    grace_s: Annotated[
        float | None, typer.Option(help=f"Seconds between a bare SIGTERM and the end (default: {DEFAULT_GRACE_S:.0f}).")
    ] = None,
    watch: Annotated[str | None, typer.Option(help="A file whose appearance announces the eviction.")] = None,
    resume: Annotated[str | None, typer.Option(help="auto, must or never (default: auto).")] = None,
    max_restarts: Annotated[int, typer.Option(help="Restarts without a new step before giving up.", min=0)] = 3,
) -> None:
    """Train SCRIPT on this machine, or on several; start the same command again to go on.

    An option that is not given is taken from the environment: SUREFOOT_GRACE_S for --grace-s.
    """
    options = Options.from_environment().given(
        to=to,
        disk=disk or None,
        interval_s=interval_s,
        max_bytes_per_s=max_bytes_per_s,
        grace_s=grace_s,
        watch=watch,
        resume=resume,
    )
    config = AgentConfig.of(options, launch=secrets.token_hex(8), node=socket.gethostname(), supervised=True)
    if nnodes > 1 and rdzv is None:
        raise ConfigError(f"{nnodes} machines need a place to meet: give --rdzv HOST:PORT, a free port of one of them")
    launch = LaunchConfig(
        script=script, num_procs=nproc, num_nodes=nnodes, meet=rdzv, job=job, max_restarts=max_restarts
    )
    raise typer.Exit(Supervisor(launch, config, options.to_environment()).run())
