"""The page of evidence names tests that are there, and leaves out none of those that state facts."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
_PAGE = (_TESTS.parent / "docs/evidence.md").read_text()
_NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", _PAGE)))
_ROWS = [line for line in _PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| rule", "| ---"))]


@cache
def _tests_of(path: Path) -> list[str]:
    """Names of a file's tests, without the brackets of their parameters."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [function.name for function in functions if function.name.startswith("test_")]


@pytest.mark.parametrize("path", sorted({path for path, _name in _NAMED}))
def test_what_the_page_names_is_there(path: str) -> None:
    """Each file is there, and each test is a function of it."""
    named = {name for where, name in _NAMED if where == path}
    assert named - set(_tests_of(_TESTS / path)) == set()


def test_every_rule_has_a_test() -> None:
    """A rule that nothing holds would only be words; and no table has a row of another form."""
    assert len(_ROWS) > 50
    for row in _ROWS:
        rule, held_by = row.strip("| ").split(" | ")
        assert rule.endswith("."), row
        assert re.fullmatch(r"`[\w/]+\.py::test_\w+`(, `[\w/]+\.py::test_\w+`)*", held_by), row


def test_every_fact_is_on_the_page() -> None:
    """Nothing that is stated about torch, torchrun, readers and Linux is left without the rule that stands on it."""
    files = sorted(_TESTS.rglob("test_what_*_do*.py"))
    assert len(files) >= 6
    facts = {(str(path.relative_to(_TESTS)), name) for path in files for name in _tests_of(path)}
    assert facts - set(_NAMED) == set()
