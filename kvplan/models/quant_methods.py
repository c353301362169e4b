"""The methods of a quantization_config: which scheme each stores a layer in, and lists that do not fit the model."""

from dataclasses import replace
from typing import Literal

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.files import printable
from kvplan.models.families.config import Config
from kvplan.models.names import in_layer, is_pattern
from kvplan.models.quant import BY_MATRIX, EXPERTS, WEIGHT_ONLY, scheme_of, tables_of
from kvplan.models.spec import ModelSpec, Quantization, Scheme


def flattened(config: Config) -> Config:
    """ModelOpt's nested form, `{"producer": ..., "quantization": {...}}`, with its settings at the outer level."""
    nested = config.values.get("quantization")
    if not isinstance(nested, dict):
        return config
    return Config({**config.values, **nested}, f"{config.where}: quantization", config.notes)


def is_modelopts_own(whole: Config) -> bool:
    """True for ModelOpt's nested form, from which servers tell the method without its name."""
    nested = whole.values.get("quantization")
    is_modelopt = whole.sub("producer").values.get("name") == "modelopt"
    return is_modelopt and isinstance(nested, dict) and nested.get("quant_algo") is not None


def read(whole: Config, inner: Config) -> Quantization | None:
    """Quantization of a config's section, or None if that is empty.

    A method or scheme kvplan does not model gives a Quantization that is not `known`: the cache is sized nevertheless,
    the weights cannot be computed from the config.
    """
    config = flattened(whole)
    if not config.values:
        return None
    method = config.text("quant_method", "modelopt" if "quant_algo" in config else "").lower()
    kv_dtype = stated_kv_dtype(config, method)
    try:
        quantization = by_method(config, inner, method, kv_dtype)
        if quantization is None:
            return None
        tables_of(quantization)  # rejects patterns that cannot be matched
    except UnsupportedModelError as part:
        stated = printable(method, 40)
        problem = f"quantization method '{stated} ({part})' is not supported"
        quantization = Quantization(stated, None, kv_dtype=kv_dtype, problem=problem, unread=str(part))
    named = "quant_method" in whole or is_modelopts_own(whole)
    return replace(quantization, named=named, stated=printable(method, 40))


def by_method(config: Config, inner: Config, method: str, kv_dtype: str | None) -> Quantization | None:
    """Read the quantization by its method. Raise UnsupportedModelError naming a scheme that is not modeled."""
    match method:
        case "fp8" | "fbgemm_fp8":
            expert_dtype = inner.text("expert_dtype", config.text("expert_dtype", ""))
            return fp8(config, method, kv_dtype, experts_in_fp4=expert_dtype == "fp4")
        case "compressed-tensors":
            return compressed_tensors(config, kv_dtype)
        case "awq" | "awq_marlin":
            zeros = config.flag("zero_point", True)
            scheme = Scheme("awq", four_bit_group(config), zeros=zeros)
            head = scheme if config.flag("lm_head") else None
            return replace(plain(config, "awq", scheme, kv_dtype), head=head)
        case "gptq" | "gptq_marlin":
            return gptq(config, gptq_scheme(config), kv_dtype)
        case "mxfp4":
            return Quantization("mxfp4", None, patterns=((EXPERTS, Scheme("mxfp4", 32)),))
        case "modelopt" | "modelopt_fp4" | "modelopt_mixed":
            return modelopt(config, kv_dtype)
        case "bitsandbytes":
            return bitsandbytes(config)
        case "auto-round" | "inc" | "quark":
            from kvplan.models.quant_rare import auto_round, quark

            return quark(config) if method == "quark" else auto_round(config)
        case "mxfp8":  # MiniMax's name for ModelOpt's format
            names, patterns = exceptions(anywhere(names_of(config, "ignored_layers")))
            return Quantization("modelopt", MODELOPT["MXFP8"], names, patterns, kv_dtype, head=MODELOPT["MXFP8"])
        case "experts_int8":  # quantized while loading
            return Quantization(method, None)
        case "none" | "":
            return None
        case _:
            raise UnsupportedModelError("", "no reader")


def stated_kv_dtype(config: Config, method: str) -> str | None:
    """KV cache dtype that the checkpoint's quantization asks for, or None.

    Source: vLLM 0.33 utils/torch_utils.py (get_kv_cache_quant_algo_string) for ModelOpt, whose other formats leave the
    cache in the model's dtype, and model_executor/layers/attention/attention.py for compressed-tensors, whose other
    formats are refused. Other methods ask for none.
    """
    scheme = config.values.get("kv_cache_scheme")
    if method == "compressed-tensors":
        return "fp8" if scheme else None
    if not method.startswith("modelopt"):
        return None
    scheme = scheme or config.values.get("kv_cache_quant_algo")
    match scheme:
        case {"type": "float", "num_bits": 8, "dynamic": False}:
            return "fp8"
        case {"type": "float", "num_bits": 4}:
            return "nvfp4"
        case str() if scheme.lower() in ("fp8", "nvfp4"):
            return scheme.lower()
    return None


