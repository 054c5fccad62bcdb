"""Options of a run: one name and unit everywhere, every value checked where it is given, none ignored."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.errors import ConfigError
from surefoot.launch.config import OPTION_NAMES, AgentConfig, Options
from surefoot.trainer.run import _misspelt

EVERY: dict[str, Any] = {
    "to": "s3://bucket/run",
    "disk": ("/mnt/a", "/mnt/b"),
    "interval_s": 60.0,
    "max_bytes_per_s": 2e8,
    "grace_s": 12.5,
    "watch": "/run/evict",
    "resume": "must",
}


def test_the_environment_carries_every_option() -> None:
    """What `surefoot run` exports for its trainers is read back as the same values, defaults included."""
    assert tuple(EVERY) == OPTION_NAMES
    for options in (Options(), Options(**EVERY)):
        assert Options.from_environment(options.to_environment()) == options


def test_an_argument_wins_over_the_environment_and_that_over_the_default() -> None:
    """One precedence for every option."""
    found = Options.from_environment({"SUREFOOT_INTERVAL_S": "60", "SUREFOOT_GRACE_S": "5"})
    chosen = found.given(interval_s=30, grace_s=None, disk="/mnt/a")
    assert (chosen.interval_s, chosen.grace_s, chosen.resume, chosen.disk) == (30, 5.0, "auto", ("/mnt/a",))


def test_a_place_is_absolute_from_the_moment_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later `chdir` of the script means no other run; a bucket is what it is."""
    monkeypatch.chdir(tmp_path)
    assert Options().given(to="runs/a", disk=["d"]) == Options(to=f"{tmp_path}/runs/a", disk=(f"{tmp_path}/d",))
    assert Options.from_environment({"SUREFOOT_TO": "runs/a"}).to == f"{tmp_path}/runs/a"
    assert Options().given(to="s3://bucket/a").to == "s3://bucket/a"


@pytest.mark.parametrize("name", EVERY)
def test_the_command_decides_and_the_script_may_repeat_it(name: str) -> None:
    """Under `surefoot run` a script's option is the command's, or refused by name with both values."""
    command = Options(**EVERY)
    assert command.decided(**EVERY) == command
    other = {"disk": ["/elsewhere"], "resume": "never", "to": "s3://other/run", "watch": "/other"}.get(name, 7.0)
    with pytest.raises(ConfigError, match=f"{name}=.*{re.escape(str(EVERY[name]))}.*--{name.replace('_', '-')} there"):
        command.decided(**{name: other})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("interval_s", -1),
        ("interval_s", "60"),
        ("interval_s", True),
        ("max_bytes_per_s", 0),
        ("grace_s", 0),
        ("grace_s", float("nan")),
        ("resume", "maybe"),
        ("stage", 0),
        ("stage", 1.5),
        ("stage", True),
        ("overlap", "no"),
        ("strict", 1),
    ],
)
def test_an_option_that_cannot_be_is_an_error_where_it_is_given(name: str, value: Any) -> None:
    """`surefoot.Run(…)` itself refuses it, by name and value, before any agent is started."""
    with pytest.raises(surefoot.ConfigError, match=f"{name} is {re.escape(repr(value))}"):
        surefoot.Run("run", **{name: value})


def test_a_variable_that_cannot_be_is_named() -> None:
    """The variable, not the option: that is what the user has to look for."""
    with pytest.raises(ConfigError, match="SUREFOOT_GRACE_S is 'soon'"):
        Options.from_environment({"SUREFOOT_GRACE_S": "soon"})


def test_no_place_is_an_error() -> None:
    """Neither argument nor environment names one."""
    with pytest.raises(ConfigError, match="no place for the run"):
        AgentConfig.of(Options(), launch="launch", node="here")


def test_an_object_that_looks_like_an_option_is_named() -> None:
    """A misspelt option would be kept as an object, and its wish ignored; usual names of objects are none."""
    wrong = {
        "intervall_s": "interval_s",
        "interval": "interval_s",
        "grace": "grace_s",
        "stages": "stage",
        "watchs": "watch",
    }
    for name, option in wrong.items():
        (said,) = _misspelt([name])
        assert f"{name}=" in said
        assert f"option {option} is meant" in said
    usual = ["model", "optimizer", "scheduler", "loader", "ema", "scaler", "state", "batch", "step", "task", "top"]
    assert list(_misspelt(usual)) == []


def test_public_errors_are_public() -> None:
    """Each error that a docstring of the public surface names can be caught by its public name."""
    for name in ("AgentError", "ConfigError", "RestoreError", "TierError", "UnsupportedStateError", "UsageError"):
        assert issubclass(getattr(surefoot, name), surefoot.SurefootError)
        assert name in surefoot.__all__


def _command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TERM": "dumb", **environment}
    command = [sys.executable, "-m", "surefoot.cli.main", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_the_version_is_printed() -> None:
    """`surefoot --version` says what `surefoot.__version__` says."""
    done = _command("--version")
    assert (done.returncode, done.stdout) == (0, f"surefoot {surefoot.__version__}\n")


@pytest.mark.parametrize(
    ("broken", "code", "sentence"),
    [
        ("surefoot.errors.ConfigError('no such place')", 2, "surefoot: no such place\n"),
        ("KeyError('x')", 1, "surefoot: KeyError: 'x' (SUREFOOT_DEBUG=1 shows where)\n"),
    ],
)
def test_an_error_of_the_command_is_one_sentence(broken: str, code: int, sentence: str) -> None:
    """Foreseen or not; the traceback is there for those who ask for it."""
    program = (
        "import sys, surefoot.errors\nfrom surefoot.inspect import machine\nfrom surefoot.cli.main import main\n"
        f"async def broken(*_): raise {broken}\n"
        "machine.find_live = broken\nsys.argv = ['surefoot', 'evict', 'run']\nmain()\n"
    )
    for debug in ("", "1"):
        env = {**os.environ, "SUREFOOT_DEBUG": debug}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
        assert ("Traceback" in done.stderr) is bool(debug)
        if not debug:
            assert (done.returncode, done.stderr) == (code, sentence)


def test_nothing_is_started_for_a_run_that_is_refused(tmp_path: Path) -> None:
    """A script's option that the command does not have ends the job with that sentence; nothing is trained."""
    script = tmp_path / "train.py"
    script.write_text(
        "import surefoot\n"
        "with surefoot.Run(interval_s=60, resume='must', total=3) as run:\n"
        "    for step in run.steps(3): print('trained', step)\n"
    )
    done = _command("run", "--to", str(tmp_path / "run"), "--max-restarts", "0", str(script), SUREFOOT_INTERVAL_S="30")
    assert done.returncode == 1
    assert "surefoot.Run interval_s=60; `surefoot run`, which decides, has 30.0" in done.stderr
    assert "trained" not in done.stdout
