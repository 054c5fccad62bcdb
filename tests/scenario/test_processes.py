"""Finding and ending the processes of a job, whoever their parent is."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

from surefoot.scenario.processes import (
    MARK_VARIABLE,
    command_of,
    find_marked,
    has_mark,
    kill_marked,
    send,
    state_of,
    stopped,
    wait_for_end,
)

# A child in a session of its own, whose parent ends at once; and one more that keeps making children.
_SCATTERED = """
import os, sys, time
for make in (False, True):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        while make:
            if os.fork() == 0:
                time.sleep(3600)
            time.sleep(0.01)
        time.sleep(3600)
print("made", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def mark() -> Iterator[str]:
    mark = secrets.token_hex(8)
    yield mark
    kill_marked(mark)


def _start(mark: str, program: str) -> subprocess.Popen[str]:
    environment = {**os.environ, MARK_VARIABLE: mark}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "made\n"
    return process


def _finish(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_finds_and_kills_what_left_session_and_parent(mark: str) -> None:
    """Daemons, orphans and children made meanwhile carry the mark, and none of them outlives the kill."""
    process = _start(mark, _SCATTERED)
    while len(find_marked(mark)) < 5:
        pass
    other = secrets.token_hex(8)
    bystander = _start(other, "import sys; print('made', flush=True); sys.stdin.read()")
    killed = kill_marked(mark)
    assert process.pid in killed
    assert len(killed) >= 5
    assert find_marked(mark) == []
    assert not has_mark(process.pid, mark)
    assert find_marked(other) == [bystander.pid]
    _finish(process)
    _finish(bystander)


def test_a_stopped_process_stands_still_and_goes_on(mark: str) -> None:
    """Inside the block the process does nothing; after it, it goes on."""
    process = _start(mark, "import time\nprint('made', flush=True)\nwhile True: print('x', flush=True)")
    assert process.stdout is not None
    with stopped(process.pid) as still:
        assert still
        assert state_of(process.pid) == "T"
        assert has_mark(process.pid, mark)
        assert "while True" in command_of(process.pid)
    process.stdout.read(1 << 17)  # more than a pipe holds
    _finish(process)


def test_a_process_that_ended_is_not_taken_for_a_stopped_one(mark: str) -> None:
    """Whoever is gone, or gone but for its exit code, is told as gone."""
    process = _start(mark, "print('made', flush=True)")
    assert wait_for_end(process.pid)
    with stopped(process.pid) as still:  # a zombie
        assert not still
    _finish(process)
    with stopped(process.pid) as still:
        assert not still
    assert not send(process.pid, 0)  # type: ignore[arg-type]
    assert state_of(process.pid) == ""
    assert command_of(process.pid) == ""
