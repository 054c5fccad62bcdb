"""Every key that a run writes, and the parsers of those keys.

A key is a relative POSIX path inside the run's prefix. No other module builds or splits a key, so that what is
written and what is looked for cannot drift apart.

    run.json                            run id, format version
    secret.json                         what proves that a node agent belongs to the run
    agents/<round>/<node>.json          where a node's agent listens, for one round
    generations/g0007.json              lineage
    plans/<hash>.json                   which shard of which tensor is whose
    steps/00001200-g0007/               boundary, generation
      rank-00003-a3f2.safetensors       rank, attempt
      rank-00003-a3f2.ok.json           that shard's acknowledgement
    commits/00001200-g0007.json         manifest
    frozen/<hash>.safetensors           tensors that never change
    events/<node>-<start>-<8 hex>-NNNN.jsonl    the ledger's input
    quarantine/<key with / as ~>.json   a copy that must not be used again, and why
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from surefoot.core.documents import Fields

RUN_KEY = "run.json"
SECRET_KEY = "secret.json"  # noqa: S105 - the place of the secret, not the secret
PRIVATE_KEYS = frozenset({SECRET_KEY})
"""In a directory, only the owner may read these."""
AGENTS = "agents/"
GENERATIONS = "generations/"
PLANS = "plans/"
STEPS = "steps/"
COMMITS = "commits/"
FROZEN = "frozen/"
EVENTS = "events/"
QUARANTINE = "quarantine/"

# A number has at most 19 digits: it fits 64 bits, as in shared memory.
_AT = r"([0-9]{8,19})-g([0-9]{4,19})"
_PIECE = rf"steps/{_AT}/rank-([0-9]{{5,9}})-([0-9a-f]{{4,16}})"
_GENERATION = re.compile(r"generations/g([0-9]{4,19})\.json")
_COMMIT = re.compile(rf"commits/{_AT}\.json")
_SHARD = re.compile(rf"{_PIECE}\.safetensors")
_ACK = re.compile(rf"{_PIECE}\.ok\.json")
_PLAN = re.compile(r"plans/([0-9a-f]{32})\.json")
_FROZEN = re.compile(r"frozen/([0-9a-f]{32})\.safetensors")
_ROUND = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{7,63}")
_NODE = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
_AGENT = re.compile(rf"agents/({_ROUND.pattern})/({_NODE.pattern})\.json")
_SAFE_KEY = re.compile(r"[A-Za-z0-9._~-]+(/[A-Za-z0-9._~-]+)*")


@dataclass(frozen=True, order=True, slots=True)
class BoundaryId:
    """A boundary of one generation: the identity of an image set, a checkpoint and a commit. Orders by boundary first.

    Boundaries are counted from 1, and the count goes on where a restored one stopped: it never repeats along a history.
    The labels are what a user calls the boundary. They say nothing of identity, and a key has none of them.
    """

    boundary: int
    generation: int
    step: int | None = field(default=None, compare=False)
    """Label: optimizer steps finished. None if only the key is known."""
    epoch: int | None = field(default=None, compare=False)
    """Label: the epoch in which the first data loader stood. None if there is no loader, or only the key is known."""

    def __str__(self) -> str:
        return f"{self.boundary:08d}-g{self.generation:04d}"

    @property
    def label(self) -> str:
        """What a sentence calls it: by its step, and by its number where the two differ."""
        if self.step is None:
            return f"boundary {self.boundary}"
        return f"step {self.step}" + (f" (boundary {self.boundary})" if self.step != self.boundary else "")

    @property
    def names(self) -> dict[str, Any]:
        """What an event calls it: as `label`."""
        if self.step == self.boundary:
            return {"step": self.step}
        return {"step": self.step, "boundary": self.boundary}

    def to_json(self) -> dict[str, Any]:
        return {"boundary": self.boundary, "generation": self.generation, "step": self.step, "epoch": self.epoch}

    @classmethod
    def of(cls, fields: Fields) -> BoundaryId:
        """The inverse of `to_json`; the message or document may have other fields."""
        return cls(
            fields.integer("boundary"),
            fields.integer("generation", 1),
            fields.optional_integer("step"),
            fields.optional_integer("epoch"),
        )


@dataclass(frozen=True, slots=True)
class ShardId:
    """One attempt to write one rank's image of one boundary."""

    at: BoundaryId
    rank: int
    attempt: str


