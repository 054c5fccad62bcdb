"""The S3 server of the demo and the tests: side by side, gone with its owner, and honest when it cannot start."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.errors import ConfigError, ResourceError, TierError
from surefoot.scenario import s3_server
from surefoot.scenario.s3_server import S3Server
from surefoot.tiers.open import open_tier


def told(server: S3Server, monkeypatch: pytest.MonkeyPatch, data: bytes | None = None) -> bytes:
    """What lies in a server's bucket, after `data` was put there."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)

    async def story() -> bytes:
        tier = open_tier(server.url("here"))
        try:
            if data is not None:
                await tier.put("run.json", data)
            return await tier.get("run.json")
        finally:
            await tier.close()

    return asyncio.run(story())


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.02)


def processes_of(directory: str) -> list[str]:
    """Command lines of the processes that name a directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace")
        except OSError:
            continue  # ended meanwhile
        if directory in line:
            found.append(line)
    return found


def test_two_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers share neither ports nor bytes nor keys, and leave nothing behind."""
    with S3Server() as one, S3Server() as other:
        assert told(one, monkeypatch, b"one") == b"one"
        assert told(other, monkeypatch, b"other") == b"other"
        assert told(one, monkeypatch) == b"one"
        monkeypatch.setattr(one, "secret_key", other.secret_key)
        with pytest.raises(TierError):
            told(one, monkeypatch)
        directories = [str(server._directory) for server in (one, other)]
        leftovers = one._leftovers() + other._leftovers()
    for directory in directories:
        assert not Path(directory).exists()
        wait_until(lambda directory=directory: processes_of(directory) == [])  # killed, but perhaps not yet gone
    assert [path for path in leftovers if path.exists()] == []


OWNER = """
import os, sys, time
from surefoot.scenario.s3_server import S3Server
server = S3Server()
server.start()
print(server._directory, flush=True)
time.sleep(600)
"""


def test_it_dies_with_its_owner() -> None:
    """SIGKILL of the process that started it ends the server, its watcher and its directory."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        directory = owner.stdout.readline().strip()
        assert len(processes_of(directory)) == 2
    finally:
        owner.kill()
        owner.communicate()
    wait_until(lambda: processes_of(directory) == [])
    assert not Path(directory).exists()


def test_a_server_that_cannot_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program that ends at once is reported with the end of its log, and cleaned up."""
    program = tmp_path / "weed"
    program.write_text("#!/bin/sh\necho no such luck\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(s3_server, "_packaged", lambda: [program])
    server = S3Server()
    with pytest.raises(ResourceError, match="no such luck"):
        server.start()
    wait_until(lambda: processes_of(str(server._directory)) == [])  # killed, but perhaps not yet gone
    assert not server._directory.exists()


def test_a_missing_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the program the error says what to install."""
    monkeypatch.setattr(s3_server, "_packaged", list)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"surefoot\[demo\]"):
        S3Server().start()


def test_the_program_is_the_packages() -> None:
    """The program that is found is the installed package's, wherever the search path leads."""
    assert Path(s3_server.find_program()) == Path(sys.prefix, "bin", "weed").resolve()
    assert os.access(s3_server.find_program(), os.X_OK)
