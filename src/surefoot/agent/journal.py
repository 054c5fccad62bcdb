"""The journal: events of this agent, on local disk at once and in the run soon after."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any, TextIO

from surefoot.core.layout import events_key
from surefoot.errors import TierError
from surefoot.events import Event, describe, make_event
from surefoot.host.clock import boot_s, wall_s
from surefoot.tiers.base import Tier

UPLOAD_EVERY_S = 30.0
_PART_BYTES = 1_000_000
_SAY_COMMITS_EVERY_S = 10.0


def state_directory() -> Path:
    """Where a machine keeps what must survive a reboot: $XDG_STATE_HOME/surefoot, by default ~/.local/state."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "surefoot"


class Journal:
    """Writes events to a file and to stderr, and uploads the file in parts."""

    def __init__(self, run: str, launch: str, node: str, tier: Tier, file: TextIO, path: Path) -> None:
        self.generation = 0
        self.path = path
        self._run = run
        self._launch = launch
        self._node = node
        self._tier = tier
        self._file = file
        self._start_s = int(wall_s())
        self._writer = secrets.token_hex(4)
        self._part = 0
        self._part_lines: list[bytes] = []
        self._dirty = False
        self._said_s = -_SAY_COMMITS_EVERY_S
        self._uploading = asyncio.Lock()

    @classmethod
    def open(cls, run: str, launch: str, node: str, tier: Tier, instead: Path) -> Journal:
        """Open the journal in the machine's state directory, or in `instead` where that cannot be written."""
        name = f"{node}-{int(wall_s())}-{os.getpid()}.jsonl"
        try:
            directory = state_directory() / run
            directory.mkdir(parents=True, exist_ok=True)
            file = (directory / name).open("a", encoding="utf-8", buffering=1)
        except OSError:
            directory = instead
            file = (directory / name).open("a", encoding="utf-8", buffering=1)
        return cls(run, launch, node, tier, file, directory / name)

    def record(self, kind: str, **fields: Any) -> Event:
        """Note an event: one line in the file, its sentence on stderr."""
        event = make_event(
            kind,
            t=wall_s(),
            run=self._run,
            launch=self._launch,
            node=self._node,
            generation=self.generation,
            **fields,
        )
        line = json.dumps(event, separators=(",", ":"))
        self._part_lines.append(line.encode() + b"\n")
        self._dirty = True
        self._write(line)
        sentence = describe(event)
        if sentence is not None and not self._too_often(event):
            self._say(f"surefoot: {sentence}")
        return event

    def _write(self, line: str) -> None:
        try:
            self._file.write(line + "\n")
        except OSError as error:
            # A full local disk must not end the agent: the events still go into the run.
            self._say(f"surefoot: events cannot be written to {self.path}: {error}")

    def _say(self, sentence: str) -> None:
        try:
            print(sentence, file=sys.stderr, flush=True)  # noqa: T201 - the log people read
        except OSError:
            # Whoever read it is gone (a closed terminal or pipe); the events have it.
            return

    def _too_often(self, event: Event) -> bool:
        """Continuous saves are for the file, not for the eye: one sentence now and then."""
        if event["event"] != "committed" or event["trigger"] != "periodic":
            return False
        due = boot_s() - self._said_s >= _SAY_COMMITS_EVERY_S
        if due:
            self._said_s = boot_s()
        return not due

    async def upload(self) -> None:
        """Bring what is new into the run. Raises what the tier raises; nothing is lost, it is tried again later."""
        async with self._uploading:
            if not self._dirty:
                return
            self._dirty = False
            key = events_key(self._node, self._start_s, self._writer, self._part)
            data = b"".join(self._part_lines)
            count = len(self._part_lines)
            try:
                await self._tier.put(key, data)
            except TierError:
                self._dirty = True
                raise
            if len(data) >= _PART_BYTES:
                self._part += 1
                del self._part_lines[:count]

    async def keep_uploading(self) -> None:
        """Upload every now and then, for ever. A tier that fails is tried again; saves report such faults louder."""
        while True:
            await asyncio.sleep(UPLOAD_EVERY_S)
            try:
                await self.upload()
            except TierError as error:
                self.record("warning", what=f"events could not be uploaded: {error}")

    async def close(self, within_s: float) -> None:
        """A last, bounded try to bring everything into the run."""
        end_s = boot_s() + within_s
        while self._dirty and boot_s() < end_s:
            try:
                async with asyncio.timeout(max(0.1, end_s - boot_s())):
                    await self.upload()
            except (TierError, TimeoutError):
                await asyncio.sleep(0.2)
        self._file.close()
