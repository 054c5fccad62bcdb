"""Machines of a test: real agents and fake trainers, each machine with a shared memory of its own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from surefoot.launch.config import AgentConfig

NURSERY = Path(__file__).with_name("nursery.py")
WITHIN_S = 60.0
"""Bound on everything that a test waits for. Nothing here takes long unless it hangs."""

QUICK = {"agent.save.shipping._FIRST_PAUSE_S": 0.01, "agent.save.shipping._LONGEST_PAUSE_S": 0.1}
"""Pauses between two tries of a save, so that a test need not wait for real ones."""


class Nursery:
    """The running nursery: starts processes and tells how they ended."""

    def __init__(self) -> None:
        self._sock = socket.socket()
        self._process: subprocess.Popen[bytes] | None = None
        self._codes: dict[int, int] = {}

    def __enter__(self) -> Self:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(NURSERY), str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        self._sock = ours
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close()
        assert self._process is not None
        self._process.wait(WITHIN_S)

    def start(self, order: dict[str, Any], fds: Iterable[int]) -> int:
        """Start a process and return its pid."""
        socket.send_fds(self._sock, [json.dumps(order).encode()], list(fds))
        while True:
            message = self._receive(WITHIN_S)
            if "pid" in message:
                return int(message["pid"])

    def exit_code(self, pid: int, within_s: float = WITHIN_S) -> int:
        """Wait for a process's end; negative: the signal that ended it."""
        end_s = time.monotonic() + within_s
        while pid not in self._codes:
            self._receive(end_s - time.monotonic())
        return self._codes[pid]

    def ended(self, pid: int) -> bool:
        while select.select([self._sock], [], [], 0)[0]:
            self._receive(0)
        return pid in self._codes

    def _receive(self, within_s: float) -> dict[str, Any]:
        if not select.select([self._sock], [], [], max(0.0, within_s))[0]:
            raise TimeoutError("a process did not end, or did not start, in time")
        message: dict[str, Any] = json.loads(self._sock.recv(1 << 20))
        if "exit" in message:
            self._codes[message["exit"]] = message["code"]
        return message


class Process:
    """One process of a machine."""

    def __init__(self, nursery: Nursery, pid: int, log: Path) -> None:
        self._nursery = nursery
        self.pid = pid
        self.log = log

    @property
    def ended(self) -> bool:
        return self._nursery.ended(self.pid)

    def exit_code(self, within_s: float = WITHIN_S) -> int:
        return self._nursery.exit_code(self.pid, within_s)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        with contextlib.suppress(ProcessLookupError):
            if not self.ended:
                os.kill(self.pid, signal.SIGKILL)
        self.exit_code()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait_until_stopped(self) -> None:
        """Wait until the process has stopped itself."""
        wait_for(lambda: _state(self.pid) == "T", f"process {self.pid} to stop")

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


class Agent(Process):
    """A real agent process."""

    def __init__(self, nursery: Nursery, pid: int, log: Path, answer: dict[str, Any]) -> None:
        super().__init__(nursery, pid, log)
        self.answer = answer

    @property
    def error(self) -> str | None:
        """Why it could not start."""
        return self.answer.get("error")


