"""Makes and describes events, schema v1: one JSON object per line. The log that a person reads is made from them.

Every event has `v` (1), `t` (seconds since the epoch), `event`, `run`, `launch`, `node`, `generation` (0 before
there is one). `step` is the number of optimizer steps finished; `boundary` stands beside it where the two differ, and a
step that is not known is null. The events and the fields beside these
are in `docs/guides/events.md`, which a test holds against the table of sentences below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from surefoot.core.layout import BoundaryId
from surefoot.core.presence import spans

SCHEMA_VERSION = 1

Event = dict[str, Any]


def make_event(kind: str, *, t: float, run: str, launch: str, node: str, generation: int, **fields: Any) -> Event:
    """An event of schema v1."""
    return {
        "v": SCHEMA_VERSION,
        "t": round(t, 6),
        "event": kind,
        "run": run,
        "launch": launch,
        "node": node,
        "generation": generation,
        **fields,
    }


def describe(event: Event) -> str | None:
    """The sentence that a person reads, or None for events that are too many to read."""
    kind = event["event"]
    if kind not in SENTENCES:
        extra = {key: value for key, value in event.items() if key not in _COMMON}
        return f"{kind}: " + ", ".join(f"{key}={value}" for key, value in extra.items())
    sentence = SENTENCES[kind]
    return None if sentence is None else sentence(event)


def human_bytes(count: float) -> str:
    """Decimal units, as storage is sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _at(event: Event) -> str:
    boundary = event["boundary"] if "boundary" in event else event["step"]
    return BoundaryId(boundary, event["generation"], event["step"]).label


def _resumed(event: Event) -> str:
    if event["from_step"] is None:
        return "nothing to resume: starting at step 0"
    seconds = sum(event["phases"].values())
    redone = event.get("redone_steps")
    again = f", {redone} finished step(s) to train again" if redone else ""
    return f"resumed from step {event['from_step']} out of {event['tier']} in {seconds:.1f} s{again}"


def _committed(event: Event) -> str:
    tag = f", tag {event['tag']}" if event.get("tag") else ""
    return (
        f"committed {_at(event)} on {event['tier']}: {human_bytes(event['bytes'])} "
        f"in {event['seconds']:.1f} s ({event['trigger']}{tag})"
    )


def _frozen_saving(event: Event) -> str:
    return (
        f"saving frozen tensors of rank {event['rank']} on {event['tier']}: {human_bytes(event['bytes'])}; "
        "durable saves wait for them"
    )


def _notice(event: Event) -> str:
    return f"eviction notice ({event['source']}): {event['grace_s']:.1f} s left"


def _unfit(event: Event) -> str:
    cause = (
        f"{_at(event)} does not fit into the {event['left_s']:.1f} s that are left: its upload from here needs "
        f"{event['needed_s']:.1f} s"
    )
    if event["first"] is None:
        return f"{cause}; no older step under way fits, so it is tried all the same"
    return f"{cause}; step {event['first']} is finished first"


def _evicted(event: Event) -> str:
    if event["safe"]:
        return f"evicted: {_at(event)} is safe; start the run again to go on"
    older = event.get("committed")
    newest = "an older checkpoint will be used" if older is None else f"the newest known to be durable is step {older}"
    return f"evicted: {_at(event)} could NOT be made safe: {event.get('why', 'no time was left')}; {newest}"


def _tier_silent(event: Event) -> str:
    return (
        f"waiting for {event['place']}: no answer for {event['seconds']:.0f} s (asked to {event['what']}); "
        "check that it works, and the network to it"
    )


def _save_waits(event: Event) -> str:
    who = [f"rank(s) {spans(ranks)} of node {node}" for node, ranks in event["missing"].items()]
    who += [f"node {node}, which does not answer" for node in event["silent"]]
    return (
        f"rank(s) {spans(event['ranks'])} have waited {event['seconds']:.0f} s to save {_at(event)} for "
        f"{'; '.join(who)}: slow there, or without the save() or last step that all ranks must have at one step"
    )


