"""Changes of a model's config as fine-tunes, pruned and merged models have them, at random.

Each change applies to the configs that have what it changes, keeps them well-formed (KV heads divide heads, lists are
as long as there are layers), and returns whether it did.
"""

import json
import random
from collections.abc import Callable
from typing import Any

from benchmarks.random_quantizations import number, quantization, text_config

Draw = random.Random
Config = dict[str, Any]
Change = Callable[[Draw, Config], bool]

CONTEXTS = ("n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions",
            "max_sequence_length", "max_seq_length", "seq_len")  # fmt: skip


def one_of(keys: tuple[str, ...], values: list[float]) -> Change:
    """Set one of the keys that the text config has: floats scale it, integers and others replace it."""

    def change(draw: Draw, config: Config) -> bool:
        text = text_config(config)
        if not (present := [key for key in keys if number(text, key)]):
            return False
        key, value = draw.choice(present), draw.choice(values)
        before, text[key] = text[key], max(1, int(text[key] * value)) if isinstance(value, float) else value
        return bool(text[key] != before)

    return change


# --- layers, heads, states -------------------------------------------------------------------------------------------


def fewer_layers(draw: Draw, config: Config) -> bool:
    text = text_config(config)
    layers = number(text, "num_hidden_layers")
    if layers < 4:
        return False
    text["num_hidden_layers"] = count = max(2, int(layers * draw.choice([0.3, 0.5, 0.8])))
    for key, value in text.items():
        if isinstance(value, list | str) and len(value) == layers:  # Nemotron-H's pattern is a string
            text[key] = value[:count]
        elif isinstance(value, list) and key.endswith("_layers") and all(isinstance(index, int) for index in value):
            text[key] = [index for index in value if index < count]
    return True


