"""HTML pages whose names come from strangers, opened in Chromium: models and servers' metrics called like scripts.

    python -m benchmarks.attacks.pages [--names 12] [--kinds film,tune]

Half of the pages are of harmless names. A page breaks when a script or an image of a name comes to life, when it loads
anything, links to anything but pages, or when the browser's console has an error; each button is pressed and each
slider moved first. Needs Chromium and Playwright.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.attacks.outcomes import Tally, command

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

ROOT = Path(__file__).resolve().parents[2]
METRICS = [ROOT / "examples" / f"metrics.{number}.txt" for number in (1, 2)]
RUN = "document.title='RAN'"
HARMLESS = (
    "my-model", "Model 7B", "modèle", "模型", "a.b_c", "x" * 80, "A&B", "1 < 2", "50%", "#1", "q?a=b", "it's",
)  # fmt: skip
HOSTILE = (
    f"<script>{RUN}</script>", f'<img src=x onerror="{RUN}">', f'"><svg onload={RUN}>',
    f"</script><script>{RUN}</script>", f"javascript:{RUN}", f"{{{{constructor.constructor('{RUN}')()}}}}", "<!--",
    "&lt;script&gt;", "\u202eevil", "a'b\"c`d",
    f"</style><script>{RUN}</script>", f"</title><script>{RUN}</script>",
)  # fmt: skip
CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16", "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip
PLACE = ("--gpu", "l40s", "--ctx", "2k")
LOAD = (*PLACE, "--prompt-tokens", "200", "--output-tokens", "20", "--rate", "2", "--num-requests", "12")
FIXED = ("--slo", "ttft=2s", "--max-num-seqs", "64", "--max-num-batched-tokens", "8192", "--no-fp8", "--jobs", "1")
# Kind of page -> the command that writes MODEL's to PAGE.
KINDS: dict[str, tuple[str, ...]] = {
    "film": ("simulate", "MODEL", *LOAD, "--num-gpu-blocks-override", "300", "--film", "PAGE"),
    "simulation": ("simulate", "MODEL", *LOAD, "--report", "PAGE"),
    "tune": ("tune", "MODEL", *LOAD, *FIXED, "--report", "PAGE"),
    "rightsize": ("rightsize", "METRICS1", "METRICS2", "--interval", "630s", "--report", "PAGE"),
    "recommendation": ("recommend", "MODEL", *PLACE, "--users", "20", "--report", "PAGE"),
    "plan": ("estimate", "MODEL", *PLACE, "--report", "PAGE"),
    "explorer": ("explore", "MODEL", *PLACE, "--tp", "1", "-o", "PAGE"),
}
ALIVE = """() => ({
  links: [...document.querySelectorAll("a[href]")]
    .map((a) => a.getAttribute("href")).filter((h) => !/^(https:|#|\\.|\\w+[.\\/])/.test(h)),
  alive: document.querySelectorAll("img[src=x], svg[onload]").length,
})"""


def sources(folder: Path, name: str) -> dict[str, str]:
    """A model's directory and two pages of metrics of this name."""
    model = folder / name.replace("/", "\u2215")  # a folder's name has no slash
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    label = name.replace("\\", "\\\\").replace('"', '\\"')
    places = {"MODEL": str(model)}
    for number, source in enumerate(METRICS, start=1):
        text = re.sub(r'model_name="[^"]*"', lambda _: f'model_name="{label}"', source.read_text(encoding="utf-8"))
        places[f"METRICS{number}"] = str(folder / f"metrics.{number}.txt")
        Path(places[f"METRICS{number}"]).write_text(text, encoding="utf-8")
    return places


def written(folder: Path, num_names: int, kinds: Sequence[str]) -> Iterator[tuple[str, str, str, list[str], Path]]:
    """(whether the name is valid or hostile, kind of page, name, command, page)."""
    for number in range(num_names):
        for what, names in (("valid", HARMLESS), ("hostile", HOSTILE)):
            name = names[number % len(names)]
            places = sources(folder / f"{what}{number}", name)
            for kind in kinds:
                path = folder / f"{what}{number}" / f"{kind}.html"
                words = [str(path) if word == "PAGE" else places.get(word, word) for word in KINDS[kind]]
                yield what, kind, name, words, path


def used(page: "Page") -> None:
    """Press every button and move every slider to its end."""
    for button in page.query_selector_all("button"):
        if button.is_visible():
            button.click(timeout=60_000)
    for slider in page.query_selector_all("input[type=range]"):
        if slider.is_visible():
            slider.fill(slider.get_attribute("max") or "1", timeout=60_000)


def dismiss(complaints: list[str], dialog: "Dialog") -> None:
    complaints.append(f"a dialog {dialog.message}")
    dialog.dismiss()


def fault_of(browser: "Browser", path: Path) -> str | None:
    """What a page does that it must not."""
    page = browser.new_page()
    complaints, loads = list[str](), list[str]()
    page.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", partial(dismiss, complaints))
    page.on("request", lambda request: loads.append(request.url))
    try:
        page.goto(path.as_uri())
        used(page)
        state = page.evaluate(ALIVE)
        has_run = page.title() == "RAN"
    finally:
        page.close()
    checks = (("a script ran", has_run), ("the console has", complaints), ("it loads", loads[1:]),
              ("it links to", state["links"]), ("elements of a name", state["alive"]))  # fmt: skip
    return next((f"{what} {value}" for what, value in checks if value), None)


def attack(open_browser: "Callable[[], Browser]", num_names: int, kinds: Sequence[str] = tuple(KINDS)) -> Tally:
    """Pages of as many harmless names as hostile ones; the browser starts when all are written."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        pages = [(what, kind, name, command(*words), path)
                 for what, kind, name, words, path in written(Path(folder), num_names, kinds)]  # fmt: skip
        browser = open_browser()
        for what, kind, name, outcome, path in pages:
            problem = fault_of(browser, path) if path.exists() else "no page"
            tally.judge(what, f"{kind} of {name!r}", outcome, problem)
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", type=int, default=len(HOSTILE), help="of each sort")
    parser.add_argument("--kinds", default=",".join(KINDS))
    options = parser.parse_args(argv)
    from playwright.sync_api import sync_playwright

    from tests.support.browser import BROWSER

    with sync_playwright() as playwright:
        tally = attack(
            lambda: playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"]),
            options.names,
            options.kinds.split(","),
        )
    return tally.closing()


if __name__ == "__main__":
    sys.exit(main())
