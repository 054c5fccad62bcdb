"""Arguments that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

Run = Annotated[str, typer.Argument(metavar="RUN", help="Where the run lives: s3://bucket/prefix, or a directory.")]
Step = Annotated[str | None, typer.Argument(metavar="[STEP]", help="A step: 1200; or a full name: 00001200-g0007.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
