"""Quantization configs in the forms that the tools of the field write, drawn at random.

AutoAWQ, GPTQModel and AutoGPTQ, llm-compressor (compressed-tensors), ModelOpt, bitsandbytes, FBGEMM, Quark, AutoRound,
fp8 as DeepSeek and Qwen publish it.
"""

import random
from typing import Any, Final

Draw = random.Random
Config = dict[str, Any]

HF_QUANT: Final = "hf_quant_config.json"  # what ModelOpt writes beside config.json; drawn under this key
TOWER: Final = ("vision_config", "audio_config")
NESTED: Final = ("text_config", "language_config", "llm_config")


def text_config(config: Config) -> Config:
    for name in NESTED:
        if isinstance(config.get(name), dict):
            return config[name]  # type: ignore[no-any-return]
    return config


def number(config: Config, key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def is_moe(text: Config) -> bool:
    return any(number(text, key) > 1 for key in ("num_experts", "n_routed_experts", "num_local_experts"))


def quantization(draw: Draw, config: Config) -> None:
    """Set `quantization_config`, or under `HF_QUANT` the content of the file beside config.json."""
    kinds = [(6, compressed_tensors), (4, modelopt), (3, gptq), (3, fp8), (2, awq), (1, bitsandbytes), (1, rare)]
    weights, makers = zip(*kinds, strict=True)
    drawn = draw.choices(makers, weights)[0](draw, skipped(draw, config))
    if HF_QUANT in drawn:
        config |= drawn
    else:
        config["quantization_config"] = drawn


def skipped(draw: Draw, config: Config) -> list[str]:
    """What stays as it is: the head, mostly the towers and routers too, sometimes attention or a layer."""
    names = ["lm_head"]
    if any(key in config for key in TOWER) and draw.random() < 0.8:
        names += ["re:.*visual.*", "re:.*vision_tower.*", "re:.*vision_model.*", "re:.*multi_modal_projector.*"]
    if is_moe(text_config(config)) and draw.random() < 0.8:
        names += ["re:.*mlp.gate$", "re:.*router$", "re:.*block_sparse_moe.gate$", "re:.*shared_expert_gate$"]
    if draw.random() < 0.2:
        names.append(draw.choice(["re:.*self_attn.*", "re:.*linear_attn.*", "re:.*down_proj$",
                                  "model.layers.0.mlp.down_proj"]))  # fmt: skip
    return names


def plain(names: list[str]) -> list[str]:
    """The names in the words of tools that compare parts of names."""
    return [name.removeprefix("re:.*").removesuffix(".*").removesuffix("$") for name in names]


def starred(names: list[str]) -> list[str]:
    """The names as ModelOpt's wildcards: whole trees end in a star, single layers do not."""
    stars = [name.replace("re:.*", "*").replace("$", "") for name in names]
    return [name.removesuffix(".*") + "*" if name.endswith(".*") else name for name in stars]


# --- compressed-tensors ----------------------------------------------------------------------------------------------


def scheme(kind: str, bits: int, strategy: str, group: int | None = None, **others: Any) -> Config:
    size = {} if group is None else {"group_size": group}
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False} | size | others


TOKEN8 = scheme("float", 8, "token", dynamic=True)
INT_TOKEN8 = scheme("int", 8, "token", dynamic=True)
BLOCK8 = scheme("float", 8, "block", block_structure=[128, 128])
NVFP4 = scheme("float", 4, "tensor_group", 16)
KV8 = scheme("float", 8, "tensor")


def group(weights: Config, inputs: Config | None = None, targets: list[str] | None = None) -> Config:
    return {"targets": targets or ["Linear"], "weights": weights, "input_activations": inputs}