def heads(draw: Draw, config: Config) -> bool:
    """Other heads or KV heads; those without a stated head_dim keep a whole one."""
    text = text_config(config)
    count, kv = number(text, "num_attention_heads"), number(text, "num_key_value_heads")
    if not count or not kv or number(text, "kv_lora_rank"):
        return False
    if draw.random() < 0.5 or not number(text, "head_dim"):
        text["num_key_value_heads"] = draw.choice([n for n in (1, 2, 4, 8, 16, 32) if count % n == 0])
        return bool(text["num_key_value_heads"] != kv)
    text["num_attention_heads"] = draw.choice([count * 2, count // 2 if count // 2 % kv == 0 else count * 2])
    return True


def head_dim(draw: Draw, config: Config) -> bool:
    text = text_config(config)
    if not number(text, "num_attention_heads") or number(text, "kv_lora_rank") or not number(text, "hidden_size"):
        return False
    text["head_dim"] = draw.choice([64, 128, 128, 192, 256, text["hidden_size"] // text["num_attention_heads"]])
    return True


def latent_ranks(draw: Draw, config: Config) -> bool:
    text = text_config(config)
    if not number(text, "kv_lora_rank"):
        return False
    key, values = draw.choice([
        ("kv_lora_rank", [256, 512]), ("q_lora_rank", [None, 768, 1536]), ("v_head_dim", [128, 192, 256]),
        ("qk_nope_head_dim", [64, 128, 192]), ("num_attention_heads", [16, 32, 64]),
    ])  # fmt: skip
    before, text[key] = text.get(key), draw.choice(values)
    if key == "num_attention_heads" and number(text, "num_key_value_heads"):
        text["num_key_value_heads"] = text[key]
    return bool(before != text[key])


STATES = (("mamba_d_state", "ssm_state_size", "state_size", "mamba_num_heads", "mamba_n_heads", "conv_kernel",
           "mamba_d_conv", "linear_num_value_heads", "linear_conv_kernel_dim", "linear_value_head_dim"),
          [0.5, 2.0])  # fmt: skip
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def one_layer_type(draw: Draw, config: Config) -> bool:
    """The other kind for some layer, as in models that continue training with fewer or more global layers."""
    text = text_config(config)
    kinds = text.get("layer_types")
    if not isinstance(kinds, list) or len(set(kinds)) < 2:
        return False
    index = draw.randrange(len(kinds) - 1)
    kinds[index] = next(kind for kind in kinds if kind != kinds[index])
    return True


# --- context, rope, windows ------------------------------------------------------------------------------------------


def context_key(draw: Draw, config: Config) -> bool:
    """Another of the keys that servers read for the context, beside or in place of the usual one."""
    text = text_config(config)
    length = number(text, "max_position_embeddings")
    if not length:
        return False
    key = draw.choice(CONTEXTS)
    (config if draw.random() < 0.2 else text)[key] = draw.choice([2048, 8192, length // 2, length, length * 2])
    if draw.random() < 0.15:
        del text["max_position_embeddings"]
    return True


def rope(draw: Draw, config: Config) -> bool:
    """Scaled rope under either name of its key; nested ones, by layer type, stay."""
    text = text_config(config)
    old = text.get("rope_parameters")
    length = number(text, "max_position_embeddings")
    if not length or number(text, "kv_lora_rank") or (isinstance(old, dict) and "rope_type" not in old):
        return False
    own = text.get("rope_scaling") or {}
    if "mrope_section" in own or "long_factor" in own:  # a family's own kind
        return False
    factor, base = draw.choice([2.0, 4.0, 8.0]), draw.choice([length, length, length // 2])
    scaled: Config = draw.choice([
        {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": base},
        {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": base},
        {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length // 2},
        {"rope_type": "linear", "factor": factor},
        {"rope_type": "dynamic", "factor": factor},
        {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": base},
        {"rope_type": "default"},
    ])  # fmt: skip
    if isinstance(old, dict):
        text["rope_parameters"] = {**{key: old[key] for key in old if key in ("rope_theta", "mrope_section")}, **scaled}
    else:
        if draw.random() < 0.3 and text.get("model_type") in ("llama", "mistral", "qwen2", "qwen3"):
            scaled["type"] = scaled.pop("rope_type")
        text["rope_scaling"] = scaled
    if draw.random() < 0.3 and "factor" in scaled:
        text["max_position_embeddings"] = int(length * factor)
    return True


def sliding_window(draw: Draw, config: Config) -> bool:
    text = text_config(config)
    if not number(text, "num_hidden_layers"):
        return False
    kind = str(text.get("model_type"))
    if text.get("sliding_window") and "use_sliding_window" not in text:
        text["sliding_window"] = draw.choice([None, 512, 1024, 4096, 8192] if "mistral" in kind else [256, 512, 4096])
    elif kind.startswith("qwen") and "layer_types" not in text:
        layers = text["num_hidden_layers"]
        text |= {"use_sliding_window": True, "sliding_window": draw.choice([4096, 32768]),
                 "max_window_layers": draw.choice([0, layers // 2, layers])}  # fmt: skip
    elif kind in ("llama", "mistral", "mixtral", "phi3", "starcoder2"):
        text["sliding_window"] = draw.choice([2048, 4096, 32768])
    else:
        return False
    return True


# --- embeddings, biases, types, classes ------------------------------------------------------------------------------


def tied(draw: Draw, config: Config) -> bool:
    """The outer key, the inner, or both: tools write one of them."""
    text, key = text_config(config), "tie_word_embeddings"
    places = [config] if text is config else draw.choice([[config], [text], [config, text]])
    value = not text.get(key, config.get(key, False))
    for place in places:
        place[key] = value
    return True


def biases(draw: Draw, config: Config) -> bool:
    text = text_config(config)
    key = draw.choice(["attention_bias", "mlp_bias"])
    if key not in text and text.get("model_type") not in ("llama", "qwen3", "mistral", "granite"):
        return False
    text[key] = not text.get(key, False)
    return True


def dtype(draw: Draw, config: Config) -> bool:
    """Another type, under the older or the newer key, in the outer or the inner config."""
    text = text_config(config)
    for place in (config, text):
        place.pop("torch_dtype", None)
        place.pop("dtype", None)
    place = draw.choice([config, text])
    place[draw.choice(["torch_dtype", "dtype"])] = draw.choice(["bfloat16", "float16", "float16", "float32"])
    return True


CLASSES = {
    "LlamaForCausalLM": ["LlamaForSequenceClassification", "LlamaModel", "LlamaForTokenClassification"],
    "MistralForCausalLM": ["MistralModel", "MistralForSequenceClassification"],
    "Qwen2ForCausalLM": ["Qwen2ForSequenceClassification", "Qwen2ForRewardModel", "Qwen2Model",
                         "Qwen2ForProcessRewardModel"],
    "Qwen3ForCausalLM": ["Qwen3ForSequenceClassification", "Qwen3Model", "Qwen3ForTokenClassification"],
    "Gemma2ForCausalLM": ["Gemma2Model", "Gemma2ForSequenceClassification"],
    "GPT2LMHeadModel": ["GPT2ForSequenceClassification"],
    "JambaForCausalLM": ["JambaForSequenceClassification"],
    "Phi3ForCausalLM": ["Phi3ForSequenceClassification"],
    "Qwen3MoeForCausalLM": ["Qwen3MoeForSequenceClassification", "Qwen3MoeModel"],
}  # fmt: skip


def architecture(draw: Draw, config: Config) -> bool:
    """A classifier, reward or embedding model made of a text generator."""
    names = CLASSES.get((config.get("architectures") or [""])[0])
    if names is None:
        return False
    name = draw.choice(names)
    config["architectures"] = [name]
    if "Classification" in name:
        labels = draw.choice([1, 2, 5])
        config["id2label"] = {str(label): f"LABEL_{label}" for label in range(labels)}
        config["label2id"] = {f"LABEL_{label}": label for label in range(labels)}
    return True


def quantized(draw: Draw, config: Config) -> bool:
    """A checkpoint's quantization, of a model that has none yet; `HF_QUANT` is a file of its own."""
    if "quantization_config" in config or "quantization_config" in text_config(config):
        return False
    quantization(draw, config)
    return True


WHOLE: list[tuple[int, Change]] = [
    (8, quantized), (2, fewer_layers), (2, heads), (1, head_dim), (2, latent_ranks), (1, one_layer_type), (2, rope),
    (2, context_key), (2, sliding_window), (2, tied), (1, biases), (1, dtype), (1, architecture),
    (1, one_of(("vocab_size",), [0.5, 1.001, 2.0])),
    (1, one_of(("intermediate_size", "moe_intermediate_size"), [0.5, 0.75, 2.0])),
    (2, one_of(EXPERTS, [0.5, 0.75, 2.0])),
    (1, one_of(("n_shared_experts", "first_k_dense_replace", "num_experts_per_tok"), [1, 2, 3])),
    (1, one_of(("max_position_embeddings",), [0.25, 0.5, 2.0, 4.0])),
    (2, one_of(*STATES)),
    (1, one_of(("num_nextn_predict_layers", "mtp_num_hidden_layers"), [0, 1, 2, 3])),
]  # fmt: skip


def keeps_shape(config: Config, source: Config) -> bool:
    """True if drafts for the source fit the changed config too."""
    mine, theirs = text_config(config), text_config(source)
    return all(mine.get(key) == theirs.get(key) for key in ("vocab_size", "hidden_size", "num_hidden_layers"))


def changed(draw: Draw, config: Config) -> Config:
    """A copy with one to three changes."""
    copy: Config = json.loads(json.dumps(config))
    weights, changes = zip(*WHOLE, strict=True)
    needed = draw.choice([1, 1, 1, 2, 2, 3])
    for _ in range(30):
        needed -= draw.choices(changes, weights)[0](draw, copy)
        if not needed:
            break
    return copy
