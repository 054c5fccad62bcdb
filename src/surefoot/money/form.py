"""From the words of a user to a `Request`: text with units in, values with names out, each with its source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigError
from surefoot.money import catalogue, units
from surefoot.money.advisor import hazard_from_advice
from surefoot.money.deadlines import Availability, offered
from surefoot.money.hazards import Hazard, Renewal, from_trace
from surefoot.money.job import Job
from surefoot.money.measured import Measured, load_events
from surefoot.money.request import Assumption, Limits, Ownership, Prices, Request
from surefoot.money.reservations import SOURCE as RESERVATION_SOURCE
from surefoot.money.reservations import reservation_discounts
from surefoot.money.schemes import Costs, Scheme, by_name, load_schemes, shipped_schemes
from surefoot.money.traces import load_trace
from surefoot.money.transfer import Keeping, route_named, store_named

USER = "given"
ASSUMED = "assumed"
NODE_COPY_BYTES_PER_S = 60e9
"""Copies of all GPUs of a node into its memory: 60 to 80 GB/s is what ML Flashpoint publishes."""
WINDOWS_S = {"aws": 120.0, "azure": 30.0, "gcp": 30.0, "oci": 30.0}
"""From the notice to the end. AWS and Azure by their documentation (best effort); others assumed."""


@dataclass(kw_only=True)
class Form:
    """What the user said, as text with units; None where nothing was said."""

    name: str = ""
    cloud: str = ""
    """Whose terms hold where no instance type is named."""
    params: str | None = None
    bytes_per_param: float = 12.0
    state: str | None = None
    work: str | None = None
    step: str | None = None
    gpus: int = 0
    gpus_per_node: int = 8
    min_nodes: int = 1
    world_sizes: str = ""
    throughput: str = ""
    instance: str | None = None
    region: str = ""
    on_demand_price: str | None = None
    spot_price: str | None = None
    reserved_price: str | None = None
    standby_price: str | None = None
    prices: Path | None = None
    evictions: str | None = None
    loss_sizes: str = ""
    announced: str | None = None
    window: str | None = None
    events: list[Path] = field(default_factory=list)
    copy: str | None = None
    bucket_bandwidth: str | None = None
    peer_bandwidth: str | None = None
    restart: str | None = None
    cold_restart: str | None = None
    rejoin: str | None = None
    replacement: str | None = None
    store: str | None = None
    route: str = "same-region"
    keep: int = 3
    cross_zones: bool = False
    schemes: Path | None = None
    only: list[str] = field(default_factory=list)
    baseline: str = "naive-tuned"
    on_demand_goodput: str | None = None
    deadline: str | None = None
    budget: str | None = None
    miss: str | None = None
    core_nodes: int = 0
    data_in: list[str] = field(default_factory=list)
    availability: str | None = None
    delay_value: str | None = None
    tail_weight: float = 0.0
    months: int = 36
    month: str | None = None
    utilisation: str | None = None
    buy_price: str | None = None
    opex: str | None = None
    residual: str | None = None
    engineer_hours: float = 0.0
    engineer_price: str | None = None
    runs: int = 2000
    seed: int = 1


def example_options(name: str) -> dict[str, Any]:
    """The fields of a built-in example's `Form`. `ConfigError` when there is none of that name."""
    if name != "brief":
        raise ConfigError(f"no example {name!r}; there is: brief")
    return tomllib.loads((resources.files("surefoot.money") / "data" / "brief.toml").read_text())


def request_of(form: Form) -> Request:
    """The request. `ConfigError` says which word cannot be used, and how to write it."""
    return _Reader(form).request()


