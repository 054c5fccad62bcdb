"""What a script may call, and the one clear sentence for each misuse. In this process: an agent of its own serves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from warm import processes_with, until

import surefoot
from surefoot.errors import ConfigError, ResourceError, UnsupportedStateError, UsageError


class Place:
    """A run's directory, and private shared memory for its agents."""

    def __init__(self, run: Path, memory: Path) -> None:
        self.run = run
        self.memory = memory

    def agents(self) -> list[int]:
        return [int(json.loads(text)["pid"]) for path in self.memory.glob("*.lock") if (text := path.read_text())]

    def tags(self) -> dict[int, str | None]:
        """Committed steps, with their tags."""
        commits = {int(path.name.split("-")[0]): path for path in self.run.glob("commits/*.json")}
        return {step: json.loads(path.read_text())["body"].get("tag") for step, path in sorted(commits.items())}

    def warnings(self) -> list[str]:
        for pid in self.agents():
            os.kill(pid, 0)
        until(lambda: not self.agents(), "the idle agent's end")
        lines = [json.loads(line) for path in self.run.glob("events/[!+]*") for line in path.read_text().splitlines()]
        return [line["what"] for line in lines if line["event"] == "warning"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    memory = Path(tempfile.mkdtemp(prefix="sft-", dir="/dev/shm"))
    monkeypatch.setenv("SUREFOOT_SHM", str(memory))
    place = Place(tmp_path / "run", memory)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield place
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        for pid in place.agents():
            os.kill(pid, signal.SIGKILL)
        until(lambda: not list(processes_with(str(memory))), "the agents' end")
        shutil.rmtree(memory)


class Counter:
    """The whole state of a training, so that what was restored can be told exactly."""

    def __init__(self) -> None:
        self.w = torch.zeros(3)
        self.done = {"n": 0}

    def step(self) -> None:
        self.w += torch.rand(3)
        self.done["n"] += 1

    def run(self, place: Place, **options: Any) -> surefoot.Run:
        return surefoot.Run(place.run, stage=1, w=self.w, done=self.done, **options)


def test_a_life_in_several_runs(place: Place) -> None:
    """steps, restore and step_done, break, exception, close, finished, in one process: like a notebook's cells."""
    first = Counter()
    with first.run(place) as run:
        assert (run.step, run.finished, run.durable_age_s, run.evicting) == (0, False, None, False)
        seen = []
        for step in run.steps(100):
            seen.append(step)
            if step == 4:
                break
            first.step()
            if step == 1:
                kept = first.w.clone()
                run.save("best", wait=True, metrics={"acc": 0.5, "note": "x"})
            if step == 2:
                # It returned only when it was committed.
                assert place.tags()[2] == "best"
                assert run.durable_age_s is not None
                run.save("late", wait=False)
        assert seen == [0, 1, 2, 3, 4]
        assert (run.step, run.finished) == (4, False)
        first.w.zero_()
    assert place.tags()[2] == "best"

    second = Counter()
    with pytest.raises(RuntimeError, match="mine"), second.run(place) as run:
        assert (run.step, second.done["n"]) == (4, 4)
        assert torch.equal(second.w[:0], kept[:0])
        for _ in run.steps(100):
            second.step()
            if run.step == 6:
                raise RuntimeError("mine")

    third = Counter()
    run = third.run(place)
    assert run.restore() == 6 == third.done["n"]
    assert run.restore() == 6
    third.step()
    run.step_done()
    with pytest.raises(UsageError, match=r"already open in this process.*close\(\)"):
        third.run(place).restore()
    with pytest.raises(UsageError, match="already open in this process"):
        surefoot.Run(f"{place.run}/../{place.run.name}/").restore()
    run.close()
    run.close()
    with pytest.raises(UsageError, match="was used before"):
        run.restore()
    with pytest.raises(UsageError, match="not open"):
        run.step_done()
    with pytest.raises(UsageError, match="not open"):
        run.save()

    fourth = Counter()
    run = fourth.run(place)
    run.restore()
    while run.step < 9:
        fourth.step()
        run.step_done(last=run.step == 8)
    assert run.finished
    run.close()
    assert place.tags()[9] is None

    fifth = Counter()
    with fifth.run(place) as run:
        assert run.step == 9
        for _ in run.steps(9):
            raise AssertionError("all steps are done")
        assert run.finished
        run.save("no step follows", wait=True)
    assert fifth.done["n"] == 9
    assert torch.equal(fifth.w, fourth.w)
    # Named ones are kept however many follow.
    assert place.tags()[2] == "best"


@pytest.mark.holds("part-not-loaded")
def test_what_a_user_hears(place: Place) -> None:
    """Once each: a loader that is iterated elsewhere, a value that came too late, a save that no step followed,
    names that are only here or only in the checkpoint."""
    loader = torch.utils.data.DataLoader(torch.arange(4))
    with surefoot.Run(place.run, stage=1, loader=loader, old=1, w=torch.zeros(1)) as run:
        for _batch, _step in zip(loader, run.steps(3), strict=False):
            run.state["late"] = 1
        run.save()
    with surefoot.Run(place.run, stage=1, new=torch.zeros(2), w=torch.zeros(1)) as run:
        assert run.step == 3
    said = place.warnings()
    assert len([text for text in said if "loader is registered, but" in text]) == 1
    assert len([text for text in said if "run.state['late'] was added after" in text]) == 1
    assert len([text for text in said if "save() was called, but no step finished after it" in text]) == 1
    assert len([text for text in said if "new is not in the checkpoint: it starts fresh" in text]) == 1
    assert len([text for text in said if "['old'], which this script does not register" in text]) == 1
    assert len(said) == 5, said


@pytest.mark.holds("best-score-forgotten")
def test_values_in_the_state(place: Place) -> None:
    """Values may be replaced while the run is open; what stands there at the boundary is kept, tensors too."""
    run = surefoot.Run(place.run, stage=1, history=[])
    run.state["best"] = (0, {"a"})
    run.state["t"] = torch.zeros(2)
    with run:
        for step in run.steps(3):
            run.state["history"].append(step)
            run.state["best"] = (step, {"b", step})
            run.state["t"] = torch.full((2,), float(step))
    history: list[int] = [7]
    again = surefoot.Run(place.run, stage=1, history=history)
    again.state.update(best=None, t=torch.ones(2))
    with again:
        assert history == [0, 1, 2]
        assert again.state["history"] is history
        assert again.state["best"] == (2, {"b", 2})
        assert torch.equal(again.state["t"], torch.full((2,), 2.0))
        del again.state["best"]
        with pytest.raises(ConfigError, match=r"run.state\['best'\] was removed"):
            again.step_done()


class _Half:
    def state_dict(self) -> dict[str, int]:
        return {}


def test_misuse_is_refused_before_an_agent_is_started(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a sentence that says what and where; nothing is left behind by it."""

    def refused(kind: type[Exception], match: str, **objects: Any) -> None:
        with pytest.raises(kind, match=match):
            surefoot.Run(place.run, **objects).restore()

    refused(UnsupportedStateError, r"^x\.a: .*sparse", x={"a": torch.eye(2).to_sparse()})
    refused(UnsupportedStateError, r"^x: .*meta", x=torch.nn.Linear(2, 2, device="meta").weight.detach())
    refused(UnsupportedStateError, r"^m\.weight: .*meta", m=torch.nn.Linear(2, 2, device="meta"))
    refused(UnsupportedStateError, r"^x: _Half has state_dict\(\), but no", x=_Half())
    refused(UnsupportedStateError, r"^x\[1\]: a value of type function", x=[1, lambda: 0])
    with pytest.raises(ConfigError, match="no place for the run"):
        surefoot.Run().restore()
    for option in ({"grace_s": -1}, {"interval_s": -1.0}, {"resume": "perhaps"}, {"max_bytes_per_s": 0.0}):
        with pytest.raises(ConfigError):
            surefoot.Run(place.run, **option).restore()  # type: ignore[arg-type]
    monkeypatch.setenv("SUREFOOT_TO", "/elsewhere")
    monkeypatch.setenv("SUREFOOT_AGENT", "/nowhere")
    refused(ConfigError, "`surefoot run`, which decides, has '/elsewhere'")
    monkeypatch.delenv("SUREFOOT_AGENT")
    monkeypatch.delenv("SUREFOOT_TO")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(UsageError, r"one of 2 processes.*init_process_group\(\) before surefoot.Run")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(sys, "platform", "darwin")
    refused(UsageError, "runs on Linux only")
    monkeypatch.undo()
    monkeypatch.setenv("SUREFOOT_SHM", str(place.memory))
    assert not place.run.exists()
    assert list(place.memory.iterdir()) == []


def test_metrics_are_plain(place: Place) -> None:
    """A tensor or a NaN as a metric is refused where it is given, not at the commit."""
    with surefoot.Run(place.run, w=torch.zeros(1)) as run:
        for bad in (torch.ones(1), float("nan"), {1, 2}):
            with pytest.raises(ConfigError, match=r"save\(metrics"):
                run.save(metrics={"loss": bad})


@pytest.mark.holds("handler-in-a-thread")
def test_in_a_thread(place: Place) -> None:
    """Without signal handlers, which only the main thread may set: one warning, and everything else works."""
    result: list[Any] = []

    def train() -> None:
        counter = Counter()
        with counter.run(place) as run:
            for _ in run.steps(3):
                counter.step()
        result.append(counter.done["n"])

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert result == [3]
    assert [text for text in place.warnings() if "not in the main thread" in text] != []


def test_a_model_that_changed_is_refused_and_nothing_is_lost(place: Place) -> None:
    """One clear error, no fall-back to an older step; with the old model the run goes on where it was."""
    for total in (3, 6):
        model = torch.nn.Linear(2, 2)
        with surefoot.Run(place.run, stage=1, model=model) as run:
            for _ in run.steps(total):
                model.weight.data += 1
    before = sorted(path.name for path in place.run.glob("commits/*"))
    for other in (torch.nn.Linear(2, 3), torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2).double()):
        with pytest.raises(ConfigError, match=r"size mismatch|only in the checkpoint|the checkpoint has torch.float32"):
            surefoot.Run(place.run, stage=1, model=other).restore()
    assert sorted(path.name for path in place.run.glob("commits/*")) == before
    again = torch.nn.Linear(2, 2)
    with surefoot.Run(place.run, stage=1, model=again) as run:
        assert run.step == 6
    assert torch.equal(again.weight, model.weight)


@pytest.mark.holds("locks-tell-lives", "handler-in-a-thread")
def test_a_forked_childs_sigterm_is_its_own(place: Place) -> None:
    """A pool that ends its workers with SIGTERM: they end, and the trainer is not evicted."""
    with surefoot.Run(place.run, w=torch.zeros(1)) as run:
        for _ in run.steps(2):
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                signal.pause()
            os.kill(pid, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        assert not run.evicting


@pytest.mark.holds("memory-reserved")
def test_a_job_that_cannot_fit_is_refused_with_the_sizes(place: Place) -> None:
    """More state than two slots have room for on this machine: said with need and have, before memory is touched."""
    huge = torch.empty(1)
    have = shutil.disk_usage("/dev/shm").total
    tensors = {f"t{i}": huge.expand(have // 8) for i in range(3)}
    with surefoot.Run(place.run, **tensors) as run:
        with pytest.raises(ResourceError, match=r"need [0-9.]+ [GT]B of shared memory .* are available"):
            run.step_done()
    assert not list(place.memory.glob("*/*.seg"))