def block_shape(config: Config, key: str) -> tuple[int, int] | None:
    block = config.ints(key)
    if block is None:
        return None
    if len(block) != 2 or min(block) < 1:
        raise config.fail(key, f"must be two positive integers ({block})", "correct the config")
    return block[0], block[1]


def four_bit_group(config: Config) -> int | None:
    """Group size of 4-bit AWQ and GPTQ; of the other widths only 8 bits are modeled, for GPTQ."""
    bits = config.count("bits", "w_bit", default=4)
    if bits != 4:
        raise UnsupportedModelError("", f"{bits}-bit")
    return group_of(config)


def group_of(config: Config) -> int | None:
    """Inputs that share a scale, or None for one group per column."""
    group = config.values.get("group_size", config.values.get("q_group_size"))
    if group is None:
        return 128
    if group == -1:
        return None
    return config.whole("group_size", group)


def gptq_variant(config: Config, group: int | None) -> str:
    """The difference from the usual packing: how zero points are stored, or which inputs form a group.

    Sources: GPTQModel's checkpoint_format; with desc_act groups are formed in the order of the activations, which
    changes nothing if all inputs are one group.
    """
    form = config.text("checkpoint_format", "gptq").lower()
    if config.flag("desc_act") and group is not None:
        return "desc_act"
    return "" if form == "gptq" else printable(form, 40)


def gptq_scheme(config: Config) -> Scheme:
    wide = config.count("bits", default=4) == 8
    group = group_of(config) if wide else four_bit_group(config)
    kind: Literal["gptq", "gptq_int8"] = "gptq_int8" if wide else "gptq"
    return Scheme(kind, group, zeros=not config.flag("sym", True), variant=gptq_variant(config, group))


def names_of(config: Config, *keys: str) -> list[str]:
    return [name for key in keys for name in config.names(key) or []]


def plain(config: Config, method: str, scheme: Scheme, kv_dtype: str | None) -> Quantization:
    """One scheme for everything except modules whose names contain a listed text (AWQ, GPTQ)."""
    names, patterns = exceptions(anywhere(names_of(config, "modules_to_not_convert")))
    return Quantization(method, scheme, names, patterns, kv_dtype)


def gptq(config: Config, scheme: Scheme, kv_dtype: str | None) -> Quantization:
    """GPTQ: everything, or the modules of `modules_in_block_to_quantize`; `dynamic` can exclude some, or give them
    other bits or groups.

    Source: vLLM 0.33 utils/gptq_utils.py, which matches fused modules' names with `dynamic`, whose first match decides.
    """
    quantization = plain(config, "gptq", scheme, kv_dtype)
    blocks = config.items("modules_in_block_to_quantize") or []
    listed = [name for block in blocks for name in (block if isinstance(block, list) else [block])]
    patterns = quantization.patterns
    for name, change in config.sub("dynamic").values.items():
        if name.startswith("-:"):
            patterns += (("re:" + name[2:], None),)
        elif change and listed:
            raise UnsupportedModelError("dynamic", f"settings for {printable(name, 40)} with a list of modules")
        elif not listed:
            own = {**config.values, **config.sub("dynamic").sub(name).values}
            patterns += (("re:" + name.removeprefix("+:"), gptq_scheme(Config(own, config.where, config.notes))),)
    patterns += tuple((f"*{name}*", scheme) for name in listed if isinstance(name, str))
    head = scheme if config.flag("lm_head") else None
    return replace(quantization, default=None if listed else scheme, patterns=patterns, head=head)


def anywhere(names: list[str]) -> list[str]:
    """Convert entries that match anywhere in a module's name to globs; a layer's module is matched by its name.

    Source: vLLM 0.33 is_layer_skipped with match_mode "substring", and ModelOpt's is_layer_excluded.
    """
    names = [name.removesuffix(".") for name in names]
    return [name if is_pattern(name) or in_layer(name) or name in WHOLE else f"*{name}*" for name in names]


def exceptions(names: list[str]) -> tuple[dict[str, Scheme | None], tuple[tuple[str, Scheme | None], ...]]:
    """Module names that are not quantized: exact ones, and patterns (`re:...` or with `*`)."""
    exact = {name: None for name in names if not is_pattern(name)}
    return dict(exact), tuple((name, None) for name in names if is_pattern(name))


WHOLE = ("lm_head", "head")  # names that match only themselves


