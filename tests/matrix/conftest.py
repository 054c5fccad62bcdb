"""Each job of the matrix is run once a session, when a cell first asks for it; if it fails, each of its cells does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from matrix_runs import Played, play

Get = Callable[[str, str | None], Played]


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """The job of a mode, through the events of one kind."""
    done: dict[tuple[str, str | None], Played | BaseException] = {}

    def get(mode: str, event: str | None) -> Played:
        if (mode, event) not in done:
            done[mode, event] = _play(mode, event, tmp_path_factory.mktemp(f"{mode}-{event}"))
        found = done[mode, event]
        if isinstance(found, Played):
            return found
        raise found

    return get


def _play(mode: str, event: str | None, place: Path) -> Played | BaseException:
    try:
        return play(mode, event, place)
    except AssertionError as error:
        return error
