"""The page: whole, self-contained, well-formed, silent in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import xml.etree.ElementTree as ElementTree
from contextlib import suppress
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from surefoot.money.page import plan_page
from surefoot.money.planner import Plan
from surefoot.pages.svg import Scale, around, log_around, spread_labels

_VOID = {"meta", "link", "br", "input"}
_BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def page(brief_plan: Plan) -> str:
    return plan_page(brief_plan)


class _Nesting(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count += 1
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def test_every_tag_is_closed(page: str) -> None:
    """Tags nest; there are many of them."""
    parser = _Nesting()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert parser.count > 500


def test_every_picture_is_xml_and_says_what_it_shows(page: str) -> None:
    """Six pictures, each well-formed, labelled, and without a coordinate that is no number."""
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 6
    for drawing in pictures:
        root = ElementTree.fromstring(drawing)
        assert root.attrib["aria-label"]
        assert "nan" not in drawing
        assert "inf" not in drawing


def test_nothing_is_fetched(page: str) -> None:
    """No address of another place, no source, no import: the page is all there is."""
    markup = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert "http" not in markup
    assert not re.search(r"\bsrc\s*=|@import|url\(|fetch\(|XMLHttpRequest", markup)
    assert 'href="data:,"' in markup


def test_the_answer_is_inside_as_json(page: str, brief_plan: Plan) -> None:
    """What a program would read from --json."""
    found = re.search(r'<script type="application/json" id="plan">(.*?)</script>', page, re.DOTALL)
    assert found
    schemes = json.loads(found[1])["schemes"]
    assert [entry["scheme"] for entry in schemes] == [result.scheme.name for result in brief_plan.schemes]


def test_words_are_escaped(brief_plan: Plan) -> None:
    """A name with markup in it stays text, in the page and in the data."""
    from dataclasses import replace

    hostile = replace(brief_plan, request=replace(brief_plan.request, name="</script><script>alert(1)</script>"))
    assert "<script>alert(1)" not in plan_page(hostile)


def test_labels_are_spread_and_kept_in_order() -> None:
    """At least the gap apart, inside the limits, in the order asked for."""
    placed = spread_labels([10, 11, 12, 300], 20, 0, 320)
    assert placed == sorted(placed)
    assert all(b - a >= 20 - 1e-9 for a, b in pairwise(placed))
    assert all(0 <= place <= 320 for place in placed)


def test_scales_have_round_ticks() -> None:
    """Ticks inside the scale, evenly spaced on a linear one."""
    assert Scale(0, 1, 0, 100).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert around([5.0, 5.0], 0, 10)(5.0) == pytest.approx(5.0)
    assert log_around([1_000, 10_000], 0, 10).ticks() == [1_000, 1_500, 2_000, 3_000, 5_000, 7_000, 10_000]


@pytest.mark.skipif(_BROWSER is None, reason="no chromium here: that the browser's console stays silent is not checked")
def test_a_browser_opens_it_without_a_word(page: str, tmp_path: Path) -> None:
    """Headless Chromium, no network: nothing on the console, the pictures in the document, the script ran."""
    file = tmp_path / "plan.html"
    file.write_text(page)
    assert _console(file, tmp_path) == []
    # The check can fail: a page with an error in its script is heard.
    broken = tmp_path / "broken.html"
    broken.write_text(page.replace("<script>", "<script>nothingOfThisName();", 1))
    assert any("nothingOfThisName" in line for line in _console(broken, tmp_path))


def _console(file: Path, tmp_path: Path) -> list[str]:
    command = [
        str(_BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        file.as_uri(),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        document, messages = process.communicate(timeout=180)
    finally:
        # Its helpers belong to its own process group; none is left behind.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert document.count("<svg") == 6
    return [line for line in messages.splitlines() if "CONSOLE" in line]