class _Reader:
    """Reads the form once, noting where each value came from."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._notes: list[Assumption] = []
        self._measured: Measured | None = load_events(form.events) if form.events else None
        self._provider = form.cloud

    def request(self) -> Request:
        form = self._form
        limits = self._limits()
        prices = self._prices(limits)
        job = self._job()
        hazard = self._hazard(job)
        schemes = self._schemes()
        return Request(
            name=form.name or form.instance or "job",
            job=job,
            costs=self._costs(job),
            hazard=hazard,
            announced=self._announced(),
            window_s=self._window_s(),
            prices=prices,
            keeping=self._keeping(limits),
            schemes=schemes,
            baseline=self._baseline(schemes),
            on_demand_goodput=self._share("on-demand goodput", form.on_demand_goodput),
            limits=limits,
            ownership=self._ownership(),
            offer=self._offer(job),
            delay_usd_per_h=units.parse_usd_per_h(form.delay_value) if form.delay_value else 0.0,
            tail_weight=form.tail_weight,
            assumptions=tuple(self._notes),
            runs=_at_least(form.runs, 100, "--runs"),
            seed=form.seed,
            month_h=units.parse_duration_s(form.month) / units.HOUR_S if form.month else units.MONTH_H,
        )

    def _note(self, name: str, value: float | str, unit: str, source: str, as_of: str = "") -> None:
        self._notes.append(Assumption(name, value, unit, source, as_of))

    def _duration(self, name: str, said: str | None, measured_s: float | None, else_s: float, why: str) -> float:
        if said is not None:
            value, source = units.parse_duration_s(said), USER
        elif measured_s is not None and self._measured is not None:
            value, source = measured_s, f"measured in {self._measured.name}"
        else:
            value, source = else_s, why
        self._note(name, value, "s", source)
        return value

    def _rate(self, name: str, said: str | None, else_bytes_per_s: float, why: str) -> float:
        value = units.parse_rate_bytes_per_s(said) if said is not None else else_bytes_per_s
        self._note(name, value / units.GB, "GB/s a node", USER if said is not None else why)
        return value

    def _share(self, name: str, said: str | None) -> float | None:
        if said is None:
            return None
        value = units.parse_share(said)
        self._note(name, value, "share", USER)
        return value

    def _job(self) -> Job:
        form, measured = self._form, self._measured
        if form.work is None or form.gpus < 1:
            raise ConfigError("a plan needs --work (as '72 h' at full speed) and --gpus")
        if form.gpus % form.gpus_per_node:
            raise ConfigError(f"{form.gpus} GPUs are no whole number of nodes of {form.gpus_per_node}")
        work_s = units.parse_duration_s(form.work)
        self._note("work", work_s / units.HOUR_S, "h at full speed", USER)
        self._note("GPUs", form.gpus, f"in nodes of {form.gpus_per_node}", USER)
        return Job(
            work_s=work_s,
            state_bytes=self._state_bytes(),
            step_s=self._duration("step time", form.step, measured.step_s if measured else None, 10.0, ASSUMED),
            nodes=form.gpus // form.gpus_per_node,
            gpus_per_node=form.gpus_per_node,
            min_nodes=form.min_nodes,
            world_sizes=tuple(int(n) for n in _pairs(form.world_sizes, "--world-sizes", single=True)),
            throughput={int(n): share for n, share in _pairs(form.throughput, "--throughput").items()},
        )

    def _state_bytes(self) -> float:
        form, measured = self._form, self._measured
        if form.state is not None:
            value, source = units.parse_size_bytes(form.state), USER
        elif form.params is not None:
            value = units.parse_parameters(form.params) * form.bytes_per_param
            source = (
                f"{form.params} parameters × {form.bytes_per_param:g} bytes (12: FP32 master and both AdamW moments)"
            )
        elif measured is not None and measured.state_bytes is not None:
            value, source = measured.state_bytes, f"measured in {measured.name}"
        else:
            raise ConfigError(
                "a plan needs the size of the state: --state '840 GB', --params 70B, or --events of a run"
            )
        self._note("state", value / units.GB, "GB, all ranks together", source)
        return value

    def _costs(self, job: Job) -> Costs:
        form, measured = self._form, self._measured
        copy_s = job.bytes_per_node / NODE_COPY_BYTES_PER_S
        flashpoint = "60 GB/s a node, as ML Flashpoint publishes"
        stall, restart = (measured.stall_s, measured.restart_s) if measured else (None, None)
        restart_s = self._duration("restart, state in memory", form.restart, restart, 60.0, ASSUMED)
        return Costs(
            copy_s=self._duration("copy to memory", form.copy, stall, copy_s, flashpoint),
            bucket_bytes_per_s=self._rate("bandwidth to the bucket", form.bucket_bandwidth, 1e9, ASSUMED),
            peer_bytes_per_s=self._rate("bandwidth to peers", form.peer_bandwidth, 8e9, f"{ASSUMED}: 100 Gb/s TCP"),
            restart_s=restart_s,
            cold_restart_s=self._duration("restart with new processes", form.cold_restart, None, 120.0, ASSUMED),
            rejoin_s=self._duration("growing back", form.rejoin, None, restart_s, "as the restart"),
            replacement_s=self._duration("wait for a node", form.replacement, None, 360.0, f"{ASSUMED}: an autoscaler"),
        )

    def _hazard(self, job: Job) -> Hazard:
        hazard = parse_hazard(self._hazard_words(), job.nodes, self._form, self._measured)
        self._note("evictions", hazard.label, "", hazard.source)
        self._note("time between evictions", hazard.mean_gap_s / units.HOUR_S, "h", hazard.source)
        return hazard

    def _hazard_words(self) -> str:
        if self._form.evictions is not None:
            return self._form.evictions
        if self._measured is not None and self._measured.loss_times_s:
            return "log"
        raise ConfigError(
            "a plan needs --evictions: a time ('4.5 h', one event), weibull:0.5:'4.5 h', lomax:1.5:'4.5 h', "
            "trace:bamboo-a100 (or a file), advisor, or log with --events"
        )

    def _announced(self) -> float:
        form, measured = self._form, self._measured
        if form.announced is not None:
            share, source = units.parse_share(form.announced), USER
        elif measured is not None and measured.announced is not None:
            share, source = measured.announced, f"measured in {measured.name}"
        else:
            share, source = 0.8, ASSUMED
        self._note("evictions announced", share, "share", source)
        return share

    def _window_s(self) -> float:
        default = WINDOWS_S.get(self._provider, 30.0)
        why = f"notice of {self._provider}" if self._provider in WINDOWS_S else ASSUMED
        return self._duration("eviction window", self._form.window, None, default, why)

    def _prices(self, limits: Limits) -> Prices:
        form = self._form
        rows = catalogue.load(form.prices)
        on_demand = self._price("on-demand", form.on_demand_price, rows)
        spot = self._price("spot", form.spot_price, rows)
        if on_demand is None or spot is None:
            missing = "spot" if on_demand is not None else "on-demand"
            raise ConfigError(
                f"no {missing} price of {form.instance or 'the nodes'}: give --{missing}-price '9.80 USD/gpu-h', "
                "or --instance with a type of `surefoot prices`"
            )
        if limits.data_regions:
            limits.check_region(form.region, "the nodes")
        reserved = self._price("reserved", form.reserved_price, rows)
        if reserved is None and self._provider in ("aws", "azure", "gcp", "oci"):
            discount = reservation_discounts(self._provider)["1yr_no_upfront"][2]
            reserved = on_demand * (1.0 - discount)
            why = f"on-demand less {discount:.0%}, 1 year, no upfront: {RESERVATION_SOURCE}"
            self._note("reserved price", reserved / form.gpus_per_node, "USD/gpu-h", why)
        standby = self._price("standby", form.standby_price, rows)
        return Prices(
            on_demand_usd_per_node_h=on_demand,
            spot_usd_per_node_h=spot,
            reserved_usd_per_node_h=reserved,
            standby_usd_per_node_h=standby,
        )

    def _price(self, market: str, said: str | None, rows: list[catalogue.Price]) -> float | None:
        form = self._form
        if said is not None:
            value, holder = units.parse_usd_per_hour(said)
            per_node = value * form.gpus_per_node if holder == "gpu" else value
            self._note(f"{market} price", per_node / form.gpus_per_node, "USD/gpu-h", USER)
            return per_node
        if form.instance is None or market == "standby":
            return None
        found = catalogue.find(rows, form.instance, market, form.region)
        if found is None:
            return None
        self._provider = self._provider or found.provider
        per_gpu = found.usd_per_gpu_hour or 0.0
        self._note(f"{market} price", per_gpu, "USD/gpu-h", f"{found.source}, {found.region}", found.as_of)
        return per_gpu * form.gpus_per_node

    def _keeping(self, limits: Limits) -> Keeping:
        form = self._form
        name = form.store or (self._provider if self._provider in ("aws", "azure", "gcp", "oci") else "aws")
        store, route = store_named(name), route_named(form.route)
        if limits.data_regions:
            elsewhere = form.route in ("cross-region", "internet")
            limits.check_region("" if elsewhere else form.region, f"the bucket ({route.title})")
        self._note("bucket", store.title, f"{store.usd_per_gb_month:g} USD/GB-month", store.source, store.as_of)
        self._note("way to the bucket", route.title, f"{route.usd_per_gb_out:g} USD/GB", route.source, route.as_of)
        cross = route_named("cross-zone").usd_per_gb_out if form.cross_zones else 0.0
        return Keeping(store=store, route=route, keep=form.keep, peer_usd_per_gb=cross)

    def _schemes(self) -> tuple[Scheme, ...]:
        form = self._form
        every = load_schemes(form.schemes) if form.schemes else shipped_schemes()
        if not form.only:
            return tuple(every)
        names = list(dict.fromkeys([*form.only, form.baseline]))
        return tuple(by_name(every, name) for name in names)

    def _baseline(self, schemes: tuple[Scheme, ...]) -> str:
        return by_name(schemes, self._form.baseline).name

    def _limits(self) -> Limits:
        form = self._form
        return Limits(
            deadline_s=units.parse_duration_s(form.deadline) if form.deadline else None,
            budget_usd=units.parse_usd(form.budget) if form.budget else None,
            miss_share=units.parse_share(form.miss) if form.miss else 0.05,
            core_nodes=form.core_nodes,
            data_regions=tuple(form.data_in),
        )

    def _offer(self, job: Job) -> Availability | None:
        form = self._form
        words = form.availability
        if words is None and form.evictions is not None and form.evictions.startswith("trace:"):
            words = form.evictions.removeprefix("trace:")
        return offered(load_trace(words), job.nodes) if words else None

    def _ownership(self) -> Ownership:
        form = self._form
        known = self._provider in ("aws", "azure", "gcp", "oci")
        return Ownership(
            months=_at_least(form.months, 1, "--months"),
            utilisation=units.parse_share(form.utilisation) if form.utilisation else 1.0,
            usd_per_gpu=units.parse_usd(form.buy_price) if form.buy_price else None,
            opex_usd_per_gpu_month=units.parse_usd(form.opex) if form.opex else 0.0,
            residual_usd_per_gpu=units.parse_usd(form.residual) if form.residual else 0.0,
            discounts=reservation_discounts(self._provider) if known else {},
            engineer_h=form.engineer_hours,
            usd_per_engineer_h=units.parse_usd_per_h(form.engineer_price) if form.engineer_price else 0.0,
        )


def parse_hazard(words: str, nodes: int, form: Form, measured: Measured | None) -> Hazard:
    """An interruption model from its words. `ConfigError` saying how to write one."""
    kind, _, rest = words.partition(":")
    if kind == "trace":
        return from_trace(load_trace(rest), nodes)
    if kind == "advisor":
        life_s = units.parse_duration_s(rest) if rest else 30 * units.DAY_S
        return hazard_from_advice(form.region, form.instance or "", nodes, life_s)
    if kind == "log":
        if measured is None:
            raise ConfigError("--evictions log needs --events with the event log of a run")
        return measured.hazard(nodes)
    sizes = {int(k): share for k, share in _pairs(form.loss_sizes, "--loss-sizes").items()}
    if kind in ("weibull", "lomax"):
        shape, _, gap = rest.partition(":")
        return Renewal(
            mean_gap_s=units.parse_duration_s(gap), kind=kind, shape=_number(shape, words), sizes=sizes, source=USER
        )
    return Renewal(mean_gap_s=units.parse_duration_s(words), sizes=sizes, source=USER)


def _number(text: str, words: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{words!r}: {text!r} is no shape; write it like weibull:0.5:'4.5 h'") from error


def _pairs(text: str, option: str, *, single: bool = False) -> Mapping[int, float]:
    """ "7:0.86,6:0.7" as a mapping; with ``single`` "8,7,4"."""
    pairs: dict[int, float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, colon, value = part.partition(":")
        if not key.strip().isdigit() or (not colon) != single:
            raise ConfigError(f"{option}: {part!r}; write it like {'8,7,4' if single else '7:0.86,6:0.7'}")
        pairs[int(key)] = 1.0 if single else units.parse_share(value)
    return pairs


def _at_least(value: int, least: int, option: str) -> int:
    if value < least:
        raise ConfigError(f"{option} is {value}: give {least} or more")
    return value
