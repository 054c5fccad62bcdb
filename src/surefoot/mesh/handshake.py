"""Lets two agents prove to each other that they know the round's key. Neither ever sends it.

    dialer    →  from, to, life, nonce, proof       "hello"
    listener  →  life, nonce, proof                 "here", only to a good hello
    dialer    →  proof                              "done"
    listener  →  first frame under the connection's keys: welcome, or why not

A proof is HMAC-SHA-256 under the round's key of everything sent so far, with the name of the step it belongs to, the
round, both names, and the channel: the fingerprint of the listener's certificate, as each side sees it. So

* a proof fits one step, one direction, one pair of nodes and one round: nothing can be sent back or used elsewhere;
* each side has put a fresh nonce under the other's last proof: nothing old is accepted. (An old hello is answered,
  with a proof over its old nonce, which is of use to nobody; it gets no further.);
* somebody in the middle of a TLS connection shows another certificate: the proofs of the two sides do not fit.

A side that fails gets no answer, whatever the reason, and comparing takes the same time wherever the difference is.
The connection's keys follow from the round's key and all that was sent, so they are new for each connection.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

from surefoot.core.documents import compact
from surefoot.core.layout import is_node_name
from surefoot.errors import WireError
from surefoot.ipc.wire import Body
from surefoot.mesh.channel import Channel
from surefoot.mesh.frames import WHOLE, Opener, Sealer, decode, plain, receive_plain
from surefoot.mesh.secret import RoundKey, derive

PROTOCOL = "surefoot mesh 1"
_NONCE_BYTES = 32
_LIFE_BYTES = 8


@dataclass(frozen=True, slots=True)
class Me:
    """An agent's own name and life."""

    node: str
    life: str
    """Drawn by each process anew: a restarted agent is the same node with another life."""


@dataclass(frozen=True, slots=True)
class Session:
    """A connection whose other side has proved itself."""

    round_nonce: str
    node: str
    life: str
    sealer: Sealer = field(repr=False)
    opener: Opener = field(repr=False)


Verdict = Callable[[str, str], str | None]
"""Called with node and life of a dialer that has proved itself; returns why it is not welcome, or None."""


class NotWelcomeError(WireError):
    """The listener knows the dialer, and gave the reason why it refuses the connection."""


def new_life() -> str:
    return secrets.token_hex(_LIFE_BYTES)


async def dial(channel: Channel, key: RoundKey, me: Me, other: str) -> Session:
    """The dialer's side. Bounded by the caller in time.

    Raises:
        NotWelcomeError: the listener refuses.
        WireError: the listener is not `other`, or not of this round.
        OSError, EOFError: the connection ended.
    """
    said = _Said(key, channel.name)
    hello = {"from": me.node, "to": other, "life": me.life, "nonce": secrets.token_hex(_NONCE_BYTES)}
    channel.writer.write(plain({**hello, "proof": said.prove("hello", hello)}))
    here = await receive_plain(channel.reader)
    proof = _take(here, "proof")
    said.check("here", _checked(here, ("life", "nonce")), proof)
    channel.writer.write(plain({"proof": said.prove("done", {})}))
    session = said.session(other, here["life"], dialer=True)
    refused = _refusal(await session.opener.receive(channel.reader))
    if refused is not None:
        raise NotWelcomeError(f"node {other} refuses: {refused}")
    return session


async def answer(channel: Channel, key: RoundKey, me: Me, verdict: Verdict) -> Session:
    """The listener's side. Bounded by the caller in time.

    Raises:
        NotWelcomeError: `verdict` refuses; the other side was sent the reason.
        WireError: the dialer did not prove itself; no answer was sent.
        OSError, EOFError: the connection ended.
    """
    said = _Said(key, channel.name)
    hello = await receive_plain(channel.reader)
    proof = _take(hello, "proof")
    said.check("hello", _checked(hello, ("from", "to", "life", "nonce")), proof)
    # Only now is it looked at: these are words of somebody who knows the key, or a repetition of such words.
    if hello["to"] != me.node or hello["from"] == me.node or not is_node_name(hello["from"]):
        raise WireError(f"a hello for node {hello['to'][:140]!r} at node {me.node}")
    here = {"life": me.life, "nonce": secrets.token_hex(_NONCE_BYTES)}
    channel.writer.write(plain({**here, "proof": said.prove("here", here)}))
    done = await receive_plain(channel.reader)
    proof = _take(done, "proof")
    said.check("done", _checked(done, ()), proof)
    session = said.session(hello["from"], hello["life"], dialer=False)
    refused = verdict(session.node, session.life)
    channel.writer.write(session.sealer.seal(WHOLE, compact({"refused": refused} if refused else {"welcome": True})))
    if refused is not None:
        raise NotWelcomeError(f"node {session.node} is refused: {refused}")
    return session


class _Said:
    """All that was sent on a connection, in order, and the proofs over it."""

    def __init__(self, key: RoundKey, channel: str) -> None:
        self._key = key
        self._words: list[object] = [PROTOCOL, channel, key.round_nonce]

    def prove(self, step: str, words: Body) -> str:
        """The proof of this side's next step."""
        # Compact JSON of a list has one reading only: no two conversations have the same text.
        self._words.append([step, *sorted(words.items())])
        return hmac.digest(self._key.key, compact(self._words), sha256).hex()

    def check(self, step: str, words: Body, proof: str) -> None:
        """Believe the other side's next step, or raise."""
        wanted = self.prove(step, words)
        if not hmac.compare_digest(proof.encode("utf-8", "surrogatepass"), wanted.encode("ascii")):
            raise WireError("the other end does not know the key of this round")

    def session(self, node: str, life: str, *, dialer: bool) -> Session:
        salt = sha256(compact(self._words)).digest()
        outward = derive(self._key.key, salt, b"surefoot frames of the dialer")
        inward = derive(self._key.key, salt, b"surefoot frames of the listener")
        mine, theirs = (outward, inward) if dialer else (inward, outward)
        return Session(self._key.round_nonce, node, life, Sealer(mine), Opener(theirs))


def _take(body: Body, name: str) -> str:
    value = body.pop(name, None)
    if type(value) is not str:
        raise WireError(f"a handshake without {name!r}")
    return value


def _checked(body: Body, names: tuple[str, ...]) -> Body:
    if set(body) != set(names) or not all(type(value) is str for value in body.values()):
        raise WireError(f"a handshake that does not consist of {names}")
    return body


def _refusal(frame: tuple[int, bytes]) -> str | None:
    kind, content = frame
    body = decode(content)
    if kind != WHOLE or not (body.keys() == {"refused"} or body.keys() == {"welcome"}):
        raise WireError("a listener that neither welcomes nor refuses")
    return str(body["refused"]) if "refused" in body else None
