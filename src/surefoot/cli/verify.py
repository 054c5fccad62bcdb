"""`surefoot verify`: read a run through."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import typer

from surefoot.cli import printing
from surefoot.cli.arguments import AsJson, Run, Step

if TYPE_CHECKING:
    from surefoot.inspect.progress import Progress
    from surefoot.inspect.verify import Verdict

_NOT_OK = 1


def register(app: typer.Typer) -> None:
    app.command("verify")(verify)


def verify(run: Run, step: Step = None, as_json: AsJson = False) -> None:
    """Read every byte of every checkpoint of RUN, or of STEP, and check it. Exit code 1 if something is wrong."""
    with printing.progress("verifying", wanted=not as_json) as progress:
        verdict = asyncio.run(_verify(run, step, progress))
    if as_json:
        problems = [{"object": problem.object, "what": problem.what} for problem in verdict.problems]
        printing.print_json({"ok": verdict.ok, "problems": problems})
    else:
        _tell(verdict)
    raise typer.Exit(0 if verdict.ok else _NOT_OK)


async def _verify(run: str, step: str | None, progress: Progress) -> Verdict:
    from surefoot.inspect.checkpoints import parse_selector
    from surefoot.inspect.verify import verify as verify_run
    from surefoot.tiers.open import open_tier
    from surefoot.tiers.silence import spoken_of

    wanted = None if step is None else parse_selector(step)
    tier = spoken_of(open_tier(run))
    try:
        return await verify_run(tier, wanted, progress)
    finally:
        await tier.close()


def _tell(verdict: Verdict) -> None:
    if verdict.problems:
        printing.print_table(("object", "what"), [(p.object, p.what) for p in verdict.problems])
    count = f"{verdict.checkpoints} checkpoint{'' if verdict.checkpoints == 1 else 's'}"
    read = f"{count}, {printing.size(verdict.size_bytes)}"
    wrong = f"{len(verdict.problems)} problem{'' if len(verdict.problems) == 1 else 's'}"
    printing.say(f"ok: {read}" if verdict.ok else f"NOT ok: {wrong} in {read}")