def fp8(config: Config, method: str, kv_dtype: str | None, *, experts_in_fp4: bool) -> Quantization:
    """FP8 throughout; DeepSeek-V4 stores its experts in MXFP4, or in the NVFP4 of `quantized_layers`."""
    block = block_shape(config, "weight_block_size")
    static = config.text("activation_scheme", "dynamic") == "static"
    if method == "fbgemm_fp8":
        scheme = Scheme("fp8_channel", variant="fbgemm")
    elif block == (32, 32) and experts_in_fp4:  # stored so by DeepSeek-V4.1, and per row in memory
        scheme = Scheme("mxfp8", 32)
    elif block:
        # In memory DeepSeek-V4's block scales are single bytes (e8m0), those of older models float32.
        scheme = Scheme("fp8_block", block=block, scale_bytes=1 if experts_in_fp4 else 4)
    else:
        scheme = Scheme("fp8_tensor", static=static)
    names, patterns = exceptions(names_of(config, "modules_to_not_convert", "ignored_layers"))
    names = listed_layers(config) | names
    if experts_in_fp4:
        patterns += ((EXPERTS, Scheme("mxfp4", 32)),)
    return Quantization("fp8", scheme, names, patterns, kv_dtype)


def compressed_scheme(config: Config) -> Scheme:
    """Scheme of one config group: type, bits and strategy of its weights."""
    weights = config.sub("weights")
    kind, bits = weights.text("type", "int"), weights.count("num_bits")
    strategy = weights.text("strategy", "tensor")
    group = weights.maybe_count("group_size")
    inputs, wide = config.sub("input_activations"), config.values.get("input_activations") is None
    static = inputs.values.get("dynamic") is False
    match (kind, bits, strategy):
        case ("float", 8, "tensor"):
            return Scheme("fp8_tensor", static=static, variant=WEIGHT_ONLY if wide else "")
        case ("float", 8, "channel"):
            return Scheme("fp8_channel", static=static, variant=WEIGHT_ONLY if wide else "")
        case ("float", 8, "block"):
            block = block_shape(weights, "block_structure") or (128, 128)
            return Scheme("fp8_block", block=block, variant=WEIGHT_ONLY if wide else "")
        case ("int", 4 | 8, "group" | "channel") if wide:
            return Scheme("int4" if bits == 4 else "int8", group, zeros=not weights.flag("symmetric", True))
        case ("int", 8, "channel" | "tensor"):
            zeros = static and not inputs.flag("symmetric", True)
            return Scheme("int8_channel" if strategy == "channel" else "int8_tensor", static=static, zeros=zeros)
        case ("int", 4, "group" | "channel"):
            return Scheme("int4", group, zeros=not weights.flag("symmetric", True))
        case ("float", 4, "group") if group == 32:  # OCP microscaling, as vLLM 0.33's _is_mxfp4 tells
            return Scheme("mxfp4", 32)
        case ("float", 4, _):
            return Scheme("nvfp4", group or 16, variant=WEIGHT_ONLY if wide else "")
    raise UnsupportedModelError("", f"{bits}-bit {printable(kind, 20)} by {printable(strategy, 20)}")


def as_computed(scheme: Scheme, config: Config) -> Scheme:
    """The scheme with what determines how a server computes with it: quantized inputs, and the order of its groups.

    Source: compressed-tensors' QuantizationArgs; `true` and "dynamic" are its names for "group".
    """
    inputs, order = config.sub("input_activations"), config.sub("weights").values.get("actorder")
    if inputs.values:
        strategy = "static" if inputs.values.get("dynamic") is False else inputs.text("strategy", "tensor")
        inputs_text = f"{inputs.text('type', 'int')}{inputs.count('num_bits')} {strategy}"
        if not inputs.flag("symmetric", True):
            inputs_text += " asymmetric"
        scheme = replace(scheme, inputs=inputs_text)
    if order is True or str(order).lower() in ("group", "dynamic"):
        scheme = replace(scheme, variant="desc_act")
    return scheme


def compressed_tensors(config: Config, kv_dtype: str | None) -> Quantization:
    """llm-compressor's format: groups of targets, each with a scheme, and an ignore list."""
    groups = config.sub("config_groups")
    if not groups.values:
        raise UnsupportedModelError("", "no config_groups")
    default: Scheme | None = None
    names, patterns = exceptions(names_of(config, "ignore"))
    targeted: dict[str, Scheme | None] = dict(names)
    ordered: list[tuple[str, Scheme | None]] = list(patterns)
    for key in groups.values:
        group = groups.sub(key)
        scheme = as_computed(compressed_scheme(group), group)
        for target in group.names("targets") or ["Linear"]:
            if target in ("Linear", "FusedMoE"):
                default = scheme
            elif target.startswith("re:"):
                ordered.append((target, scheme))
            else:
                targeted.setdefault(target, scheme)
    by_head = config.sub("kv_cache_scheme").values.get("strategy") == "attn_head"
    return Quantization(
        "compressed-tensors", default, targeted, tuple(ordered), kv_dtype, kv_by_head=by_head, whole_names=True
    )


