"""Ask a server's own code which quantized layers it creates, on which GPU and in which shapes.

    python -m benchmarks.start_quantization ask vllm HOME --gpu H100 [--only WORD] -o H100.jsonl
    python -m benchmarks.start_quantization ask vllm HOME --gpu A100 --like H100.jsonl -o A100.jsonl

HOME is the folder of the oracle (its venv, the servers' sources and the scripts that play a GPU). `ask` reads each of
CHECKPOINTS as the server does (its config classes, its checks of method, capability and dtype) and creates layers on
the meta device: column, fused column, row and whole linear layers, and fused experts, with one rank and with two; each
one's class chooses its kernel and creates its parameters, or refuses. Nothing is loaded or run: a kernel that fails
later is not seen. Asked are all ten capabilities in bfloat16 (float16 below 8.0, and on 9.0 too), and of shapes
the least aligned ones and a well aligned one (ENDS), then, if their answers differ, a grid. Derived is that shapes in
between answer as all ends do, that a grid of one GPU (--like) holds on another whose ends answer alike, and that what
explains all cells of a grid holds for every shape (start_table.py, which writes the table that plans look up).

`ask ... --methods` asks for lists on one GPU, as none depends on it: which methods a config may name, of those that
transformers or the server lists, which are deprecated, and of which vLLM's attention layers read scales of K and V.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

Json = dict[str, Any]
GPUS = {"V100": 70, "T4": 75, "A100": 80, "A10G": 86, "L40S": 89, "H100": 90, "B200": 100, "B300": 103,
        "RTX5090": 120, "GB10": 121}  # fmt: skip
BOTH_DTYPES = (90,)  # capabilities on which float16 is asked, too

# --- checkpoints: a quantization_config for every scheme that kvplan reads -------------------------------------------


def weights(bits: int, kind: str, strategy: str, **more: Any) -> Json:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | more


def inputs(bits: int, kind: str, strategy: str, **more: Any) -> Json:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": True} | more


def compressed(layout: str, stored: Json, computed: Json | None = None) -> Json:
    group = {"targets": ["Linear"], "weights": stored, "input_activations": computed, "format": layout}
    groups = {"a": group}
    return {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"], "config_groups": groups}


def integer_groups() -> Iterator[Json]:
    grids: list[Json] = [{"strategy": "group", "group_size": size} for size in (32, 64, 128)]
    for grid in [*grids, {"strategy": "channel"}]:
        for symmetric in (True, False):
            yield compressed("pack-quantized", weights(4, "int", symmetric=symmetric, **grid))
        yield compressed("pack-quantized", weights(4, "int", **grid), inputs(8, "float", "token"))
        yield compressed("pack-quantized", weights(4, "int", **grid), inputs(8, "int", "token"))
        if grid["strategy"] == "group":
            yield compressed("pack-quantized", weights(4, "int", actorder="group", **grid))
            yield compressed("pack-quantized", weights(8, "int", **grid))
    for symmetric in (True, False):
        yield compressed("pack-quantized", weights(8, "int", "channel", symmetric=symmetric))


def eight_bits() -> Iterator[Json]:
    for strategy, computed in itertools.product(("tensor", "channel"), (
        inputs(8, "float", "token"), inputs(8, "float", "tensor"), inputs(8, "float", "tensor", dynamic=False), None,
    )):  # fmt: skip
        yield compressed("float-quantized", weights(8, "float", strategy), computed)
    block = weights(8, "float", "block", block_structure=[128, 128])
    yield compressed("float-quantized", block, inputs(8, "float", "group", group_size=128))
    yield compressed("float-quantized", block)
    for strategy, computed in itertools.product(("tensor", "channel"), (
        inputs(8, "int", "token"), inputs(8, "int", "token", symmetric=False),
        inputs(8, "int", "tensor", dynamic=False), inputs(8, "int", "tensor", dynamic=False, symmetric=False),
    )):  # fmt: skip
        yield compressed("int-quantized", weights(8, "int", strategy), computed)


def four_bit_floats() -> Iterator[Json]:
    tensor_group = {"strategy": "tensor_group", "group_size": 16}
    four = {"num_bits": 4, "type": "float", "symmetric": True}
    yield compressed("nvfp4-pack-quantized", {**four, **tensor_group}, {**four, **tensor_group, "dynamic": "local"})
    yield compressed("nvfp4-pack-quantized", {**four, **tensor_group})
    micro = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    yield compressed("mxfp4-pack-quantized", {**four, **micro})
    yield compressed("mxfp4-pack-quantized", {**four, **micro}, {**four, **micro, "dynamic": True})
    yield {"quant_method": "mxfp4"}


def rare() -> Iterator[Json]:
    """AutoRound's and Quark's formats that kvplan reads."""
    for packing, bits, size in (*itertools.product(("gptq", "awq"), (4,), (32, 64, 128)), ("gptq", 8, 128)):
        for sym in (True, False):
            yield {"quant_method": "auto-round", "bits": bits, "group_size": size, "sym": sym, "data_type": "int",
                   "packing_format": f"auto_round:auto_{packing}"}  # fmt: skip
    for stored, static in itertools.product(("per_tensor", "per_channel"), (True, False)):
        weight = {"dtype": "fp8_e4m3", "qscheme": stored, "is_dynamic": False, "ch_axis": 0}
        computed = {"dtype": "fp8_e4m3", "qscheme": "per_tensor" if static else stored, "is_dynamic": not static}
        yield quark(weight, computed)
    yield quark(*({"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": dynamic, "ch_axis": -1,
                   "scale_format": "e8m0"} for dynamic in (False, True)))  # fmt: skip


def quark(weight: Json, computed: Json) -> Json:
    return {
        "quant_method": "quark", "exclude": ["lm_head"], "layer_quant_config": {}, "layer_type_quant_config": {},
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
        "global_quant_config": {"weight": weight, "input_tensors": computed, "output_tensors": None, "bias": None},
    }  # fmt: skip


def modelopt() -> Iterator[Json]:
    algos = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8", "W4A16_AWQ", "W4A8_AWQ")
    for algo in algos:
        listed = {"group_size": 16 if "NVFP4" in algo else 32 if algo == "MXFP8" else 128}
        yield {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"]} | listed
    for algo in ("FP8", "NVFP4", "W4A16_NVFP4", "MXFP8"):
        entry = {"quant_algo": algo, "group_size": 32 if algo == "MXFP8" else 16}
        layers = dict.fromkeys((*PREFIXES, *(f"{EXPERTS}.0.{name}" for name in PROJECTIONS), EXPERTS), entry)
        layers["model.layers.1.mlp.down_proj"] = {"quant_algo": "NVFP4", "group_size": 16}  # as in published ones
        yield {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers,
               "kv_cache_quant_algo": None}  # fmt: skip


def checkpoints() -> Iterator[Json]:
    yield {"quant_method": "fp8", "activation_scheme": "dynamic"}
    yield {"quant_method": "fp8", "activation_scheme": "static"}
    yield {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    yield {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    yield from integer_groups()
    yield from eight_bits()
    yield from four_bit_floats()
    for size, zeros in itertools.product((32, 64, 128, -1), (True, False)):
        yield {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": zeros, "version": "gemm"}
    for bits, size, ordered, sym in itertools.product((4, 8), (32, 64, 128, -1), (False, True), (True, False)):
        yield {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": ordered, "sym": sym}
    for bits, size, sym in itertools.product((4, 8), (32, 64, 128, -1), (True, False)):
        yield {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": False, "sym": sym,
               "checkpoint_format": "gptq_v2"}  # fmt: skip
    yield from modelopt()
    yield from rare()
    for eight in (False, True):
        yield {"quant_method": "bitsandbytes", "load_in_8bit": eight, "load_in_4bit": not eight,
               "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}  # fmt: skip
    yield from unread()


def unread() -> Iterator[Json]:
    """Formats whose weights kvplan cannot size, of methods that it reads otherwise."""
    for bits, size in itertools.product((2, 3), (32, 64, 128, -1)):
        yield {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": False, "sym": True}
    for bits in (2, 3, 8):
        yield {"quant_method": "awq", "bits": bits, "group_size": 128, "zero_point": True, "version": "gemm"}
    for bits in (2, 3):
        yield {"quant_method": "auto-round", "bits": bits, "group_size": 128, "sym": True, "data_type": "int",
               "packing_format": "auto_round:auto_gptq"}  # fmt: skip
    for algo in ("INT8_SQ", "W8A8_SQ_PER_CHANNEL", "INT4_AWQ"):
        yield {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"]}


ONLINE = ("fp8", "experts_int8", "mxfp8")  # --quantization for a checkpoint that is not quantized


# --- cells: layers of one checkpoint on one GPU ----------------------------------------------------------------------

PROJECTIONS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
PREFIXES = tuple(f"model.layers.0.mlp.{name}" for name in PROJECTIONS)
EXPERTS = "model.layers.0.mlp.experts"
OUTPUTS = sorted({m << v for m in (1, 3) for v in range(3, 10)} | {160, 288, 1076})
INPUTS = sorted({m << v for m in (1, 3) for v in range(4, 10)} | {160, 288, 1076})
PARTS = list(itertools.product((8, 16, 32, 64, 96, 128, 192, 256, 288, 1024), repeat=2))
WIDE = 1536  # inputs and outputs that every kernel takes
HIDDEN = (128, 192, 256, 288, 384, 512, 2880)
WIDTHS = (16, 32, 48, 64, 96, 128, 192, 256, 288, 384, 512, 704)
ACTIVATIONS = ("silu", "swigluoai", "relu2_no_mul")

ODD = [((8,), 16), ((24,), 48), ((1076,), 1076), ((288,), 160), ((64,), WIDE), ((WIDE,), 64), ((WIDE,), WIDE)]
ENDS = dict.fromkeys(("column", "row", "whole"), ODD) | {
    "fused": [
        ((8, 8), WIDE),
        ((96, 288), WIDE),
        ((64, 192), WIDE),
        ((288, 1024), WIDE),
        ((WIDE, WIDE), 16),
        ((WIDE, WIDE), 160),
        ((WIDE, WIDE), 1076),
        ((WIDE, WIDE), WIDE),
    ],
    "experts": [((16,), 288), ((48,), 128), ((704,), 2880), ((96,), 192), ((512,), 1024)],
}

Shape = tuple[tuple[int, ...], int]  # outputs of each part, inputs; of experts: width of each, inputs
Create = Callable[[str, Shape, int], None]  # kind of layer, its shape on a rank, ranks


def linear_shapes() -> dict[str, list[Shape]]:
    grid: list[Shape] = [((n,), k) for n in OUTPUTS for k in INPUTS]
    fused: list[Shape] = [*((parts, WIDE) for parts in PARTS), *(((WIDE, WIDE), k) for k in INPUTS)]
    return {"column": grid, "fused": fused, "row": grid, "whole": grid}


def reason(error: BaseException) -> str:
    """The server's text in one line, without what pydantic adds."""
    text = str(error).partition(" [type=")[0].split("Value error, ")[-1]
    return f"{type(error).__name__}: {' '.join(text.split())}"[:400]


