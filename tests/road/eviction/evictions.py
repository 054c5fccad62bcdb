"""Jobs that are evicted, and what is asked of each afterwards."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from surefoot.scenario.job import Job, Node

SCRIPT = Path(__file__).parent / "small_job.py"
SUREFOOT = Path(sys.executable).parent / "surefoot"
PATIENCE_S = 120.0


class Evicted:
    """One run that is started, evicted and started again."""

    def __init__(self, root: Path, *, total: int = 60, options: Sequence[str] = (), **environment: str) -> None:
        self.root = root
        self.total = total
        self.uri = root / "run"
        self.log = root / "log"
        self.stuck = root / "stuck"
        self.go = root / "go"
        # A socket's path is short; a test's own directory may not be.
        self.memory = Path(tempfile.mkdtemp(prefix="sft-", dir="/dev/shm"))
        (root / "out").mkdir()
        command = [str(SUREFOOT), "run", "--to", str(self.uri), *options, str(SCRIPT), str(total), str(self.log)]
        places = {"STUCK_FILE": str(self.stuck), "GO": str(self.go), "XDG_STATE_HOME": str(root / "state")}
        self.job = Job(
            Node(
                name="node",
                command=command,
                memory=self.memory,
                output=root / "out",
                environment={**places, **environment},
            )
        )

    def __enter__(self) -> Evicted:
        self.job.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.job.kill()
        shutil.rmtree(self.memory)

    def wait_for(self, what: str, condition: Callable[[], object]) -> None:
        """Wait for a condition; what did not come is named, with what the job printed."""
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > end_s:
                raise AssertionError(f"no {what} in {PATIENCE_S} s; the job printed:\n{self.job.output_tail()}")
            time.sleep(0.002)

    def wait_for_steps(self, count: int) -> None:
        self.wait_for(f"{count} steps", lambda: len(self.lines()) >= count)

    def wait_for_end(self) -> int:
        self.wait_for("end", lambda: self.job.exit_code() is not None)
        self.wait_for("end of every process", lambda: not self.job.members())
        code = self.job.exit_code()
        assert code is not None
        return code

    def lines(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = []
        for path in sorted(self.uri.glob("events/[!+]*")):
            found += [json.loads(line) for line in path.read_text().splitlines()]
        return [event for event in sorted(found, key=lambda event: event["t"]) if event["event"] == kind]

    def newest_commit(self) -> int:
        """Newest step with a manifest, read beside Surefoot; 0 if there is none."""
        return max((int(path.name[:8]) for path in self.uri.glob("commits/[0-9]*")), default=0)