MODELOPT = {
    "FP8": Scheme("fp8_tensor", static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8_channel", variant=BY_MATRIX),
    "FP8_PB_WO": Scheme("fp8_block", block=(128, 128)),
    "FP8_BLOCK_SCALES": Scheme("fp8_block", block=(128, 128)),  # former name of the same (vLLM 0.33)
    "NVFP4": Scheme("nvfp4", 16),
    "W4A16_NVFP4": Scheme("nvfp4", 16, static=True, variant=WEIGHT_ONLY),
    "MXFP8": Scheme("mxfp8", 32),
    "W4A16_AWQ": Scheme("awq", 128, zeros=True),
    "W4A8_AWQ": Scheme("awq", 128, zeros=True),
}


def modelopt_scheme(config: Config, algo: str) -> Scheme:
    if algo.upper() not in MODELOPT:
        raise UnsupportedModelError("", printable(algo, 40))
    return MODELOPT[algo.upper()]


def modelopt(config: Config, kv_dtype: str | None) -> Quantization:
    """NVIDIA ModelOpt: one algorithm, or a list of layers with an algorithm each."""
    names, patterns = exceptions(anywhere(names_of(config, "ignore", "exclude_modules")))
    algo = config.text("quant_algo")
    if algo.upper() != "MIXED_PRECISION":
        scheme = modelopt_scheme(config, algo)
        return Quantization("modelopt", scheme, names, patterns, kv_dtype, head=scheme)
    listed = listed_layers(config)
    patterns += tuple((name, scheme) for name, scheme in listed.items() if is_pattern(name))
    modules = {name: scheme for name, scheme in listed.items() if not is_pattern(name)}
    return Quantization("modelopt", None, modules | names, patterns, kv_dtype, mixed=True)


def listed_layers(config: Config) -> dict[str, Scheme | None]:
    """ModelOpt's `quantized_layers`: a scheme per named module; thousands of them share a few algorithms."""
    chosen: dict[str, Scheme | None] = {}
    layers = config.sub("quantized_layers")
    known: dict[object, Scheme] = {}
    for name, entry in layers.values.items():
        if not isinstance(entry, dict):
            raise layers.fail(name, "must be an object", "correct the config")
        algo = entry.get("quant_algo")
        if not isinstance(algo, str) or algo not in known:
            known[algo] = modelopt_scheme(layers, Config(entry, layers.where).text("quant_algo"))
        chosen[name] = known[algo]
    return chosen


def bitsandbytes(config: Config) -> Quantization:
    ignored = ("llm_int8_skip_modules",)
    names, patterns = exceptions(names_of(config, *ignored))
    if config.flag("load_in_8bit"):
        return Quantization("bitsandbytes", Scheme("bnb_int8"), dict(names), patterns)
    double = config.flag("bnb_4bit_use_double_quant")
    return Quantization("bitsandbytes", Scheme("nf4_double" if double else "nf4", 64), dict(names), patterns)


def first_two(names: list[str]) -> str:
    more = f" and {len(names) - 2:,} more" if len(names) > 2 else ""
    return ", ".join(printable(name, 120) for name in names[:2]) + more


def list_problem(spec: ModelSpec, quantization: Quantization) -> str:
    """Describe what in the config's lists does not fit the model; empty if every entry matches one of its modules."""
    if quantization.default is not None and not (quantization.names or quantization.patterns):
        return ""
    from kvplan.models.listed import some_experts, unmatched

    if wrong := list(dict.fromkeys(unmatched(spec, quantization))):
        return f"quantization_config names {first_two(wrong)}, which match no tensor kvplan knows of {spec.model_type}"
    if some := list(dict.fromkeys(some_experts(spec, quantization))):
        return f"quantization_config names {first_two(some)}, but a layer's experts are stored as one"
    try:
        used = {
            scheme_of(quantization, index, weight.sources or (weight.name,), weight.name)
            for index, weights in enumerate(spec.layer_weights)
            for weight in weights
            if weight.quantizable
        }
    except UnsupportedModelError as parts:
        return str(parts)
    if used <= {None} and quantization.method != "experts_int8":
        return (
            f"quantization_config ({printable(quantization.method, 40)}) gives no layer of {spec.model_type} a scheme"
        )
    return ""
