"""What the documents show runs as it is shown."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "road" / "usage"))

from warm import Warm

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    warm = Warm()
    yield warm
    warm.close()


class Reader:
    """A reader of the documents, with a shared memory of their own, who runs each script in one directory."""

    def __init__(self, warm: Warm, place: Path, memory: str) -> None:
        self._warm = warm
        self._place = place
        self._environment = {"SUREFOOT_SHM": memory, "XDG_STATE_HOME": str(place / "state")}
        self._runs = 0

    def runs(self, script: str, ranks: int = 0) -> str:
        """What the script printed, without Surefoot's own lines. `ranks`: as torchrun starts so many."""
        self._runs += 1
        (self._place / "script.py").write_text(script)
        output = self._place / f"{self._runs}.out"
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"} if ranks == 1 else {}
        job = self._warm.start(
            self._place / "script.py", [], output, self._environment | alone, ranks=max(1, ranks), cwd=self._place
        )
        assert job.wait() == 0, job.output
        own = ("surefoot", "codes ")
        return "".join(line for line in job.output.splitlines(keepends=True) if not line.startswith(own))


@pytest.fixture
def reader(warm: Warm, tmp_path: Path) -> Iterator[Reader]:
    with tempfile.TemporaryDirectory(prefix="sft-", dir="/dev/shm") as memory:
        yield Reader(warm, tmp_path, memory)
        warm.kill_all()


def _python_blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", document.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_the_readme_s_example_trains_and_then_has_nothing_to_do(tmp_path: Path, reader: Reader) -> None:
    """Run once it trains all 200 steps and commits the last; run again it goes straight to the end."""
    (example,) = _python_blocks(_ROOT / "README.md")
    assert "all steps are done" in reader.runs(example)
    assert (tmp_path / "runs/first/commits/00000200-g0001.json").exists()
    assert "all steps are done" in reader.runs(example)
    assert len(list(tmp_path.glob("runs/first/generations/*"))) == 2


def test_the_loops_of_the_saving_page_all_finish(tmp_path: Path, reader: Reader) -> None:
    """The page's three loops, with bodies that train, end at the same step with the same weights."""
    (loops,) = _python_blocks(_ROOT / "docs/guides/saving.md")
    assert loops.count("for step") == 2
    assert "run.step_done(last=done == total)" in loops
    script = """
import sys, torch, surefoot
from torch.utils.data import DataLoader
weights = []
for number in range(3):
    torch.manual_seed(0)
    w = torch.ones(4)
    loader = DataLoader(torch.arange(40.0), batch_size=4)
    total = 15
    def train_one_step():
        w.mul_(1.1).add_(1)
    with surefoot.Run(f"run{number}", w=w) as run:
        if number == 0:
            for step in run.steps(total): train_one_step()
        elif number == 1:
            for step, batch in run.batches(loader, total): train_one_step()
        else:
            done = run.restore()
            while done < total:
                train_one_step()
                done += 1
                run.step_done(last=done == total)
    assert run.finished
    weights.append(w.tolist())
assert weights[0] == weights[1] == weights[2], weights
"""
    reader.runs(script)
    committed = {path.name for path in tmp_path.glob("run?/commits/00000015-*")}
    assert committed == {"00000015-g0001.json"}
    assert len(list(tmp_path.glob("run?/commits/00000015-*"))) == 3


def test_the_examples_of_the_exact_resume_page(tmp_path: Path, reader: Reader) -> None:
    """Each script of the page runs as it stands, and says what the page promises; run again it has nothing to do."""
    across, stream, check = _python_blocks(_ROOT / "docs/guides/exact-resume.md")
    for _ in range(2):
        assert reader.runs(across) == "finished True\n"
        # 20 batches of 8 from 1 to 50, the seventh of each epoch short.
        assert reader.runs(stream) == f"{float(2 * 1275 + sum(range(1, 49)))}\n"
    assert reader.runs(check) == "every sample and every bit of 20 losses\n"


def test_the_example_of_the_resharding_page(tmp_path: Path, reader: Reader) -> None:
    """One rank begins, two go on from its very values."""
    (example,) = _python_blocks(_ROOT / "docs/guides/resharding.md")
    first = reader.runs(example, ranks=1).split()
    second = reader.runs(example, ranks=2).split()
    assert (first[0], second[0]) == ("5", "10")
    assert second[1] == first[2]
    assert second[2] != second[1]


def test_every_page_that_a_document_points_to_is_there() -> None:
    """No dead link between documents."""
    for document in [_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} points to {target}"


def test_no_document_or_source_names_a_place_of_one_machine() -> None:
    """Documents and sources speak of the project only."""
    forbidden = re.compile(r"/work/|/root/|\.library|issue #?\d|(?<!\w)registry\.")
    for path in [*_ROOT.glob("*.md"), *(_ROOT / "docs").rglob("*.md"), *(_ROOT / "src").rglob("*.py")]:
        assert not forbidden.search(path.read_text()), f"{path}: {forbidden.search(path.read_text())}"