def outcomes(
    create: Create, layer: str, shapes: Iterable[Shape], ranks: int, known: list[tuple[Shape, str]]
) -> list[tuple[Shape, str]]:
    """The server's refusal of each shape, empty if it starts: of the ends of the grid, and of all if these differ.

    known  answers of another GPU, which hold here, too, if those for the ends are the same
    """
    ends = [outcome(create, layer, shape, ranks) for shape in ENDS[layer.split()[0]]]
    if len(set(refusals(ends))) == 1:
        return ends
    if answered(ends) == answered(known[: len(ends)]) and len(known) > len(ends):
        return known
    return ends + [outcome(create, layer, shape, ranks) for shape in shapes]


def outcome(create: Create, layer: str, shape: Shape, ranks: int) -> tuple[Shape, str]:
    try:
        create(layer, shape, ranks)
        return shape, ""
    except Exception as error:
        return shape, reason(error)


def cells(create: Create, known: Mapping[tuple[str, int], list[tuple[Shape, str]]]) -> Iterator[Json]:
    """All layers of a checkpoint whose config the server accepts."""
    for layer, shapes in linear_shapes().items():
        for ranks in (1, 2) if layer != "whole" else (1,):
            answers = outcomes(create, layer, shapes, ranks, known.get((layer, ranks), []))
            yield {"layer": layer, "ranks": ranks, "answers": answers}
    grid: list[Shape] = [((i,), h) for h in HIDDEN for i in WIDTHS]
    usual = outcomes(create, "experts silu", grid, 2, known.get(("experts silu", 2), []))
    for activation, spread in itertools.product(ACTIVATIONS, ("", " spread")):
        layer = f"experts {activation}{spread}"
        answers = [outcome(create, layer, shape, 2) for shape in ENDS["experts"]]
        if refusals(answers) == refusals(usual[: len(answers)]):
            answers = usual
        elif len(set(refusals(answers))) == 2:
            answers += [outcome(create, layer, shape, 2) for shape in grid]
        yield {"layer": layer, "ranks": 2, "answers": answers}


