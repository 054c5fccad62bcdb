"""AWS Spot Advisor: how many instances were interrupted in 30 days, and what spot saved, by region and type."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import resources

from surefoot.errors import ConfigError
from surefoot.money.hazards import Renewal, from_monthly_share
from surefoot.money.units import DAY_S

AS_OF = "2025-07-28"
MONTH_S = 30 * DAY_S
BUCKET_SHARES = (0.025, 0.075, 0.125, 0.175, 0.25)
"""Middle of each bucket: <5, 5-10, 10-15, 15-20, >20 %. The last has no upper end: 25 % stands for "at least 20"."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One row of the feed."""

    region: str
    instance_type: str
    bucket: int
    label: str
    saving: float
    """Share of the on-demand price; negative where spot costs more."""


def advices() -> list[Advice]:
    text = (resources.files("surefoot.money") / "data" / "spot-advisor.csv").read_text()
    return [
        Advice(row[0], row[1], int(row[2]), row[3], int(row[4]) / 100.0)
        for row in list(csv.reader(text.splitlines()))[1:]
    ]


def hazard_from_advice(region: str, instance_type: str, nodes: int, life_s: float = MONTH_S) -> Renewal:
    """Exponential hazard of a bucket. `ConfigError` when the feed has no such row.

    The feed does not say how long the interrupted instances had lived. With the whole month (the default) this is the
    least hazard that fits; traces of held nodes are 100 to 1,000 times as hard.
    """
    for row in advices():
        if (row.region, row.instance_type) == (region, instance_type):
            share = BUCKET_SHARES[row.bucket]
            label = f"Spot Advisor bucket {row.label} a month, {instance_type} in {region}"
            return from_monthly_share(share, nodes, life_s, label, f"AWS Spot Advisor of {AS_OF}")
    raise ConfigError(f"Spot Advisor has no {instance_type} in {region}; see `surefoot prices --discounts`")