class Trainer(Process):
    """A fake trainer, commanded over a socket."""

    def __init__(self, nursery: Nursery, pid: int, log: Path, sock: socket.socket) -> None:
        super().__init__(nursery, pid, log)
        self._sock = sock

    def tell(self, do: str, **arguments: Any) -> None:
        self._sock.send(json.dumps({"do": do, **arguments}).encode())

    def answer(self, within_s: float = WITHIN_S) -> dict[str, Any]:
        """The answer to the last command; `{"ended": code}` if the trainer ended instead."""
        if not select.select([self._sock], [], [], within_s)[0]:
            raise TimeoutError(f"the trainer did not answer in {within_s:g} s; it said: {self.said()}")
        data = self._sock.recv(1 << 20)
        return json.loads(data) if data else {"ended": self.exit_code()}  # type: ignore[no-any-return]

    def do(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.tell(do, **arguments)
        return self.answer()

    def close(self) -> None:
        self._sock.close()


class Machine:
    """One machine: a shared memory, a place for logs, one agent and its trainers at a time."""

    def __init__(
        self,
        nursery: Nursery,
        directory: Path,
        uri: str,
        name: str,
        bounds: dict[str, float] | None = None,
        env: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self._nursery = nursery
        self._logs = directory / name
        self._logs.mkdir(parents=True)
        # Not below pytest's own directory: the path of a Unix socket is short.
        self.shm = Path(tempfile.mkdtemp(prefix="sf-", dir="/dev/shm"))
        self._name = name
        self._uri = uri
        self._settings = settings
        self._launches = 0
        self.agent: Agent | None = None
        self.trainers: list[Trainer] = []
        self.env = env or {}
        self._bounds = {**QUICK, **(bounds or {})}
        self.launch = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self.shm)

    # ------------------------------------------------------------------ starting

    def start(self, world_size: int = 1, faults: dict[str, Any] | None = None, **settings: Any) -> Agent:
        """A launch: trainers, and an agent whose launch ends with the first of them."""
        self._launches += 1
        self.launch = f"{self._name}-{self._launches}"
        self.trainers = [self._start_trainer(rank) for rank in range(world_size)]
        return self.start_agent(faults, **settings)

    def start_agent(self, faults: dict[str, Any] | None = None, **settings: Any) -> Agent:
        """The launch's agent; called again, one that replaces a lost one."""
        config = AgentConfig(
            uri=self._uri,
            launch=self.launch,
            node=self._name,
            **{"owner_pid": self.trainers[0].pid, **self._settings, **settings},
        )
        reader, writer = os.pipe()
        log = self._logs / "agent.log"
        order = {
            "what": "agent",
            "config": config.to_json(),
            "faults": faults or {},
            "bounds": self._bounds,
            "env": self._env(),
            "log": str(log),
        }
        try:
            pid = self._nursery.start(order, [writer])
        finally:
            os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            line = pipe.readline() if select.select([pipe], [], [], WITHIN_S)[0] else b""
        answer = json.loads(line) if line else {"error": "it ended without a word"}
        self.agent = Agent(self._nursery, pid, log, answer)
        return self.agent

    def _start_trainer(self, rank: int) -> Trainer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log = self._logs / f"trainer-{rank}.log"
        with theirs:
            order = {"what": "trainer", "env": self._env(), "log": str(log)}
            pid = self._nursery.start(order, [theirs.fileno()])
        return Trainer(self._nursery, pid, log, ours)

    def _env(self) -> dict[str, str]:
        return {"SUREFOOT_SHM": str(self.shm), "XDG_STATE_HOME": str(self._logs / "state"), **self.env}

    # ------------------------------------------------------------------ what trainers do

    def tell_all(self, do: str, **arguments: Any) -> None:
        for trainer in self.trainers:
            trainer.tell(do, **arguments)

    def answers(self) -> list[dict[str, Any]]:
        return [trainer.answer() for trainer in self.trainers]

    def answers_left(self, from_rank: int) -> list[dict[str, Any]]:
        """The other ranks' answers, where some were taken already."""
        return [trainer.answer() for trainer in self.trainers[from_rank:]]

    def do_all(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        self.tell_all(do, **arguments)
        return self.answers()

    def open(self, **arguments: Any) -> list[dict[str, Any]]:
        """Every trainer opens the run and loads what it is given."""
        assert self.agent is not None
        assert self.agent.error is None, self.agent.error
        for rank, trainer in enumerate(self.trainers):
            path = self.agent.answer["socket"]
            trainer.tell("open", socket=path, rank=rank, world_size=len(self.trainers), **arguments)
        return self.answers()

    def begin(self, world_size: int = 1, faults: dict[str, Any] | None = None, **settings: Any) -> int | None:
        """Start, open and load on every rank: the step that training goes on from. Every byte was right."""
        self.start(world_size, faults, **settings)
        return self.went_on_from(self.open())

    @staticmethod
    def went_on_from(opened: list[dict[str, Any]]) -> int | None:
        for answer in opened:
            assert answer.get("wrong") == [], answer
            assert not answer.get("error"), answer
        (step,) = {answer["step"] for answer in opened}
        return step  # type: ignore[no-any-return]

    def save(self, step: int, **arguments: Any) -> list[dict[str, Any]]:
        return self.do_all("save", step=step, **arguments)

    def saved(self, step: int, **arguments: Any) -> None:
        """A save that must succeed on every rank."""
        answers = self.save(step, **arguments)
        assert all(answer.get("ok") for answer in answers), answers

    def finish(self, step: int) -> int:
        """Everybody leaves in good order: the agent's exit code."""
        self.do_all("bye", step=step, finished=True)
        self.end_trainers()
        assert self.agent is not None
        return self.agent.exit_code()

    def end_trainers(self, code: int = 0) -> None:
        for trainer in self.trainers:
            trainer.tell("exit", code=code)
        for trainer in self.trainers:
            trainer.exit_code()
            trainer.close()
        self.trainers = []

    # ------------------------------------------------------------------ ending and looking

    def kill(self) -> None:
        """The machine vanishes, but for its shared memory."""
        if self.agent is not None:
            self.agent.kill()
            self.agent = None
        self.kill_trainers()

    def restart_trainers(self, world_size: int = 1) -> list[dict[str, Any]]:
        """The trainers die and the launcher starts them again; the agent stays."""
        self.kill_trainers()
        self.trainers = [self._start_trainer(rank) for rank in range(world_size)]
        return self.open()

    def kill_trainers(self) -> None:
        for trainer in self.trainers:
            trainer.kill()
            trainer.close()
        self.trainers = []

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """What agents of this machine noted, in order."""
        files = sorted((self._logs / "state").rglob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
        events = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        return [event for event in events if kind is None or event["event"] == kind]

    def wait_for_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The first event of that kind with these fields, which may still have to come."""

        def found() -> list[dict[str, Any]]:
            return [e for e in self.events(kind) if all(e.get(name) == value for name, value in fields.items())]

        wait_for(lambda: bool(found()), f"{kind} {fields}")
        return found()[0]


MakeMachine = Callable[..., Machine]
"""Type of the fixture `machine`."""


def wait_for(condition: Callable[[], bool], what: str, within_s: float = WITHIN_S) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"waited {within_s:g} s in vain for {what}"
        time.sleep(0.005)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