def answered(answers: list[tuple[Shape, str]]) -> list[tuple[Shape, bool]]:
    return [(shape, bool(text)) for shape, text in answers]


def refusals(answers: list[tuple[Shape, str]]) -> list[bool]:
    return [bool(text) for _, text in answers]


# --- vLLM ------------------------------------------------------------------------------------------------------------

TINY: Json = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
}  # fmt: skip
GPT_OSS: Json = TINY | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64, "num_local_experts": 8,
    "num_experts_per_tok": 2, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


class Vllm:
    """vLLM's own code with a GPU played by the oracle's stand-ins."""

    def __init__(self, home: Path, gpu: str) -> None:
        start_scripts(home, "vllm", "vllm-src")
        import pretend  # type: ignore[import-not-found]

        self.pretend = pretend
        pretend.load_and_warm(gpu, str(home))

    def names(self) -> list[str]:
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS  # type: ignore[import-not-found]

        return list(QUANTIZATION_METHODS)

    def deprecated(self) -> list[str]:
        from vllm.model_executor.layers.quantization import DEPRECATED_QUANTIZATION_METHODS

        return list(DEPRECATED_QUANTIZATION_METHODS)

    def config(self, folder: str, dtype: str, online: str | None) -> Any:
        """vLLM's config; deprecated methods are allowed."""
        from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]

        arguments = {"model": folder, "skip_tokenizer_init": True, "load_format": "dummy", "dtype": dtype}
        arguments |= {"quantization": online} if online else {}
        return EngineArgs(**arguments, allow_deprecated_quantization=True).create_engine_config()

    def creator(self, config: Any, dtype: str) -> Create:
        import torch
        from vllm.config import set_current_vllm_config  # type: ignore[import-not-found]
        from vllm.model_executor.layers import linear  # type: ignore[import-not-found]
        from vllm.model_executor.layers.attention import Attention  # type: ignore[import-not-found]
        from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory  # type: ignore[import-not-found]
        from vllm.utils.torch_utils import set_default_torch_dtype  # type: ignore[import-not-found]

        parallel, common = config.parallel_config, {"quant_config": config.quant_config}

        def create(layer: str, shape: Shape, ranks: int) -> None:
            parts, k = shape
            outputs = [n * ranks for n in parts]
            match layer.split():
                case ["column"]:
                    linear.ColumnParallelLinear(k, outputs[0], bias=False, prefix=PREFIXES[2], **common)
                case ["fused"]:
                    linear.MergedColumnParallelLinear(k, outputs, bias=False, prefix=PREFIXES[0], **common)
                case ["row"]:
                    linear.RowParallelLinear(k * ranks, parts[0], bias=False, prefix=PREFIXES[3], **common)
                case ["whole"]:
                    linear.ReplicatedLinear(k, parts[0], bias=False, prefix=PREFIXES[2], **common)
                case ["cache"]:
                    config.compilation_config.static_forward_context.clear()
                    config.cache_config.cache_dtype = "fp8_e5m2"  # refused where scales of K and V are read
                    Attention(
                        4, 64, 0.125, num_kv_heads=2, cache_config=config.cache_config,
                        prefix="model.layers.0.self_attn.attn", **common,
                    )  # fmt: skip
                case ["experts", activation, *spread]:
                    config.compilation_config.static_forward_context.clear()
                    parallel.enable_expert_parallel = bool(spread)
                    names = ("gate_proj", "down_proj", None if activation.endswith("no_mul") else "up_proj")
                    width = parts[0] if spread else outputs[0]
                    FusedMoEFactory(
                        num_experts=8, top_k=2, hidden_size=k, intermediate_size=width, params_dtype=torch_dtype,
                        prefix=EXPERTS, activation=activation, ckpt_names=names,
                        has_bias=activation == "swigluoai", **common,
                    )  # fmt: skip

        torch_dtype = getattr(torch, dtype)
        played = (set_current_vllm_config(config), set_default_torch_dtype(torch_dtype), torch.device("meta"),
                  self.pretend._cuda_to_meta())  # fmt: skip

        def on_ranks(layer: str, shape: Shape, ranks: int) -> None:
            parallel.tensor_parallel_size = ranks
            ep = ranks if layer.endswith("spread") else 1
            self.pretend.install_groups(tp=ranks, pp=1, ep=ep, pp_rank=0, dcp=1, pcp=1)
            create(layer, shape, ranks)

        return within(played, on_ranks)


