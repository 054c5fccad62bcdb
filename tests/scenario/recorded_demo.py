"""A demo with other ways beside it, written down once and read back: what it logged, not what was made of it.

    python tests/scenario/recorded_demo.py

runs one and writes it into `recorded/` again. Verdicts, answers and the page are made anew from it by each reader.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surefoot.demo.demo import DemoConfig, DemoResult, run_demo
from surefoot.demo.methods import compare
from surefoot.demo.methods.compare import Conditions, PeerResult
from surefoot.demo.methods.methods import METHODS, Method
from surefoot.demo.page import Shown, demo_page
from surefoot.scenario.engine import Outcome
from surefoot.scenario.events import Event, Kind, Strike
from surefoot.scenario.log import Line, read
from surefoot.scenario.stalls import Stall
from surefoot.scenario.verdict import judge

RECORDED = Path(__file__).with_name("recorded")
STEPS, RANKS = 80, 2
EVENTS = (
    Event(kind=Kind.EVICT, phase="training", step=10),
    Event(kind=Kind.KILL_TRAINER, phase="training", step=28, rank=1),
    # Between two saves, for which it may have to wait: so with room behind it.
    Event(kind=Kind.KILL_AGENT, phase="idle", step=36),
)


def live(store: Path, *, keep: bool = False) -> DemoResult:
    """Train through three events, undisturbed, and both other ways through the same."""
    config = DemoConfig(steps=STEPS, ranks=RANKS, store=store, events=EVENTS, peers=METHODS, keep=keep)
    return run_demo(config, lambda _name, _view: None)


def record(result: DemoResult, to: Path) -> None:
    """Write down a demo that was kept."""
    place, peers = result.log.parent, result.peers or ()
    to.mkdir()
    for name in ("log.jsonl", "stalls.jsonl"):
        shutil.copyfile(place / name, to / name)
    for peer in peers:
        shutil.copyfile(place / peer.method.name / "log.jsonl", to / f"{peer.method.name}.jsonl")
    written = {
        "strikes": [strike.to_json() for strike in result.strikes],
        "peers": {peer.method.name: _peer_json(peer, place / peer.method.name / "checkpoints") for peer in peers},
    }
    (to / "demo.json").write_text(json.dumps(written, indent=1) + "\n")


def _peer_json(peer: PeerResult, left: Path) -> dict[str, Any]:
    return {
        "save_every": peer.save_every,
        "strikes": [met.strike.to_json() for met in peer.met if met.strike is not None],
        "files": sorted(str(path.relative_to(left)) for path in left.rglob("*") if path.is_file()),
    }


def play_back(place: Path) -> DemoResult:
    """The recorded demo as if it had just been run, with its log, its stalls and its page in an empty directory."""
    for name in ("log.jsonl", "stalls.jsonl"):
        shutil.copyfile(RECORDED / name, place / name)
    written = json.loads((RECORDED / "demo.json").read_text())
    lines, strikes = read(place / "log.jsonl"), _strikes(written)
    peers = tuple(_peer(method, written["peers"][method.name], lines, place) for method in METHODS)
    result = DemoResult(
        STEPS,
        strikes,
        judge(lines, strikes, steps=STEPS, num_ranks=RANKS),
        place / "log.jsonl",
        "",
        place / "page.html",
        peers,
    )
    shown = Shown(
        seed=0,
        steps=STEPS,
        ranks=RANKS,
        lines=lines,
        strikes=strikes,
        verdict=result.verdict,
        stalls=[Stall(**json.loads(line)) for line in (place / "stalls.jsonl").read_text().splitlines()],
        peers=peers,
        answer=result.to_json(),
    )
    result.page.write_text(demo_page(shown))
    return result


def _peer(method: Method, written: dict[str, Any], lines: Sequence[Line], place: Path) -> PeerResult:
    left = place / method.name
    for name in written["files"]:
        (left / name).parent.mkdir(parents=True, exist_ok=True)
        (left / name).touch()
    conditions = Conditions(
        steps=STEPS, seed=0, ranks=RANKS, events=EVENTS, save_every=written["save_every"], memory=place
    )
    own = read(RECORDED / f"{method.name}.jsonl")
    return compare._judged(method, conditions, Outcome(_strikes(written), ()), own, lines, left)


def _strikes(written: dict[str, Any]) -> tuple[Strike, ...]:
    return tuple(Strike.from_json(each) for each in written["strikes"])


def main() -> None:
    with tempfile.TemporaryDirectory() as store:
        result = live(Path(store), keep=True)
        assert result.verdict.passed, result.verdict.problems
        shutil.rmtree(RECORDED, ignore_errors=True)
        record(result, RECORDED)
        shutil.rmtree(result.log.parent)


if __name__ == "__main__":
    main()
