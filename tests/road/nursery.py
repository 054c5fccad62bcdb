"""A program that starts real agents and fake trainers by fork: hundreds of processes without hundreds of start-ups.

    python nursery.py FD

FD is a socket on which one JSON message a process is asked for, its descriptors beside it; the answer is the pid, and
its exit code follows when it ends. The nursery has no threads, so what it forks is as good as a fresh program. It
ends, and all its children with it, when the other side of the socket is closed.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tiers"))

import fake_trainer
import faults

import surefoot.agent.__main__ as agent_program
import surefoot.tiers.object_store  # noqa: F401 - once, here, and not in every child

MAX_MESSAGE_BYTES = 1 << 20


def main(sock: socket.socket) -> None:
    children: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([sock, *children], [], [])
        for pidfd in ready:
            if pidfd in children:
                pid = children.pop(pidfd)
                os.close(pidfd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                sock.send(json.dumps({"exit": pid, "code": code}).encode())
        if sock in ready:
            data, fds, _flags, _address = socket.recv_fds(sock, MAX_MESSAGE_BYTES, 4)
            if not data:
                _kill_all(children)
                return
            pid = _fork(json.loads(data), fds, sock, children)
            children[os.pidfd_open(pid)] = pid
            for fd in fds:
                os.close(fd)
            sock.send(json.dumps({"pid": pid}).encode())


def _kill_all(children: dict[int, int]) -> None:
    for pidfd, pid in children.items():
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork(order: dict[str, Any], fds: list[int], sock: socket.socket, children: dict[int, int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        sock.close()
        for pidfd in children:
            os.close(pidfd)
        code = _become(order, fds)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:  # noqa: BLE001 - the child's last word, in its own log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(order: dict[str, Any], fds: list[int]) -> int:
    os.setsid()
    log = os.open(order["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(order["env"])
    if order["what"] == "trainer":
        return fake_trainer.main(socket.socket(fileno=fds[0]))
    for name, value in order["bounds"].items():
        _set_bound(name, value)
    agent_program.open_tier = faults.opener(order["faults"])  # type: ignore[assignment]
    sys.argv = ["surefoot.agent", order["config"], str(fds[0])]
    return agent_program.main()


def _set_bound(name: str, value: float) -> None:
    """Shorten a wait that is right for real runs and too long for a test: "agent.save.shipping._ENSURE_S" of the
    agent's own, or "tiers.silence.SILENT_AFTER_S"."""
    module_name, _, constant = name.rpartition(".")
    module = importlib.import_module(f"surefoot.{module_name}")
    assert isinstance(getattr(module, constant), int | float), f"{name} is no bound"
    setattr(module, constant, value)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
