"""The pictures of README.md, drawn from what kvplan answers today.

python docs/pictures/make.py          rewrites docs/pictures/*.svg
python docs/pictures/make.py --check  exit 1 where a picture is out of date
"""

import argparse
import io
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parents[1]))

from rich.console import Console  # noqa: E402
from rich.terminal_theme import MONOKAI  # noqa: E402
from rich.text import Text  # noqa: E402

import kvplan  # noqa: E402
from kvplan.report.console import plan_parts  # noqa: E402
from kvplan.report.lines import write  # noqa: E402

COLUMNS = 100
COMMAND = "kvplan estimate llama-3.1-8b --ctx 32k --gpu a100-80g"


def estimate_svg() -> str:
    """What a terminal of 100 columns shows for COMMAND, in color."""
    answer = kvplan.estimate("llama-3.1-8b", max_model_len="32k", gpu="a100-80g")
    printed = io.StringIO()
    write(plan_parts(answer.plan), terminal(printed))
    recorder = terminal(io.StringIO(), record=True)
    recorder.print(f"$ {COMMAND}", style="bold")
    recorder.print(Text.from_ansi(printed.getvalue()), overflow="fold")  # a terminal folds what is too long
    svg = recorder.export_svg(title="kvplan", theme=MONOKAI, unique_id="kvplan")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # nothing is loaded from elsewhere
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def terminal(file: io.StringIO, *, record: bool = False) -> Console:
    return Console(
        file=file, record=record, width=COLUMNS, force_terminal=True, color_system="truecolor", markup=False,
        emoji=False, highlight=False, legacy_windows=False, _environ={},
    )  # fmt: skip


PICTURES = {"estimate.svg": estimate_svg}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a picture is out of date")
    check = parser.parse_args().check
    stale = 0
    for name, draw in PICTURES.items():
        path, text = FOLDER / name, draw()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if check:
            print(f"{name}: out of date; run `python docs/pictures/make.py`", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8", newline="\n")
            print(f"{name}: written")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
