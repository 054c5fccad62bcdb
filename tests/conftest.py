"""The order of the files, the last lines of a run, and fixtures that several parts need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.scenario.s3_server import S3Server

_LONG_FIRST = ("road", "matrix", "bench", "campaign", "docs", "examples", "scenario", "cli", "trainer", "mesh", "agent")
"""Folders whose files take longest. They come first, so that no worker is left alone with one in the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _rank(item.path.relative_to(Path(__file__).parent).as_posix()))


def _rank(path: str) -> int:
    return next((rank for rank, folder in enumerate(_LONG_FIRST) if path.startswith(f"{folder}/")), len(_LONG_FIRST))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Name what was repeated, after everything but pytest's own last line."""
    yield
    repeated = [report.nodeid for report in terminalreporter.getreports("rerun")]
    if repeated:
        terminalreporter.section(f"{len(repeated)} repeated", yellow=True)
        for nodeid in repeated:
            terminalreporter.line(f"REPEATED {nodeid}")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server. Without its program this fails: a run of the tests without it proves nothing."""
    with S3Server() as server:
        yield server


@pytest.fixture
def s3_env(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with this process's environment set for its clients."""
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    return s3_server
