"""Every row of the documents' tables of rules and failures is held by tests, and names those that hold it."""

from __future__ import annotations

import ast
from collections import Counter

from held import PAGES, TESTS, filled, find_tests, holders, names

_NAMES = Counter(name for page in PAGES for name in names(page.read_text()))


def test_each_row_has_a_name_of_its_own_and_tests() -> None:
    """A rule that nothing holds would only be words."""
    assert len(_NAMES) > 100
    assert set(_NAMES.values()) == {1}
    assert set(_NAMES) - set(holders()) == set()


def test_no_test_holds_what_no_page_says() -> None:
    """Each name that stands at a test is a row's."""
    assert set(holders()) - set(_NAMES) == set()


def test_the_pages_name_the_tests_that_are_there() -> None:
    """`python tests/docs/held.py` writes them."""
    assert [page.name for page in PAGES if filled(page.read_text()) != page.read_text()] == []


def test_every_fact_is_on_a_page() -> None:
    """Nothing that is stated about torch, torchrun, readers and Linux is left without the rule that stands on it."""
    files = sorted(TESTS.rglob("test_what_*_do*.py"))
    assert len(files) >= 6
    facts = {f"`{path.relative_to(TESTS)}::{test.name}`" for path in files for test in find_tests(path)}
    assert facts - {test for tests in holders().values() for test in tests} == set()


def test_only_functions_that_are_tests_are_read() -> None:
    """What is read of a test file are its tests, and nothing else."""
    here = ast.parse(TESTS.joinpath("docs/test_held.py").read_text())
    assert len(find_tests(TESTS / "docs/test_held.py")) == 5
    assert len(here.body) > 5
