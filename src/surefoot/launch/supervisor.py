"""The supervisor, `surefoot run`: starts two children, the agent and torchrun, and restarts either; fit to be PID 1.

A SIGTERM to the supervisor, to its group or to every process of the job is one notice: the children ignore SIGTERM, and
the supervisor passes the notice on. The agent ends the trainers, not torchrun, which takes half a minute to do so.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surefoot.errors import AgentError, SurefootError
from surefoot.exits import EVICTED, EVICTED_UNSAVED, FINISHED, SUPERSEDED
from surefoot.host.clock import boot_s
from surefoot.ipc import wire
from surefoot.launch.config import AgentConfig
from surefoot.launch.container import unheard
from surefoot.launch.spawn import spawn_agent

_RESERVED = (SUPERSEDED, EVICTED_UNSAVED, EVICTED)
_NOTICES = {signal.SIGTERM: "sigterm", signal.SIGINT: "sigint", signal.SIGHUP: "sighup"}
"""Signals that end a launch in good order. A second SIGINT ends it at once."""
_TICK_S = 0.05
_SPAWNS_AT_MOST = 5
_SPAWNS_WITHIN_S = 30.0
_LIVED_S = 1.0
_DRAIN_WITHIN_S = 960.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """The script of a launch, and the processes and nodes on which it runs."""

    script: Sequence[str]
    """Script (or `-m module`) and its arguments."""
    num_procs: int = 1
    num_nodes: int = 1
    meet: str | None = None
    """Host and port of one of the nodes, where all nodes' torchrun meet; needed for several nodes."""
    job: str | None = None
    """Name by which the nodes of one job find each other; by default made of the run's place."""
    max_restarts: int = 3
    """Restarts in a row without a new finished step, before the script's failure is final."""