class Sglang:
    """SGLang's own code with a GPU played by the oracle's stand-ins."""

    def __init__(self, home: Path, gpu: str) -> None:
        start_scripts(home, "sglang", "sglang-src")
        import pretend  # type: ignore[import-not-found]

        pretend.load(gpu)
        import copy
        from types import ModuleType

        copy._deepcopy_dispatch[ModuleType] = lambda module, memo: module  # type: ignore[attr-defined]
        for module in list(sys.modules.values()):
            copy._deepcopy_dispatch[type(module)] = lambda copied, memo: copied  # type: ignore[attr-defined]

    def names(self) -> list[str]:
        from sglang.srt.layers.quantization import QUANTIZATION_METHODS  # type: ignore[import-not-found]

        return list(QUANTIZATION_METHODS)

    def deprecated(self) -> list[str]:
        return []

    def config(self, folder: str, dtype: str, online: str | None) -> Any:
        """SGLang's arguments and quantization by ranks and spread."""
        words = ["--model-path", folder, "--skip-tokenizer-init", "--dtype", dtype]
        words += ["--quantization", online] if online else []
        settings = {(1, False): self.published(words), (2, False): self.published([*words, "--tp-size", "2"])}
        settings[2, True] = self.published([*words, "--tp-size", "2", "--ep-size", "2"])
        return settings

    def published(self, words: list[str]) -> tuple[Any, Any]:
        from sglang.srt.configs.load_config import LoadConfig  # type: ignore[import-not-found]
        from sglang.srt.configs.model_config import ModelConfig  # type: ignore[import-not-found]
        from sglang.srt.model_loader.loader import _get_quantization_config  # type: ignore[import-not-found]
        from sglang.srt.runtime_context import SpawnRanks, publish  # type: ignore[import-not-found]
        from sglang.srt.server_args import prepare_server_args  # type: ignore[import-not-found]

        args = prepare_server_args(words)
        args.resolve_once()

        def enter() -> None:
            publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))

        enter()
        return enter, _get_quantization_config(ModelConfig.from_server_args(args), LoadConfig(load_format="dummy"))

    def creator(self, settings: Any, dtype: str) -> Create:
        import torch
        from sglang.srt.layers import linear  # type: ignore[import-not-found]
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE  # type: ignore[import-not-found]

        torch_dtype, last = getattr(torch, dtype), None

        def create(layer: str, shape: Shape, ranks: int) -> None:
            nonlocal last
            enter, quantization = settings[ranks, layer.endswith("spread")]
            if last is not enter:
                enter()
                last = enter
            parts, k = shape
            outputs, common = [n * ranks for n in parts], {"quant_config": quantization, "params_dtype": torch_dtype}
            match layer.split():
                case ["column"]:
                    linear.ColumnParallelLinear(k, outputs[0], bias=False, prefix=PREFIXES[2], **common)
                case ["fused"]:
                    linear.MergedColumnParallelLinear(k, outputs, bias=False, prefix=PREFIXES[0], **common)
                case ["row"]:
                    linear.RowParallelLinear(k * ranks, parts[0], bias=False, prefix=PREFIXES[3], **common)
                case ["whole"]:
                    linear.ReplicatedLinear(k, parts[0], bias=False, prefix=PREFIXES[2], **common)
                case ["experts", activation, *spread]:
                    FusedMoE(
                        num_experts=8, top_k=2, hidden_size=k, intermediate_size=parts[0] if spread else outputs[0],
                        layer_id=0, prefix=EXPERTS,
                        activation="relu2" if activation.endswith("no_mul") else "silu",
                        is_gated=not activation.endswith("no_mul"), with_bias=activation == "swigluoai",
                        gemm1_alpha=1.702 if activation == "swigluoai" else None, **common,
                    )  # fmt: skip

        return within((torch.device("meta"),), create)


