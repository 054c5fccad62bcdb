"""Which tests hold what the documents' tables say: a row has a name, and tests say in `@pytest.mark.holds(…)` whose.

    python tests/docs/held.py

writes the last cell of each such row anew.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGES = sorted((TESTS.parent / "docs").rglob("*.md"))
_CELL = re.compile(r"<!-- ([\w-]+) -->.*(?= \|$)", re.MULTILINE)


def names(page: str) -> list[str]:
    """Of the rows of a page."""
    return _CELL.findall(page)


def filled(page: str) -> str:
    """The page with each row's tests as they are now."""
    return _CELL.sub(
        lambda cell: " ".join((f"<!-- {cell[1]} -->", ", ".join(holders().get(cell[1], ())))).strip(), page
    )


@cache
def holders() -> dict[str, list[str]]:
    """Each name's tests."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for test in find_tests(path):
            for name in _held_by(test):
                found.setdefault(name, []).append(f"`{path.relative_to(TESTS)}::{test.name}`")
    return found


def find_tests(path: Path) -> list[ast.FunctionDef]:
    functions = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
    return [function for function in functions if function.name.startswith("test_")]


def _held_by(test: ast.FunctionDef) -> Iterator[str]:
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.holds":
            yield from (ast.literal_eval(argument) for argument in decorator.args)


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
