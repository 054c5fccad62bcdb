"""Watches a file whose appearance is a notice, for tools that can only touch files."""

from __future__ import annotations

import asyncio
import os

from surefoot.notices.base import Notice

_LOOK_EVERY_S = 0.025


class FileNotice:
    """Watches one path. Polls, because the file may be made on another machine of a shared file system."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def wait(self) -> Notice:
        while not os.path.lexists(self._path):  # noqa: ASYNC110, ASYNC240 - one stat; another process makes it
            await asyncio.sleep(_LOOK_EVERY_S)
        return Notice(f"file {self._path}", None)
