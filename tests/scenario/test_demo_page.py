"""The demo's page and the other ways: of a demo that was recorded, and in the long form of one that runs now."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from recorded_demo import RANKS, STEPS, live, play_back

from surefoot.demo.demo import DemoConfig, DemoResult
from surefoot.demo.methods.methods import METHODS
from surefoot.demo.page import Shown, demo_page
from surefoot.errors import ConfigError
from surefoot.pages.svg import Scale
from surefoot.scenario.curves import losses, progress, quantile, step_times
from surefoot.scenario.log import DISTURBED, UNDISTURBED, Line, read
from surefoot.scenario.verdict import Verdict

_BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_VOID = {"meta", "link"}


@pytest.fixture(scope="module", params=["recorded", pytest.param("live", marks=pytest.mark.soak)])
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoResult]:
    """Through three events, undisturbed, and both other ways through the same; a live one leaves nothing in memory."""
    if request.param == "recorded":
        yield play_back(tmp_path_factory.mktemp("recorded"))
        return
    patch = pytest.MonkeyPatch()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sf-test-") as path:
        place = Path(path)
        for name, variable in (("m", "SUREFOOT_SHM"), ("t", "TMPDIR")):
            (place / name).mkdir()
            patch.setenv(variable, str(place / name))
        patch.setattr(tempfile, "tempdir", None)
        yield live(place / "store")
        assert list((place / "m").iterdir()) == []
        patch.undo()
        tempfile.tempdir = None


@pytest.fixture(scope="module")
def page(demo: DemoResult) -> str:
    return demo.page.read_text()


class _Reader(HTMLParser):
    """Tables by their id, as rows of words; the cards; and what was opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.cards: dict[str, str] = {}
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self._rows: list[list[str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "table":
            self._rows = self.tables[str(given["id"])] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        if tag not in _VOID:
            self.open.append((tag, given))

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if not self.open:
            return
        tag, attrs = self.open[-1]
        if any(name in ("td", "th") for name, _ in self.open) and tag != "small":
            self._rows[-1][-1] += data
        elif "data-name" in attrs:
            self.cards[str(attrs["data-name"])] = data


# ---------------------------------------------------------------------- the page says what the log says


def test_the_page_has_the_numbers_of_the_answer(demo: DemoResult, page: str) -> None:
    """Verdict, sums and what each event cost are those that `--json` prints, cell for cell."""
    told, read_back = demo.to_json(), _Reader(page)
    assert read_back.open == []
    assert told["problems"] == []
    assert read_back.cards["verdict"] == told["verdict"] == "PASS"
    assert read_back.cards["redone"] == str(sum(event["redone_steps"] for event in told["events"]))
    assert read_back.cards["lost"] == f"{sum(event['seconds_to_new_step'] for event in told['events']):.1f} s"
    rows = read_back.tables["events"][1:]
    assert rows == [
        [
            f"{number}. {event['event']}",
            str(event["resumed_from"]),
            str(event["redone_steps"]),
            f"{event['seconds_to_new_step']:.1f}",
        ]
        for number, event in enumerate(told["events"], start=1)
    ]
    carried = re.search(r'<script type="application/json" id="demo">(.*?)</script>', page, re.DOTALL)
    assert carried
    assert json.loads(carried[1]) == told


def test_the_curves_are_those_of_the_log(demo: DemoResult, page: str) -> None:
    """Points of the drawn lines, put back through the axis, are the mean losses of the log, step for step."""
    lines = read(demo.log)
    calm = [line for line in lines if line.run == UNDISTURBED]
    expected = [
        sum(struct.unpack("<f", bytes.fromhex(line.loss_bits))[0] for line in calm if line.step == step) / RANKS
        for step in range(STEPS)
    ]
    drawing = next(found for found in re.findall(r"<svg.*?</svg>", page, re.DOTALL) if 'class="wide"' in found)
    drawn = _points(drawing, "calm")[0]
    low, high = expected.index(min(expected)), expected.index(max(expected))
    back = Scale(drawn[low][1], drawn[high][1], expected[low], expected[high])
    assert [back(y) for _, y in drawn] == pytest.approx(expected, abs=0.02)
    # An attempt's line lies on it, each step at its place: the disturbed run did the same.
    attempts = _points(drawing, "disturbed")
    assert len(attempts) == len({line.attempt for line in lines if line.run == DISTURBED}) == 3
    assert {point for attempt in attempts for point in attempt} == set(drawn)


def _points(drawing: str, css: str) -> list[list[tuple[float, float]]]:
    found = re.findall(rf'<path d="M([^"]*)" class="{css}"', drawing)
    return [[(float(x), float(y)) for x, y in (pair.split(",") for pair in each.split(" L"))] for each in found]


def test_stalls_and_pace_are_on_the_page(demo: DemoResult, page: str) -> None:
    """Their tables have the quantiles of what was written down, and of the log."""
    tables = _Reader(page).tables
    written = [json.loads(line) for line in (demo.log.parent / "stalls.jsonl").read_text().splitlines()]
    lines = read(demo.log)
    assert {stall["run"] for stall in written} == {DISTURBED, UNDISTURBED}
    for row in tables["stalls"][1:]:
        values = sorted(stall["stall_s"] * 1e3 for stall in written if stall["run"] == row[0])
        assert row[1] == str(len(values))
        assert row[4] == f"{values[-1]:.1f}"
    calm = next(row for row in tables["pace"] if row[0] == "undisturbed")
    median_s = quantile(step_times([line for line in lines if line.run == UNDISTURBED]), 0.5)
    assert calm[1:3] == [str(STEPS), f"{median_s * 1e3:.0f}"]


def test_nothing_is_fetched_and_no_script_runs(page: str) -> None:
    """No address of another place, no source, no import, and no script but the data."""
    markup = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert not re.search(r"http|<script|\bsrc\s*=|@import|url\(|\son\w+=", markup)
    assert 'href="data:,"' in markup


def test_every_picture_is_xml_and_says_what_it_shows(page: str) -> None:
    """Five pictures, each for wide and for narrow columns, well-formed and labelled, without a broken number."""
    drawings = [found for found in re.findall(r"<svg.*?</svg>", page, re.DOTALL) if 'role="img"' in found]
    assert len(drawings) == 10
    for drawing in drawings:
        assert ElementTree.fromstring(drawing).attrib["aria-label"]
        assert not re.search(r"\bnan\b|\binf\b", drawing)


def test_words_are_escaped() -> None:
    """A problem with markup in it stays text; a demo without any line still has a page."""
    shown = Shown(
        seed=0,
        steps=40,
        ranks=1,
        lines=[],
        strikes=(),
        verdict=Verdict(False, (), ("</main><script>alert(1)</script>",)),
        stalls=[],
        peers=(),
        answer={"problems": ["</script><script>alert(1)</script>"]},
    )
    page = demo_page(shown)
    assert "<script>alert(1)" not in page
    assert _Reader(page).cards["verdict"] == "FAIL"


@pytest.mark.skipif(_BROWSER is None, reason="no chromium here: that the page fits a narrow screen is not checked")
@pytest.mark.parametrize(("width_px", "shown"), [(360, "narrow"), (1280, "wide")])
def test_a_browser_shows_it_without_a_word_and_without_scrolling_aside(
    page: str, tmp_path: Path, width_px: int, shown: str
) -> None:
    """Headless Chromium: nothing on the console, nothing wider than the screen, and the pictures drawn for it."""
    probe = (
        "<script>addEventListener('load',()=>{const root=document.documentElement;"
        "document.title=JSON.stringify([root.scrollWidth-root.clientWidth,[...document.querySelectorAll('svg[role]')]"
        ".filter(e=>e.getBoundingClientRect().width>250).map(e=>e.getAttribute('class'))])})</script>"
    )
    (tmp_path / "page.html").write_text(page.replace("</body>", f"{probe}</body>"))
    (tmp_path / "frame.html").write_text(
        f"<iframe src='page.html' style='width:{width_px}px;height:900px'></iframe><script>addEventListener('load',()=>"
        "{document.title=frames[0].document.title})</script>"
    )
    document, console = _browse(tmp_path / "frame.html", tmp_path)
    found = re.search(r"<title>(.*?)</title>", document)
    assert console == []
    assert found
    assert json.loads(found[1]) == [0, [shown] * 5]


def _browse(file: Path, tmp_path: Path) -> tuple[str, list[str]]:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += ["--allow-file-access-from-files", "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [str(_BROWSER), *options, "--dump-dom", file.as_uri()]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        document, messages = process.communicate(timeout=180)
    finally:
        # Its helpers belong to its own process group; none is left behind.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return document, [line for line in messages.splitlines() if "CONSOLE" in line]


# ---------------------------------------------------------------------- the other ways


def _peer(demo: DemoResult, name: str) -> dict[str, Any]:
    return next(peer for peer in demo.to_json()["peers"] if peer["method"] == name)


def test_what_is_written_by_hand_with_care_survives_these_events(demo: DemoResult) -> None:
    """Flag, all-reduce, async_save and saved random states: every bit the same, no step lost to the eviction."""
    told = _peer(demo, "hand_written")
    assert told["problems"] == []
    assert (told["bit_identical"], told["first_difference"]) == (True, None)
    evict, kill, agent = told["events"]
    assert agent == {"event": "kill_agent", "skipped": "no such process"}
    assert (evict["event"], evict["redone_steps"]) == ("evict", 0)
    assert evict["resumed_from"] >= evict["at_step"]
    # Back to the newest periodic save, or to that of the eviction.
    assert kill["resumed_from"] % told["save_every"] == 0 or kill["resumed_from"] == evict["resumed_from"]
    assert kill["redone_steps"] == kill["at_step"] - kill["resumed_from"] or kill["redone_steps"] == (
        kill["at_step"] + 1 - kill["resumed_from"]
    )
    assert told["redone_steps"] == kill["redone_steps"]
    assert told["seconds_lost"] == pytest.approx(evict["seconds_to_new_step"] + kill["seconds_to_new_step"])
    assert told["checkpoints"] > 0


def test_the_plain_loop_goes_its_own_way_after_a_resume(demo: DemoResult) -> None:
    """Without random states the first step after a resume differs, and no earlier one."""
    told = _peer(demo, "torch_save_on_sigterm")
    assert told["problems"] == []
    resumed = [event["resumed_from"] for event in told["events"] if event.get("resumed_from")]
    assert told["bit_identical"] is False
    assert told["first_difference"] == min(resumed)


def test_the_other_ways_are_on_the_page(demo: DemoResult, page: str) -> None:
    """Steps redone, first difference, seconds lost and saves left stand beside Surefoot's, as `--json` has them."""
    rows = _Reader(page).tables["peers"][1:]
    told = demo.to_json()
    common = [event for event in told["events"] if event["event"] != "kill_agent"]
    seconds = sum(event["seconds_to_new_step"] for event in common)
    assert rows[0] == [
        "Surefoot",
        str(sum(event["redone_steps"] for event in common)),
        "none",
        f"{round(seconds, 3):.1f}",
        "–",
    ]
    for row, peer in zip(rows[1:], told["peers"], strict=True):
        first = "none" if peer["first_difference"] is None else f"step {peer['first_difference']}"
        saves = f"{peer['checkpoints']} / {len(peer['unusable'])}"
        assert row[1:] == [str(peer["redone_steps"]), first, f"{peer['seconds_lost']:.1f}", saves]
    side = _Reader(page).tables["side-by-side"][3]
    assert side == ["3. kill_agent", side[1], "no such process", "no such process"]


@pytest.mark.soak
@pytest.mark.parametrize("demo", ["live"], indirect=True)
def test_only_logs_page_and_output_are_kept(demo: DemoResult) -> None:
    """Beside the demo's own there is a directory for each way, and neither checkpoints nor parts of logs."""
    place = demo.log.parent
    assert {path.name for path in place.iterdir() if path.is_dir()} == {method.name for method in METHODS}
    assert {path.suffix for path in place.rglob("*") if path.is_file()} == {".jsonl", ".out", ".html"}


# ---------------------------------------------------------------------- numbers out of a log


def _line(attempt: int, rank: int, step: int, loss: float, t: float) -> Line:
    return Line(DISTURBED, attempt, rank, step, (step,), struct.pack("<f", loss).hex(), t)


def test_curves_of_a_log_made_by_hand() -> None:
    """Means over ranks; an attempt begins where it went on; a step is done with its last rank; times in an attempt."""
    lines = [_line(1, rank, step, step + rank, 10.0 + step + rank / 4) for step in range(3) for rank in range(2)]
    lines += [_line(2, rank, step, step + rank, 20.0 + 2 * step) for step in range(2, 4) for rank in range(2)]
    # In flight when the other rank was killed: no step, and no mean of one.
    lines.append(_line(1, 0, 3, 3.0, 13.0))
    assert losses(lines) == [[(1, 0.5), (2, 1.5), (3, 2.5)], [(2, 1.5), (3, 2.5), (4, 3.5)]]
    assert progress(lines) == [[(0.25, 1), (1.25, 2), (2.25, 3)], [(14.0, 3), (16.0, 4)]]
    assert step_times(lines) == [1.0, 1.0, 2.0]
    assert [quantile([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.75, 1.0)] == [1.0, 2.0, 3.0, 4.0]


def test_losses_of_other_widths_are_read() -> None:
    """Half and double precision have their own number of bits."""
    for form in ("<e", "<d"):
        line = replace(_line(1, 0, 0, 0.0, 0.0), loss_bits=struct.pack(form, 1.5).hex())
        assert losses([line]) == [[(1, 1.5)]]


def test_a_page_for_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Said before the training, not after it."""
    with pytest.raises(ConfigError, match=r"page is .*there is no directory"):
        DemoConfig(page=tmp_path / "absent" / "page.html")
