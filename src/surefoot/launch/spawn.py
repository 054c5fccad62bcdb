"""Start a node agent, or find the one that another process of this launch has started."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from surefoot import errors
from surefoot.errors import AgentError
from surefoot.host.clock import boot_s
from surefoot.ipc.home import base_directory, open_private
from surefoot.ipc.wire import connect
from surefoot.launch.config import AgentConfig

READY_WITHIN_S = 180.0
"""An agent may have to wait for an older one that is still shipping."""


_started: list[subprocess.Popen[bytes]] = []
"""Kept, so that Python does not warn of an agent that outlives the call as of a forgotten child."""


def spawn_agent(config: AgentConfig) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """Start an agent as a program of its own, in its own session, and wait until it serves.

    It is never a fork of the caller, whose threads and libraries would be in an undefined state in the child.

    Returns:
        The process, and its answer: `socket`, `board`, `run`.

    Raises:
        SurefootError: it could not start; the error is the agent's own.
    """
    end_s = boot_s() + READY_WITHIN_S
    while True:
        process, answer = _try_spawn(config, end_s)
        if answer is not None:
            break
        # An agent that was killed from outside does not show that the next one will end; one that ends by itself
        # will end again.
        if process.wait() != -signal.SIGKILL or boot_s() > end_s:
            raise AgentError("the agent ended before it was ready; its own output names the reason")
    if "error" in answer:
        process.wait()
        kind = getattr(errors, str(answer.get("kind")), AgentError)
        raise kind(answer["error"])
    return process, answer


def _try_spawn(config: AgentConfig, end_s: float) -> tuple[subprocess.Popen[bytes], dict[str, Any] | None]:
    """A new agent, and its answer when it was ready; None if it ended before."""
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "surefoot.agent", config.to_json(), str(writer)],
            pass_fds=(writer,),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        os.close(writer)
    _started.append(process)
    try:
        return process, _first_line(reader, end_s)
    finally:
        os.close(reader)


def find_or_spawn(config: AgentConfig, key: str) -> dict[str, Any]:
    """The agent of the launch that `key` names; started here if none serves yet. Safe for racing processes."""
    note = base_directory() / f"surefoot-{os.geteuid()}-launch-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    with _locked(note) as fd:
        known = os.pread(fd, 65536, 0)
        if known:
            answer: dict[str, Any] = json.loads(known)
            if _serves(answer["socket"]):
                return answer
        _process, answer = spawn_agent(replace(config, note=str(note)))
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(answer).encode(), 0)
        return answer


def launch_key(owner_pid: int, uri: str) -> str:
    """A name for the launch that this process owns. A pid alone is not enough: pids are used again."""
    start = Path(f"/proc/{owner_pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    return f"{owner_pid}-{start}-{uri}"


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    while True:
        fd = open_private(path)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            break
        # Removed while this process waited for it: the next process would lock another file.
        os.close(fd)
    try:
        yield fd
    finally:
        os.close(fd)


def _serves(socket_path: str) -> bool:
    try:
        connect(socket_path, 1.0).close()
    except OSError:
        return False
    return True


def _first_line(fd: int, end_s: float) -> dict[str, Any] | None:
    """The first line, parsed; None if the writer ended without one."""
    data = b""
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0.0, end_s - boot_s()))
        if not ready:
            raise AgentError(f"the agent did not get ready within {READY_WITHIN_S:.0f} s")
        part = os.read(fd, 65536)
        if not part:
            return None
        data += part
    answer: dict[str, Any] = json.loads(data)
    return answer
