"""The run's place for commands: its silence is said on standard error, as an agent says it in its log."""

from __future__ import annotations

import sys
from typing import Any

from surefoot.events import describe
from surefoot.tiers.open import open_tier
from surefoot.tiers.silence import Watched


def open_place(uri: str) -> Watched:
    """Open a run's place, and speak of it while it is silent.

    Raises:
        ConfigError: the URI is none that can be opened.
    """
    place = Watched(open_tier(uri), lambda silence: _say(**place.event_of(silence)))
    return place


def _say(kind: str, **fields: Any) -> None:
    print(f"surefoot: {describe({'event': kind, **fields})}", file=sys.stderr, flush=True)  # noqa: T201 - nobody else does
