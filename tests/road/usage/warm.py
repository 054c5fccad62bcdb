"""Real trainers, started quickly: a process that has torch imported forks one for each request.

Importing torch takes longer than most of what is tested here. Each trainer is a process of its own, in a session of
its own; several ranks get a parent that stands in their midst as torchrun would, and that is told apart from this
one, since the agent takes a trainer's parent for its launch.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

WITHIN_S = 120.0
"""Generous bound on everything that is waited for."""
_SAY_WHERE = signal.SIGUSR2
"""A trainer prints the stack of each of its threads at this signal."""


class Job:
    """One launch: a trainer, or the parent of several."""

    def __init__(self, pid: int, output: Path, poll: Callable[[int], int | None]) -> None:
        self.pid = pid
        self._output = output
        self._poll = poll

    @property
    def output(self) -> str:
        """What it printed so far, errors included."""
        return self._output.read_text()

    @property
    def code(self) -> int | None:
        """Exit code; negative for a signal; None while it runs."""
        return self._poll(self.pid)

    def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        self._until(lambda: self.code is not None, f"the end of process {self.pid}")
        assert self.code is not None
        return self.code

    def until_printed(self, text: str) -> None:
        """Wait until it has printed something."""
        self._until(lambda: text in self.output or self.code is not None, f"{text!r} of process {self.pid}")
        assert text in self.output, f"ended with {self.code} before it printed {text!r}:\n{self.output}"

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait; if in vain, have each of its processes say where it stands."""
        try:
            until(condition, what)
        except AssertionError as error:
            for pid in (self.pid, *self.children()):
                os.kill(pid, _SAY_WHERE)
            time.sleep(1.0)
            raise AssertionError(f"{error}; it printed:\n{self.output}") from None

    def children(self) -> list[int]:
        """Ranks of a launch of several, in rank order."""
        listed = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return sorted(int(pid) for pid in listed)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    @staticmethod
    def signal_of(pid: int, number: int) -> None:
        """Signal a process, if it is still there."""
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def signal_group(self, number: int) -> None:
        os.killpg(self.pid, number)


class Warm:
    """The process that forks, and the connection to it."""

    def __init__(self, enter: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        """`enter` comes before the command line; `env` is added to the environment of all that is started here."""
        mine, its = socket.socketpair()
        self._process = subprocess.Popen(
            [*enter, sys.executable, "-u", __file__, str(its.fileno())],
            pass_fds=(its.fileno(),),
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
        its.close()
        self._stream = mine.makefile("rw")
        self._socket = mine
        self._codes: dict[int, int] = {}
        self._pids: set[int] = set()
        assert self._read() == {"ready": True}

    def start(
        self,
        script: Path,
        args: list[str],
        output: Path,
        env: dict[str, str],
        *,
        ranks: int = 1,
        world: int = 0,
        first_rank: int = 0,
        address: str = "127.0.0.1",
        port: int = 0,
        cwd: Path | None = None,
    ) -> Job:
        """Start a script; for several ranks with what torchrun would set.

        Args:
            script: what each rank runs.
            args: its arguments.
            output: gets what all of them print.
            env: added to the environment.
            ranks: how many here.
            world: how many in all; 0: these are all.
            first_rank: global rank of the first one here.
            address: where the ranks meet.
            port: and at which port; 0: a free one.
            cwd: working directory.
        """
        request = {
            "script": str(script),
            "args": args,
            "output": str(output),
            "env": env,
            "ranks": ranks,
            "world": world or ranks,
            "first_rank": first_rank,
            "address": address,
            "port": port or free_port(),
            "cwd": str(cwd or output.parent),
        }
        self._write(request)
        pid = self._read_answer()["pid"]
        # Numbers of processes come again.
        self._codes.pop(pid, None)
        self._pids.add(pid)
        return Job(pid, output, self._poll)

    @property
    def pid(self) -> int:
        """Of the process that forks."""
        return self._process.pid

    def kill_all(self) -> None:
        """End the launches that are still there, their ranks included."""
        for pid in self._pids:
            if self._poll(pid) is None:
                os.killpg(pid, signal.SIGKILL)
        until(lambda: all(self._poll(pid) is not None for pid in self._pids), "the end of what was killed")
        self._pids.clear()

    def close(self) -> None:
        self._stream.close()
        self._socket.close()
        self._process.wait(WITHIN_S)

    def _poll(self, pid: int) -> int | None:
        if pid not in self._codes:
            self._write({"poll": True})
            self._codes.update({int(key): code for key, code in self._read_answer()["codes"].items()})
        return self._codes.get(pid)

    def _write(self, body: dict[str, Any]) -> None:
        self._stream.write(json.dumps(body) + "\n")
        self._stream.flush()

    def _read(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._stream.readline())
        return answer

    def _read_answer(self) -> dict[str, Any]:
        return self._read()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], bool], what: str, within_s: float = WITHIN_S) -> None:
    """Wait for a condition."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        time.sleep(0.01)


def processes_with(text: str) -> Iterator[int]:
    """Live processes of this user in whose environment `text` stands."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                found = text.encode() in (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if found and state != "Z":
                yield int(entry.name)


# ------------------------------------------------------------------ the forking process


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Answer requests for ever; returns a request in the child that is to run it."""
    import torch

    import surefoot

    # What the first optimizer or DistributedDataParallel of a process imports: a good second of work.
    import_module("torch._dynamo")
    assert threading.active_count() == 1, "a process with threads must not fork"
    del torch, surefoot
    # What is imported here is not garbage: looking for some in it would take most of its children's time.
    gc.collect()
    gc.freeze()
    stream = connection.makefile("rw")
    running: set[int] = set()

    def answer(body: dict[str, Any]) -> None:
        stream.write(json.dumps(body) + "\n")
        stream.flush()

    answer({"ready": True})
    for line in stream:
        request: dict[str, Any] = json.loads(line)
        if "poll" in request:
            answer({"codes": _ended(running)})
            continue
        pid = os.fork()
        if pid == 0:
            os.setsid()
            stream.close()
            connection.close()
            return request
        running.add(pid)
        answer({"pid": pid})
    os._exit(0)


def _ended(running: set[int]) -> dict[int, int]:
    codes = {}
    for pid in list(running):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            codes[pid] = os.waitstatus_to_exitcode(status)
            running.discard(pid)
    return codes


def _become_ranks(request: dict[str, Any]) -> None:
    """In a launch of several ranks: fork them, and wait for all; returns in each of them."""
    ranks: list[int] = []
    for rank in range(request["ranks"]):
        pid = os.fork()
        if pid == 0:
            os.environ.update(
                RANK=str(request["first_rank"] + rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(request["world"]),
                LOCAL_WORLD_SIZE=str(request["ranks"]),
                MASTER_ADDR=request["address"],
                MASTER_PORT=str(request["port"]),
                OMP_NUM_THREADS="1",
            )
            return
        ranks.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    print("codes", codes, flush=True)
    os._exit(next((code if code > 0 else 128 - code for code in codes if code), 0))


def _enter(request: dict[str, Any]) -> None:
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    fd = os.open(request["output"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    # Lines of several ranks that share this file must not mix.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    faulthandler.register(_SAY_WHERE, file=2)
    sys.argv = [request["script"], *request["args"]]
    sys.path[0] = str(Path(request["script"]).parent)


if __name__ == "__main__":
    _request = _serve(socket.socket(fileno=int(sys.argv[1])))
    _enter(_request)
    if _request["world"] > 1:
        _become_ranks(_request)
    runpy.run_path(_request["script"], run_name="__main__")
