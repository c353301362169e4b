"""docs/gallery.md shows the pictures that its script draws, each beside the command it was drawn by."""

import importlib.util
import re
import struct
from pathlib import Path
from types import ModuleType

import pytest

from kvplan.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    pytest.importorskip("playwright")
    spec = importlib.util.spec_from_file_location("gallery", PICTURES / "gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_begins_with_a_page_in_both_themes(script: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = re.search(r"<picture>.*?</picture>|!\[", readme)
    assert first is not None
    names = re.findall(r'(?:srcset|src)="docs/pictures/gallery-(\w+)\.png"', first[0])
    assert [script.SHOTS[name].scheme for name in names] == ["dark", "light"]
    commands = {(script.SHOTS[name].command, script.SHOTS[name].address) for name in names}
    assert len(commands) == 1
    assert all((PICTURES / f"gallery-{name}.png").stat().st_size < 150_000 for name in names)


def test_every_picture_is_in_the_gallery_and_of_its_size(script: ModuleType) -> None:
    named = set(re.findall(r"pictures/gallery-(\w+)\.png", (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")))
    assert named == set(script.SHOTS)
    for name, shot in script.SHOTS.items():
        head = (PICTURES / f"gallery-{name}.png").read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        assert struct.unpack(">II", head[16:]) == (shot.width, shot.height)
        assert shot.command.split()[0] in COMMANDS
