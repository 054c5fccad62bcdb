"""Surefoot: train PyTorch models on preemptible machines without losing work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.errors import (
    AgentError,
    ConfigError,
    CorruptError,
    ResourceError,
    RestoreError,
    RunBusyError,
    SupersededError,
    SurefootError,
    TierError,
    UnsupportedStateError,
    UsageError,
)
from surefoot.exits import Evicted, Superseded

if TYPE_CHECKING:
    from surefoot.trainer.run import Run

__version__ = "0.1.0"
__all__ = [
    "AgentError",
    "ConfigError",
    "CorruptError",
    "Evicted",
    "ResourceError",
    "RestoreError",
    "Run",
    "RunBusyError",
    "Superseded",
    "SupersededError",
    "SurefootError",
    "TierError",
    "UnsupportedStateError",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # The agent, the supervisor and most commands never need torch: what pulls it in is loaded on first use.
    if name == "Run":
        from surefoot.trainer.run import Run

        return Run
    raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
