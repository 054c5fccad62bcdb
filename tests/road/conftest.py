"""What forks processes is started once; machines are gone, processes and all, when their test is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path += [str(Path(__file__).parents[1] / "tiers"), str(Path(__file__).parent / "usage")]

from machines import Machine, MakeMachine, Nursery
from warm import Warm

pytest.register_assert_rewrite("evidence")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as running:
        yield running


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Forks trainers."""
    warm = Warm()
    yield warm
    warm.close()


@pytest.fixture
def machine(nursery: Nursery, tmp_path: Path) -> Iterator[MakeMachine]:
    """Makes machines: `machine(uri)`, `machine(uri, num_slots=4)`."""
    with ExitStack() as stack:
        made: list[Machine] = []

        def make(uri: str | Path, **settings: Any) -> Machine:
            made.append(Machine(nursery, tmp_path / "machines", str(uri), f"m{len(made)}", **settings))
            return stack.enter_context(made[-1])

        yield make