def within(contexts: Iterable[AbstractContextManager[Any]], create: Create) -> Create:
    """`create`, once all contexts are entered; they stay so for the process's current checkpoint."""
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    create.leave = stack.close  # type: ignore[attr-defined]
    return create


def start_scripts(home: Path, server: str, source: str) -> None:
    """Put the oracle's scripts and the server's source on the path."""
    sys.path[:1] = [str(home / source), *(str(home / "scripts" / name) for name in (server, "common"))]
    from oracle_cases import ENVIRONMENT  # type: ignore[import-not-found]

    os.environ |= {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"


SERVERS = {"vllm": Vllm, "sglang": Sglang}


MODELOPT_NAMES = {"NVFP4": "modelopt_fp4", "MXFP8": "modelopt_mxfp8", "MIXED_PRECISION": "modelopt_mixed"}
UNKNOWN = "Unknown quantization method"
SCALES = "fp8_e5m2 kv-cache is not supported with fp8 checkpoints"
KV_STATED = {  # a cache in fp8, as compressed-tensors and ModelOpt state it
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
    "kv_cache_quant_algo": "FP8",
}


# --- asking ----------------------------------------------------------------------------------------------------------


def key_of(checkpoint: Json) -> str:
    """The checkpoint's scheme in the table's words."""
    from kvplan.models.families.config import Config  # only here: the oracle's Python lacks kvplan's packages
    from kvplan.models.quant import read_quantization
    from kvplan.servers.plans.quantized import scheme_keys

    holder = Config({"quantization_config": checkpoint}, "checkpoint")
    quantization = read_quantization(holder, Config({}, "text"))
    assert quantization is not None
    return scheme_keys(quantization)[0]


def questions(only: str) -> Iterator[Json]:
    """Every checkpoint with its key, or the method that quantizes one while loading."""
    seen: set[str] = set()
    for checkpoint in checkpoints():
        key = key_of(checkpoint)
        if key not in seen and re.search(only, key):
            seen.add(key)
            yield {"key": key, "checkpoint": checkpoint, "online": None}
    for method in ONLINE:
        if re.search(only, f"online {method}"):
            yield {"key": f"online {method}", "checkpoint": None, "online": method}


def methods(server: Any, questions: list[Json], write: Callable[[Json], None]) -> None:
    """Write which methods a config may name, and of which the server reads scales of K and V."""
    from transformers.utils.quantization_config import QuantizationMethod

    stated = [question["checkpoint"] for question in reversed(questions) if question["checkpoint"]]
    known = {checkpoint["quant_method"]: checkpoint for checkpoint in stated}
    for checkpoint in stated:
        if (name := MODELOPT_NAMES.get(checkpoint.get("quant_algo", ""))) is not None:
            known[name] = checkpoint | {"quant_method": name}
    names = {method.value for method in QuantizationMethod} | {*server.names(), *known}
    named, scaled = [], []
    for name in sorted(names):
        checkpoint = known.get(name, {"quant_method": name})
        text, scales = asked_of(server, checkpoint)
        print(f"{name}: {text or 'starts'}", file=sys.stderr, flush=True)
        named += [] if UNKNOWN in text else [name]
        scaled += [name] if scales else [f"{name}/stated"] if asked_of(server, checkpoint | KV_STATED)[1] else []
    write({"capabilities": [str(sm) for sm in GPUS.values()]})
    write({"methods": named})
    if deprecated := server.deprecated():
        write({"deprecated": deprecated})
    if scaled:
        write({"scales": scaled})


def asked_of(server: Any, checkpoint: Json) -> tuple[str, bool]:
    """(why a config is refused, whether scales of K and V are read)."""
    with tempfile.TemporaryDirectory() as folder:
        config = TINY | {"dtype": "bfloat16", "quantization_config": checkpoint}
        Path(folder, "config.json").write_text(json.dumps(config))
        try:
            settings = server.config(folder, "bfloat16", None)
        except (Exception, SystemExit) as error:
            return reason(error).replace(folder, ""), False
    create = server.creator(settings, "bfloat16")
    text = outcome(create, "cache", ((0,), 0), 1)[1] if isinstance(server, Vllm) else ""
    create.leave()
    return text, SCALES in text


def play(server: Any, gpu: str, questions: list[Json], like: list[Json], write: Callable[[Json], None]) -> None:
    """Answer the questions as on this GPU, in the oracle's Python; `like`: cells of another GPU."""
    known: dict[str, dict[tuple[str, int], list[tuple[Shape, str]]]] = defaultdict(dict)
    for row in like:
        if "answers" in row:
            answers = [((tuple(parts), k), text) for (parts, k), text in row["answers"]]
            known[row["key"]].setdefault((row["layer"], row["ranks"]), answers)
    sm = GPUS[gpu]
    dtypes = ("float16",) if sm < 80 else ("bfloat16", "float16") if sm in BOTH_DTYPES else ("bfloat16",)
    for question, dtype in itertools.product(questions, dtypes):
        start, key = time.time(), question["key"]
        head = {"key": key, "sm": sm, "dtype": dtype}
        with tempfile.TemporaryDirectory() as folder:
            config = dict(GPT_OSS if key.startswith("mxfp4") else TINY, dtype=dtype)
            config |= {"quantization_config": question["checkpoint"]} if question["checkpoint"] else {}
            Path(folder, "config.json").write_text(json.dumps(config))
            try:
                settings = server.config(folder, dtype, question["online"])
            except (Exception, SystemExit) as error:
                write(head | {"refused": reason(error).replace(folder, "")})
                continue
        create = server.creator(settings, dtype)
        for row in cells(create, known[key]):
            write(head | row)
        create.leave()
        print(f"{gpu} {dtype} {key}: {time.time() - start:.1f} s", file=sys.stderr, flush=True)


def ask(args: argparse.Namespace) -> None:
    """Run `play` in the oracle's Python."""
    home, out = args.home.resolve(), args.out.resolve()
    words = [
        *(["--like", args.like.resolve()] if args.like else []),
        *(["--methods"] if args.methods else []),
        "-o",
        out,
    ]
    words = [home / "venv" / "bin" / "python", __file__, "play", args.server, home, "--gpu", args.gpu, *words]
    subprocess.run([str(word) for word in words], input=json.dumps(list(questions(args.only))), text=True, check=True,
                   env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"})  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("ask", "play"):
        asking = commands.add_parser(name)
        asking.add_argument("server", choices=SERVERS)
        asking.add_argument("home", type=Path)
        asking.add_argument("--gpu", choices=GPUS, default="H100")
        asking.add_argument("--only", default="", help="a pattern of keys")
        asking.add_argument("--methods", action="store_true", help="ask for the lists of methods instead")
        asking.add_argument("--like", type=Path, help="cells of a GPU whose grids hold wherever the ends are equal")
        asking.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "ask":
        ask(args)
        return
    answers = json.load(sys.stdin)
    with args.out.open("w") as file:
        server = SERVERS[args.server](args.home, args.gpu)
        if args.methods:
            methods(server, answers, lambda row: print(json.dumps(row), file=file, flush=True))
            return
        like = [json.loads(line) for line in args.like.read_text().splitlines()] if args.like else []
        play(server, args.gpu, answers, like, lambda row: print(json.dumps(row), file=file, flush=True))


if __name__ == "__main__":
    main()
