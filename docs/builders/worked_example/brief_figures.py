"""Every figure of the project's brief, computed again: holds, holds under these assumptions, or does not and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from surefoot.money import advisor, catalogue
from surefoot.money.closed_form import best_interval_s, expected, goodput
from surefoot.money.job import Timing
from surefoot.money.planner import Plan, result_named
from surefoot.money.survival import group_survival
from surefoot.money.units import GB, HOUR_S, show_duration, show_share, show_usd

GPUS = 64
STATE_BYTES = 840 * GB
SPOT_USD_PER_GPU_H = 3.10
ON_DEMAND_USD_PER_GPU_H = 9.80
STEP_S = 12.0

HOLDS, UNDER, NOT = "holds", "holds under these assumptions", "does not hold"

PCIE_BYTES_PER_S = 64 * GB
"""PCIe Gen5 x16, one direction, line rate."""
NVME_BYTES_PER_S = 26 * GB
"""Best published write rate of a node: eight Gen5 drives in RAID-0 (DeepSpeed DeepNVMe, June 2025)."""
STREAM_BYTES_PER_S = 0.2 * GB
"""One HTTP stream, as the brief's second article measures it."""
MONTH_H = 720.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: what the brief says, what comes out, and the verdict."""

    claim: str
    computed: str
    verdict: str
    why: str = ""


def figures(plan: Plan) -> list[Figure]:
    """In the brief's order. ``plan`` is the plan of `surefoot plan --example brief`."""
    return [figure for part in _PARTS for figure in part(plan)]


def _prices(plan: Plan) -> list[Figure]:
    spot, base, gpus = SPOT_USD_PER_GPU_H, ON_DEMAND_USD_PER_GPU_H, GPUS
    feed = advisor.advices()
    p5 = [row for row in feed if row.instance_type == "p5.48xlarge"]
    inside, own = (sum(0.60 <= row.saving <= 0.74 for row in rows) for rows in (feed, p5))
    azure = next(share for price, share in catalogue.discounts(catalogue.shipped()) if "ND96isr" in price.instance_type)
    p5_price = catalogue.find(catalogue.shipped(), "p5.48xlarge", "on-demand")
    now = p5_price.usd_per_gpu_hour if p5_price else None
    return [
        Figure(
            "spot H100 nodes cost 60 to 74 % less",
            f"AWS Spot Advisor, {advisor.AS_OF}: {inside} of {len(feed)} GPU offers are in that range, "
            f"{own} of {len(p5)} of p5.48xlarge ({show_share(min(r.saving for r in p5), 0)} to "
            f"{show_share(max(r.saving for r in p5), 0)}); Azure ND96isr H100 v5 {show_share(azure)}",
            UNDER,
            "a typical range, not a bound: it depends on region and day, and spot can cost more than on-demand",
        ),
        Figure(
            "3.10 against 9.80 USD a GPU-hour",
            f"the catalogue of {p5_price.as_of if p5_price else '?'} has p5.48xlarge on demand at {now:.2f} USD a "
            "GPU-hour",
            UNDER,
            "as premises; the on-demand price has fallen since",
        ),
        Figure(
            "64 GPUs, 720 h: 451,584 against 142,848 USD",
            f"{gpus * MONTH_H * base:,.0f} and {gpus * MONTH_H * spot:,.0f}",
            HOLDS,
        ),
        Figure(
            "SIGTERM, 30 s later SIGKILL",
            "AWS 120 s, Google Cloud 30 s (GKE pods 15 s unless asked), Azure at least 30 s, all best effort",
            UNDER,
            "true for some clouds; the window is an input here (--window)",
        ),
    ]


def _state(plan: Plan) -> list[Figure]:
    params = 70e9
    return [
        Figure(
            "840 GB of state: BF16 weights 140, FP32 weights 280, AdamW moments 420",
            f"master {params * 4 / GB:.0f} + two FP32 moments {params * 8 / GB:.0f} = {params * 12 / GB:.0f} GB; "
            f"with the BF16 copy {params * 14 / GB:.0f} GB",
            UNDER,
            "the total holds at 12 bytes a parameter, the parts do not: two FP32 moments are 560 GB, and the "
            "BF16 weights "
            "follow from the master and need not be saved",
        ),
        Figure(
            "torch.save on rank 0 at 3.1 GB/s takes 271 s",
            f"{STATE_BYTES / (3.1 * GB):.1f} s",
            HOLDS,
        ),
        Figure(
            "it is killed at 30 s",
            f"840 GB in 30 s would need {STATE_BYTES / 30 / GB:.0f} GB/s",
            HOLDS,
        ),
        Figure(
            "and throws the cluster back 3 hours",
            _thrown_back(plan),
            UNDER,
            "3 hours is the worst case of a save each 3 h",
        ),
        Figure(
            "synchronous checkpointing loses 38 % of the compute budget",
            _sync_loss(plan),
            NOT,
            "not of a tuned baseline: it is what badly chosen intervals lose, or a slower pipe",
        ),
    ]


