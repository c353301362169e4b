"""What an adapter's directory says of itself, read without torch: its config, and the shapes of its matrices.

What changes a layer in another way than y += scale * B (A x) is refused by name, as vLLM refuses it.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplan.core.errors import InvalidInputError, UnsupportedModelError
from kvplan.core.files import load_json, printable

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
class Shape:
    """Sizes of an adapter's update of one linear layer."""

    rank: int
    inputs: int
    outputs: int


def shapes_of(path: Path, config: dict[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> dict[str, Shape]:
    """The update of each layer ("model.layers.0.self_attn.q_proj"), by the shapes of the stored tensors.

    Raises UnsupportedModelError for tensors that are no such matrices, InvalidInputError for those that do not match.
    """
    matrices: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in tensors.items():
        layer, matrix = layer_and_matrix(path, name)
        matrices.setdefault(layer, {})[matrix] = shape
    return {name: _shape(path, name, pair, config) for name, pair in matrices.items()}


def layer_and_matrix(path: Path, name: str) -> tuple[str, str]:
    """(layer, "A" or "B") of a stored tensor."""
    parts = TENSOR.fullmatch(name)
    if parts is None:
        raise UnsupportedModelError(
            f"{path / WEIGHTS}: tensor {name!r} is no matrix of a linear layer in the decoder's layers; "
            "train the adapter without that module"
        )
    return f"model.{parts[1]}", parts[2]


def _shape(path: Path, name: str, pair: dict[str, tuple[int, ...]], config: dict[str, Any]) -> Shape:
    if len(pair) < 2:
        raise InvalidInputError(f"{path / WEIGHTS}: {name} has lora_{next(iter(pair))} alone; export the adapter again")
    a, b = pair["A"], pair["B"]
    rank = int(of_layer(config.get("rank_pattern"), name, config["r"]))
    if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
        raise InvalidInputError(
            f"{path / WEIGHTS}: {name} has matrices {list(a)} and {list(b)}, {CONFIG} says rank {rank}; "
            "they do not belong together"
        )
    return Shape(rank, a[1], b[0])


def scale_of(config: dict[str, Any], name: str, rank: int) -> float:
    """peft's factor of a layer's update."""
    alpha = float(of_layer(config.get("alpha_pattern"), name, config["lora_alpha"]))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def check_fit(
    path: Path, layers: Mapping[str, Shape], max_lora_rank: int, model: Mapping[str, tuple[int, int]]
) -> None:
    """Refuse what has no place in the slots; model: (inputs, outputs) of each layer that adapters may change."""
    rank = max((shape.rank for shape in layers.values()), default=0)
    if rank > max_lora_rank:
        raise InvalidInputError(f"{path}: has rank {rank}, slots are for {max_lora_rank}; raise max_lora_rank")
    for name, shape in layers.items():
        if name not in model:
            raise UnsupportedModelError(
                f"{path}: changes {name}, which is no linear layer that adapters may change here; "
                "train the adapter without that module"
            )
        inputs, outputs = model[name]
        if (shape.inputs, shape.outputs) != (inputs, outputs):
            raise InvalidInputError(
                f"{path}: {name} maps {shape.inputs} inputs to {shape.outputs} outputs, the model's "
                f"{inputs} to {outputs}; the adapter is of another model"
            )


def of_layer(patterns: Any, name: str, usual: Any) -> Any:
    """The value of the first pattern that matches this layer; peft matches from a dot to the end.

    RE2 does not backtrack: Python's own engine could run forever on a pattern.
    """
    if not patterns:
        return usual
    import re2

    for pattern, value in patterns.items():
        try:
            if re2.match(rf"(.*\.)?({pattern})$", name):
                return value
        except re2.error as error:
            raise UnsupportedModelError(
                CONFIG, f"pattern {printable(pattern, 60)!r} cannot be matched", "name the layers without lookaheads"
            ) from error
    return usual


def read_config(directory: Path) -> dict[str, Any]:
    """The config of an adapter that has only low-rank matrices.

    Raises InvalidInputError for a missing or damaged file, UnsupportedModelError for other adapters.
    """
    config = _read_config(directory / CONFIG)
    _check_kind(directory / CONFIG, config)
    return config


def weights_file(path: Path) -> Path:
    """The file of an adapter's matrices; raises InvalidInputError if there is none."""
    file = path / WEIGHTS
    if not file.is_file():
        pickled = (
            f"; {PICKLED} is pickled and is not read, save it with safe_serialization" * (path / PICKLED).is_file()
        )
        raise InvalidInputError(f"{file}: does not exist{pickled or '; name a directory of peft'}")
    return file


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = load_json(path)
    except InvalidInputError as error:
        raise error.changed(remedy="name a directory of peft's, or export the adapter again") from error
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
    """Refuse adapters that have more than low-rank matrices."""
    if config.get("peft_type") != "LORA":
        raise UnsupportedModelError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA is supported")
    for name in MORE:
        if config.get(name):
            raise UnsupportedModelError(
                f"{path}: {name} is {config[name]!r:.60}, which is not supported; train the adapter without it"
            )
    if config.get("bias", "none") != "none":
        raise UnsupportedModelError(
            f"{path}: bias is {config['bias']!r:.60}, which is not supported; train the adapter with bias 'none'"
        )
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in PLAIN_INITS:
        raise UnsupportedModelError(
            f"{path}: init_lora_weights is {init!r:.60}, which changes the model's own weights; "
            "convert the adapter to plain LoRA with peft (path_initial_model_for_weight_conversion)"
        )
