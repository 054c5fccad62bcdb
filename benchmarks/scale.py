"""`python -m benchmarks scale`: what the decisions cost that are made for all ranks at once, on plain values.

Planning, commit, listing, recovery choice and retention are pure functions; here they get inputs as large as a job of
many ranks and tensors makes them. No process, file or network takes part: one thread, CPU seconds of this process.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from surefoot.core.commit import complete_set, make_manifest
from surefoot.core.documents import compact
from surefoot.core.layout import BoundaryId, ShardId, ack_key, parse_ack, parse_commit, parse_shard, shard_key
from surefoot.core.lineage import counts, cuts
from surefoot.core.manifest import Generation, Manifest, Parent, Shard
from surefoot.core.plan import Leaf, Plan, Report, make_plan
from surefoot.core.recovery import Copy, Facts, Source, decide, ranking
from surefoot.core.replicas import with_replicas
from surefoot.core.retention import abandoned_steps, to_retire

_Result = TypeVar("_Result")
_PLAN_HASH = "a" * 32
_GENERATIONS = 50
_KEPT_STEPS = 3
"""Steps of which pieces lie on the store at once."""
_HISTORY = 300
"""Manifests and tombstones under `commits/`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleBench:
    """What to measure."""

    ranks: tuple[int, ...] = (8, 64, 512, 4096)
    tensors: tuple[int, ...] = (100, 1000, 10_000, 100_000)
    largest_report: int = 500_000
    """Ranks times tensors: larger plans are left out, since the reports alone would fill the memory."""
    rounds: int = 3
    """The quickest of as many counts."""


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """One figure."""

    what: str
    ranks: int
    tensors: int
    """0 where their number plays no part."""
    ms: float


def measure(bench: ScaleBench, on_row: Callable[[ScaleRow], None]) -> list[ScaleRow]:
    """Every figure, smallest first."""
    rows: list[ScaleRow] = []

    def take(what: str, ranks: int, tensors: int, work: Callable[[], _Result]) -> _Result:
        seconds, result = _quickest(work, bench.rounds)
        rows.append(ScaleRow(what, ranks, tensors, round(seconds * 1e3, 3)))
        on_row(rows[-1])
        return result

    for ranks in bench.ranks:
        _commits(ranks, take)
        for tensors in bench.tensors:
            if ranks * tensors <= bench.largest_report:
                _plans(ranks, tensors, take)
    return rows


def to_json(rows: Sequence[ScaleRow]) -> dict[str, object]:
    return {"results": [asdict(row) for row in rows]}


_RANKS_A_MACHINE = 4
Take = Callable[[str, int, int, Callable[[], Any]], Any]


def _quickest(work: Callable[[], _Result], rounds: int) -> tuple[float, _Result]:
    # Garbage is collected between rounds, not in them: how often would depend on everything else that lives.
    seconds: list[float] = []
    result: _Result | None = None
    for _ in range(rounds):
        result = None
        gc.collect()
        gc.disable()
        start_s = time.process_time()
        result = work()
        seconds.append(time.process_time() - start_s)
        gc.enable()
    assert result is not None
    return min(seconds), result


# ---------------------------------------------------------------------- plans


