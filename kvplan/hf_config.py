"""config.json -> ModelSpec: finds the family's reader and adds name, dtype, quantisation and towers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvplan.errors import InvalidInputError, UnsupportedModelError
from kvplan.families import classic, deepseek_v4, dense, gemma, hybrid, mla, moe, multimodal_text, nas, towers
from kvplan.families.config import Config
from kvplan.families.draft import SpecDraft
from kvplan.files import load_json, printable
from kvplan.quant import read_quantization
from kvplan.spec import ModelSpec

Reader = Callable[[Config, str], SpecDraft]

READERS: dict[str, Reader] = {
    **dict.fromkeys(dense.TRAITS, dense.read),
    **classic.READERS,
    **multimodal_text.READERS,
    **moe.READERS,
    **mla.READERS,
    **hybrid.READERS,
    **gemma.READERS,
    **nas.READERS,
    **deepseek_v4.READERS,
}

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_DTYPES = {"float16": "float16", "half": "float16", "bfloat16": "bfloat16", "float32": "float32", "float": "float32"}


def inner_config(outer: Config) -> Config:
    """The part of a config that describes the language model; keys of the outer level fill its gaps."""
    config = outer
    for _ in range(3):
        key = next((k for k in NESTED if isinstance(config.values.get(k), dict)), None)
        if key is None:
            return config
        inner = config.values[key]
        for shared in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads"):
            if shared in inner and shared in config.values and inner[shared] != config.values[shared]:
                outer.notes.append(f"{shared} differs between {key} ({inner[shared]}) and the outer config; {key} wins")
        upper = {k: v for k, v in config.values.items() if k not in NESTED and not k.endswith("_config")}
        config = Config({**upper, **inner}, f"{config.where}: {key}", outer.notes)
    return config


def find_reader(outer: Config, inner: Config) -> tuple[Reader, str]:
    """The reader for the inner model_type, else for the outer one; an unknown type is refused by name."""
    kinds = [kind for kind in (inner.values.get("model_type"), outer.values.get("model_type")) if isinstance(kind, str)]
    for kind in kinds:
        if kind in READERS:
            return READERS[kind], kind
    if not kinds:
        raise outer.fail("model_type", "is missing; kvplan sizes a model by its type")
    raise UnsupportedModelError(
        f"{outer.where}: model_type {printable(repr(kinds[0]), 60)} is not one kvplan can size; "
        "use --assume-dense if it is a plain dense transformer, or add a reader in kvplan/families"
    )


def model_dtype(outer: Config, inner: Config) -> str:
    """The dtype a server loads the weights in: float32 checkpoints are served in bfloat16 (vLLM `--dtype auto`)."""
    for config in (inner, outer):
        stated = config.values.get("dtype", config.values.get("torch_dtype"))
        if isinstance(stated, str):
            known = _DTYPES.get(stated.removeprefix("torch."))
            if known is None:
                raise config.fail("torch_dtype", f"{printable(repr(stated), 40)} is not a dtype kvplan knows")
            if known == "float32":
                outer.notes.append("the checkpoint is float32; a server's default dtype for it is bfloat16")
                return "bfloat16"
            return known
    return "bfloat16"


def check_size(draft: SpecDraft, where: str) -> None:
    """Refuse dimensions whose product no machine can hold."""
    largest = max((w.num_params for layer in draft.layer_weights for w in layer), default=0)
    if largest * len(draft.layers) > 2**63:
        raise InvalidInputError(f"{where}: the dimensions multiply to more than 2^63 parameters; correct the config")


def read_config(
    values: Mapping[str, Any], where: str, name: str, *, source: str = "", assume_dense: bool = False
) -> ModelSpec:
    """The facts of one config.

    where  how errors call the file
    Raises InvalidInputError for a damaged config, UnsupportedModelError for a model kvplan will not guess.
    """
    outer = Config(values, where)
    inner = inner_config(outer)
    try:
        reader, model_type = find_reader(outer, inner)
    except UnsupportedModelError:
        if not assume_dense:
            raise
        reader, model_type = dense.read, "llama"
        outer.notes.append(
            f"model_type {outer.values.get('model_type')!r} is unknown: sized as a plain dense transformer"
        )
    draft = reader(inner, model_type)
    check_size(draft, where)
    draft.other_weights += towers.weights(outer)
    quantization = read_quantization(outer, inner)
    architectures = outer.names("architectures") or [""]
    return ModelSpec(
        name=name,
        model_type=model_type,
        architecture=architectures[0],
        dtype=model_dtype(outer, inner),
        hidden_size=draft.hidden_size,
        num_heads=draft.num_heads,
        vocab_size=draft.vocab_size,
        max_model_len=draft.max_model_len,
        context_limit=draft.context_limit,
        layers=tuple(draft.layers),
        layer_weights=tuple(draft.layer_weights),
        other_weights=tuple(draft.other_weights),
        ropes=draft.ropes,
        quantization=quantization,
        tied=draft.tied,
        experts_per_token=draft.experts_per_token,
        multimodal=draft.multimodal or towers.is_multimodal(outer),
        widest_mlp=draft.widest_mlp,
        item_tokens=draft.item_tokens,
        notes=tuple(dict.fromkeys(outer.notes)),
        source=source or where,
    )


def load_spec(path: Path, *, name: str | None = None, assume_dense: bool = False) -> ModelSpec:
    """A config.json, or the directory that holds one."""
    file = path / "config.json" if path.is_dir() else path
    values = load_json(file)
    return read_config(
        values, printable(str(file)), name or printable(file.resolve().parent.name), assume_dense=assume_dense
    )
