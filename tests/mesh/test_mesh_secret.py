"""The run's secret: made once, never shown, never believed in another form; keys differ by run and round."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from surefoot.core.documents import seal
from surefoot.core.layout import SECRET_KEY
from surefoot.errors import ConfigError, CorruptError, ObjectExistsError, TierError
from surefoot.mesh.secret import Secret, derive, round_key, run_secret
from surefoot.scenario.s3_server import S3Server
from surefoot.tiers.base import Tier
from surefoot.tiers.open import open_tier


def test_many_that_start_at_once_have_one_secret(tmp_path: Path) -> None:
    """Of twenty agents that find none, one's secret stands, and all have it; later ones too."""

    async def story() -> None:
        found = await asyncio.gather(*(run_secret(open_tier(tmp_path)) for _ in range(20)))
        assert len({secret.value for secret in found}) == 1
        assert len(found[0].value) == 32
        assert await run_secret(open_tier(tmp_path)) == found[0]
        document = json.loads((tmp_path / SECRET_KEY).read_bytes())
        assert document["body"] == {"format": 2, "secret": found[0].value.hex()}

    asyncio.run(story())


def test_it_lies_in_a_bucket_too(s3_env: S3Server) -> None:
    """The same on a real object store, whose condition decides the race."""

    async def story() -> None:
        tiers = [open_tier(s3_env.url("secret-run")) for _ in range(8)]
        assert len({secret.value for secret in await asyncio.gather(*map(run_secret, tiers))}) == 1
        for tier in tiers:
            await tier.close()

    asyncio.run(story())


@pytest.mark.holds("secret-stays")
def test_in_a_directory_only_its_owner_can_read_the_secret(tmp_path: Path) -> None:
    """Whatever the umask lets others read of the run, the secret is not among it."""
    before = os.umask(0)
    try:
        tier = open_tier(tmp_path / "run")
        asyncio.run(run_secret(tier))
        asyncio.run(tier.put_if_absent("run.json", b"{}"))
    finally:
        os.umask(before)
    modes = {name: (tmp_path / "run" / name).stat().st_mode & 0o777 for name in ("secret.json", "run.json")}
    assert modes == {"secret.json": 0o600, "run.json": 0o666}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"secret",
        seal({}),
        seal({"secret": 7}),
        seal({"secret": ""}),
        seal({"secret": "ab" * 31}),
        seal({"secret": "0123456789ABCDEF" * 4}),
        seal({"secret": "00" * 32}),
        seal({"secret": "0123456789abcdef" * 4 + "\n"}),
        seal({"secret": "0123456789abcdef" * 4, "more": "x" * 1024}),
        seal({"secret": bytes(range(32)).hex()})[:-2] + b" \n",
    ],
)
def test_what_is_no_secret_is_refused_and_not_quoted(tmp_path: Path, data: bytes) -> None:
    """Another size, another form, a placeholder, a damaged document: an error that names the key and shows nothing."""
    (tmp_path / SECRET_KEY).write_bytes(data)
    with pytest.raises(CorruptError, match=r"secret\.json") as caught:
        asyncio.run(run_secret(open_tier(tmp_path)))
    assert "0123456789" not in str(caught.value)
    assert (tmp_path / SECRET_KEY).read_bytes() == data


def test_a_place_that_does_not_answer_is_no_place_without_a_secret(tmp_path: Path) -> None:
    """Where the secret cannot be read, none is made."""
    (tmp_path / SECRET_KEY).mkdir()
    with pytest.raises(TierError):
        asyncio.run(run_secret(open_tier(tmp_path)))


class _Forgetful:
    """A tier whose put goes through and is then told to have lost: the answer was lost and the put repeated."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    async def get(self, key: str) -> bytes:
        return await self._tier.get(key)

    async def put_if_absent(self, key: str, data: bytes) -> None:
        await self._tier.put_if_absent(key, data)
        raise ObjectExistsError(key)


def test_a_put_that_went_through_unnoticed_counts(tmp_path: Path) -> None:
    """Told that the key is taken by its own earlier try, an agent takes what lies there."""
    tier = open_tier(tmp_path)
    forgetful: Tier = _Forgetful(tier)  # type: ignore[assignment]
    assert asyncio.run(run_secret(forgetful)) == asyncio.run(run_secret(tier))


@pytest.mark.holds("round-keys")
def test_keys_are_of_one_run_and_one_round() -> None:
    """HKDF with SHA-256 over run and round, in a form that cannot be read in two ways; equal inputs, equal keys."""
    secret = Secret(bytes(range(32)))
    key = round_key(secret, "run", "round-000001")
    assert key == round_key(secret, "run", "round-000001")
    purpose = b'["surefoot round","run","round-000001"]'
    assert key.key == HKDF(SHA256(), 32, b"", purpose).derive(secret.value)
    others = [
        round_key(secret, "run", "round-000002"),
        round_key(secret, "runr", "ound-000001"),
        round_key(Secret(bytes(32)), "run", "round-000001"),
    ]
    assert len({key.key, *(other.key for other in others)}) == 4
    for wrong in ("", "short", "with space in it", "x" * 65):
        with pytest.raises(ConfigError, match="nonce"):
            round_key(secret, "run", wrong)


def test_hkdf_is_the_standard_s() -> None:
    """RFC 5869, test case 1, cut to 32 bytes."""
    made = derive(bytes([0x0B]) * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)))
    assert made.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


@pytest.mark.holds("secret-stays")
def test_nothing_shows_a_secret() -> None:
    """Text forms of secrets and keys show neither."""
    secret = Secret(bytes(range(32)))
    key = round_key(secret, "run", "round-000001")
    for shown in (repr(secret), str(secret), repr(key), f"{key}"):
        assert secret.value.hex()[:8] not in shown
        assert "\\x00" not in shown
        assert key.key.hex()[:8] not in shown
    assert "round-000001" in repr(key)