CT_FORMS: list[tuple[int, str, Config]] = [
    (4, "pack-quantized", group(scheme("int", 4, "group", 128))),
    (1, "pack-quantized", group(scheme("int", 4, "group", 32))),
    (1, "pack-quantized", group(scheme("int", 4, "group", 64))),
    (1, "pack-quantized", group(scheme("int", 4, "channel"))),
    (2, "pack-quantized", group(scheme("int", 4, "group", 128, symmetric=False))),
    (1, "pack-quantized", group(scheme("int", 4, "group", 128, actorder="group"))),
    (2, "pack-quantized", group(scheme("int", 4, "group", 128, actorder="weight"))),
    (1, "pack-quantized", group(scheme("int", 4, "group", 128, actorder="static"))),
    (2, "pack-quantized", group(scheme("int", 8, "channel"))),
    (1, "pack-quantized", group(scheme("int", 8, "group", 128))),
    (1, "pack-quantized", group(scheme("int", 4, "group", 128), TOKEN8)),
    (4, "int-quantized", group(scheme("int", 8, "channel"), INT_TOKEN8)),
    (1, "int-quantized", group(scheme("int", 8, "channel"), scheme("int", 8, "tensor"))),
    (1, "int-quantized", group(scheme("int", 8, "channel"), scheme("int", 8, "token", dynamic=True, symmetric=False))),
    (6, "float-quantized", group(scheme("float", 8, "channel"), TOKEN8)),
    (2, "float-quantized", group(scheme("float", 8, "tensor"), scheme("float", 8, "tensor"))),
    (2, "float-quantized", group(BLOCK8, scheme("float", 8, "group", 128, dynamic=True))),
    (1, "naive-quantized", group(scheme("float", 8, "tensor"))),
    (4, "nvfp4-pack-quantized", group(NVFP4, NVFP4 | {"dynamic": "local"})),
    (2, "nvfp4-pack-quantized", group(NVFP4)),
    (1, "mxfp4-pack-quantized", group(scheme("float", 4, "group", 32, scale_dtype="torch.uint8"))),
    (1, "mxfp8-quantized", group(scheme("float", 8, "group", 32, scale_dtype="torch.uint8"),
                                 scheme("float", 8, "group", 32, dynamic=True, scale_dtype="torch.uint8"))),
]  # fmt: skip
MIXED: list[tuple[str, Config]] = [
    ("pack-quantized", group(scheme("int", 4, "group", 128), None, ["re:.*mlp.*"])),
    ("float-quantized", group(scheme("float", 8, "channel"), TOKEN8, ["re:.*self_attn.*"])),
]


def compressed_tensors(draw: Draw, names: list[str]) -> Config:
    config: Config = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": names}
    if draw.random() < 0.08:
        groups = {f"group_{i}": own | {"format": form} for i, (form, own) in enumerate(MIXED)}
        return config | {"format": "mixed-precision", "config_groups": groups}
    weights, forms, groups_of = zip(*CT_FORMS, strict=True)
    index = draw.choices(range(len(forms)), weights)[0]
    config |= {"format": forms[index], "config_groups": {"group_0": groups_of[index]}}
    if draw.random() < 0.2:
        config["kv_cache_scheme"] = KV8
    return config


# --- ModelOpt --------------------------------------------------------------------------------------------------------

ALGORITHMS = ["NVFP4", "NVFP4", "NVFP4", "FP8", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8",
              "W4A16_NVFP4", "W4A16_AWQ", "W4A8_AWQ", "NVFP4_AWQ", "MIXED_PRECISION"]  # fmt: skip


