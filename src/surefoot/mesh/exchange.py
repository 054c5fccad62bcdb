"""Hands each message (one-way, question or answer) to the handler of its operation.

    {"beat": n}                        the sender's counter
    {"tell": body}                     no answer
    {"ask": number, "body": body}      a question
    {"answer": number, "body": body}   or {"answer": number, "error": text}

`body["op"]` names the operation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count

from surefoot.errors import AgentError, SurefootError, WireError
from surefoot.ipc.wire import Body

Hear = Callable[[str, Body], None]
"""Called with the sending node and the body. Must not wait: it runs where connections are read, message by message."""
Answer = Callable[[str, Body], Awaitable[Body]]
"""Called with the asking node and the body; its result is the answer. A `SurefootError` is an answer, too, as text."""

_ERROR_CHARACTERS = 2000


class Handlers:
    """The handlers of the operations."""

    def __init__(self) -> None:
        self._hear: dict[str, Hear] = {}
        self._answer: dict[str, Answer] = {}

    def hear(self, operation: str, handler: Hear) -> None:
        assert operation not in self._hear
        self._hear[operation] = handler

    def answer(self, operation: str, handler: Answer) -> None:
        assert operation not in self._answer
        self._answer[operation] = handler

    def told(self, node: str, body: Body) -> None:
        """Hand on a one-way message of `node`.

        Raises:
            WireError: the operation has no handler.
            SurefootError: of the handler.
        """
        handler = self._hear.get(_operation(body))
        if handler is None:
            raise WireError(f"node {node} sent {_operation(body)!r}, which this version does not know")
        handler(node, body)

    async def asked(self, node: str, body: Body) -> Body:
        """The answer to a question, which may be an error."""
        handler = self._answer.get(_operation(body))
        if handler is None:
            return {"error": f"this version does not know the question {_operation(body)!r}"}
        try:
            return {"body": await handler(node, body)}
        except SurefootError as error:
            return {"error": str(error)[:_ERROR_CHARACTERS]}


class Questions:
    """Questions to one member that are not answered yet."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._numbers = count(1)
        self._open: dict[int, asyncio.Future[Body]] = {}

    def begin(self) -> tuple[int, asyncio.Future[Body]]:
        number = next(self._numbers)
        self._open[number] = asyncio.get_running_loop().create_future()
        return number, self._open[number]

    def end(self, number: int) -> None:
        """Nobody waits for that answer any more."""
        waiting = self._open.pop(number)
        if not waiting.cancel() and not waiting.cancelled():
            waiting.exception()

    def answered(self, message: Body) -> None:
        """An answer came; one that nobody waits for any more is dropped.

        Raises:
            WireError: it is not an answer.
        """
        number, body, error = message.get("answer"), message.get("body"), message.get("error")
        if type(number) is not int or (type(body) is not dict and type(error) is not str):
            raise WireError(f"node {self._node} sent a message that is not an answer")
        waiting = self._open.get(number)
        if waiting is None or waiting.done():
            return
        if type(body) is dict:
            waiting.set_result(body)
        else:
            waiting.set_exception(AgentError(f"node {self._node}: {error}"))

    def fail(self, why: str) -> None:
        """Fail every question that is still open: no answer will come."""
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(AgentError(f"node {self._node} did not answer: {why}"))


def _operation(body: Body) -> str:
    operation = body.get("op")
    if type(operation) is not str:
        raise WireError("a message without an operation")
    return operation[:64]
