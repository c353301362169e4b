"""docs/python.md runs as a notebook, from its first cell to its last, and a notebook shows answers as pictures."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel")
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[2]
SHOWN = "answer", "answer.plot()", "half", "choice", "timed", "tuning", "load.plot()"  # cells that display
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
pytestmark = pytest.mark.filterwarnings("ignore")  # of the notebook's own libraries


@pytest.fixture(scope="module")
def notebook() -> Any:
    """The page's blocks, one cell each, then a cell for each answer to display; all of them were run."""
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    sources = ["%matplotlib inline\n", *BLOCK.findall(page), *SHOWN]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    client = nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(ROOT)}})
    return client.execute(env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"})


def outputs(notebook: Any, source: str) -> dict[str, str]:
    """What a cell displays, by media type."""
    (cell,) = [cell for cell in notebook.cells if cell.source == source]
    return {kind: text for output in cell.outputs for kind, text in output.get("data", {}).items()}


def test_every_example_of_the_page_runs_as_a_cell(notebook: Any) -> None:
    counts = [cell.execution_count for cell in notebook.cells]
    assert counts == list(range(1, len(counts) + 1))
    assert len(counts) > 15
    assert not [output for cell in notebook.cells for output in cell.outputs if output.output_type == "error"]


def test_an_estimate_is_shown_with_its_bar(notebook: Any) -> None:
    page = outputs(notebook, "answer")["text/html"]
    assert "14 users at 32,768 tokens each" in page
    widths = [float(width) for width in re.findall(r"width:([0-9.]+)%", page)]
    assert len(widths) >= 5
    assert sum(widths) == pytest.approx(100, abs=0.5)


@pytest.mark.parametrize("source", ["answer.plot()", "load.plot()"])
def test_a_plot_is_a_picture(notebook: Any, source: str) -> None:
    assert outputs(notebook, source)["image/png"].startswith("iVBOR")  # PNG, in base64


@pytest.mark.parametrize(("source", "headline"), [("timed", "Take 2 x l40s"), ("tuning", "Yes: 2 requests/s")])
def test_answers_about_time_show_their_first_line(notebook: Any, source: str, headline: str) -> None:
    assert f"<p><b>{headline}" in outputs(notebook, source)["text/html"]
