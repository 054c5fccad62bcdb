"""The page of failures names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs/cases.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def _rows() -> list[str]:
    lines = _PAGE.read_text().splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith(("| what goes wrong", "| ---"))]


@cache
def _tests_of(path: str) -> frozenset[str]:
    tree = ast.parse((_ROOT / path).read_text(), path)
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def test_every_failure_is_held_by_tests_that_exist() -> None:
    """Each row has three cells, the last of which names tests, and each of them is a test of the named file."""
    rows = _rows()
    assert len(rows) > 50
    for row in rows:
        cells = re.split(r"(?<!\\)\|", row)[1:-1]
        assert len(cells) == 3, row
        named = _TEST.findall(cells[2])
        assert named, row
        assert len(named) == cells[2].count("::"), row
        for path, name in named:
            assert name in _tests_of(path), f"{path}::{name} is named by {_PAGE.name}, and is not there"


def test_a_name_that_is_not_there_would_be_found() -> None:
    """What is read of a test file are its tests, and nothing else."""
    here = Path(__file__).relative_to(_ROOT).as_posix()
    assert _tests_of(here) == {
        "test_every_failure_is_held_by_tests_that_exist",
        "test_a_name_that_is_not_there_would_be_found",
    }
