"""One job on several nodes, evicted again and again: evictions.py --count N --grace S [--nodes N] [--seed N]

Prints one JSON object: how many evictions there were and what became of them, and from the first notice until every
node knew, until every rank's newest step was in memory, and until that step was committed, the p50 and p99 in seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from schedules import Place, Setting, open_place

from surefoot.scenario.events import Event, Kind, draw
from surefoot.scenario.network import isolate

STEPS_BETWEEN = 14
_FIRST = 6
_PHASES = ("training", "filling", "sealed")


def plan(count: int, seed: int, nodes: int) -> list[Event]:
    """Evictions of any node, in any phase of its trainer, at any step."""
    rng = random.Random(f"evictions {seed}")
    wanted = [
        Event(
            kind=Kind.EVICT,
            phase=rng.choice(_PHASES),
            step=_FIRST + number * STEPS_BETWEEN,
            latest=_FIRST + number * STEPS_BETWEEN + STEPS_BETWEEN // 2,
            node=None,
        )
        for number in range(count)
    ]
    return draw(wanted, rng, 1, nodes)


def measure(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Latencies by generation, from what the nodes' agents noted. They share one clock here."""
    by_generation: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        by_generation.setdefault(event["generation"], []).append(event)
    taken = [latencies for noted in by_generation.values() if (latencies := _latencies(noted)) is not None]
    names = ("notice_to_all_nodes_s", "notice_to_all_staged_s", "notice_to_committed_s")
    return {
        "measured": len(taken),
        **{name: _quantiles([each[number] for each in taken]) for number, name in enumerate(names)},
    }


def _latencies(noted: Sequence[dict[str, Any]]) -> tuple[float, float, float] | None:
    notices = [event["t"] for event in noted if event["event"] == "notice"]
    committed = [e for e in noted if e["event"] == "committed" and notices and e["t"] >= min(notices)]
    if not committed:
        return None
    step = max(event["step"] for event in committed)
    first_s = min(notices)
    sealed = [e["t"] for e in noted if e["event"] == "sealed" and e["step"] == step]
    done_s = min(event["t"] for event in committed if event["step"] == step)
    return max(notices) - first_s, max(0.0, max(sealed, default=done_s) - first_s), done_s - first_s


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    ordered = sorted(values)
    if not ordered:
        return None
    return {f"p{p}": round(ordered[min(len(ordered) - 1, math.ceil(len(ordered) * p / 100) - 1)], 4) for p in (50, 99)}


def run(place: Place, count: int, grace_s: float, seed: int, nodes: int) -> dict[str, Any]:
    """Evict so often; returns what is printed."""
    setting = Setting(
        seed, "fsdp" if seed % 2 else "ddp", False, False, nodes, steps=_FIRST + (count + 1) * STEPS_BETWEEN
    )
    told = place.run(setting, plan(count, seed, nodes), {"grace_s": grace_s}, keep=True)
    noted = [json.loads(line) for path in Path(told["place"]).rglob("state/**/*.jsonl") for line in path.open()]
    evicted = [event for event in noted if event["event"] == "evicted"]
    return {
        "evictions": len(told["recoveries"]),
        "grace_s": grace_s,
        "redone_steps": sum(recovery[2] for recovery in told["recoveries"]),
        "safe": all(event["safe"] for event in evicted),
        "bit_identical": told["bit_identical"],
        "problems": told["problems"],
        **measure(noted),
        "place": told["place"],
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=10)
    options.add_argument("--grace", type=float, default=30.0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--nodes", type=int, default=3)
    given = options.parse_args()
    isolate([sys.executable, *sys.argv])
    with open_place(given.nodes) as place:
        told = run(place, given.count, given.grace, given.seed, given.nodes)
    print(json.dumps(told))
    return 1 if told["problems"] or not told["safe"] else 0


if __name__ == "__main__":
    sys.exit(main())
