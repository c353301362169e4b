"""What every stage shares: its options, the result it leaves behind, and the models it runs."""

import argparse
import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_stages.evidence import write_json
from benchmarks.gpu_stages.runner import SCRIPT
from kvplan.models import catalog, hf_config
from kvplan.models.spec import ModelSpec

RESULT = "result.json"
PARENT_S = 1.0  # between looks at whether the script is still there
SAVING_S = 15.0  # before a stage is ended: what is under way comes to its end, and what is known is saved


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number: the median of n, and its 20th and 80th percentile."""

    metric: str
    unit: str
    value: float
    p20: float
    p80: float
    n: int
    model: str = ""


def row(metric: str, unit: str, values: Sequence[float], model: str = "") -> Row:
    """The spread of at least one value."""
    cuts = statistics.quantiles(values, n=5, method="inclusive") if len(values) > 1 else [values[0]] * 4
    return Row(metric, unit, statistics.median(values), cuts[0], cuts[3], len(values), model)


@dataclass(frozen=True, slots=True)
class Task:
    """Where a stage leaves its evidence and what it runs on; on a CPU every shape is small.

    fallbacks  what its engines do without, as they say once they have started, and why: its result says so
    """

    folder: Path
    device: torch.device
    options: argparse.Namespace
    fallbacks: dict[str, str] = field(default_factory=dict)

    @property
    def is_small(self) -> bool:
        return self.device.type == "cpu"

    @property
    def until_s(self) -> float:
        """When (time.monotonic) to stop with what is known: --limit from now, or SAVING_S before the stage is ended."""
        limit_s, end_s = time.monotonic() + self.options.limit, self.options.end
        return limit_s if end_s is None else min(limit_s, end_s - SAVING_S)

    @property
    def commit(self) -> str | None:
        """Of the code that runs; None where nobody knows."""
        return getattr(self.options, "commit", None)

    def save(self, headline: str, numbers: dict[str, Any], rows: Sequence[Row] = ()) -> None:
        """Write result.json, as often as there is news: a stage that is cut off later has said this much."""
        if self.fallbacks:
            headline = f"{headline}; without the engine's own {', '.join(sorted(self.fallbacks))}"
            numbers = {**numbers, "fallbacks": self.fallbacks}
        values = {"headline": headline, "commit": self.commit, "numbers": numbers}
        write_json(self.folder / RESULT, {**values, "rows": [asdict(row) for row in rows]})


def parser(description: str | None) -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--folder", type=Path, required=True, help="where the evidence goes")
    own.add_argument("--device", default="cuda:0", help="cuda:N or cpu (%(default)s)")
    own.add_argument("--end", type=float, metavar="SECONDS", help="when it is ended at the latest, by time.monotonic()")
    own.add_argument("--commit", help="of the code, for those that go on from what another stage has measured")
    return own


def task(own: argparse.ArgumentParser, *, computes: bool = True) -> Task:
    """The stage as its command line says it.

    computes  on the device itself, which is then torch's current one: graphs are captured there. A stage that leaves
              that to processes of its own must not open the device: it would hold memory that they measure.
    """
    options = own.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if SCRIPT in os.environ:
        threading.Thread(target=end_with, args=(int(os.environ[SCRIPT]),), daemon=True).start()
    device = torch.device(options.device)
    if computes and device.type == "cuda":
        torch.cuda.set_device(device)
    return Task(options.folder.resolve(), device, options)


def end_with(parent: int) -> None:
    """End this stage and all that it started once the script that began it is gone: killed, that could end nothing."""
    while os.getppid() == parent:
        time.sleep(PARENT_S)
    os.killpg(0, signal.SIGKILL)


def result_of(folder: Path) -> dict[str, Any]:
    """What a stage has saved; nothing where it has not, or not what can be read."""
    try:
        content = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


# --- models -----------------------------------------------------------------------------------------------------------

# What a small model has in place of its config's own values, so that a CPU runs every family in seconds.
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}


def config_of(name: str, *, is_small: bool) -> dict[str, Any]:
    """A catalog model's config without its quantisation, which the engine does not run; small on request."""
    config: dict[str, Any] = catalog.expand(catalog.facts(name)["config"])
    config.pop("quantization_config", None)
    if not is_small:
        return config
    for part in (config, config.get("text_config", {})):
        part |= {key: value for key, value in SMALL.items() if key in part}
        if "layer_types" in part:
            part["layer_types"] = part["layer_types"][: SMALL["num_hidden_layers"]]
    return config


def spec_of(name: str, *, is_small: bool) -> ModelSpec:
    return hf_config.read_config(config_of(name, is_small=is_small), name, name)


def write_config(name: str, folder: Path, *, is_small: bool) -> None:
    """folder/config.json, for commands that take a model's directory."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(name, is_small=is_small), indent=2), encoding="utf-8")
