"""How processes end that used an object store, or failed among others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.launch.config import AgentConfig

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


_ENDS_LATE = """
import atexit, signal, sys, threading
from surefoot.exits import bound_end, let_end
atexit.register(threading.Event().wait, float(sys.argv[1]))
signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
bound_end(0.2)
bound_end(0.2)
if sys.argv[2] == "let":
    let_end()
raise SystemExit(3)
"""


@pytest.mark.parametrize(("ends_in_s", "then", "code"), [(600, "", -signal.SIGALRM), (0, "", 3), (1, "let", 3)])
def test_an_end_that_is_bounded(ends_in_s: float, then: str, code: int) -> None:
    """One that does not come is made; one that comes in time, or is let be, is the script's own."""
    command = [sys.executable, "-c", _ENDS_LATE, str(ends_in_s), then]
    assert subprocess.run(command, check=False, timeout=120).returncode == code


_FAILS = """
import sys
import torch.distributed as dist
from surefoot.core.agreement import Vector
from surefoot.trainer.boundary.agreement import GlooAgreement
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
agreement = GlooAgreement()
dist.barrier()
if rank == 1:
    sys.stdin.read()
agreement.post(Vector(free_slots=1))
agreement.abandon()
agreement.abandon()
raise ValueError("the script's own")
"""


def test_a_rank_that_fails_waits_for_no_other(tmp_path: Path) -> None:
    """It ends by its own error, though another one never comes to the agreement that it brought its part to."""
    start = [sys.executable, "-c", _FAILS]
    with subprocess.Popen([*start, "1", str(tmp_path / "store")], stdin=subprocess.PIPE) as other:
        try:
            command = [*start, "0", str(tmp_path / "store")]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
            assert other.poll() is None
        finally:
            other.kill()
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].endswith("ValueError: the script's own")