def _tier_one(plan: Plan) -> list[Figure]:
    shard = STATE_BYTES / GPUS
    stall_share = 0.85 / 300.85
    return [
        Figure(
            "a shard of 13.12 GB for each of 64 GPUs", f"{shard / GB:.3f} GB", HOLDS, "without replication in the job"
        ),
        Figure(
            "its copy over PCIe Gen5 x16 at 64 GB/s takes 0.85 s",
            f"{shard / PCIE_BYTES_PER_S:.3f} s at 64 GB/s; 0.85 s is {shard / 0.85 / GB:.1f} GB/s a GPU and "
            f"{shard * 8 / 0.85 / GB:.1f} GB/s a node",
            NOT,
            "0.205 s by its own premise; but eight GPUs share the host's memory, and 60 to 80 GB/s a node is the best "
            "that is published (1.3 to 1.75 s)",
        ),
        Figure(
            "training goes on at 0.86 s",
            "state changes only in the optimizer step: a copy hidden behind forward and backward stops nothing",
            UNDER,
            "an upper bound: with a hidden copy the stall is milliseconds",
        ),
        Figure(
            "a checkpoint each 5 minutes costs under 0.3 %",
            f"{show_share(stall_share, 3)} of the time stands still",
            UNDER,
            "the stall only; evictions, replays and restarts come on top "
            f"({show_share(1 - result_named(plan.schemes, 'two-tier-shrink').expected.goodput)} in all)",
        ),
        Figure("under 2 s from the flag to the snapshot", *_snapshot(plan)),
    ]


def _tier_two(plan: Plan) -> list[Figure]:
    node = plan.request.job.bytes_per_node
    shard = plan.request.job.bytes_per_gpu
    return [
        Figure(
            "the flush to NVMe and S3 takes 1.1 to 14 s",
            f"{node / GB:.0f} GB a node: 1.1 s is {node / 1.1 / GB:.0f} GB/s, the best published NVMe array takes "
            f"{node / NVME_BYTES_PER_S:.1f} s; 14 s is {node / 14 / GB:.1f} GB/s to the bucket",
            NOT,
            "1.1 s is beyond any published array; 14 s is about the best that one node reaches to object storage",
        ),
        Figure(
            "13.12 GB over 400 Gb/s RDMA into a peer in 0.26 s",
            f"{shard / (50 * GB):.4f} s at 50 GB/s a GPU",
            UNDER,
            "if each GPU has its own 400 Gb/s card, at line rate, with training silent",
        ),
        Figure(
            "the previous flush ends before its buffer is used again",
            f"at 3.1 GB/s in all a flush takes {show_share(STATE_BYTES / (3.1 * GB) / 300, 0)} of the 5 minutes",
            UNDER,
            "a rule, and it just fits; the planner lengthens the interval when it does not",
        ),
        Figure(
            "a power loss never loses more than 5 minutes",
            _worst_age(),
            NOT,
            "a save counts when its upload has ended: the bound is interval + stall + upload; replicas in peers' "
            "memory "
            "bring it to a step",
        ),
    ]


def _benchmark(plan: Plan) -> list[Figure]:
    best = result_named(plan.schemes, "two-tier-shrink")
    gross = 1 - SPOT_USD_PER_GPU_H / ON_DEMAND_USD_PER_GPU_H
    return [
        Figure(
            "72 h and one node lost in 4.5 h are 16 evictions",
            f"{72 / 4.5:.0f}; expected in the {best.expected.wall_s / HOUR_S:.1f} h that it takes: "
            f"{best.expected.events:.1f}",
            HOLDS,
        ),
        Figure(
            "zero lost steps",
            f"{best.expected.lost_steps:.0f} finished steps; {best.expected.lost_work_s / 60:.1f} min of steps in "
            "flight are done "
            f"again. Without notices and replicas: {_lost_without(plan):,.0f} finished steps",
            UNDER,
            "if each eviction is announced and the window is long enough, or a replica of each step is left",
        ),
        Figure(
            "68.4 % net cost reduction",
            f"{show_share(gross, 2)} is the discount; net {show_share(best.saving.net, 2)}, of which the price "
            f"{show_share(best.saving.price)} and the scheme {show_share(best.saving.scheme)} (against "
            f"{plan.request.baseline})",
            NOT,
            "it is the gross discount: net equals it only with goodput 1 and free storage",
        ),
    ]


