"""The demo on the real road: `surefoot run`, torchrun, the agent, trainers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.demo.demo import DemoConfig, DemoResult, run_demo
from surefoot.errors import ConfigError
from surefoot.scenario.events import Event, Kind
from surefoot.scenario.log import read
from surefoot.scenario.network import can_isolate

_HERE = Path(__file__).parent


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Base directories of the test's own, in which nothing may be left: shared memory and temporary files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sf-test-") as path:
        for name, variable in (("m", "SUREFOOT_SHM"), ("t", "TMPDIR")):
            (Path(path) / name).mkdir()
            monkeypatch.setenv(variable, str(Path(path) / name))
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(path)
        monkeypatch.undo()
        tempfile.tempdir = None


def _run(script: str, places: Path, *events: Event) -> DemoResult:
    config = DemoConfig(steps=40, ranks=1, store=places / "store", script=_HERE / script, events=events)
    result = run_demo(config, lambda _name, _view: None)
    assert list((places / "m").iterdir()) == []
    assert not (places / "store").exists()
    return result


@pytest.mark.soak
def test_a_generator_that_is_not_registered_is_found_out(places: Path) -> None:
    """A script whose losses depend on what it does not keep gets FAIL, with the first step that went wrong."""
    event = Event(kind=Kind.KILL_TRAINER, phase="training", step=15)
    result = _run("train_dots.py", places, event)
    assert result.to_json()["verdict"] == "FAIL"
    assert not result.verdict.bit_identical
    resumed_from = result.verdict.recoveries[0].resumed_from
    assert resumed_from is not None
    # Step 15 was in progress: 15 steps were done, of which the last may be done again.
    assert resumed_from >= 14
    assert result.verdict.problems[0].startswith(f"disturbed attempt 2, rank 0, step {resumed_from}: loss ")
    assert "resumed from step" in result.output_tail or "finished after step 40" in result.output_tail


def test_the_same_script_passes_once_the_generator_is_registered(places: Path) -> None:
    """Evicted, and all of it killed and its memory lost, it does the same steps, as promised for each event."""
    kinds = (Kind.EVICT, Kind.KILL_ALL)
    events = [Event(kind=kind, phase="training", step=10 * number) for number, kind in enumerate(kinds, start=1)]
    result = _run("register_dots.py", places, *events)
    told = result.to_json()
    assert told["problems"] == []
    assert told["verdict"] == "PASS"
    assert told["bit_identical"] is True
    assert [event["event"] for event in told["events"]] == [str(kind) for kind in kinds]
    evicted, lost = told["events"]
    assert evicted["redone_steps"] == 0
    assert lost["resumed_from"] >= lost["durable"] >= evicted["resumed_from"] > 0
    lines = read(result.log)
    assert {(line.run, line.step) for line in lines} == {
        (run, step) for run in ("disturbed", "undisturbed") for step in range(40)
    }
    assert len({line.attempt for line in lines if line.run == "disturbed"}) == 3
    # The logs, the page and what the processes printed, and nothing else, is kept.
    assert {path.suffix for path in result.log.parent.iterdir()} == {".jsonl", ".out", ".html"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(places: Path, number: signal.Signals) -> None:
    """Ctrl-C or SIGTERM while training, twice as by the impatient: no process, memory, store or file is left."""
    command = [sys.executable, "-m", "surefoot.cli.main", "demo", "--json"]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    # Its agent serves: the store is up, and trainers are on their way.
    while not list((places / "m").glob("*/*/agent.sock")):
        assert demo.poll() is None
    demo.send_signal(number)
    demo.send_signal(number)
    out, _ = demo.communicate(timeout=120)
    assert demo.returncode == 128 + number
    assert out == b""
    assert _started_beside(places) == []
    assert list((places / "m").iterdir()) == []
    assert list((places / "t").iterdir()) == []


def _started_beside(places: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if path.parent.name != str(os.getpid()) and str(places).encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("wrong", [{"steps": 39}, {"ranks": 0}])
def test_what_cannot_be_shown_is_refused(wrong: dict[str, Any]) -> None:
    """Too few steps for four events, or nobody to train, is an error that names the option."""
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is"):
        DemoConfig(**wrong)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(10))
def test_the_demo_passes(seed: int) -> None:
    """`surefoot demo` as users run it, for several seeds."""
    command = [sys.executable, "-m", "surefoot.cli.main", "demo", "--seed", str(seed), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    told = json.loads(done.stdout)
    assert told["problems"] == []
    assert (told["verdict"], told["bit_identical"], done.returncode) == ("PASS", True, 0)
    assert sorted(event["event"] for event in told["events"]) == ["evict", "kill_agent", "kill_all", "kill_trainer"]


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(3))
def test_the_demo_on_several_machines_passes(seed: int) -> None:
    """The same on three machines; where they have links of their own one is cut, too."""
    command = [sys.executable, "-m", "surefoot.cli.main", "demo", "--nodes", "3", "--seed", str(seed), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    told = json.loads(done.stdout)
    assert told["problems"] == []
    assert (told["verdict"], told["bit_identical"], done.returncode) == ("PASS", True, 0)
    links = ["cut"] if can_isolate() else []
    assert sorted(event["event"] for event in told["events"]) == sorted(
        ["evict", "kill_agent", "kill_all", "kill_trainer", *links]
    )
    page = (Path(told["log"]).parent / "page.html").read_text()
    assert all(event["event"] in page for event in told["events"])
