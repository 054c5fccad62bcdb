"""How processes that used an object store end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.agent_config import AgentConfig

_LEAVE = """
import atexit, sys
from surefoot.exits import leave
atexit.register(print, "the interpreter ended")
print("said", end="")
print("told", end="", file=sys.stderr)
leave(75)
"""


def test_what_was_said_is_out_and_the_interpreter_does_not_end() -> None:
    """The code is the one that was given, buffered words are written, and nothing runs after that."""
    done = subprocess.run([sys.executable, "-c", _LEAVE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (75, "said", "told")


def test_an_agent_leaves_so(tmp_path: Path) -> None:
    """Its code is its own, whatever is registered to run at the interpreter's end."""
    config = AgentConfig(uri=str(tmp_path / "run.json" / "run"), launch="launch", node="here")
    (tmp_path / "run.json").write_text("in the way")
    program = "import atexit, os, runpy, sys\natexit.register(os._exit, 99)\n"
    program += "runpy.run_module('surefoot.agent', run_name='__main__', alter_sys=True)"
    reader, writer = os.pipe()
    try:
        command = [sys.executable, "-c", program, config.to_json(), str(writer)]
        done = subprocess.run(command, pass_fds=(writer,), capture_output=True, text=True, check=False)
    finally:
        os.close(writer)
    with os.fdopen(reader) as pipe:
        assert "error" in pipe.read()
    assert done.returncode == 1, done.stderr


@pytest.mark.parametrize(("arguments", "code", "said"), [(["ls", "{}/nothing"], 2, ""), (["--help"], 0, "Usage")])
def test_the_command_leaves_so(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    """Its code is what it says, an error's and a success's, and all that it wrote is out."""
    program = "import atexit, os, runpy\natexit.register(os._exit, 99)\n"
    program += "runpy.run_module('surefoot.cli.main', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", program, *(argument.format(tmp_path) for argument in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stdout
    assert bool(done.stderr.strip()) == (code != 0)
