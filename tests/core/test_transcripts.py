"""Runs of the core told line by line: `transcripts/*.txt`, one status a file.

Lines that build the status:

    generation 7 from 6 at 1200          a generation record ("from scratch" for none)
    checkpoint 1200 g6 [verified] [tag NAME] [retired SECONDS]
    shards 1200 g6                       objects of a step that has no manifest
    ack 1200 g6 rank 0 of 2 [plan b] [attempt bbbb] [KEY=VALUE ...]
    tombstone 1200 g6                    instead of a manifest
    memory 1200 g6 on a b [plan b]       rank 0 is in the memory of node a, rank 1 in that of b; "-" for no node
    gone 1200 g6 a                       node a does not have it any more
    silent b                             a node does not report its memory
    resume never                         as it was asked for
    fails [REASON ...]                   what was to be restored last; a reason is remembered
    post notice replan durable free=1 every=2        one rank's vector; all posted ones are agreed on
    boundary 7 [unplanned] [wanted] [last]           takes the agreed vector, and forgets it
    window 30                                        an eviction's seconds, from its notice at 0
    node NAME finished=9 sealed=6 no-trainers ...    facts of one node; those not named stay, "no-X" turns a flag off
    counted NAME FINISHED/ENTERED ...                where a node's held ranks are
    holds NAME rank 0 1200 g6                        a rank's hashed image in a node's memory, one of two ranks
    uploads NAME newest=20 left=9 1200g6=3           seconds that a node reports; newest=? before any speed is measured

Lines that start with `expect` ask; "nothing" is an empty answer.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from core_samples import generation, manifest, shard

from surefoot.core import eviction
from surefoot.core.agreement import BoundaryPlan, Vector, at_boundary
from surefoot.core.commit import complete_set, make_manifest
from surefoot.core.eviction import Count, Done, UploadReport, late_target, newest_to_ship, shipped_elsewhere, unfit
from surefoot.core.layout import BoundaryId
from surefoot.core.lineage import counts, cuts
from surefoot.core.manifest import Generation, Manifest, Shard
from surefoot.core.recovery import Copy, Facts, Look, Refuse, Restore, Scratch, Source, decide, wholes
from surefoot.core.retention import abandoned_steps, to_retire, to_sweep
from surefoot.errors import CorruptError

_TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


class _Status:
    """What the lines so far have built, and the answers to `expect`."""

    def __init__(self) -> None:
        self.generations: dict[int, Generation] = {}
        self.manifests: list[Manifest] = []
        self.verified: set[BoundaryId] = set()
        self.shards: list[BoundaryId] = []
        self.acks: list[Shard] = []
        self.tombstones: list[BoundaryId] = []
        self.copies: list[Copy] = []
        self.silent: list[str] = []
        self.resume = "auto"
        self.chosen: Source | None = None
        self.failed: list[Source] = []
        self.refused: dict[str, str] = {}
        self.posted: list[Vector] = []
        self.plan: BoundaryPlan | None = None
        self.window_s = 0.0
        self.nodes: dict[str, eviction.Facts] = {}
        self.counted: dict[str, list[Count]] = {}
        self.copies: list[Copy] = []
        self.uploads: dict[str, UploadReport] = {}

    def play(self, line: str) -> None:
        words = line.split()
        if words[0] == "expect":
            asked, _, wanted = line.removeprefix("expect ").partition(": ")
            assert getattr(self, f"ask_{asked.split()[0]}")(asked.split()[1:]) == wanted.strip()
        else:
            getattr(self, f"say_{words[0]}")(words[1:])

    def say_generation(self, words: list[str]) -> None:
        parent = None if words[2] == "scratch" else (int(words[2]), int(words[4]))
        self.generations[int(words[0])] = generation(int(words[0]), parent)

    def say_checkpoint(self, words: list[str]) -> None:
        at, options = _at(words), _options(words[2:])
        retired = options.get("retired")
        self.manifests.append(manifest(at, tag=options.get("tag"), retired=None if retired is None else float(retired)))
        if "verified" in words:
            self.verified.add(at)

    def say_shards(self, words: list[str]) -> None:
        self.shards.append(_at(words))

    def say_ack(self, words: list[str]) -> None:
        options = _options(words[2:])
        record = {key: json.loads(value) for key, _, value in (w.partition("=") for w in words if "=" in w)}
        self.acks.append(
            shard(
                _at(words),
                int(options["rank"]),
                world_size=int(options["of"]),
                plan=options.get("plan", "a") * 32,
                attempt=options.get("attempt", "aaaa"),
                record=record,
            )
        )

    def say_tombstone(self, words: list[str]) -> None:
        self.tombstones.append(_at(words))

    def say_memory(self, words: list[str]) -> None:
        at, plan = _at(words), _options(words[3:]).get("plan", "a") * 32
        nodes = list(itertools.takewhile(lambda word: word != "plan", words[3:]))
        self.copies += [
            Copy(at, plan, len(nodes), rank, f"{at}{rank}", 1, node) for rank, node in enumerate(nodes) if node != "-"
        ]

    def say_gone(self, words: list[str]) -> None:
        self.copies = [copy for copy in self.copies if (copy.at, copy.node) != (_at(words), words[2])]

    def say_silent(self, words: list[str]) -> None:
        self.silent += words

    def say_resume(self, words: list[str]) -> None:
        (self.resume,) = words

    def say_fails(self, words: list[str]) -> None:
        assert self.chosen is not None
        self.failed.append(self.chosen)
        if words:
            self.refused[f"step {self.chosen.at.boundary}"] = " ".join(words)

    def say_post(self, words: list[str]) -> None:
        numbers = {key: int(value) for key, _, value in (w.partition("=") for w in words if "=" in w)}
        flags: dict[str, Any] = {word: True for word in words if "=" not in word}
        self.posted.append(Vector(**flags, free_slots=numbers.get("free", 1), stage_every=numbers.get("every", 1)))

    def say_boundary(self, words: list[str]) -> None:
        columns = zip(*(vector.encode() for vector in self.posted), strict=True)
        agreed = Vector.decode([max(column) for column in columns]) if self.posted else Vector()
        self.posted = []
        self.plan = at_boundary(
            agreed, int(words[0]), planned="unplanned" not in words, wanted="wanted" in words, last="last" in words
        )

    def say_window(self, words: list[str]) -> None:
        self.window_s = float(words[0])
        self.nodes = {name: replace(facts, deadline_s=self.window_s) for name, facts in self.nodes.items()}

    def say_node(self, words: list[str]) -> None:
        facts = self.nodes.get(words[0], eviction.Facts(0.0, self.window_s))
        changes: dict[str, Any] = {}
        for word in words[1:]:
            name, _, value = word.removeprefix("no-").partition("=")
            changes[name] = json.loads(value) if value else not word.startswith("no-")
        self.nodes[words[0]] = replace(facts, **changes)

    def say_counted(self, words: list[str]) -> None:
        self.counted[words[0]] = [Count(*map(int, word.split("/"))) for word in words[1:]]

    def say_holds(self, words: list[str]) -> None:
        rank, at = int(words[2]), _at(words[3:])
        self.copies.append(Copy(at, "a" * 32, 2, rank, f"{rank}" * 32, 100, words[0]))

    def say_uploads(self, words: list[str]) -> None:
        given = dict(word.split("=") for word in words[1:])
        seconds = {name: None if value == "?" else float(value) for name, value in given.items()}
        newest_s, left_s = seconds.pop("newest"), seconds.pop("left")
        older_s = {_at(name.replace("g", " g").split()): value or 0.0 for name, value in seconds.items()}
        self.uploads[words[0]] = UploadReport(newest_s, left_s, older_s)

    def ask_order(self, words: list[str]) -> str:
        order = eviction.decide(self.nodes[words[0]], float(words[2]))
        if isinstance(order, Done):
            return f"done, {'safe' if order.safe else 'not safe'}: {order.why}"
        return {"Wait": "wait", "StageLate": "stage late", "ShipNewest": "ship the newest"}[type(order).__name__]

    def ask_late(self, words: list[str]) -> str:
        target = late_target(self.counted, words)
        return "nothing" if target is None else str(target)

    def ask_ship(self, words: list[str]) -> str:
        durable = _at(words[1:]) if words else None
        every = {copy.at.generation: inf for copy in self.copies}
        found = newest_to_ship(next(iter(wholes(self.copies, every)), None), durable)
        if found is None:
            return "nothing"
        elsewhere = shipped_elsewhere(found, {0: "a", 1: "b"}.get)
        return ", ".join([_listed([found.at]), *(f"rank {rank} from {node}" for rank, node in elsewhere)])

    def ask_first(self, _words: list[str]) -> str:
        found = unfit(self.uploads)
        if found is None:
            return "the newest"
        first = "nothing that fits" if found.first is None else _listed([found.first])
        return f"{first}: {found.slowest} needs {found.needed_s:g} s of {found.left_s:g}"

    def ask_cuts(self, _words: list[str]) -> str:
        try:
            chain = cuts(self.generations)
        except CorruptError as error:
            return f"refused, {error}"
        return _joined(f"g{number}={'all' if cut == inf else int(cut)}" for number, cut in chain.items())

    def ask_counting(self, _words: list[str]) -> str:
        chain = cuts(self.generations)
        return _listed(made.at for made in self.manifests if counts(made.at, chain))

    def ask_restore(self, _words: list[str]) -> str:
        """The manifests that are looked at, and the end."""
        read: dict[BoundaryId, Manifest | None] = {}
        stored = {made.at: made for made in self.manifests}
        looked = []
        while True:
            facts = Facts(
                generations=self.generations,
                chain=cuts(self.generations),
                launches=["launch9"],
                resume=self.resume,
                uri="s3://run",
                place="object",
                copies=self.copies,
                silent=self.silent,
                commits=[*stored, *self.tombstones],
                manifests=read,
                failed=self.failed,
                refused=self.refused,
            )
            match decide(facts):
                case Look(at):
                    looked.append(f"look {_listed([at])}")
                    read[at] = stored.get(at)
                case Restore(source):
                    self.chosen = source
                    nodes = [copy.node for copy in source.holders] or [source.place]
                    return _joined([*looked, f"{_listed([source.at])} {' '.join(nodes)}"])
                case Scratch():
                    return _joined([*looked, "from scratch"])
                case Refuse(why, error):
                    return _joined([*looked, f"{error.__name__} {why}"])

    def ask_retire(self, _words: list[str]) -> str:
        return _listed(to_retire(self.manifests, cuts(self.generations), self.generations, self.verified))

    def ask_sweep(self, words: list[str]) -> str:
        return _listed(made.at for made in to_sweep(self.manifests, float(words[1])))

    def ask_abandoned(self, words: list[str]) -> str:
        bound = _at(words[1:]) if words else None
        taken = [made.at for made in self.manifests]
        newest = max(self.generations)
        return _listed(abandoned_steps(self.shards, taken, cuts(self.generations), newest, bound))

    def ask_commit(self, words: list[str]) -> str:
        found = complete_set(self.acks, _at(words))
        if found is None:
            return "nothing"
        made = make_manifest(found, generation(_at(words).generation), 1.0)
        parts = [f"plan {made.plan[0]}", *(f"{part.id.rank}:{part.id.attempt}" for part in made.shards), made.trigger]
        parts += [f"tag {made.tag}"] if made.tag is not None else []
        parts += [f"{key}={json.dumps(value)}" for key, value in sorted(made.metrics.items())]
        return " ".join(parts)

    def ask_all(self, _words: list[str]) -> str:
        assert self.plan is not None
        return _joined(name for name in ("stage", "replan", "durable", "stop", "skipped") if getattr(self.plan, name))


def _at(words: list[str]) -> BoundaryId:
    return BoundaryId(int(words[0]), int(words[1].removeprefix("g")))


def _options(words: list[str]) -> dict[str, str]:
    return {key: value for key, value in itertools.pairwise(words) if "=" not in key}


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(parts) or "nothing"


def _listed(ats: Iterable[BoundaryId]) -> str:
    return _joined(f"{at.boundary} g{at.generation}" for at in ats)


@pytest.mark.parametrize("path", _TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_transcript_holds(path: Path) -> None:
    """Every `expect` line of the transcript has the answer that stands in it."""
    status = _Status()
    asked = 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        asked += text.startswith("expect ")
        try:
            status.play(text)
        except AssertionError as error:
            pytest.fail(f"{path.name}:{number}: {line}\n{error}")
    assert asked, "a transcript must ask something"


def test_there_are_transcripts_and_they_can_fail() -> None:
    """The runner finds its files, and an answer that is wrong is noticed."""
    assert len(_TRANSCRIPTS) >= 10
    status = _Status()
    status.play("generation 1 from scratch")
    with pytest.raises(AssertionError):
        status.play("expect cuts: g1=5")
