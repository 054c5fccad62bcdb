"""The contract on a real S3 server."""

from __future__ import annotations

import asyncio
import secrets

import pytest
from contract import TierContract
from plain_s3 import PlainS3

from surefoot.scenario.s3_server import S3Server
from surefoot.tiers.base import Tier
from surefoot.tiers.open import open_tier


class BucketPlace:
    """A prefix of its own in the server's bucket."""

    def __init__(self, server: S3Server) -> None:
        self._server = server
        self._prefix = f"runs/{secrets.token_hex(4)} x=1"
        self._plain = PlainS3(server)

    def open(self) -> Tier:
        return open_tier(self._server.url(self._prefix))

    def read(self, key: str) -> bytes | None:
        return self._plain.read(f"{self._prefix}/{key}")

    def everything(self) -> list[str]:
        prefix = f"{self._prefix}/"
        uploads = [f"upload of {key}" for key in self._plain.uploads(prefix)]
        return [key.removeprefix(prefix) for key in self._plain.keys(prefix)] + uploads

    def seed(self, keys: list[str]) -> None:
        asyncio.run(self._seed(keys))

    async def _seed(self, keys: list[str]) -> None:
        tier = self.open()
        await asyncio.gather(*(tier.put(key, b"1") for key in keys))
        await tier.close()


class TestObjectStore(TierContract):
    @pytest.fixture
    def place(self, s3_env: S3Server) -> BucketPlace:
        return BucketPlace(s3_env)
