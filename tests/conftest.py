"""Fixtures that several parts need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from surefoot.s3_server import S3Server


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
