"""The trainer's side of the agent's socket, and the watcher thread that keeps it.

The watcher reads the socket, answers pins, obeys stop words, notices signals, and finds the agent again after it was
replaced; all this also while the main thread sits in a collective. It never touches the user's state. The threads that
do are the copier (`trainer/stage/copying.py`) and the thread of the frozen tensors (`trainer/frozen/frozen.py`).
"""

from __future__ import annotations

import itertools
import os
import queue
import select
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from surefoot import errors
from surefoot.errors import AgentError, SurefootError, UsageError
from surefoot.exits import SUPERSEDED, Evicted, Superseded
from surefoot.host.clock import boot_s
from surefoot.ipc import wire
from surefoot.ipc.wire import Body

_TICK_S = 0.1
_RETRY_S = 0.05
_ANSWER_WITHIN_S = 600.0
_RESPAWN_AFTER_S = 0.5
_RESPAWN_EVERY_S = 60.0
_QUESTION = "question"
"""Marks a frame as a question: the agent needs its answer before it can answer the request."""


class Refused(SurefootError):  # noqa: N818 - an answer, not a fault
    """The agent accepts no more trainers; `code` is the exit code that goes with the reason."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code

    def exit(self, step: int) -> SystemExit:
        return Superseded(str(self)) if self.code == SUPERSEDED else Evicted(step)


class AgentClient:
    """Requests and messages to the agent; survives the agent's replacement."""

    def __init__(
        self,
        socket_path: str,
        hello: Callable[[bool], tuple[Body, list[int]]],
        on_push: Callable[[Body, list[int]], None],
        on_reconnect: Callable[[], list[Body]],
        on_tick: Callable[[bytes], None],
        respawn: Callable[[], None] | None,
    ) -> None:
        self._path = socket_path
        self._hello = hello
        self._on_push = on_push
        self._on_reconnect = on_reconnect
        self._on_tick = on_tick
        self._respawn = respawn
        self._sock: socket.socket | None = None
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[Body, queue.SimpleQueue[tuple[Body, list[int]]]]] = {}
        self._closing = threading.Event()
        self._established = False
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._thread = threading.Thread(target=self._watch, name="surefoot-watcher", daemon=True)

    def start(self) -> None:
        """Connect, and start the watcher."""
        self._sock = wire.connect(self._path, 10.0)
        # A forked child (a data loader's worker) must not hold the connection open after the trainer's death.
        os.register_at_fork(after_in_child=self._forget)
        self._thread.start()

    @property
    def wake_fd(self) -> int:
        """A byte written here wakes the watcher; safe for `signal.set_wakeup_fd`."""
        return self._wake_writer

    def register(self, consider: Callable[[Body], Body]) -> tuple[Body, list[int]]:
        """Say hello, and wait until the agent lets this trainer start.

        Args:
            consider: makes the answer to a question that the agent has before that.
        """
        body, fds = self._hello(False)
        return self._ask(body, fds, within_s=None, consider=consider)

    def request(
        self,
        body: Body,
        within_s: float | None = _ANSWER_WITHIN_S,
        give_up: Callable[[], str | None] | None = None,
    ) -> tuple[Body, list[int]]:
        """Ask and wait for the answer. The question is sent again if the agent is replaced meanwhile.

        Args:
            body: the question.
            within_s: bound on the wait; None for none.
            give_up: called now and then while there is no answer; a reason that it returns ends the wait.

        Raises:
            SurefootError: the agent's own error, of its own kind.
            AgentError: no answer in time.
            UsageError: with the reason that `give_up` returned.
        """
        return self._ask(body, [], None if give_up is not None else within_s, give_up)

    def tell(self, body: Body) -> None:
        """Send without waiting. The message is lost if no agent is there: news that matter are sent again on
        reconnection."""
        # Such news stand where `_greet` finds them BEFORE they are sent from here.
        with self._sending, suppress(OSError):
            if self._sock is not None:
                wire.send(self._sock, body)

    def event(self, kind: str, **fields: Any) -> None:
        """Have the agent note an event."""
        self.tell({"op": "event", "event": kind, "fields": fields})

    def close(self) -> None:
        self._closing.set()
        os.write(self._wake_writer, b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._sock is not None:
            self._sock.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    # ------------------------------------------------------------------ requests

    def _ask(
        self,
        body: Body,
        fds: list[int],
        within_s: float | None,
        give_up: Callable[[], str | None] | None = None,
        consider: Callable[[Body], Body] | None = None,
    ) -> tuple[Body, list[int]]:
        number = next(self._numbers)
        answers: queue.SimpleQueue[tuple[Body, list[int]]] = queue.SimpleQueue()
        request = {**body, "id": number}
        try:
            self._send_request(number, request, answers, fds)
            answer, answer_fds = answers.get(timeout=within_s) if give_up is None else _until(give_up, answers)
            while consider is not None and _QUESTION in answer:
                # If the agent is lost meanwhile, its successor gets the request again, and asks its own question.
                self.tell(consider(answer[_QUESTION]))
                answer, answer_fds = answers.get()
        except queue.Empty:
            raise AgentError(f"the agent did not answer {body.get('op', 'hello')!r} within {within_s} s") from None
        finally:
            self._pending.pop(number, None)
        _raise_if_bad(answer)
        return answer, answer_fds

    def _send_request(
        self, number: int, request: Body, answers: queue.SimpleQueue[tuple[Body, list[int]]], fds: list[int]
    ) -> None:
        # Under one lock with the look for a connection: else a new agent could be greeted in between without it.
        with self._sending:
            self._pending[number] = (request, answers)
            sock = self._sock
            if sock is None:
                return
            try:
                wire.send(sock, request, fds)
            except OSError:
                # The watcher sees the end of the connection, and sends pending requests to the next agent.
                return

    # ------------------------------------------------------------------ the watcher thread

    def _watch(self) -> None:
        while not self._closing.is_set():
            sock = self._sock
            if sock is None:
                self._reconnect()
                continue
            ready, _, _ = select.select([sock.fileno(), self._wake_reader], [], [], _TICK_S)
            woken = os.read(self._wake_reader, 4096) if self._wake_reader in ready else b""
            if not self._closing.is_set():
                self._on_tick(woken)
            if sock.fileno() in ready:
                self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        try:
            frame = wire.receive(sock)
        except OSError:
            frame = None
        if frame is None:
            self._sock = None
            sock.close()
            return
        body, fds = frame
        waiting = self._pending.get(body["id"]) if isinstance(body.get("id"), int) else None
        if waiting is not None:
            # Set before any thread acts on the answer: an agent that comes after this one must learn of this trainer.
            accepted = not body.get("refused") and not body.get("error") and _QUESTION not in body
            self._established = self._established or ("role" in waiting[0] and accepted)
            waiting[1].put((body, fds))
        else:
            self._on_push(body, fds)

    def _reconnect(self) -> None:
        """Find the agent that replaces the lost one. Training goes on meanwhile."""
        lost_s = boot_s()
        respawn_at_s = lost_s + _RESPAWN_AFTER_S
        logged = False
        while not self._closing.is_set():
            self._on_tick(b"")
            try:
                sock = wire.connect(self._path, 1.0)
            except OSError:
                sock = None
            if sock is not None and self._greet(sock):
                return
            if self._respawn is not None and boot_s() > respawn_at_s:
                self._try_respawn()
                # If the agent could not start, it is tried again, at growing intervals.
                respawn_at_s = boot_s() + min(_RESPAWN_EVERY_S, max(1.0, boot_s() - lost_s))
            if not logged and boot_s() - lost_s > 30.0:
                logged = True
                _log("the node agent is gone; nothing is saved until it is back")
            self._closing.wait(_RETRY_S)

    def _greet(self, sock: socket.socket) -> bool:
        try:
            with self._sending:
                self._send_all(sock)
                self._sock = sock
        except OSError:
            sock.close()
            return False
        return True

    def _send_all(self, sock: socket.socket) -> None:
        if self._established:
            body, fds = self._hello(True)
            wire.send(sock, body, fds)
            for message in self._on_reconnect():
                wire.send(sock, message)
        for request, _answers in list(self._pending.values()):
            wire.send(sock, request)

    def _try_respawn(self) -> None:
        assert self._respawn is not None
        try:
            self._respawn()
        except SurefootError as error:
            _log(f"the node agent could not be started again: {error}")

    def _forget(self) -> None:
        # Runs in a forked child: the child's copies of the descriptors are closed, the parent's stay open.
        if self._sock is not None:
            self._sock.close()


def _until(
    give_up: Callable[[], str | None], answers: queue.SimpleQueue[tuple[Body, list[int]]]
) -> tuple[Body, list[int]]:
    while True:
        try:
            return answers.get(timeout=_TICK_S)
        except queue.Empty:
            why = give_up()
            if why is not None:
                raise UsageError(why) from None


def _log(what: str) -> None:
    # In one write: launchers run us unbuffered, and the output of others must not come between a line and its end.
    sys.stderr.write(f"surefoot: {what}\n")


def _raise_if_bad(answer: Body) -> None:
    if answer.get("refused"):
        raise Refused(str(answer["refused"]), int(answer["code"]))
    if answer.get("error"):
        kind: Any = getattr(errors, str(answer.get("kind")), SurefootError)
        raise kind(str(answer["error"]))
