"""The chapters as notebooks, and what they print.

python docs/course/notebooks.py [FOLDER]    writes a notebook of each chapter (build/course)
python docs/course/notebooks.py --update    runs every chapter with its answer; rewrites what it prints, and its picture

A chapter is a page with blocks of Python: one that starts with "yours" is the reader's, one with "test" fails until
that is written, and one with "answer" is a solution, of which a notebook has only the text. A block of text is what the
block before it prints.
"""

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
FENCE = re.compile(r"^```(python|text)(?: (yours|test|answer))?\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
Kind = Literal["prose", "code", "yours", "test", "answer", "printed"]
START = f"%matplotlib inline\nimport sys\n\nsys.path[:0] = [{str(ROOT)!r}, {str(FOLDER)!r}]"


@dataclass(frozen=True, slots=True)
class Part:
    kind: Kind
    text: str


def chapters() -> list[Path]:
    return sorted(FOLDER.glob("[0-9]-*.md"))


def parts(page: str) -> Iterator[Part]:
    """A page's prose and blocks, in order."""
    end = 0
    for block in FENCE.finditer(page):
        if prose := page[end : block.start()].strip():
            yield Part("prose", prose)
        language, role, text = block.groups()
        yield Part(cast(Kind, role or ("code" if language == "python" else "printed")), text)
        end = block.end()
    if prose := page[end:].strip():
        yield Part("prose", prose)


def notebook(page: str, pictures: str = "pictures") -> Any:
    """A notebook for a reader: the answer stays text, and what is printed is left to the reader's own run."""
    from nbformat import v4

    cells = [v4.new_code_cell(START)]
    for part in parts(page):
        if part.kind == "prose":
            cells.append(v4.new_markdown_cell(part.text.replace("](pictures/", f"]({pictures}/")))
        elif part.kind == "answer":
            cells.append(v4.new_markdown_cell(f"```python\n{part.text}```"))
        elif part.kind != "printed":
            cells.append(v4.new_code_cell(part.text.rstrip()))
    return v4.new_notebook(cells=cells)


def write(folder: Path) -> None:
    import nbformat

    folder.mkdir(parents=True, exist_ok=True)
    for chapter in chapters():
        book = notebook(chapter.read_text(encoding="utf-8"), str(FOLDER / "pictures"))
        nbformat.write(book, folder / f"{chapter.stem}.ipynb")
    print(f"{len(chapters())} notebooks in {folder}; open them with jupyter lab {folder}")


def update(chapter: Path) -> None:
    """Run a chapter with its answer in the reader's place."""
    page = chapter.read_text(encoding="utf-8")
    answer = next(part.text for part in parts(page) if part.kind == "answer")
    names: dict[str, Any] = {}
    printed = ""

    def run(block: re.Match[str]) -> str:
        nonlocal printed
        language, role, text = block.groups()
        if language == "text":
            return f"```text\n{printed}```\n"
        with contextlib.redirect_stdout(io.StringIO()) as output:
            if role != "answer":
                exec(compile(answer if role == "yours" else text, chapter.name, "exec"), names)
        printed = output.getvalue()
        return block.group()

    chapter.write_text(FENCE.sub(run, page), encoding="utf-8")
    target = FOLDER / "pictures" / f"{chapter.stem}.png"
    target.parent.mkdir(exist_ok=True)
    names["picture"].savefig(target, dpi=80)


def main() -> int:
    sys.path[:0] = [str(ROOT), str(FOLDER)]
    if sys.argv[1:] == ["--update"]:
        for chapter in chapters():
            update(chapter)
    else:
        write(Path(sys.argv[1] if sys.argv[1:] else ROOT / "build" / "course"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