def modelopt(draw: Draw, names: list[str]) -> Config:
    """As config.json has it since 0.29 (flat), before (nested), or beside config.json alone."""
    algorithm, form = draw.choice(ALGORITHMS), draw.choice(["flat", "flat", "nested", "file", "file"])
    kv = draw.choice([None, "FP8", "FP8"])
    inner: Config = {"quant_algo": algorithm, "kv_cache_quant_algo": kv, "exclude_modules": starred(names)}
    if "FP4" in algorithm or "AWQ" in algorithm:
        inner["group_size"] = 16 if "FP4" in algorithm else 128
    if algorithm == "MIXED_PRECISION":
        parts = {"self_attn.q_proj": "FP8", "self_attn.k_proj": "FP8", "self_attn.v_proj": "FP8"}
        inner["quantized_layers"] = {
            f"model.layers.{layer}.{part}": {"quant_algo": own} for layer in range(4) for part, own in parts.items()
        }
    producer = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": inner}
    if form == "file":
        return {HF_QUANT: producer}
    if form == "nested" or algorithm not in ("NVFP4", "FP8"):
        return {"quant_method": "modelopt", **producer}
    bits = scheme("float", 4, "group", 16) if algorithm == "NVFP4" else scheme("float", 8, "tensor")
    own = {key: bits[key] for key in ("num_bits", "type", "dynamic", "group_size") if key in bits}
    groups = {"group_0": {"targets": ["Linear"], "weights": own, "input_activations": own}}
    flat: Config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": starred(names),
                    "producer": {"name": "modelopt", "version": "0.37.0"}, "config_groups": groups}  # fmt: skip
    if kv:
        flat["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return flat


# --- the others ------------------------------------------------------------------------------------------------------


def gptq(draw: Draw, names: list[str]) -> Config:
    config: Config = {"quant_method": "gptq", "bits": draw.choice([4, 4, 4, 4, 8, 8, 3, 2]),
                      "group_size": draw.choice([128, 128, 128, 64, 32, -1]), "desc_act": draw.random() < 0.4,
                      "sym": draw.random() < 0.85, "lm_head": draw.random() < 0.1}  # fmt: skip
    if draw.random() < 0.2:
        config["checkpoint_format"] = draw.choice(["gptq", "gptq_v2"])
    if draw.random() < 0.25:
        config["dynamic"] = draw.choice([
            {rf"-:.*{name}.*": {} for name in plain(names) if name != "lm_head"},
            {r"-:.*self_attn.*": {}}, {r"+:.*down_proj.*": {"bits": 8, "group_size": 32}},
        ])  # fmt: skip
    return config


def awq(draw: Draw, names: list[str]) -> Config:
    skip = [name for name in plain(names) if name != "lm_head"]
    return {"quant_method": "awq", "bits": 4, "group_size": draw.choice([128, 128, 128, 64, 32]),
            "zero_point": True, "version": draw.choice(["gemm", "gemm", "gemm", "gemv"]),
            "modules_to_not_convert": skip or None}  # fmt: skip


def fp8(draw: Draw, names: list[str]) -> Config:
    config: Config = draw.choice([
        {"activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
        {"activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
        {"activation_scheme": "dynamic", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        {"activation_scheme": "static"}, {"activation_scheme": "dynamic"},
    ])  # fmt: skip
    skip = {"modules_to_not_convert": [name for name in plain(names) if "layers" not in name]}
    return {"quant_method": "fp8"} | config | (skip if draw.random() < 0.6 else {})


def bitsandbytes(draw: Draw, names: list[str]) -> Config:
    four = draw.random() < 0.7
    skip = draw.choice([None, plain(names)])
    config: Config = {"quant_method": "bitsandbytes", "load_in_4bit": four, "load_in_8bit": not four,
                      "llm_int8_threshold": 6.0, "llm_int8_skip_modules": skip}  # fmt: skip
    if four:
        config |= {"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_type": draw.choice(["nf4", "fp4"]),
                   "bnb_4bit_use_double_quant": draw.random() < 0.5, "bnb_4bit_quant_storage": "uint8"}  # fmt: skip
    return config


def rare(draw: Draw, names: list[str]) -> Config:
    quark_weight, quark_input = draw.choice([
        ({"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False},
         {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}),
        ({"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": False},
         {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": True}),
        ({"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": False, "scale_format": "e8m0"},
         {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": True, "scale_format": "e8m0"}),
    ])  # fmt: skip
    return draw.choice([
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": plain(names)},
        {"quant_method": "quark", "exclude": names, "layer_quant_config": {}, "layer_type_quant_config": {},
         "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
         "global_quant_config": {"weight": quark_weight, "input_tensors": quark_input, "bias": None,
                                 "output_tensors": None}},
        {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
         "packing_format": draw.choice(["auto_round:auto_gptq", "auto_round:auto_awq"]),
         "extra_config": draw.choice([{}, {"lm_head": {"bits": 16, "data_type": "float"}}])},
        {"quant_method": "experts_int8"},
        {"quant_method": "mxfp8", "activation_scheme": "dynamic", "modules_to_not_convert": plain(names)},
    ])  # fmt: skip
