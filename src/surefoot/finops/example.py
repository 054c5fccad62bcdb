"""The example of the project's brief: 70B parameters on 64 H100, one node lost in 4.5 hours."""

from __future__ import annotations

from dataclasses import replace

from surefoot.finops.hazards import Renewal
from surefoot.finops.job import Job
from surefoot.finops.request import Assumption, Limits, Ownership, Prices, Request
from surefoot.finops.reservations import SOURCE as RESERVED
from surefoot.finops.reservations import reservation_discounts
from surefoot.finops.schemes import Costs, shipped_schemes
from surefoot.finops.transfer import Keeping, route_named, store_named
from surefoot.finops.units import GB, HOUR_S

BRIEF = "the project's brief"
GPUS = 64
STATE_BYTES = 840 * GB
WORK_S = 72 * HOUR_S
GAP_S = 4.5 * HOUR_S
SPOT_USD_PER_GPU_H = 3.10
ON_DEMAND_USD_PER_GPU_H = 9.80
STEP_S = 12.0
"""Not in the brief; assumed, and no cost depends on it by more than the step in flight."""


def brief_request(*, runs: int = 2000, seed: int = 1, deadline_s: float | None = 80 * HOUR_S) -> Request:
    """The brief's premises as a request; what it does not say is assumed, and says so."""
    reserved_usd = ON_DEMAND_USD_PER_GPU_H * 8 * (1.0 - reservation_discounts("aws")["1yr_no_upfront"][2])
    return Request(
        name="the brief: 70B on 64 H100",
        job=Job(work_s=WORK_S, state_bytes=STATE_BYTES, step_s=STEP_S, nodes=8, gpus_per_node=8, min_nodes=4),
        costs=Costs(
            copy_s=0.85,
            bucket_bytes_per_s=3.1 * GB,
            peer_bytes_per_s=400 * GB,
            restart_s=18.0,
            cold_restart_s=0.0,
            rejoin_s=18.0,
            replacement_s=360.0,
        ),
        hazard=Renewal(mean_gap_s=GAP_S, source=BRIEF),
        announced=1.0,
        window_s=30.0,
        prices=Prices(
            on_demand_usd_per_node_h=ON_DEMAND_USD_PER_GPU_H * 8,
            spot_usd_per_node_h=SPOT_USD_PER_GPU_H * 8,
            reserved_usd_per_node_h=reserved_usd,
        ),
        keeping=Keeping(store=store_named("aws"), route=route_named("same-region")),
        schemes=tuple(shipped_schemes()),
        on_demand_goodput=1.0,
        limits=Limits(deadline_s=deadline_s),
        ownership=Ownership(
            months=36,
            discounts=reservation_discounts("aws"),
            engineer_h=160.0,
            usd_per_engineer_h=125.0,
        ),
        assumptions=_assumptions(reserved_usd),
        runs=runs,
        seed=seed,
    )


def with_price_saving_baseline(request: Request, baseline: str) -> Request:
    """The same request, its scheme saving measured against another scheme."""
    return replace(request, baseline=baseline)


def _assumptions(reserved_usd: float) -> tuple[Assumption, ...]:
    said: list[tuple[str, float | str, str]] = [
        ("work", 72.0, "h at full speed"),
        ("GPUs", 64, "in 8 nodes of 8"),
        ("state", 840.0, "GB, all ranks together"),
        ("spot price", SPOT_USD_PER_GPU_H, "USD/gpu-h"),
        ("on-demand price", ON_DEMAND_USD_PER_GPU_H, "USD/gpu-h"),
        ("time between evictions", 4.5, "h, one node each, exponential (Poisson)"),
        ("evictions announced", 1.0, "share"),
        ("eviction window", 30.0, "s"),
        ("copy to memory", 0.85, "s, training stands still"),
        ("bandwidth to the bucket", 3.1, "GB/s a node"),
        ("bandwidth to peers", 400.0, "GB/s a node (50 GB/s a GPU)"),
        ("restart and resize", 18.0, "s"),
        ("wait for a node", 360.0, "s"),
    ]
    own: list[tuple[str, float | str, str, str]] = [
        ("step time", STEP_S, "s", "assumed"),
        ("growing back", 18.0, "s", "assumed: a resize like the shrink; the brief counts only one of the two"),
        ("on-demand goodput", 1.0, "", "assumed: a run that never fails, the assumption least kind to spot"),
        ("reserved price", reserved_usd / 8, "USD/gpu-h", f"on-demand less 32 %: AWS, 1 year, no upfront; {RESERVED}"),
        ("bucket", "same region", "", "AWS S3 Standard 0.023 USD/GB-month, three checkpoints kept"),
        ("adoption", 160.0, "engineer-hours at 125 USD", "assumed"),
    ]
    return (
        *(Assumption(name, value, unit, BRIEF) for name, value, unit in said),
        *(Assumption(name, value, unit, source) for name, value, unit, source in own),
    )
