"""`surefoot status`, `evict` and `clean` on jobs that really run here, and on what they leave."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_jobs import STEPS, Answer, Evicted, Finished, Killed

from surefoot.exits import EVICTED

Command = Callable[..., Answer]


@pytest.fixture
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine where nothing runs."""
    monkeypatch.setenv("SUREFOOT_SHM", str(tmp_path))
    return tmp_path


def test_status_tells_what_a_run_is_doing(evicted: Evicted) -> None:
    """A list with one entry: the run, its trainer, the newest durable step and its age, no notice."""
    (said,) = json.loads(evicted.status.out)
    assert (said["run"], said["uri"], said["generation"]) == (evicted.run_id, evicted.uri, 1)
    assert (said["notice"], said["deadline_in_s"]) == (False, None)
    assert said["committed"] >= 1
    assert said["tier"] == "object"
    assert said["durable_age_s"] > 0
    (rank,) = said["ranks"]
    assert rank["rank"] == 0
    assert rank["finished"] >= 3


def test_status_for_people_names_run_step_and_phase(evicted: Evicted) -> None:
    """By its URI, in a few lines."""
    lines = evicted.status_by_uri.out.splitlines()
    assert lines[0] == f"run {evicted.run_id} at {evicted.uri}: generation 1"
    assert "newest durable: step" in lines[1]
    assert "on object" in lines[1]


def test_clean_leaves_a_live_run_alone(evicted: Evicted) -> None:
    """Nothing of it is removed, and it is said, with or without its id."""
    cleaned = json.loads(evicted.cleaned.out)
    assert evicted.cleaned.code == 0
    assert (cleaned["freed_bytes"], cleaned["removed"]) == (0, [])
    ((run, why),) = [(entry["run"], entry["why"]) for entry in cleaned["alive"]]
    assert run == evicted.run_id
    assert "is already being trained on this machine" in why
    assert evicted.cleaned_by_id.code == 2
    assert evicted.run_id in evicted.cleaned_by_id.err
    assert evicted.memory_after_clean == evicted.memory_before_clean


def test_evict_ends_a_run_with_its_last_step_saved(evicted: Evicted, surefoot: Command, s3_env: object) -> None:
    """Exit code 75, and the last step that the script finished is committed, by an emergency save."""
    assert json.loads(evicted.evicted.out) == {"run": evicted.run_id, "ok": True}
    assert evicted.code == EVICTED
    newest = json.loads(surefoot("ls", evicted.uri, "--json").out)[0]
    assert (newest["step"], newest["trigger"]) == (evicted.steps, "emergency")


def test_evict_needs_a_live_run(evicted: Evicted) -> None:
    """Afterwards there is nobody to evict: exit code 2, one sentence."""
    assert evicted.gone.code == 2
    assert f"no agent of run {evicted.run_id} is on this machine" in evicted.gone.err
    assert len(evicted.gone.err.splitlines()) == 1


@pytest.mark.holds("locks-tell-lives")
def test_clean_spares_memory_in_which_a_trainer_lives(killed: Killed) -> None:
    """While an agent is being replaced nobody holds the lock; the trainer's memory must not go."""
    cleaned = json.loads(killed.orphaned.out)
    assert cleaned["removed"] == []
    assert "still trains in its memory" in cleaned["alive"][0]["why"]
    assert [name for name in killed.memory_then if name.endswith(".seg")]


def test_clean_removes_all_that_a_killed_run_left(killed: Killed) -> None:
    """Segments, board, lock and the launch's note: nothing is left, and the bytes are told."""
    assert [name for name in killed.memory if name.endswith(".seg")]
    cleaned = json.loads(killed.cleaned.out)
    (removed,) = cleaned["removed"]
    assert cleaned["freed_bytes"] == removed["bytes"] > 0
    assert removed["unsaved_step"] >= STEPS + 3
    assert cleaned["notes"] == 1
    assert killed.memory_after == []


def test_clean_with_nothing_to_do(surefoot: Command, nothing_here: Path) -> None:
    """Says so, and exits 0; a named run that left nothing is an error."""
    assert surefoot("clean").out == "freed 0 B\n"
    assert json.loads(surefoot("clean", "--json").out) == {"freed_bytes": 0, "removed": [], "alive": [], "notes": 0}
    assert surefoot("clean", "--run", "0123456789abcdef").code == 2


def test_status_where_nothing_runs(surefoot: Command, nothing_here: Path) -> None:
    """An empty list, and a sentence for people."""
    assert surefoot("status", "--json").out == "[]\n"
    assert surefoot("status").out == "no run of yours trains on this machine\n"


@pytest.mark.parametrize("command", ["evict", "status"])
def test_a_run_is_found_by_uri_or_id_or_not_at_all(
    surefoot: Command, nothing_here: Path, finished: Finished, command: str
) -> None:
    """A finished run, a place without a run, an unknown id: three different sentences, exit code 2."""
    record = json.loads((finished.run / "run.json").read_text())["body"]
    for run, what in (
        (str(finished.run), f"no agent of run {record['run']} is on this machine"),
        (str(nothing_here / "empty"), "there is no run at"),
        ("0123456789abcdef", "no run of that id is on this machine"),
    ):
        answer = surefoot(command, run)
        assert answer.code == 2
        assert what in answer.err


@pytest.mark.parametrize("grace", ["0", "-1", "nan", "inf"])
def test_evict_refuses_an_impossible_grace(surefoot: Command, nothing_here: Path, grace: str) -> None:
    """Before anybody is asked."""
    answer = surefoot("evict", "0123456789abcdef", "--grace-s", grace)
    assert answer.code == 2
    assert "--grace-s" in answer.err


@pytest.mark.parametrize("command", ["ls", "show", "verify", "clean", "status"])
def test_a_command_starts_without_heavy_libraries(finished: Finished, nothing_here: Path, command: str) -> None:
    """Looking at a directory or at the machine loads neither torch, NumPy, SciPy nor the object store's library."""
    words = [command] if command in ("clean", "status") else [command, str(finished.run)]
    assert loaded(words) & {"torch", "numpy", "obstore", "scipy"} == set()


def test_help_starts_without_torch() -> None:
    """The list of commands shall come at once."""
    assert loaded(["--help"]) & {"torch", "numpy", "scipy"} == set()


def loaded(words: list[str]) -> set[str]:
    """Modules that a command loads in a process of its own."""
    script = (
        "import sys\n"
        "from surefoot.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines()[-1].split())