def _rules(plan: Plan) -> list[Figure]:
    facts, job = plan.advice.standby_facts, plan.request.job
    idle = (job.nodes - 1) * 8 * SPOT_USD_PER_GPU_H * 0.1
    standby = result_named(plan.schemes, "two-tier-standby")
    shrink = result_named(plan.schemes, "two-tier-shrink")
    node_usd = plan.request.prices.spot_usd_per_node_h
    return [
        Figure(
            "a flag by all-reduce at the end of each step; all know within 150 ms",
            f"with a step of {STEP_S:g} s the flag waits up to {STEP_S:g} s for the boundary",
            NOT,
            "the collective takes under a millisecond, waiting for it a step; 150 ms needs a channel beside the "
            "training",
        ),
        Figure(
            "waiting 6 min for the autoscaler idles 56 GPUs; keep a warm standby",
            f"a wait costs {idle:.2f} USD, {idle / 4.5:.2f} an hour; the standby costs {node_usd:.2f} an hour: net "
            f"{show_share(standby.saving.net)} with it, {show_share(shrink.saving.net)} without",
            NOT,
            f"it pays only below {show_duration(facts.break_even_gap_s)} between evictions, or when an hour of "
            "delay is "
            f"worth {facts.break_even_delay_usd_per_h:,.0f} USD",
        ),
        Figure(
            "or torchrun --nnodes=7:8: go on at N−1",
            f"goodput {shrink.expected.goodput:.3f}, {show_usd(shrink.cost_usd)} USD",
            HOLDS,
            "if the state fits on seven nodes and the samples of a step stay the same",
        ),
        Figure(
            "no emergency checkpoint to S3 over one HTTP stream",
            f"{job.bytes_per_node / GB:.0f} GB at 200 MB/s: {show_duration(job.bytes_per_node / STREAM_BYTES_PER_S)}",
            HOLDS,
            "and local NVMe dies with an evicted node: it is no place for an emergency",
        ),
        Figure(
            "256Gi of shared memory in the pod",
            f"two own images {2 * job.bytes_per_node / 2**30:.0f} GiB, with two of a peer "
            f"{4 * job.bytes_per_node / 2**30:.0f} GiB",
            UNDER,
            "enough for own images; not for those of a peer as well",
        ),
        Figure("the resize takes under 18 s", *_resize(plan)),
        Figure("model spot and reserved, zero-egress storage, payback, TCO", *_mix(plan)),
    ]


def _second_article(plan: Plan) -> list[Figure]:
    every_30 = result_named(plan.schemes, "naive-30min")
    tuned = result_named(plan.schemes, "naive-tuned")
    slow_s = STATE_BYTES / STREAM_BYTES_PER_S
    node_s = plan.request.job.bytes_per_node / STREAM_BYTES_PER_S
    return [
        Figure(
            "30 to 120 s of notice; Vast.ai, RunPod and Lambda give 30 s",
            "RunPod about 5 s (second-hand), Vast.ai none, no spot product or notice of Lambda's was found",
            NOT,
            "the range holds for AWS, Azure and Google Cloud, not for these three",
        ),
        Figure(
            "checkpoint at least every 30 minutes",
            f"goodput {every_30.expected.goodput:.3f} here, {tuned.expected.goodput:.3f} at the best interval of "
            f"{show_duration(tuned.timing.interval_s)}",
            UNDER,
            "near the optimum of a 271 s standstill; an asynchronous save is worth far more often",
        ),
        Figure(
            "2 GB at 200 MB/s take 10 s",
            f"{2 * GB / STREAM_BYTES_PER_S:.0f} s; 840 GB take {show_duration(slow_s)}",
            UNDER,
            "right for 2 GB; but 70B parameters are not 2 GB",
        ),
        Figure(
            "save and upload fit in 30 s",
            f"2 GB: yes; one node's {plan.request.job.bytes_per_node / GB:.0f} GB over that stream: "
            f"{show_duration(node_s)}",
            UNDER,
            "for small models only",
        ),
        Figure(
            "back in under 5 minutes: 60 s + 90 s + 30 s, about 3 minutes",
            f"the sum is 180 s; 840 GB in 60 s are {STATE_BYTES / 60 / GB:.0f} GB/s",
            UNDER,
            "for the 2 GB of that article; 70B need every node's own pipe and 1.75 GB/s on each",
        ),
    ]


_PARTS: tuple[Callable[[Plan], list[Figure]], ...] = (
    _prices,
    _state,
    _tier_one,
    _tier_two,
    _benchmark,
    _rules,
    _second_article,
)


def _thrown_back(plan: Plan) -> str:
    result = result_named(plan.schemes, "naive-3h")
    mean_s = result.expected.lost_work_s / result.expected.events
    return f"{show_duration(mean_s)} of compute for each eviction on average, with a save each 3 h"


