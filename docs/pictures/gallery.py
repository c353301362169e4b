"""The pictures of docs/gallery.md: real answers, written as pages, photographed in the Chromium that is installed.

python docs/pictures/gallery.py [NAME ...]   rewrites docs/pictures/gallery-NAME.png, all of them where none is named
"""

import argparse
import io
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(ROOT))

from PIL import Image  # noqa: E402
from playwright.sync_api import Page, sync_playwright  # noqa: E402

from kvplan.cli.main import main as kvplan  # noqa: E402

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
COLORS = 128  # of a picture: a third of the bytes, and no difference that one sees
STEP = "(n) => { const s = document.getElementById('step'); s.value = n; s.dispatchEvent(new Event('input')); }"


@dataclass(frozen=True, slots=True)
class Shot:
    """A command, FILE standing for its page, and how the page is photographed."""

    command: str
    width: int = 1280
    height: int = 900
    scheme: str = "light"
    address: str = ""
    step: int | None = None

    def words(self, file: Path) -> list[str]:
        return [str(file) if word == "FILE" else word for word in self.command.split()]


SHOTS = {
    "explore": Shot(
        "explore llama-3.1-8b --gpu l40s,a100-80g,h100-80g --prices examples/prices.yaml -o FILE",
        address="#gpu=l40s&users=24&max_model_len=65,536&mean_tokens=4,096",
    ),
    "explore_dark": Shot(
        "explore llama-3.1-8b --gpu l40s,a100-80g,h100-80g --prices examples/prices.yaml -o FILE",
        scheme="dark",
        address="#gpu=l40s&users=24&max_model_len=65,536&mean_tokens=4,096",
    ),
    "film": Shot(
        "simulate llama-3.1-8b --gpu rtx-4090 --ctx 8k --prompt-tokens 1500 --output-tokens 400 --users 24 "
        "--num-requests 120 --shared-prefix 512 --baseline contiguous --film FILE",
        height=960,
        step=700,
    ),
    "estimate": Shot("estimate llama-3.1-8b --ctx 32k --gpu rtx-4090,l40s,a100-80g,h100-80g --report FILE", height=760),
    "why": Shot("why examples/vllm-did-not-start.log --gpu a100-80g --report FILE", width=900, height=860),
    "simulate": Shot(
        "simulate qwen3-8b --gpu l40s --ctx 8k --profile azure-2023-conv --rate 2 --num-requests 500 --report FILE",
        height=1080,
    ),
    "phone": Shot(
        "explore qwen3-8b --gpu l40s --tp 1 -o FILE", width=390, height=844, scheme="dark", address="#users=16"
    ),
}  # fmt: skip


def photograph(shot: Shot, file: Path, target: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        size = {"width": shot.width, "height": shot.height}
        page: Page = browser.new_page(viewport=size, color_scheme=shot.scheme)  # type: ignore[arg-type]
        page.goto(file.as_uri() + shot.address)
        if "<script>" in file.read_text(encoding="utf-8"):
            page.wait_for_selector("html[data-ready]")
        if shot.step is not None:
            page.evaluate(STEP, shot.step)
        picture = page.screenshot()
        browser.close()
    with Image.open(io.BytesIO(picture)) as pixels:
        pixels.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(target, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*SHOTS, []], help=f"one of {', '.join(SHOTS)}")
    names = parser.parse_args().names or [*SHOTS]
    if BROWSER is None:
        print("Chromium is not installed; apt-get install chromium", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            file = Path(folder) / f"{name}.html"
            if code := kvplan(SHOTS[name].words(file)):
                return code
            photograph(SHOTS[name], file, FOLDER / f"gallery-{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
