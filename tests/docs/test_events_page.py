"""One list of events: the table of sentences. The code records no other, and the page describes each of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from surefoot.events import SENTENCES

_ROOT = Path(__file__).parents[2]


def _recorded() -> set[str]:
    """The kinds that the package names where it records an event."""
    kinds = set()
    for path in (_ROOT / "src").rglob("*.py"):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args)
        for call in calls:
            named = isinstance(call.func, ast.Attribute) and call.func.attr in ("record", "event")
            if named and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str):
                kinds.add(call.args[0].value)
    return kinds


def test_every_event_that_is_recorded_has_its_place_in_the_log() -> None:
    """An event without a line in the table would be printed as raw fields."""
    recorded = _recorded()
    assert {"committed", "notice", "evicted", "warning"} <= recorded
    assert recorded - set(SENTENCES) == set()


def test_the_page_has_every_event_and_no_other() -> None:
    """The first column of its table, name by name."""
    page = (_ROOT / "docs" / "guides" / "events.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])} == set(SENTENCES)
