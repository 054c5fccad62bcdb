"""The design page is true of the tree: its files are there, its rooms are all, and words that it rules out stay out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_SRC = _ROOT / "src" / "surefoot"
_DESIGN = (_ROOT / "docs" / "DESIGN.md").read_text()
_RULED_OUT = re.compile(
    r"crews?|fleets?|_?books|keepers?|reception|(frozen|needs)_?desk|desk|leftovers|last[ _]words|twins?|keepsakes?"
    r"|situation|deliver(y|ies)|shipments?",
    re.IGNORECASE,
)
_ALLOWED = {
    "scenario/s3_server.py": {"leftovers"},
    "money": {"fleet", "fleets", "twin"},
}
"""By file or folder, words that mean something else there."""


def test_the_page_fits_a_sitting() -> None:
    """A newcomer reads it in one go."""
    assert len(_DESIGN.splitlines()) <= 350


def test_every_file_that_the_tour_names_is_there() -> None:
    """A file is named by its path below the package, its folder, or the file named before it on the line."""
    named = 0
    for line in _DESIGN.splitlines():
        folder = _SRC
        for name in re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)`", line):
            near = [place / name for place in (_SRC, folder, folder.parent, _ROOT)]
            found = [path for path in near if path.exists()]
            assert found, f"{name} in: {line}"
            folder = found[0].parent
            named += 1
    assert named > 40


def test_every_room_is_in_the_table() -> None:
    """Each folder of the package has its line."""
    rooms = {path.name for path in _SRC.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    table = _DESIGN[_DESIGN.index("| folder |") : _DESIGN.index("`tests/test_imports.py` holds")]
    assert rooms - set(re.findall(r"`([a-z]+)/`", table)) == set()


@pytest.mark.parametrize("path", sorted(_SRC.rglob("*.py")), ids=lambda path: str(path.relative_to(_SRC)))
def test_a_word_that_is_ruled_out_does_not_come_back(path: Path) -> None:
    """In identifiers, comments, docstrings and messages alike."""
    relative = path.relative_to(_SRC)
    allowed = _ALLOWED.get(str(relative), set()) | _ALLOWED.get(relative.parts[0], set())
    words = {word for part in re.findall(r"[A-Za-z_]+", path.read_text()) for word in re.split(r"_|(?=[A-Z])", part)}
    found = {word for word in words if _RULED_OUT.fullmatch(word)}
    assert {word for word in found if word.lower() not in allowed} == set()