def _plans(ranks: int, tensors: int, take: Take) -> None:
    replicated, sharded = _replicated(ranks, tensors), _sharded(ranks, tensors)
    copied: Plan = take("plan, replicated", ranks, tensors, lambda: make_plan(replicated))
    machines = [rank // _RANKS_A_MACHINE for rank in range(ranks)]
    take("replicas, replicated", ranks, tensors, lambda: with_replicas(copied, replicated, machines))
    plan: Plan = take("plan, sharded", ranks, tensors, lambda: make_plan(sharded))
    take("all ranks' images", ranks, tensors, lambda: _all_images(_afresh(plan)))
    body = plan.body
    take("plan from its document", ranks, tensors, lambda: Plan.from_body(body))


def _all_images(plan: Plan) -> int:
    return sum(plan.image(rank).size_bytes for rank in range(plan.world_size))


def _afresh(plan: Plan) -> Plan:
    """The same plan without anything that was computed of it, but its hash."""
    fresh = Plan(plan.world_size, plan.items, plan.structures, plan.structure_of_rank)
    fresh.__dict__["hash"] = plan.hash
    return fresh


def _structure(tensors: int) -> str:
    return compact({f"t{n}": {"$tensor": f"t{n}"} for n in range(tensors)}).decode()


def _replicated(ranks: int, tensors: int) -> list[Report]:
    """As of DDP: each rank has everything."""
    leaves = tuple(Leaf(f"t{n}", "float32", (64, 1 + n % 97), "replicated", "d") for n in range(tensors))
    return [Report(leaves, _structure(tensors))] * ranks


def _sharded(ranks: int, tensors: int) -> list[Report]:
    """As of FSDP on two dimensions of ranks: each rank has one block of each tensor."""
    across = _divisor(ranks)
    down = ranks // across
    structure = _structure(tensors)
    reports = []
    for rank in range(ranks):
        offset = (4 * (rank // across), 8 * (rank % across))
        leaves = (
            Leaf(f"t{n}", "float32", (4, 8), "sharded", "", offset, (4 * down, 8 * across)) for n in range(tensors)
        )
        reports.append(Report(tuple(leaves), structure))
    return reports


def _divisor(ranks: int) -> int:
    """The divisor next to the square root, from below."""
    return max(n for n in range(1, int(ranks**0.5) + 1) if ranks % n == 0)


# ---------------------------------------------------------------------- commit, listing, recovery, retention


def _commits(ranks: int, take: Take) -> None:
    generations = _history_of_generations()
    newest = BoundaryId(_HISTORY, _GENERATIONS)
    acks = [_ack(newest, rank, ranks) for rank in range(ranks)]
    take("commit decision", ranks, 0, lambda: complete_set(acks, newest))
    manifest: Manifest = take("manifest", ranks, 0, lambda: make_manifest(acks, generations[_GENERATIONS], 1.0))
    data = take("manifest to its document", ranks, 0, manifest.to_bytes)
    take("manifest from its document", ranks, 0, lambda: Manifest.from_bytes(data, manifest.key))
    keys = _listing(ranks)
    take("listing to candidates", ranks, 0, lambda: _candidates(keys, generations))
    made = [_manifest(step, ranks) for step in (_HISTORY - 1, _HISTORY)]
    held = [copy for step in range(_HISTORY, _HISTORY + _KEPT_STEPS) for copy in _held(step, ranks)]
    chain = cuts(generations)
    facts = _facts(generations, held, made)
    take("recovery choice", ranks, 0, lambda: decide(facts))
    manifests = [_manifest(step, ranks) for step in range(1, _HISTORY + 1)]
    ats = [m.at for m in manifests]
    steps = [BoundaryId(step, 1 + step % _GENERATIONS) for step in range(2 * _HISTORY)]
    take("retention", ranks, 0, lambda: to_retire(manifests, chain, generations, ats))
    take("abandoned steps", ranks, 0, lambda: [*abandoned_steps(steps, ats, chain, _GENERATIONS, ats[-1]), None])


def _history_of_generations() -> dict[int, Generation]:
    """One after the other, each from where the one before had come to."""
    per = _HISTORY // _GENERATIONS
    parents = {number: Parent(number - 1, per * (number - 1), committed=True) for number in range(2, _GENERATIONS + 1)}
    return {n: Generation(n, "launch", parents.get(n), 8, "node", 1.0) for n in range(1, _GENERATIONS + 1)}


def _ack(at: BoundaryId, rank: int, ranks: int) -> Shard:
    record = {**at.to_json(), "world_size": ranks, "trigger": "periodic", "tag": None, "metrics": {}, "values": [1, 2]}
    return Shard(ShardId(at, rank, f"{rank:08x}"), _PLAN_HASH, 4096, f"{rank:032x}", record)


def _manifest(step: int, ranks: int) -> Manifest:
    at = BoundaryId(step, -(-step * _GENERATIONS // _HISTORY))
    shards = tuple(_ack(at, rank, ranks) for rank in range(ranks if step >= _HISTORY - 1 else 1))
    return Manifest(at, _PLAN_HASH, len(shards), "periodic", None, {}, "launch", None, 1.0, shards)


def _held(step: int, ranks: int) -> list[Copy]:
    """Every image in the memory of two nodes, eight ranks a node."""
    at = BoundaryId(step, _GENERATIONS)
    nodes = max(1, ranks // 8)
    return [
        Copy(at, _PLAN_HASH, ranks, rank, f"{rank:032x}", 4096, f"node{(rank // 8 + beside) % nodes}")
        for rank in range(ranks)
        for beside in (0, 1)
    ]


def _facts(generations: dict[int, Generation], held: Sequence[Copy], manifests: Sequence[Manifest]) -> Facts:
    return Facts(
        generations=generations,
        chain=cuts(generations),
        launches=["launch"],
        resume="auto",
        uri="s3://bucket/run",
        place="object",
        copies=held,
        silent=(),
        commits=[manifest.at for manifest in manifests],
        manifests={manifest.at: manifest for manifest in manifests},
        failed=(),
        refused={},
    )


def _listing(ranks: int) -> list[str]:
    """What a store lists of a run: commits, and of the newest steps every shard and acknowledgement."""
    shards = [
        ShardId(BoundaryId(step, _GENERATIONS), rank, f"{rank:08x}")
        for step in range(_HISTORY, _HISTORY + _KEPT_STEPS)
        for rank in range(ranks)
    ]
    commits = [_manifest(step, 1).key for step in range(1, _HISTORY + 1)]
    return [*commits, *(shard_key(shard) for shard in shards), *(ack_key(shard) for shard in shards)]


def _candidates(keys: Sequence[str], generations: dict[int, Generation]) -> list[Source]:
    """From keys to the sources that count, best first."""
    chain = cuts(generations)
    pieces: dict[BoundaryId, int] = {}
    for key in keys:
        piece = parse_shard(key) or parse_ack(key)
        if piece is not None:
            pieces[piece.at] = pieces.get(piece.at, 0) + 1
    ats = [at for key in keys if (at := parse_commit(key)) is not None and counts(at, chain)]
    return ranking([Source(at, "object", _PLAN_HASH, committed=True) for at in ats], chain)
