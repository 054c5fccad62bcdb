"""Jobs of these tests end with their test, processes and all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from evictions import Evicted


@pytest.fixture
def evicted(tmp_path: Path) -> Iterator[Callable[..., Evicted]]:
    """Starts a job: `evicted(total=60, options=[…], STUCK_AT="7")`."""
    with ExitStack() as stack:

        def start(**settings: Any) -> Evicted:
            return stack.enter_context(Evicted(tmp_path, **settings))

        yield start


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The log of the same training without an event."""
    with Evicted(tmp_path_factory.mktemp("undisturbed"), STEP_S="0") as run:
        assert run.wait_for_end() == 0, run.job.output_tail()
        return run.lines()
