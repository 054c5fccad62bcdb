"""How far a long reading has come."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Hears of bytes as they are read. Called often: must be cheap."""

    def start(self, total_bytes: int) -> None:
        """So many bytes will be read."""

    def advance(self, size_bytes: int) -> None:
        """So many more have been."""


class Silent:
    """For those who do not want to know."""

    def start(self, total_bytes: int) -> None:
        pass

    def advance(self, size_bytes: int) -> None:
        pass