class Supervisor:
    """Keeps one launch going until it is finished, evicted, superseded, or failed for good."""

    def __init__(self, launch: LaunchConfig, agent: AgentConfig, options: Mapping[str, str]) -> None:
        self._launch = launch
        self._options = options
        self._config = replace(agent, supervised=True, owner_pid=os.getpid())
        self._agent: subprocess.Popen[bytes] | None = None
        self._answer: dict[str, Any] = {}
        self._link: socket.socket | None = None
        self._inbox: list[dict[str, Any]] = []
        self._torchrun: subprocess.Popen[bytes] | None = None
        self._generation_at_launch = 0
        self._noticed: str | None = None
        self._drained: int | None = None
        self._respawns: list[float] = []
        self._agent_since_s = 0.0
        self._wake_reader, self._wake_writer = os.pipe()

    def run(self) -> int:
        """Run to the end; returns the exit code."""
        self._listen_to_signals()
        if self._config.watch is None and (deaf := unheard()) is not None:
            print(f"surefoot: {deaf}", file=sys.stderr)  # noqa: T201 - before there is an agent to note it
        try:
            self._start_agent()
            self._start_torchrun(self._launch.max_restarts)
            return self._loop()
        finally:
            self._kill_torchrun()
            # Also after an error or a second Ctrl-C: no trainer is left then, and the agent ends by itself.
            self._send({"op": "done", "finished": False})
            if self._agent is not None:
                self._reap(self._agent)

    # ------------------------------------------------------------------ the loop

    def _loop(self) -> int:
        while True:
            self._wait_for_something()
            self._read_inbox()
            if self._drained is not None:
                return self._end(self._drained)
            assert self._agent is not None
            if self._agent.poll() is not None:
                self._agent_ended()
            if self._torchrun is not None and self._torchrun.poll() is not None:
                code = self._torchrun_ended(self._torchrun.returncode)
                if code is not None:
                    return self._end(code)

    def _torchrun_ended(self, code: int) -> int | None:
        """The exit code to end with, now that torchrun has ended; None to go on."""
        self._torchrun = None
        if code == FINISHED:
            self._send({"op": "done", "finished": True})
            return FINISHED
        generation, barren, ending = self._progress()
        if self._noticed is not None or ending:
            # The agent decides on the exit code, once everything that can be made safe is safe.
            return None
        # Not worth another start: the script never opened the run, or too many starts in a row finished no step.
        if generation > self._generation_at_launch and barren < self._launch.max_restarts:
            self._start_torchrun(self._launch.max_restarts - barren - 1)
            return None
        self._send({"op": "done", "finished": False})
        return code

    def _progress(self) -> tuple[int, int, bool]:
        """Newest generation; how many up to it in a row finished no step; whether the agent is ending the launch."""
        answer = self._ask({"op": "progress"}) or {}
        return int(answer.get("generation") or 0), int(answer.get("barren") or 0), bool(answer.get("ending"))

    def _end(self, code: int) -> int:
        self._kill_torchrun()
        if code == FINISHED or code not in _RESERVED:
            self._send({"op": "done", "finished": code == FINISHED})
        else:
            self._send({"op": "done", "finished": False})
        assert self._agent is not None
        try:
            agent_code = self._agent.wait(_DRAIN_WITHIN_S)
        except subprocess.TimeoutExpired:
            print("surefoot: the agent did not end in time", file=sys.stderr)  # noqa: T201
            self._agent.kill()
            agent_code = 1
        if code == FINISHED and agent_code not in (FINISHED, EVICTED):
            return agent_code
        return code

    # ------------------------------------------------------------------ signals

    def _listen_to_signals(self) -> None:
        os.set_blocking(self._wake_writer, False)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        for number in (*_NOTICES, signal.SIGCHLD):
            signal.signal(number, lambda _number, _frame: None)

    def _wait_for_something(self) -> None:
        fds = [self._wake_reader] + ([self._link.fileno()] if self._link is not None else [])
        ready, _, _ = select.select(fds, [], [], _TICK_S)
        if self._wake_reader in ready:
            self._signals(os.read(self._wake_reader, 4096))
        if self._link is not None and self._link.fileno() in ready:
            self._receive()
        self._reap_orphans()

    def _signals(self, numbers: bytes) -> None:
        if signal.SIGINT in numbers and self._noticed is not None:
            raise KeyboardInterrupt
        for number, source in _NOTICES.items():
            if number in numbers and self._noticed is None:
                self._noticed = source
                self._send({"op": "notice", "source": self._noticed, "grace_s": self._config.grace_s})

    def _reap_orphans(self) -> None:
        """As PID 1, reap orphans that other processes left; our own two children are waited for by pid."""
        if os.getpid() != 1:
            return
        own = {p.pid for p in (self._agent, self._torchrun) if p is not None}
        while True:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None or info.si_pid in own:
                return
            os.waitpid(info.si_pid, os.WNOHANG)

    # ------------------------------------------------------------------ the agent

    def _start_agent(self) -> None:
        self._agent, self._answer = spawn_agent(self._config)
        self._agent_since_s = boot_s()
        try:
            self._link = wire.connect(self._answer["socket"], 10.0)
        except OSError:
            # The agent has ended since; the loop finds that in its next round.
            return
        self._send({"role": "supervisor"})
        if self._torchrun is not None:
            self._send({"op": "torchrun", "pid": self._torchrun.pid})
        if self._noticed is not None:
            self._send({"op": "notice", "source": self._noticed, "grace_s": self._config.grace_s})

    def _agent_ended(self) -> None:
        assert self._agent is not None
        if self._drained is not None:
            return
        served = boot_s() - self._agent_since_s >= _LIVED_S
        # An agent that was killed from outside (by hand, for its memory) does not show that the next one will end; one
        # that ends by itself as soon as it has started will end again.
        if self._agent.returncode != -signal.SIGKILL:
            self._respawns = [*self._respawns[-_SPAWNS_AT_MOST:], boot_s()] if not served else []
        if len(self._respawns) > _SPAWNS_AT_MOST and self._respawns[-1] - self._respawns[0] < _SPAWNS_WITHIN_S:
            raise AgentError("the node agent ended again and again; its own output names the reason")
        if self._link is not None:
            self._link.close()
            self._link = None
        self._start_agent()

    def _send(self, body: dict[str, Any]) -> None:
        if self._link is None:
            return
        try:
            wire.send(self._link, body)
        except OSError:
            # The agent is gone: `_start_agent` sends what counts to its successor.
            return

    def _ask(self, body: dict[str, Any]) -> dict[str, Any] | None:
        if self._link is None:
            return None
        self._send({**body, "id": 1})
        self._link.settimeout(10.0)
        try:
            while (frame := wire.receive(self._link)) is not None:
                if frame[0].get("id") == 1:
                    return frame[0]
                self._inbox.append(frame[0])
        except (OSError, SurefootError):
            return None
        finally:
            self._link.settimeout(None)
        return None

    def _receive(self) -> None:
        assert self._link is not None
        try:
            frame = wire.receive(self._link)
        except (OSError, SurefootError):
            frame = None
        if frame is None:
            self._link.close()
            self._link = None
            return
        self._inbox.append(frame[0])

    def _read_inbox(self) -> None:
        inbox, self._inbox = self._inbox, []
        for body in inbox:
            if body.get("op") == "drained":
                self._drained = int(body["code"])
            elif body.get("op") == "trainers_gone":
                self._noticed = self._noticed or "agent"
                self._kill_torchrun()

    # ------------------------------------------------------------------ torchrun

    def _start_torchrun(self, own_restarts: int) -> None:
        self._generation_at_launch, _barren, _ending = self._progress()
        command = [
            sys.executable,
            "-m",
            "surefoot.launch.torchrun",
            f"--nnodes={self._launch.num_nodes}",
            f"--nproc-per-node={self._launch.num_procs}",
            f"--max-restarts={own_restarts}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self._launch.meet or 'localhost:0'}",
            f"--rdzv-id={self._job()}",
            "--monitor-interval=0.1",
            "--signals-to-handle=SIGQUIT",
            *_after_options(self._launch.script),
        ]
        # torchrun would set this too, and print a page of explanation at each launch.
        threads = {"OMP_NUM_THREADS": "1"} if self._launch.num_procs > 1 else {}
        environment = {
            **threads,
            **os.environ,
            "SUREFOOT_AGENT": str(self._answer["socket"]),
            **self._options,
        }
        self._torchrun = subprocess.Popen(command, env=environment, preexec_fn=_deaf)
        self._send({"op": "torchrun", "pid": self._torchrun.pid})

    def _job(self) -> str:
        if self._launch.num_nodes == 1:
            return secrets.token_hex(8)
        return self._launch.job or hashlib.sha256(self._config.uri.encode()).hexdigest()[:16]

    def _kill_torchrun(self) -> None:
        if self._torchrun is not None and self._torchrun.poll() is None:
            self._torchrun.kill()
            self._reap(self._torchrun)
        self._torchrun = None

    @staticmethod
    def _reap(process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _after_options(script: Sequence[str]) -> list[str]:
    # Without the dashes torchrun would take an option of the script for an option of its own that begins alike.
    flags = [word for word in script[:1] if word == "-m"]
    return [*flags, "--", *script[len(flags) :]]


def _deaf() -> None:
    # The trainers inherit this: of a signal to all processes only the supervisor takes notice.
    for number in _NOTICES:
        signal.signal(number, signal.SIG_IGN)
