"""Small random adapters as peft saves them, and models that they are merged into: W + scale * B A, in float64."""

import atexit
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.small_engines import saved_model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def shapes(family: str, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the linear layers that these targets name, by their names in the checkpoint."""
    with safe_open(saved_model(family) / "model.safetensors", framework="pt") as stored:
        names = [name for name in stored.keys() if name.endswith(".weight")]  # noqa: SIM118 (a safe_open is no dict)
        own = {name.removesuffix(".weight"): tuple(stored.get_slice(name).get_shape()) for name in names}
    return {name: shape for name, shape in own.items() if name.rpartition(".")[2] in targets and "layers." in name}


@cache
def saved_adapter(
    family: str, targets: tuple[str, ...] = ATTENTION + MLP, rank: int = 4, seed: int = 0, **config: Any
) -> Path:
    """A directory as peft writes it; strong enough that tokens change."""
    folder = Path(tempfile.mkdtemp(prefix="kvplan-adapter-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    values = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none",
        "use_dora": False, "use_rslora": False, "fan_in_fan_out": False, "init_lora_weights": True, **config,
    }  # fmt: skip
    source = torch.Generator().manual_seed(1000 + seed)
    tensors = {}
    for name, (outputs, inputs) in shapes(family, targets).items():
        layer_rank = dict(config.get("rank_pattern", ())).get(name.rpartition(".")[2], rank)
        a = torch.randn(layer_rank, inputs, generator=source) / math.sqrt(inputs)
        b = torch.randn(outputs, layer_rank, generator=source) / math.sqrt(layer_rank)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    values |= {key: dict(value) for key, value in config.items() if key.endswith("_pattern")}  # lru_cache wants tuples
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def scale_of(config: dict[str, Any], name: str, rank: int) -> float:
    """peft's scale of a layer whose name ends as a pattern says, or of any."""
    alpha = config.get("alpha_pattern", {}).get(name.rpartition(".")[2], config["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if config["use_rslora"] else rank)


@cache
def merged_model(family: str, adapter: Path) -> Path:
    """The family's directory with the adapter in its weights."""
    folder = Path(tempfile.mkdtemp(prefix="kvplan-merged-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(saved_model(family), folder, dirs_exist_ok=True)
    weights, matrices = load_file(folder / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for key, a in matrices.items():
        if ".lora_A." not in key:
            continue
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = matrices[key.replace(".lora_A.", ".lora_B.")].double()
        delta = scale_of(config, name, len(a)) * (b @ a.double())
        weights[f"{name}.weight"] = (weights[f"{name}.weight"].double() + delta).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