def is_round(text: str) -> bool:
    """True for the nonce of a round: 8 to 64 letters, digits, ``_`` and ``-``."""
    return bool(_ROUND.fullmatch(text))


def is_node_name(text: str) -> bool:
    """True for a node's name: up to 128 letters, digits, ``.``, ``_`` and ``-``; the first is a letter or digit."""
    return bool(_NODE.fullmatch(text))


def agents_prefix(round_nonce: str) -> str:
    return f"{AGENTS}{round_nonce}/"


def agent_key(round_nonce: str, node: str) -> str:
    return f"{agents_prefix(round_nonce)}{node}.json"


def generation_key(generation: int) -> str:
    return f"{GENERATIONS}g{generation:04d}.json"


def plan_key(plan_hash: str) -> str:
    return f"{PLANS}{plan_hash}.json"


def boundary_prefix(at: BoundaryId) -> str:
    return f"{STEPS}{at}/"


def shard_key(shard: ShardId) -> str:
    return f"{boundary_prefix(shard.at)}rank-{shard.rank:05d}-{shard.attempt}.safetensors"


def ack_key(shard: ShardId) -> str:
    return f"{boundary_prefix(shard.at)}rank-{shard.rank:05d}-{shard.attempt}.ok.json"


def commit_key(at: BoundaryId) -> str:
    return f"{COMMITS}{at}.json"


def frozen_key(xxh3_128: str) -> str:
    return f"{FROZEN}{xxh3_128}.safetensors"


def events_key(node: str, start_s: int, writer: str, part: int) -> str:
    """`writer` is drawn at random: machines and containers may share a name, and agents may start in one second."""
    return f"{EVENTS}{node}-{start_s}-{writer}-{part:04d}.jsonl"


def quarantine_key(key: str) -> str:
    return f"{QUARANTINE}{key.replace('/', '~')}.json"


# The parsers accept exactly what the functions above build: another spelling of a number would be a second key for
# one thing.


def parse_generation(key: str) -> int | None:
    match = _GENERATION.fullmatch(key)
    if match is None:
        return None
    number = int(match[1])
    return number if generation_key(number) == key else None


def parse_commit(key: str) -> BoundaryId | None:
    match = _COMMIT.fullmatch(key)
    if match is None:
        return None
    at = BoundaryId(int(match[1]), int(match[2]))
    return at if commit_key(at) == key else None


def parse_agent(key: str) -> tuple[str, str] | None:
    """Round and node of an agent's entry."""
    match = _AGENT.fullmatch(key)
    return (match[1], match[2]) if match else None


def parse_shard(key: str) -> ShardId | None:
    shard = _shard_id(_SHARD.fullmatch(key))
    return shard if shard is not None and shard_key(shard) == key else None


def parse_ack(key: str) -> ShardId | None:
    shard = _shard_id(_ACK.fullmatch(key))
    return shard if shard is not None and ack_key(shard) == key else None


def parse_plan(key: str) -> str | None:
    match = _PLAN.fullmatch(key)
    return match[1] if match else None


def parse_frozen(key: str) -> str | None:
    """The hash of the file that a key names."""
    match = _FROZEN.fullmatch(key)
    return match[1] if match else None


def is_safe_key(key: str) -> bool:
    """True for a key that cannot leave its prefix: no empty, ``.`` or ``..`` component, no odd character."""
    return bool(_SAFE_KEY.fullmatch(key)) and not any(part in (".", "..") for part in key.split("/"))


def _shard_id(match: re.Match[str] | None) -> ShardId | None:
    return None if match is None else ShardId(BoundaryId(int(match[1]), int(match[2])), int(match[3]), match[4])
