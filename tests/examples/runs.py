"""Run an example as its reader would, and read what it told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from surefoot.scenario.processes import MARK_VARIABLE, find_marked, kill_marked

_ENDS_WITHIN_S = 240.0


def run_to_its_end(command: Sequence[str], mark: str, memory: Path, *, evict_at: int | None = None) -> tuple[int, str]:
    """Its exit code and all that was written; with `evict_at`, SIGTERM to it once that step's loss is told."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SUREFOOT_SHM": str(memory),
        "XDG_STATE_HOME": str(memory),
        MARK_VARIABLE: mark,
    }
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if evict_at is not None and evict_at in losses(line):
                process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=_ENDS_WITHIN_S)
        left = find_marked(mark)
    finally:
        kill_marked(mark)
        process.wait()
    text = "".join(said)
    assert left == [], text
    return code, text


def losses(text: str) -> dict[int, str]:
    """The losses told, by step, as they were written.

    Python writes a line of `print` and its end apart when it is unbuffered, as under torchrun, so what another process
    says may stand between the two.
    """
    found = re.findall(r"\bstep (\d+): loss (\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan|inf)", text)
    return {int(step): loss for step, loss in found}
