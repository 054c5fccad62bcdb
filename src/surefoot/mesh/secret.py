"""The run's secret, and the keys made of it.

The secret lies in the run's own place, so a process can speak for one of the run's nodes only
if it can read the run. It is never in an argument, an environment variable, a log or a message. Each round has a key
of its own: an agent of an older round cannot speak in a newer one.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from surefoot.core.documents import Fields, compact, seal, unseal
from surefoot.core.layout import SECRET_KEY, is_round
from surefoot.errors import ConfigError, CorruptError, ObjectExistsError, ObjectMissingError
from surefoot.tiers.base import Tier

SECRET_BYTES = 32
_MAX_DOCUMENT_BYTES = 1024
_HEX = re.compile(rf"[0-9a-f]{{{2 * SECRET_BYTES}}}")
_DISTINCT_BYTES = 8
"""A random secret has more distinct bytes than this, but for one in 10^30: fewer are a placeholder."""


@dataclass(frozen=True, slots=True)
class Secret:
    """The run's secret. Its text form does not show it."""

    value: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class RoundKey:
    """What proves that an agent belongs to one round of one run. Its text form does not show the key."""

    round_nonce: str
    key: bytes = field(repr=False)


async def run_secret(tier: Tier) -> Secret:
    """The run's secret, made now if there is none. Of several that start at once, one's stands.

    Raises:
        CorruptError: the object is not a secret.
        TierError: the run's place did not answer.
    """
    try:
        return _read(await tier.get(SECRET_KEY))
    except ObjectMissingError:
        made = Secret(secrets.token_bytes(SECRET_BYTES))
    try:
        await tier.put_if_absent(SECRET_KEY, seal({"secret": made.value.hex()}))
    except ObjectExistsError:
        # Another agent was first, or an earlier try of this put went through unnoticed: what lies there counts.
        return _read(await tier.get(SECRET_KEY))
    return made


def round_key(secret: Secret, run: str, round_nonce: str) -> RoundKey:
    """The key of one round: HKDF with SHA-256 (RFC 5869) of the secret, the run's id and the round's nonce.

    Raises:
        ConfigError: the nonce is not valid.
    """
    if not is_round(round_nonce):
        raise ConfigError(f"not the nonce of a round: {round_nonce[:80]!r}; 8 to 64 letters, digits, _ and -")
    return RoundKey(round_nonce, derive(secret.value, b"", compact(["surefoot round", run, round_nonce])))


def derive(key: bytes, salt: bytes, purpose: bytes) -> bytes:
    """32 bytes for one purpose, by HKDF with SHA-256."""
    return HKDF(SHA256(), SECRET_BYTES, salt, purpose).derive(key)


def _read(data: bytes) -> Secret:
    # No error from here quotes what it read.
    if len(data) > _MAX_DOCUMENT_BYTES:
        raise CorruptError(f"{SECRET_KEY}: {len(data)} bytes are too many for a secret")
    text = Fields(unseal(data, SECRET_KEY), SECRET_KEY).text("secret")
    if not _HEX.fullmatch(text):
        raise CorruptError(f"{SECRET_KEY}: not {2 * SECRET_BYTES} hex digits; delete it while no node of the run is up")
    value = bytes.fromhex(text)
    if len(set(value)) < _DISTINCT_BYTES:
        raise CorruptError(f"{SECRET_KEY}: not a random secret; delete it while no node of the run is up")
    return Secret(value)