def _sync_loss(plan: Plan) -> str:
    tuned = plan.request.hazard
    sync = result_named(plan.schemes, "naive-tuned").timing
    best = best_interval_s(plan.request.job, sync, tuned, 0.0, 1.0)
    loss = 1 - goodput(plan.request.job, replace(sync, interval_s=best), tuned)
    low, high = intervals_with_loss(plan, 3.1, 0.38)
    slow = _timing(1.5)
    three_hours = 1 - goodput(plan.request.job, replace(slow, interval_s=3 * HOUR_S), tuned)
    return (
        f"at 3.1 GB/s the best interval ({show_duration(best)}) loses {show_share(loss)}; 38 % are lost with an "
        "interval "
        f"of {show_duration(low)} or {show_duration(high)}, or each 3 h at 1.5 GB/s ({show_share(three_hours)})"
    )


def intervals_with_loss(plan: Plan, gb_per_s: float, loss: float) -> tuple[float, float]:
    """The two intervals, below and above the best one, that lose this share. Blocking saves through one pipe."""
    job, hazard, timing = plan.request.job, plan.request.hazard, _timing(gb_per_s)
    best = best_interval_s(job, timing, hazard, 0.0, 1.0)

    def lost(interval_s: float) -> float:
        return 1 - goodput(job, replace(timing, interval_s=interval_s), hazard)

    return _crossing(lost, loss, best, 1.0), _crossing(lost, loss, best, 100 * best)


def _crossing(lost: Callable[[float], float], wanted: float, inner: float, outer: float) -> float:
    """Where ``lost``, growing from ``inner`` to ``outer``, reaches ``wanted``."""
    for _ in range(60):
        middle = (inner * outer) ** 0.5
        inner, outer = (inner, middle) if lost(middle) > wanted else (middle, outer)
    return inner


def _timing(gb_per_s: float) -> Timing:
    """Blocking saves and loads through one pipe; six minutes until a lost node is replaced."""
    moved_s = STATE_BYTES / (gb_per_s * GB)
    return Timing(interval_s=HOUR_S, stall_s=moved_s, load_s=moved_s, replacement_s=360.0)


def _worst_age() -> str:
    one_pipe, every_node = STATE_BYTES / (3.1 * GB), STATE_BYTES / (24.8 * GB)
    return (
        f"at worst {300 + 0.85 + one_pipe:.0f} s and {300 + 0.85 + every_node:.0f} s with an upload of "
        f"{one_pipe:.0f} s "
        f"and {every_node:.0f} s; on average {150 + one_pipe:.0f} s and {150 + every_node:.0f} s"
    )


def _snapshot(plan: Plan) -> tuple[str, str, str]:
    need = plan.window.needed_s
    words = f"the copy takes 0.2 to 0.85 s; the whole emergency, replica and commit included, {need:.2f} s"
    why = "if nobody waits for the end of the step, which takes 12 s here and 8 to 66 s in such jobs"
    return words, UNDER, why


def _lost_without(plan: Plan) -> float:
    result = result_named(plan.schemes, "two-tier-shrink")
    timing = replace(result.timing, hot_announced=False, replica_survival=None)
    return expected(plan.request.job, timing, plan.request.hazard, 0.0).lost_steps


def _resize(plan: Plan) -> tuple[str, str, str]:
    bar = next(bar for bar in plan.bars if bar.name == "restart")
    shrink = result_named(plan.schemes, "two-tier-shrink")
    words = (
        f"ten times as long (180 s) costs {show_usd(bar.high_usd - shrink.cost_usd)} USD more here; growing back is a "
        "second resize, which the brief does not count"
    )
    return (
        words,
        UNDER,
        "it would be a record (about 20 s with standby machines is published); an input here (--restart)",
    )


def _mix(plan: Plan) -> tuple[str, str, str]:
    egress = next(trap for trap in plan.traps if trap.route == "internet")
    months = plan.months
    words = (
        f"mix: {plan.mix_note}; a store without egress fee outside the cloud still costs "
        f"{show_share(egress.share_of_compute, 0)} "
        f"of the GPUs on the way out; adopting pays back in {months.adoption_months:.1f} months, reserving beats "
        "spot above "
        f"{show_share(months.break_even_utilisation or 0.0, 0)} utilisation"
    )
    return words, UNDER, "zero egress pays where the way out is free too; at these prices nothing beats spot"


def replica_survival_of_eight() -> list[tuple[int, float, float]]:
    """(nodes lost at once, P with pairs, P with groups of four) for eight nodes."""
    return [(k, group_survival(8, 2, k), group_survival(8, 4, k)) for k in (1, 2, 3, 4)]
