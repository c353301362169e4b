"""A chapter of docs/course runs as a notebook; its test fails until the reader's part is written, and passes then."""

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("ipykernel")
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "course"
NAMES = (
    "1-pages", "2-blocks", "3-scheduler", "4-preemption", "5-prefix-cache", "6-kernels", "7-batching", "8-tiers",
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore")  # of the notebook's own libraries


@pytest.fixture(scope="module")
def notebooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("course_notebooks", FOLDER / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(cells: list[Any]) -> Any:
    client = nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=600)
    return client.execute(env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})


def printed(cell: Any) -> str:
    return "".join(output["text"] for output in cell.outputs if output.output_type == "stream")


@pytest.mark.parametrize("name", NAMES)
def test_a_chapter_prints_what_it_says(name: str, notebooks: ModuleType) -> None:
    """The reader's test is run before the answer, where it has to fail, and after it."""
    page = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    parts = list(notebooks.parts(page))
    answer = next(part.text for part in parts if part.kind == "answer")
    cells, outputs, unsolved = [nbformat.v4.new_code_cell(notebooks.START)], {0: ""}, None
    for part in parts:
        if part.kind == "printed":
            outputs[len(cells) - 1] = part.text
        elif part.kind == "test":
            unsolved = len(cells)
            tagged = nbformat.v4.new_code_cell(part.text, metadata={"tags": ["raises-exception"]})
            cells += [tagged, nbformat.v4.new_code_cell(answer), nbformat.v4.new_code_cell(part.text)]
        elif part.kind in ("code", "yours"):
            cells.append(nbformat.v4.new_code_cell(part.text))
    ran = run(cells).cells
    assert unsolved is not None
    (failure,) = ran[unsolved].outputs
    assert failure.ename == "NotImplementedError"
    assert {i: printed(cell) for i, cell in enumerate(ran) if i != unsolved} == {
        i: outputs.get(i, "") for i in range(len(ran)) if i != unsolved
    }
    pictures = [output for cell in ran for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 1
    assert (FOLDER / "pictures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert f"](pictures/{name}.png)" in page


def test_the_index_names_every_chapter(notebooks: ModuleType) -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[\d\. [^\]]+\]\((.*?)\.md\)", index, re.MULTILINE) == list(NAMES)
    assert [chapter.stem for chapter in notebooks.chapters()] == list(NAMES)


def test_links_lead_to_files() -> None:
    links = [
        (page.name, link)
        for page in FOLDER.glob("*.md")
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    ]
    assert [(page, link) for page, link in links if not (FOLDER / link).exists()] == []
    assert len(links) > 30


def test_a_reader_gets_notebooks_without_answers(notebooks: ModuleType, tmp_path: Path) -> None:
    """An answer is a cell of text: running all cells does not fill in the reader's part."""
    notebooks.write(tmp_path)
    books = {path.stem: nbformat.read(path, as_version=4) for path in tmp_path.glob("*.ipynb")}
    assert sorted(books) == list(NAMES)
    for name, book in books.items():
        nbformat.validate(book)
        code = "".join(cell.source for cell in book.cells if cell.cell_type == "code")
        assert code.count("raise NotImplementedError") >= 1, name
        answer = next(
            part.text for part in notebooks.parts((FOLDER / f"{name}.md").read_text()) if part.kind == "answer"
        )
        assert answer not in code
        assert any(answer in cell.source for cell in book.cells if cell.cell_type == "markdown")
