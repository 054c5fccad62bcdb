"""A job for `surefoot run` that fails as it is told: `case_job.py TOTAL LOG DEEDS`, deeds by step as JSON.

`kill`: SIGKILL to itself, once. `raise`: an error, each time. `child`: once, a process that holds a port and outlives
it, then SIGKILL to itself. At the step `open` the run has not been opened. At the step `hold` it waits to be evicted.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

import torch

import surefoot

TOTAL, LOG, DEEDS = int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])


def note(*words: object) -> None:
    with LOG.open("a") as out:
        out.write(json.dumps(words) + "\n")


def once(what: str) -> bool:
    """True the first time."""
    marker = LOG.with_suffix(f".{what}")
    first = not marker.exists()
    marker.touch()
    return first


def listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener


def leave_a_child(port: int) -> None:
    """A process of this one's group that holds the port, memory and whatever else it was given, for ever."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        listen(port)
        os.write(writer, b"1")
        signal.pause()
    os.read(reader, 1)


def main() -> None:
    if "open" in DEEDS:
        note("failed before it was opened")
        raise ValueError("no such file")
    if "port" in DEEDS:
        listen(DEEDS["port"]).close()
    w = torch.zeros(2)
    with surefoot.Run(stage=1, w=w) as run:
        note("start", run.step, w.tolist())
        for step in run.steps(TOTAL):
            w += 1
            deed = DEEDS.get(str(step))
            if deed == "child" and once("child"):
                leave_a_child(DEEDS["port"])
                os.kill(os.getpid(), signal.SIGKILL)
            if deed == "kill" and once(f"kill{step}"):
                os.kill(os.getpid(), signal.SIGKILL)
            if deed == "raise":
                raise ValueError("a bad sample")
            if deed == "hold":
                note("holds")
                while not run.evicting:
                    signal.sigtimedwait([], 0.01)
            note("step", step)


if __name__ == "__main__":
    main()
