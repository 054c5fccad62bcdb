"""Lets agents find each other: each puts its address into the run's own place, and lists the others' addresses.

The round's nonce is part of the key, so entries of older rounds are never seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from surefoot.core.documents import seal, unseal
from surefoot.core.layout import agent_key, agents_prefix, is_round, parse_agent
from surefoot.core.presence import Census, Presence, count, spans
from surefoot.errors import (
    AgentError,
    ConfigError,
    CorruptError,
    ObjectExistsError,
    ObjectMissingError,
    SurefootError,
    TierDeniedError,
    TierError,
)
from surefoot.host.clock import boot_s
from surefoot.mesh.member import Place
from surefoot.tiers.base import Entry, Tier

_FIRST_LOOK_S = 0.1
_MOST_BETWEEN_LOOKS_S = 1.0
_READS_AT_ONCE = 16
_MAX_ENTRY_BYTES = 16 * 1024 * 1024
"""A node with a million ranks needs less."""


async def announce(tier: Tier, round_nonce: str, presence: Presence, *, instead: bool = False) -> None:
    """Put where this node's agent listens.

    Args:
        tier: the run's place.
        round_nonce: the round's nonce.
        presence: this node.
        instead: the agent of this node before this one is known to have ended: put this one's entry in its place.

    Raises:
        AgentError: an agent of this node was in this round before, and its trainers were still to start.
        ConfigError: another node of this name has been announced in this round.
        TierError: the run's place did not take it.
    """
    key = _key(round_nonce, presence.node)
    data = seal(presence.body())
    if instead:
        await tier.put(key, data)
        return
    try:
        await tier.put_if_absent(key, data)
    except ObjectExistsError:
        # An earlier try of this very put may have gone through unnoticed.
        if await tier.get(key) != data:
            raise _taken(presence, await find(tier, round_nonce, presence.node)) from None


def _taken(mine: Presence, standing: Presence) -> SurefootError:
    """The error for a node that another agent has announced before."""
    if standing.ranks == mine.ranks and standing.world_size == mine.world_size:
        # A round has each rank once: it was this node's.
        return AgentError(
            f"the agent of node {mine.node} was lost while its trainers started, and others may have met that one: "
            "this start ends here; the trainers' launcher starts it again; without one, start all nodes again"
        )
    return ConfigError(
        f"node {mine.node} has been announced by another process, with rank(s) {spans(standing.ranks)}: "
        "give each node a name of its own"
    )


async def find(tier: Tier, round_nonce: str, node: str) -> Presence:
    """Where a node's agent listens by now.

    Raises:
        ObjectMissingError: it has not announced itself.
        CorruptError: the entry is damaged.
    """
    key = _key(round_nonce, node)
    presence = Presence.from_body(unseal(await tier.get(key), key), key)
    if presence.node != node:
        raise CorruptError(f"{key}: is about node {presence.node}")
    return presence


async def gather(
    tier: Tier, round_nonce: str, within_s: float, *, now_s: Callable[[], float] = boot_s
) -> dict[str, Presence]:
    """All nodes of the round, by name, once their ranks are together the whole world.

    Raises:
        AgentError: they are not within `within_s`; names the ranks that are missing, or what the place answered.
        ConfigError: the entries contradict one another.
        CorruptError: an entry is damaged.
        TierDeniedError: the place refuses the credentials.
    """
    until_s = now_s() + within_s
    found: dict[str, Presence] = {}
    pause_s, trouble = _FIRST_LOOK_S, ""
    while True:
        try:
            await _look(tier, round_nonce, found)
            trouble = ""
        except TierDeniedError:
            raise
        except TierError as error:
            # Could not be read is not "is not there": look again, and report it if it stays like that.
            trouble = str(error)
        census = count(found.values())
        if census.complete:
            return found
        if now_s() >= until_s:
            raise AgentError(_who_is_missing(tier, round_nonce, found, census, within_s, trouble))
        await asyncio.sleep(min(pause_s, max(0.0, until_s - now_s())))
        pause_s = min(1.5 * pause_s, _MOST_BETWEEN_LOOKS_S)


def places(found: Iterable[Presence]) -> dict[str, Place]:
    """Where to dial each node: what `Mesh.join` takes."""
    return {presence.node: presence.place for presence in found}


async def _look(tier: Tier, round_nonce: str, found: dict[str, Presence]) -> None:
    """Read the entries that are new."""
    gate = asyncio.Semaphore(_READS_AT_ONCE)
    listed = [(entry, parse_agent(entry.key)) for entry in await tier.list(agents_prefix(round_nonce))]
    new = [(entry, named[1]) for entry, named in listed if named is not None and named[1] not in found]
    results = await asyncio.gather(*(_read(gate, tier, round_nonce, entry, node) for entry, node in new))
    found.update({presence.node: presence for presence in results if presence is not None})


async def _read(gate: asyncio.Semaphore, tier: Tier, round_nonce: str, entry: Entry, node: str) -> Presence | None:
    if entry.size_bytes > _MAX_ENTRY_BYTES:
        raise CorruptError(f"{entry.key}: {entry.size_bytes} bytes are too many for an entry")
    async with gate:
        try:
            return await find(tier, round_nonce, node)
        except ObjectMissingError:
            return None


def _key(round_nonce: str, node: str) -> str:
    if not is_round(round_nonce):
        raise ConfigError(f"not the nonce of a round: {round_nonce[:80]!r}; 8 to 64 letters, digits, _ and -")
    key = agent_key(round_nonce, node)
    if parse_agent(key) != (round_nonce, node):
        raise ConfigError(f"not a node's name: {node[:140]!r}; up to 128 letters, digits, '.', '_' and '-'")
    return key


def _who_is_missing(
    tier: Tier, round_nonce: str, found: dict[str, Presence], census: Census, within_s: float, trouble: str
) -> str:
    here = ", ".join(sorted(found)) or "none"
    if trouble:
        return (
            f"the members of round {round_nonce} are still unknown after {within_s:g} s (nodes seen: {here}); "
            f"the run's place failed at the last look: {trouble}"
        )
    who = f"rank(s) {spans(census.missing)} of {census.world_size}" if found else "all ranks"
    return (
        f"{who} did not come to round {round_nonce} within {within_s:g} s (nodes here: {here}); "
        f"do all nodes run, with the same run ({tier.uri})?"
    )
