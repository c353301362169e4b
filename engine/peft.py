"""LoRA adapters as peft writes them: a directory with adapter_config.json and adapter_model.safetensors.

What changes a layer in another way than y += scale * B (A x) is refused by name, as vLLM refuses it.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvplan.core.errors import InvalidInputError, UnsupportedModelError

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# What a config may say of an adapter that is more than two matrices beside a layer's own.
MORE = (
    "use_dora", "lora_bias", "modules_to_save", "alora_invocation_tokens", "layer_replication", "use_bdlora",
    "use_qalora", "trainable_token_indices", "target_parameters", "fan_in_fan_out", "megatron_config",
)  # fmt: skip
# Ways to begin training that leave the model's own weights alone; others change them, and peft does so again.
PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
TENSOR = re.compile(r"(?:.*\.)?(layers\.\d+\..+)\.lora_(A|B)(?:\.default)?\.weight")


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one linear layer: b @ (a @ x). float32, on the host.

    a  [rank, inputs]; b [outputs, rank], its scale in it
    """

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter by the names of the layers that it changes ("model.layers.0.self_attn.q_proj")."""

    path: Path
    layers: dict[str, LowRank]

    @property
    def rank(self) -> int:
        return max((low.rank for low in self.layers.values()), default=0)


def read_adapter(path: Path) -> Adapter:
    """Raises InvalidInputError for a directory that is damaged or none, UnsupportedModelError for another kind."""
    config = _read_config(path / CONFIG)
    _check_kind(path / CONFIG, config)
    tensors = _read_tensors(path)
    matrices: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        parts = TENSOR.fullmatch(name)
        if parts is None:
            raise UnsupportedModelError(
                f"{path / WEIGHTS}: tensor {name!r} is no matrix of a linear layer in the decoder's layers; "
                "train the adapter without that module"
            )
        matrices.setdefault(f"model.{parts[1]}", {})[parts[2]] = tensor
    return Adapter(path, {name: _low_rank(path, name, pair, config) for name, pair in matrices.items()})


def _low_rank(path: Path, name: str, pair: dict[str, torch.Tensor], config: dict[str, Any]) -> LowRank:
    """The two matrices of a layer, with peft's scale for it."""
    if len(pair) < 2:
        raise InvalidInputError(f"{path / WEIGHTS}: {name} has lora_{next(iter(pair))} alone; export the adapter again")
    a, b = pair["A"], pair["B"]
    rank = int(_of_layer(config.get("rank_pattern"), name, config["r"]))
    if a.dim() != 2 or b.dim() != 2 or len(a) != rank or b.shape[1] != rank:
        raise InvalidInputError(
            f"{path / WEIGHTS}: {name} has matrices {list(a.shape)} and {list(b.shape)}, {CONFIG} says rank {rank}; "
            "they do not belong together"
        )
    alpha = float(_of_layer(config.get("alpha_pattern"), name, config["lora_alpha"]))
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(a.float(), b.float() * scale)


def _of_layer(patterns: Any, name: str, usual: Any) -> Any:
    """What the first pattern that names this layer says; peft matches from a dot to the end."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return usual


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read ({error.strerror}); name a directory of peft's") from error
    except ValueError as error:
        raise InvalidInputError(f"{path}: is not JSON ({error}); export the adapter again") from error
    if not isinstance(config, dict):
        raise InvalidInputError(f"{path}: is not an object; export the adapter again")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    ranks, alphas = config.get("rank_pattern"), config.get("alpha_pattern")
    for name, value, is_ok, need in (
        ("r", rank, isinstance(rank, int) and rank >= 1, "a whole number of at least 1"),
        ("lora_alpha", alpha, isinstance(alpha, int | float) and math.isfinite(alpha), "a number"),
        ("rank_pattern", ranks, ranks is None or _is_map(ranks, int), "an object of ranks"),
        ("alpha_pattern", alphas, alphas is None or _is_map(alphas, int | float), "an object of numbers"),
    ):
        if isinstance(value, bool) or not is_ok:
            raise InvalidInputError(f"{path}: {name} must be {need} ({value!r:.60}); export the adapter again")
    return config


def _is_map(value: Any, kind: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(number, kind) and number > 0 for number in value.values())


def _check_kind(path: Path, config: dict[str, Any]) -> None:
    """Refuse adapters that are more than low-rank matrices."""
    if config.get("peft_type") != "LORA":
        raise UnsupportedModelError(f"{path}: peft_type is {config.get('peft_type')!r}; the engine runs LORA")
    for name in MORE:
        if config.get(name):
            raise UnsupportedModelError(
                f"{path}: {name} is {config[name]!r:.60}, which the engine does not run; train the adapter without it"
            )
    if config.get("bias", "none") != "none":
        raise UnsupportedModelError(f"{path}: bias is {config['bias']!r:.60}, the engine runs 'none'; train it so")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in PLAIN_INITS:
        raise UnsupportedModelError(
            f"{path}: init_lora_weights is {init!r:.60}, which changes the model's own weights; "
            "convert the adapter to plain LoRA with peft (path_initial_model_for_weight_conversion)"
        )


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    file = path / WEIGHTS
    if not file.is_file():
        pickled = (
            f"; {PICKLED} is pickled and is not read, save it with safe_serialization" * (path / PICKLED).is_file()
        )
        raise InvalidInputError(f"{file}: does not exist{pickled or '; name a directory of peft'}")
    try:
        with safe_open(file, framework="pt", device="cpu") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (a safe_open is no dict)
    except (SafetensorError, OSError) as error:
        raise InvalidInputError(f"{file}: is damaged or truncated ({error}); export the adapter again") from error
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise UnsupportedModelError(f"{file}: tensor {name!r} is {tensor.dtype}; the engine reads floats")
    return tensors