def _planned(event: Event) -> str:
    return (
        f"{event['items']} tensors, {human_bytes(event['bytes'])} per step on this node; "
        f"{event['slots']} slots in {event['place']}"
    )


def _quarantined(event: Event) -> str:
    return f"quarantined {event['object']} on {event['tier']}: {event['why']}"


def _save_failed(event: Event) -> str:
    return f"saving {_at(event)} on {event['tier']} failed (attempt {event['attempt']}): {event['why']}"


def _durable_age(event: Event) -> str:
    where = f"{_at(event)} on {event['tier']}" if event["step"] is not None else "none yet"
    return f"the newest durable checkpoint ({where}) is {event['age_s']:.0f} s old"


def _generation(event: Event) -> str:
    start = "from scratch" if event["parent"] is None else f"from step {event['parent']}"
    return f"generation {event['generation']}: {event['world_size']} rank(s), {start}"


def _trainer_lost(event: Event) -> str:
    return f"rank {event['rank']} (process {event['pid']}) died after {_at(event)}"


def _agent_started(event: Event) -> str:
    how = "agent restarted" if event["restart"] else "agent started"
    return f"{how}, {event['adopted']} segment(s) taken over"


SENTENCES: dict[str, Callable[[Event], str] | None] = {
    "step": None,
    "stall": None,
    "sealed": None,
    "mesh": None,
    "resumed": _resumed,
    "committed": _committed,
    "copied": lambda e: f"copied {_at(e)} to {e['tier']}: {human_bytes(e['bytes'])} in {e['seconds']:.1f} s",
    "notice": _notice,
    "late": lambda e: f"no boundary came in time: {_at(e)} is staged from where the trainers stand",
    "frozen_saving": _frozen_saving,
    "frozen_saved": lambda e: (
        f"saved frozen tensors on {e['tier']}: {human_bytes(e['bytes'])} in {e['seconds']:.1f} s ({e['object']})"
    ),
    "frozen_failed": lambda e: f"saving {e['object']} on {e['tier']} failed (attempt {e['attempt']}): {e['why']}",
    "frozen_changed": lambda e: (
        f"{', '.join(e['tensors'])} changed though no version counter moved: checkpoints of the last "
        f"{e['t'] - e['since']:.0f} s may have the bytes before that, in {e['object']}"
    ),
    "frozen_loaded": lambda e: (
        f"loaded frozen tensors from {e['tier']}: {human_bytes(e['bytes'])} in {e['seconds']:.1f} s"
    ),
    "unfit": _unfit,
    "evicted": _evicted,
    "planned": _planned,
    "quarantined": _quarantined,
    "save_failed": _save_failed,
    "durable_age": _durable_age,
    "generation": _generation,
    "trainer_lost": _trainer_lost,
    "agent_started": _agent_started,
    "skipped": lambda e: f"{_at(e)} was not staged: {e['why']}",
    "stopped": lambda e: f"stopped rank(s) {e['ranks']}: {e['why']}",
    "tier_silent": _tier_silent,
    "tier_answers": lambda e: f"{e['place']} answers again, after {e['seconds']:.0f} s",
    "save_waits": _save_waits,
    "save_goes_on": lambda e: f"all ranks have come to save {_at(e)}, after {e['seconds']:.0f} s",
    "swept": lambda e: f"deleted {len(e['steps'])} given-up checkpoint(s), {human_bytes(e['bytes'])}",
    "superseded": lambda e: f"superseded by {e['by']}: this launch stops",
    "warning": lambda e: f"warning: {e['what']}",
    "left": lambda e: f"{'finished' if e['finished'] else 'left'} after {_at(e)}",
}
"""Every event, and the sentence that the log has of it; None for those that are too many to read."""
_COMMON = {"v", "t", "event", "run", "launch", "node", "generation"}
