"""Who may import whom. Read from the source, so that an import hidden in a function counts too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import surefoot

_ROOT = Path(surefoot.__file__).parent
_CORE_MAY_NOT = {"asyncio", "os", "socket", "time", "threading", "logging", "subprocess", "multiprocessing"}


@dataclass(frozen=True)
class _Import:
    """One name that a module imports, wherever in it."""

    importer: str
    imported: str
    line: int
    typing_only: bool
    """Inside `if TYPE_CHECKING:`, so never executed."""

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def _module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _typing_only_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            lines.update(line for child in node.body for line in range(child.lineno, (child.end_lineno or 0) + 1))
    return lines


def _imported_names(node: ast.AST, importer: str, is_package: bool) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parts = importer.split(".")
        above = parts[: len(parts) - node.level + is_package] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        yield base
        # `from surefoot import wire` imports the module surefoot.ipc.wire.
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "__import__",
        "import_module",
        "importlib.import_module",
    ):
        yield node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else "a computed name"


@cache
def _imports(root: Path) -> list[_Import]:
    found = []
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text(), str(path))
        importer = _module_name(path, root)
        typing_only = _typing_only_lines(tree)
        for node in ast.walk(tree):
            for name in _imported_names(node, importer, path.stem == "__init__"):
                found.append(_Import(importer, str(name), node.lineno, node.lineno in typing_only))
    return found


def _under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _core(each: _Import) -> bool:
    top = each.imported.split(".")[0]
    if top == "surefoot":
        # The bare name is the first half of "from surefoot.core import x" or of "from surefoot import errors".
        return not (_under(each.imported, "surefoot.core", "surefoot.errors") or each.imported == "surefoot")
    return top not in sys.stdlib_module_names or top in _CORE_MAY_NOT


def _beyond(imported: str, room: str) -> bool:
    """Of the package, and neither of the room nor an error."""
    return _under(imported, "surefoot") and not (_under(imported, room, "surefoot.errors") or imported == "surefoot")


_PICKLES = ("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle")
_TORCH = ("torch", "torchvision", "torchaudio")
_TORCH_PLACES = (
    "surefoot.bench",
    "surefoot.data",
    "surefoot.trainer",
    "surefoot.launch.torchrun",
    "surefoot.scenario",
    "surefoot.demo",
)
_DATA_PLACES = ("surefoot.data", "surefoot.bench", "surefoot.scenario", "surefoot.demo")
# What a rule says must not be: the importer, and the import that breaks it.
_FORBIDDEN: dict[str, Callable[[_Import], bool]] = {
    "core imports the standard library's pure part, errors and itself": lambda i: (
        _under(i.importer, "surefoot.core") and _core(i)
    ),
    "torch only where tensors are": lambda i: _under(i.imported, *_TORCH) and not _under(i.importer, *_TORCH_PLACES),
    "trainer never imports agent": lambda i: (
        _under(i.importer, "surefoot.trainer") and _under(i.imported, "surefoot.agent")
    ),
    "agent never imports trainer": lambda i: (
        _under(i.importer, "surefoot.agent") and _under(i.imported, "surefoot.trainer")
    ),
    "tiers and notices know neither side": lambda i: (
        _under(i.importer, "surefoot.tiers", "surefoot.notices")
        and _under(i.imported, "surefoot.agent", "surefoot.trainer")
    ),
    "the mesh carries what it does not understand": lambda i: (
        _under(i.importer, "surefoot.mesh")
        and _under(i.imported, "surefoot.agent", "surefoot.trainer", "surefoot.notices", "surefoot.ipc.segment")
    ),
    "nothing but cli imports money": lambda i: (
        _under(i.imported, "surefoot.money") and not _under(i.importer, "surefoot.money", "surefoot.cli")
    ),
    "pages draw what they are given": lambda i: (
        _under(i.importer, "surefoot.pages") and _beyond(i.imported, "surefoot.pages")
    ),
    "data serves scripts: it knows nothing but the errors, and only what trains by itself uses it": lambda i: (
        (_under(i.importer, "surefoot.data") and _beyond(i.imported, "surefoot.data"))
        or (_under(i.imported, "surefoot.data") and not _under(i.importer, *_DATA_PLACES))
    ),
    "nothing imports the tests": lambda i: _under(i.imported, "tests"),
    "no pickle": lambda i: _under(
        i.imported, "pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"
    ),
    "no import by a computed name": lambda i: i.imported == "a computed name",
}


@pytest.mark.holds("nothing-unpickled")
@pytest.mark.parametrize("rule", _FORBIDDEN)
def test_imports_go_one_way(rule: str) -> None:
    """Every module keeps the rule; the package's own lazy name for the user's class is read by type checkers only."""
    broken = [
        str(each)
        for each in _imports(_ROOT)
        if _FORBIDDEN[rule](each) and not (each.typing_only and each.importer == "surefoot")
    ]
    assert broken == []


_BAD = {
    "core imports the standard library's pure part, errors and itself": [
        ("core/a.py", "import os"),
        ("core/a.py", "from asyncio import sleep"),
        ("core/a.py", "def f():\n    import time"),
        ("core/a.py", "import numpy"),
        ("core/a.py", "from surefoot import wire"),
        ("core/a.py", "from ..segment import Segment"),
        ("core/a.py", "from .. import clock"),
    ],
    "torch only where tensors are": [
        ("agent/a.py", "def f():\n    from torch.distributed import checkpoint"),
        ("money/a.py", "import torch"),
        ("ipc/a.py", "if 1:\n    import torch.cuda as c"),
        ("cli/a.py", "import importlib\nimportlib.import_module('torch')"),
    ],
    "trainer never imports agent": [("trainer/a.py", "from surefoot.agent.status import Status")],
    "agent never imports trainer": [("agent/a.py", "from surefoot import trainer")],
    "tiers and notices know neither side": [
        ("tiers/a.py", "from ..agent import records"),
        ("notices/a.py", "import surefoot.trainer.run"),
    ],
    "the mesh carries what it does not understand": [("mesh/a.py", "from surefoot.agent import trainers")],
    "nothing but cli imports money": [("agent/a.py", "def f():\n    import surefoot.money.units")],
    "pages draw what they are given": [
        ("pages/a.py", "from surefoot.money.units import show_usd"),
        ("pages/a.py", "from .. import scenario"),
    ],
    "data serves scripts: it knows nothing but the errors, and only what trains by itself uses it": [
        ("data/a.py", "from surefoot.trainer.run import Run"),
        ("data/a.py", "from .. import wire"),
        ("trainer/a.py", "from surefoot.data import order"),
    ],
    "nothing imports the tests": [("agent/a.py", "import tests.core")],
    "no pickle": [("agent/a.py", "from pickle import loads")],
    "no import by a computed name": [("agent/a.py", "__import__(name)")],
}


@pytest.mark.holds("nothing-unpickled")
@pytest.mark.parametrize("rule", _FORBIDDEN)
def test_each_rule_can_be_broken(tmp_path: Path, rule: str) -> None:
    """For every rule there is a module that breaks it, however the import is written, and it is found."""
    for number, (place, text) in enumerate(_BAD[rule]):
        root = tmp_path / str(number) / "surefoot"
        (root / place).parent.mkdir(parents=True)
        (root / place).write_text(text)
        assert [each for each in _imports(root) if _FORBIDDEN[rule](each)], text


def test_the_reader_of_imports_sees_the_project() -> None:
    """The rules look at real modules: the known ones are there, with known imports."""
    found = {(each.importer, each.imported) for each in _imports(_ROOT)}
    assert ("surefoot.ipc.segment", "surefoot.core.plan") in found
    assert ("surefoot.core.lineage", "surefoot.errors") in found
    assert ("surefoot", "surefoot.errors") in found


_WITHOUT_TORCH = [
    "surefoot",
    "surefoot.agent",
    "surefoot.agent.__main__",
    "surefoot.cli",
    "surefoot.cli.main",
    "surefoot.launch.supervisor",
]


def test_what_needs_no_tensors_does_not_load_torch() -> None:
    """Importing the package, the agent, the supervisor and the command line pulls in neither torch nor scipy."""
    script = (
        "import importlib, sys\n"
        f"for name in {_WITHOUT_TORCH}: importlib.import_module(name)\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'scipy', 'pandas', 'matplotlib'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout == "[]\n"


def test_core_loads_nothing_but_itself_and_the_errors() -> None:
    """Importing every module of the core loads no other part of the package and no third party's."""
    modules = sorted(_module_name(path, _ROOT) for path in (_ROOT / "core").rglob("*.py"))
    script = (
        "import importlib, sys\n"
        "before = set(sys.modules)\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        "loaded = {n for n in set(sys.modules) - before if n.split('.')[0] not in sys.stdlib_module_names}\n"
        "print(sorted(n for n in loaded if not n.startswith('surefoot.core')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "['surefoot', 'surefoot.errors', 'surefoot.exits']\n"
