"""Quantized checkpoints run as the float model of the weights they stand for, and take the bytes that were planned.

Each checkpoint is packed here, value by value, from the description of its format; the float model is what transformers
makes of the dequantized weights.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from engine import Engine, quantized
from engine.directory import read_spec
from engine.kernels import dequantize, load, torch_backend
from engine.layers import Mlp
from engine.loader import Checkpoint, NoWeights, RandomWeights
from engine.memory import nbytes
from engine.models import Model
from engine.quantized import Fp8Matrix, Int4Matrix, Matrix, product
from engine.tp import TensorParallel
from kvplan.core.errors import InvalidInputError, KvplanError, UnsupportedModelError, UsageError
from kvplan.models import catalog
from kvplan.models.spec import Scheme
from kvplan.servers.bundled.rules import EngineInputs, predict
from tests.support import kernel_reference as reference
from tests.support import small_models
from tests.support.parts import paired, some
from tests.support.small_engines import ROUNDING, engine_for, greedy, random_tokens, saved_model

WHOLE = "model.safetensors"
LINEAR = re.compile(r"\.(self_attn|mlp)\.\w+_proj\.weight$")
GROUP = 32
Packed = tuple[dict[str, torch.Tensor], torch.Tensor]  # (tensors after the module's name, the weight they stand for)


# --- packers: a weight [outputs, inputs] float32 -> what the format stores, and what that means -----------------------


def fp8_tensor(weight: torch.Tensor) -> Packed:
    """One float32 scale for all: value * scale."""
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def fp8_tensor_static(weight: torch.Tensor) -> Packed:
    tensors, meant = fp8_tensor(weight)
    return {**tensors, "weight_scale": tensors["weight_scale"].view(1), "input_scale": torch.tensor([0.02])}, meant


def fp8_channel(weight: torch.Tensor) -> Packed:
    """One scale for each row, in bfloat16 [outputs, 1] as llm-compressor writes it."""
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    values = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scales}, values.float() * scales.float()


def fp8_block(weight: torch.Tensor) -> Packed:
    """One scale for each block of 32 rows and 64 columns; blocks at the ends are cut off."""
    outputs, inputs = weight.shape
    scales = torch.zeros(math.ceil(outputs / 32), math.ceil(inputs / 64))
    values, meant = torch.zeros_like(weight).to(torch.float8_e4m3fn), torch.zeros_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(32 * i, 32 * i + 32), slice(64 * j, 64 * j + 64)
            scales[i, j] = weight[block].abs().max() / 448
            values[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[block] = values[block].float() * scales[i, j]
    return {"weight": values, "weight_scale_inv": scales}, meant


def four_bits(
    weight: torch.Tensor, group: int, lowest: int = 1, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values [inputs, outputs], zeros [groups, outputs] from `lowest`, scales alike, (value - zero) * scale)."""
    grouped = weight.T.reshape(-1, group, weight.shape[0])
    low, high = grouped.amin(1).clamp(max=0), grouped.amax(1).clamp(min=0)
    scales = ((high - low) / 15).to(dtype)
    zeros = (-low / scales.float()).round().clamp(lowest, 15).int()
    values = (grouped / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15).int()
    meant = (values - zeros[:, None]).float() * scales.float()[:, None]
    return values.flatten(0, 1), zeros, scales, meant.flatten(0, 1).T.contiguous()


def words(nibbles: Callable[[int, int, int], int], rows: int, columns: int) -> torch.Tensor:
    """int32 [rows, columns] of which nibble i, from the lowest, is nibbles(row, column, i)."""
    packed = torch.tensor(
        [
            [sum(nibbles(row, column, i) << (4 * i) for i in range(8)) for column in range(columns)]
            for row in range(rows)
        ]
    )
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the eight of a word, by nibble


def awq(weight: torch.Tensor, group: int = GROUP) -> Packed:
    """Words along the outputs, in an order of their own; zero points as they are (AutoAWQ, WQLinear_GEMM)."""
    values, zeros, scales, meant = four_bits(weight, group, lowest=0)

    def along_outputs(x: list[list[int]]) -> torch.Tensor:
        return words(lambda r, c, i: x[r][8 * c + AWQ_COLUMNS[i]], len(x), len(x[0]) // 8)

    tensors = {"qweight": along_outputs(values.tolist()), "qzeros": along_outputs(zeros.tolist()), "scales": scales}
    return tensors, meant


def gptq(weight: torch.Tensor, group: int = GROUP, less: int = 1, dtype: torch.dtype = torch.float16) -> Packed:
    """Words along the inputs, zero points less one along the outputs, both in order; g_idx names each input's group."""
    values, zeros, scales, meant = four_bits(weight, group, lowest=less, dtype=dtype)
    rows, points = values.tolist(), zeros.tolist()
    tensors = {
        "qweight": words(lambda r, c, i: rows[8 * r + i][c], len(rows) // 8, len(rows[0])),
        "qzeros": words(lambda r, c, i: points[r][8 * c + i] - less, len(points), len(points[0]) // 8),
        "scales": scales,
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group,
    }
    return tensors, meant


def gptq_column(weight: torch.Tensor) -> Packed:
    """One group for all inputs."""
    return gptq(weight, weight.shape[1])


def int4(weight: torch.Tensor, group: int = GROUP, *, has_zeros: bool = False, is_ordered: bool = False) -> Packed:
    """Words along the inputs, zero points (else all 8) in words along the outputs; scales and the rest by output.

    is_ordered  groups are of inputs from all over, the same for layers of as many (llm-compressor's actorder: group)
    """
    inputs = weight.shape[1]
    source = torch.Generator().manual_seed(inputs)
    index = torch.arange(inputs) // group
    index = index[torch.randperm(inputs, generator=source)] if is_ordered else index
    order = index.argsort(stable=True)
    values, zeros, scales, meant = four_bits(weight[:, order], group, lowest=0)
    if not has_zeros:
        grouped = weight[:, order].T.reshape(-1, group, weight.shape[0])
        scales, zeros = (grouped.abs().amax(1) / 7.5).half(), torch.full_like(zeros, 8)
        values = ((grouped / scales.float()[:, None]).round().clamp(-8, 7).int() + 8).flatten(0, 1)
        meant = ((values.view_as(grouped) - 8).float() * scales.float()[:, None]).flatten(0, 1).T
    back = order.argsort()
    rows, points = values[back].tolist(), zeros.tolist()
    tensors = {
        "weight_packed": words(lambda r, c, i: rows[8 * c + i][r], weight.shape[0], inputs // 8),
        "weight_scale": scales.T.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if has_zeros:
        tensors["weight_zero_point"] = words(lambda r, c, i: points[c][8 * r + i], weight.shape[0] // 8, len(points))
    if is_ordered:
        tensors["weight_g_idx"] = index.int()
    return tensors, meant[:, back].contiguous()


# --- checkpoints ------------------------------------------------------------------------------------------------------


def pack_quantized(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


def compressed(strategy: str, dynamic: bool) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True},
        "input_activations": {
            "num_bits": 8,
            "type": "float",
            "strategy": "token" if dynamic else "tensor",
            "dynamic": dynamic,
        },
    }
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}


@dataclass(frozen=True, slots=True)
class Format:
    """A checkpoint's quantization_config, and how it stores one weight."""

    config: dict[str, Any]
    pack: Callable[[torch.Tensor], Packed]


FORMATS = {
    "fp8 per tensor": Format({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_tensor),
    "fp8 per tensor, static": Format({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor_static),
    "fp8 per tensor, compressed": Format(compressed("tensor", dynamic=False), fp8_tensor_static),
    "fp8 per channel": Format(compressed("channel", dynamic=True), fp8_channel),
    "fp8 per block": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 64]}, fp8_block
    ),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq
    ),
    "gptq": Format(GPTQ, gptq),
    "gptq v2": Format({**GPTQ, "checkpoint_format": "gptq_v2"}, lambda weight: gptq(weight, less=0)),
    "gptq bfloat16": Format(GPTQ, lambda weight: gptq(weight, dtype=torch.bfloat16)),
    "gptq by column": Format({**GPTQ, "group_size": -1, "desc_act": True}, gptq_column),
    "int4": Format(pack_quantized(strategy="group", group_size=GROUP), int4),
    "int4 with zeros": Format(
        pack_quantized(strategy="group", group_size=GROUP, symmetric=False, actorder="weight"),
        lambda weight: int4(weight, has_zeros=True),
    ),
    "int4 by row": Format(pack_quantized(strategy="channel"), lambda weight: int4(weight, weight.shape[1])),
    "int4 ordered": Format(
        pack_quantized(strategy="group", group_size=GROUP, symmetric=False, actorder="group"),
        lambda weight: int4(weight, has_zeros=True, is_ordered=True),
    ),
}  # fmt: skip


@cache
def checkpoint(name: str, family: str) -> tuple[Path, Path]:
    """(directory of the quantized model, directory of the float model it stands for); not to be written to."""
    plain = wide_model() if family == "wide" else saved_model(family)
    packed, meant = plain.parent / f"{family} {name}", plain.parent / f"{family} {name} meant"
    write(FORMATS[name], plain, packed, meant)
    return packed, meant


def wide_model() -> Path:
    """A llama of which two ranks share whole groups and blocks."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**{**small_models.COMMON, **sizes})
    folder = saved_model("llama").parent / "wide"
    torch.manual_seed(0)
    small_models.AUTO.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def write(form: Format, plain: Path, packed: Path, meant: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    floats = load_file(plain / WHOLE)
    for key, weight in list(floats.items()):
        if LINEAR.search(key):
            stored, floats[key] = form.pack(weight)
            tensors |= {key.removesuffix("weight") + suffix: tensor for suffix, tensor in stored.items()}
        else:
            tensors[key] = weight
    for folder, weights, extra in ((packed, tensors, {"quantization_config": form.config}), (meant, floats, {})):
        folder.mkdir()
        config = json.loads((plain / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **extra}))
        save_file(weights, folder / WHOLE, metadata={"format": "pt"})


def logits(engine: Engine, text: list[int]) -> torch.Tensor:
    """[vocab_size] after the text."""
    logit_rows: list[torch.Tensor] = []
    plain = engine.runner.logits

    def recorder(arrays: Any) -> torch.Tensor:
        logit_rows.append(plain(arrays))
        return logit_rows[-1]

    engine.runner.logits = recorder  # type: ignore[method-assign]
    engine.generate([text], greedy(1))
    engine.runner.logits = plain  # type: ignore[method-assign]
    return logit_rows[-1][0]


@cache
def meant_by_transformers(name: str, family: str) -> Any:
    return small_models.load_reference(checkpoint(name, family)[1])


@pytest.mark.parametrize(("family", "name"), paired(["llama", "llama_bias", "qwen3"], FORMATS))
def test_a_quantized_model_is_the_float_model_of_its_weights(name: str, family: str) -> None:
    engine = engine_for(checkpoint(name, family)[0])
    (text,) = random_tokens(40)
    with torch.inference_mode():
        theirs = meant_by_transformers(name, family)(torch.tensor([text]), use_cache=False).logits[0, -1]
        ours = logits(engine, text)
    assert (ours - theirs).abs().max() < ROUNDING * theirs.abs().max()


@pytest.mark.parametrize("name", some(FORMATS, list(FORMATS)[1::3]))
def test_its_greedy_tokens_are_the_float_models(name: str) -> None:
    packed, meant = checkpoint(name, "llama")
    prompts = random_tokens(5, 17, 40)
    ours, theirs = (engine_for(folder).generate(prompts, greedy(24)) for folder in (packed, meant))
    assert [output.token_ids for output in ours] == [output.token_ids for output in theirs]


@pytest.mark.parametrize("name", FORMATS)
def test_quantizing_changes_the_model(name: str) -> None:
    """So that the comparisons above see what is stored: rounding to 8 or 4 bits is far above float32's."""
    packed, _ = checkpoint(name, "llama")
    (text,) = random_tokens(40)
    ours, plain = logits(engine_for(packed), text), logits(engine_for("llama"), text)
    assert (ours - plain).abs().max() > 10 * ROUNDING * plain.abs().max()


@pytest.mark.parametrize("rows", [1, 8, 24, 1000])
def test_weights_are_wide_a_few_rows_at_a_time(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which changes nothing but the order of sums."""
    monkeypatch.setattr(dequantize, "WIDE_BYTES", {"cpu": 4 * 96 * rows})
    source = torch.Generator().manual_seed(0)
    x = torch.randn(7, 96, generator=source)
    values = (torch.randn(40, 96, generator=source) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    row_scales, block_scales = torch.rand(40, generator=source), torch.rand(3, 2, generator=source)
    words = torch.randint(-(2**31), 2**31, (12, 40), dtype=torch.int32, generator=source)
    zeros = torch.randint(-(2**31), 2**31, (3, 5), dtype=torch.int32, generator=source)
    scales = torch.rand(3, 40, generator=source).half()
    wide_scales = block_scales.repeat_interleave(16, 0)[:40].repeat_interleave(64, 1)[:, :96]
    for output, exact in (
        (torch_backend.fp8_linear(x, values, row_scales), x.double() @ (values.double() * row_scales[:, None]).T),
        (
            torch_backend.fp8_block_linear(x, values, block_scales, (16, 64)),
            x.double() @ (values.double() * wide_scales).T,
        ),
        (torch_backend.int4_linear(x, words, scales, zeros), reference.int4_linear(x.double(), words, scales, zeros)),
    ):
        # 96 float32 products and their sums: 97 roundings of 2^-24 of their sizes together, which are less than 96
        # times the largest answer.
        assert (output - exact).abs().max() <= 97 * 2**-24 * 96 * exact.abs().max()


# --- against compressed-tensors, the library of one of the formats, which converts from others ------------------------

CONVERTERS = "compressed_tensors.entrypoints.convert.converters"


def test_compressed_tensors_reads_the_awq_words_alike() -> None:
    autoawq: Any = import_module(f"{CONVERTERS}.autoawq").AutoAWQConverter
    packed, _ = checkpoint("awq", "llama")
    tensors = load_file(packed / WHOLE)
    layer: Any = loaded(packed, TensorParallel()).layers[1]
    name = "model.layers.1.mlp.down_proj"
    scales = tensors[f"{name}.scales"]
    parts = autoawq.unpack_awq(tensors[f"{name}.qweight"], tensors[f"{name}.qzeros"], 4)
    values, zeros = (part.int() & 15 for part in autoawq.reverse_awq_order(*parts, 4))
    theirs = (values - zeros.repeat_interleave(GROUP, 0)).float() * scales.float().repeat_interleave(GROUP, 0)
    assert torch.equal(widened(layer.mlp.down_proj.weight), theirs.T)


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("int4")])
def test_compressed_tensors_unpacks_int4_alike(name: str) -> None:
    library: Any = import_module("compressed_tensors.compressors.pack_quantized.base").PackedQuantizationCompressor
    scheme_of: Any = import_module("compressed_tensors.quantization").QuantizationScheme
    packed, _ = checkpoint(name, "llama")
    layer: Any = loaded(packed, TensorParallel()).layers[1]
    group = FORMATS[name].config["config_groups"]["group_0"]
    for part, matrix in (("mlp.down_proj", layer.mlp.down_proj), ("self_attn.o_proj", layer.attention.o_proj)):
        start = f"model.layers.1.{part}."
        tensors = {k.removeprefix(start): x for k, x in load_file(packed / WHOLE).items() if k.startswith(start)}
        tensors["weight_scale"] = tensors["weight_scale"].float()  # else it rounds products to the scales' dtype
        if name == "int4 ordered":  # which this release unpacks as if there were no order: one input at a time
            index, groups = tensors.pop("weight_g_idx"), tensors["weight_scale"].shape[1]
            unpack: Any = import_module("compressed_tensors.compressors.pack_quantized.helpers").unpack_from_int32
            shape = tuple(tensors["weight_shape"].tolist())
            values = unpack(tensors["weight_packed"], 4, shape).float()
            zeros = unpack(tensors["weight_zero_point"], 4, (shape[0], groups), packed_dim=0).float()
            theirs = (values - zeros[:, index.long()]) * tensors["weight_scale"][:, index.long()]
        else:
            theirs = library.decompress(tensors, scheme_of(**group))["weight"]
        assert torch.equal(widened(matrix.weight), theirs)


def test_ranks_share_no_groups_of_inputs_from_all_over() -> None:
    with pytest.raises(UsageError, match=r"^tensor_parallel_size: groups of .*\.o_proj are of inputs from all over"):
        loaded(checkpoint("int4 ordered", "wide")[0], TensorParallel(0, 2))


@pytest.mark.parametrize(
    ("suffix", "edit", "text"),
    [
        ("weight_g_idx", lambda x: torch.zeros_like(x), "names groups that have not 32 inputs each"),
        ("weight_shape", lambda x: x.flip(0) + 1, "says [65, 65], the config [64, 64]"),
        ("weight_scale", lambda x: -x, "holds scales that are 0, negative or no finite numbers"),
    ],
)
def test_damaged_int4_is_named(suffix: str, edit: Callable[[torch.Tensor], Any], text: str, tmp_path: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q_PROJ}.{suffix}"] = edit(tensors[f"{Q_PROJ}.{suffix}"])

    assert text in refusal(changed("int4 ordered", tmp_path, damage), InvalidInputError)


def test_fused_layers_have_one_order_of_their_inputs(tmp_path: Path) -> None:
    def turn(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q_PROJ}.weight_g_idx"] = tensors[f"{Q_PROJ}.weight_g_idx"].flip(0)

    assert "group their inputs in different orders" in refusal(
        changed("int4 ordered", tmp_path, turn), UnsupportedModelError
    )


def test_compressed_tensors_widens_fp8_blocks_alike() -> None:
    converter: Any = import_module(f"{CONVERTERS}.fp8block_dequantizer").FP8BlockDequantizer
    packed, _ = checkpoint("fp8 per block", "llama")  # of down_proj's blocks of 64 columns, the second has 32
    layer: Any = loaded(packed, TensorParallel()).layers[1]
    name = "model.layers.1.mlp.down_proj"
    tensors = {key: tensor for key, tensor in load_file(packed / WHOLE).items() if key.startswith(name)}
    theirs = converter(targets=[name], weight_block_size=(32, 64), dtype=torch.float32).process(tensors)
    assert torch.equal(widened(layer.mlp.down_proj.weight), theirs[f"{name}.weight"])


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # on purpose: with dequantize
@pytest.mark.parametrize("name", ["fp8 per tensor, compressed", "fp8 per channel"])
def test_compressed_tensors_widens_fp8_alike(name: str) -> None:
    config = transformers.CompressedTensorsConfig(dequantize=True)
    packed, meant = checkpoint(name, "llama")
    theirs = small_models.AUTO.from_pretrained(packed, quantization_config=config, dtype=torch.float32).state_dict()
    floats = load_file(meant / WHOLE)
    assert theirs.keys() == floats.keys()
    for key, weight in floats.items():  # by the library's own rounding to the dtype of the scales
        assert ((theirs[key] - weight).abs() <= weight.abs() * (2**-8 if name == "fp8 per channel" else 0)).all()


# --- bytes ------------------------------------------------------------------------------------------------------------

META = torch.device("meta")
INPUTS = EngineInputs(
    total=80 * 2**30, dtype="bfloat16", kv_cache_dtype="bfloat16", block_size=16, max_model_len=4096,
    max_num_seqs=64, max_num_batched_tokens=2048, gpu_memory_utilization=0.9, num_blocks=100,
)  # fmt: skip
# One of each way to store dense layers, at real size.
CATALOG = (
    "llama-3.1-8b-awq", "llama-3.1-8b-fp8", "llama-3.1-8b-fp8-dynamic", "wizard-vicuna-30b-gptq", "qwen2.5-7b-awq",
    "qwen3-8b-fp8",
)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_takes_the_bytes_that_were_planned(name: str) -> None:
    packed, _ = checkpoint(name, "llama")
    engine = engine_for(packed, dtype="bfloat16")
    assert engine.memory_report().weights == predict(read_spec(packed), INPUTS).weights


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_takes_the_bytes_of_its_files(name: str) -> None:
    """But for what is converted (the float32 rest, here kept), and for what says nothing that is not known."""
    packed, _ = checkpoint(name, "llama")
    known = ("g_idx", "weight_shape")
    stored = {key: tensor.nbytes for key, tensor in load_file(packed / WHOLE).items() if not key.endswith(known)}
    widened = 2 if name == "fp8 per channel" else 0  # its bfloat16 scales are held in float32
    rows = 3 * (64 + 32 + 32 + 64 + 96 + 96 + 64)  # outputs of the linear layers
    assert engine_for(packed).memory_report().weights == sum(stored.values()) + widened * rows


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", CATALOG)
def test_real_models_take_the_bytes_that_were_planned(name: str, num_ranks: int) -> None:
    spec, tp = catalog.load(name), TensorParallel(num_ranks - 1, num_ranks)
    model = Model(spec, NoWeights(), torch_backend, tp, torch.bfloat16, META, 4096)
    planned = predict(spec, replace(INPUTS, tensor_parallel_size=num_ranks))
    assert nbytes(model.weights) == planned.weights
    assert nbytes(list(model.buffers.values())) == planned.buffers


@pytest.mark.parametrize(("name", "num_ranks", "rows"), [
    # Outputs of one layer's linear layers: 6144 + 4096 + 28672 + 4096; of two ranks each has half of those of the
    # layers that are cut by outputs, the first and the third.
    ("llama-3.1-8b-fp8", 1, 32 * 43_008),
    ("llama-3.1-8b-fp8", 2, 32 * 25_600),
    ("llama-3.1-8b-fp8-dynamic", 1, 0),  # has a scale for each row
    ("qwen3-8b-fp8", 1, 0),  # and for each block
    ("llama-3.1-8b-awq", 1, 0),
])  # fmt: skip
def test_scales_of_whole_tensors_are_spread_over_their_rows(name: str, num_ranks: int, rows: int) -> None:
    spec = catalog.load(name)
    planned = predict(spec, replace(INPUTS, tensor_parallel_size=num_ranks)).buffers
    assert planned == 4 * rows + 4096 * 128 * 4  # beside the rotary table of 4096 positions


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoints_buffers_are_those_that_were_planned(name: str) -> None:
    packed, _ = checkpoint(name, "llama")
    engine = engine_for(packed)
    inputs = replace(INPUTS, dtype="float32", max_model_len=engine.max_model_len)
    assert engine.memory_report().buffers == predict(read_spec(packed), inputs).buffers


class Operators(TorchDispatchMode):
    """Counts what torch is asked to do: each would be a launch of its own on a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in FORMATS if "fp8" in name])
def test_a_product_begins_with_nothing_but_the_kernel(name: str) -> None:
    input_scales: list[torch.Tensor | None] = []

    def fp8_linear(x: torch.Tensor, *tensors: Any, input_scale: torch.Tensor | None = None) -> torch.Tensor:
        input_scales.append(input_scale)
        return x

    layer: Any = loaded(checkpoint(name, "llama")[0], TensorParallel()).layers[0]
    x = torch.ones(1, 64)
    kernels: Any = SimpleNamespace(fp8_linear=fp8_linear, fp8_block_linear=fp8_linear)
    with torch.inference_mode(), Operators() as operators:
        for linear in (layer.attention.qkv_proj, layer.attention.o_proj):
            product(kernels, x, linear.weight, None)
    assert operators.names == []
    assert [scale is not None for scale in input_scales] == 2 * [name in STATIC]


STATIC = ("fp8 per tensor, static", "fp8 per tensor, compressed")


def test_fused_layers_divide_activations_by_their_largest_scale(tmp_path: Path) -> None:
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for part, scale in (("q", 0.02), ("k", 0.07), ("v", 0.05)):
            tensors[f"model.layers.1.self_attn.{part}_proj.input_scale"] = torch.tensor([scale])

    folder = changed("fp8 per tensor, static", tmp_path, widen)
    layer: Any = loaded(folder, TensorParallel()).layers[1]
    assert layer.attention.qkv_proj.weight.input_scale == torch.tensor(0.07)


def test_a_quantized_8b_weighs_what_is_worked_out_by_hand() -> None:
    # AWQ of Llama 3.1 8B: 32 layers of 218,103,808 parameters in linear layers (4096 x 6144 + 4096 x 4096 + 4096 x
    # 28672 + 14336 x 4096), half a byte each, and for each 128 of them 2 bytes of scale and half a byte of zero point;
    # embedding and head 2 x 128,256 x 4096 and 65 norms of 4096, in 16 bits.
    linear = 32 * 218_103_808
    expected = linear // 2 + linear // 128 * 5 // 2 + 2 * (2 * 128_256 * 4096 + 65 * 4096)
    model = Model(
        catalog.load("llama-3.1-8b-awq"), NoWeights(), torch_backend, TensorParallel(), torch.float16, META, 8
    )
    assert nbytes(model.weights) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["fp8 per tensor", "fp8 per block", "awq", "gptq", "int4"])
def test_weights_that_are_wide_for_a_moment_are_planned(name: str, dtype: str) -> None:
    """With few tokens they are the larger part of the peak; the rest is what a plain model misses too."""
    limits: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 96, "block_size": 4}
    inputs = replace(INPUTS, backend="torch", dtype=dtype, kv_cache_dtype=dtype, **limits)
    packed, _ = checkpoint(name, "llama")
    measured = engine_for(packed, dtype=dtype).memory_report().activations
    planned = predict(read_spec(packed), inputs).activations
    assert 0.9 * measured < planned <= measured


# --- ranks ------------------------------------------------------------------------------------------------------------


def loaded(folder: Path, tp: TensorParallel) -> Model:
    spec = read_spec(folder)
    with torch.inference_mode():
        return Model(spec, Checkpoint(folder), torch_backend, tp, torch.float32, torch.device("cpu"), 64)


def widened(matrix: Matrix) -> torch.Tensor:
    """[outputs, inputs] float32, by multiplying the identity."""
    assert not isinstance(matrix, torch.Tensor)
    inputs = 8 * matrix.words.shape[0] if isinstance(matrix, Int4Matrix) else matrix.values.shape[1]
    with torch.inference_mode():
        return product(torch_backend, torch.eye(inputs), matrix, None).T


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "int4 ordered"])
def test_two_ranks_hold_the_halves_of_the_weights(name: str) -> None:
    packed, meant = checkpoint(name, "wide")
    floats = load_file(meant / WHOLE)
    for rank in range(2):
        layer: Any = loaded(packed, TensorParallel(rank, 2)).layers[1]
        half = {width: slice(rank * width // 2, (rank + 1) * width // 2) for width in (128, 64, 256)}
        for matrix, names, is_columns in (
            (layer.attention.qkv_proj.weight, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), False),
            (layer.attention.o_proj.weight, ("self_attn.o_proj",), True),
            (layer.mlp.gate_up_proj.weight, ("mlp.gate_proj", "mlp.up_proj"), False),
            (layer.mlp.down_proj.weight, ("mlp.down_proj",), True),
        ):
            wholes = [floats[f"model.layers.1.{part}.weight"] for part in names]
            expected = [w[:, half[w.shape[1]]] if is_columns else w[half[w.shape[0]]] for w in wholes]
            assert torch.equal(widened(matrix), torch.cat(expected))


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("awq", "inputs 0 to 48 of model.layers.0.mlp.down_proj cut through the groups of 32"),
        ("gptq", "inputs 0 to 48 of model.layers.0.mlp.down_proj cut through the groups of 32"),
        ("fp8 per block", "rows 0 to 16 of model.layers.0.self_attn.k_proj cut through the blocks of 32"),
    ],
)
def test_ranks_that_would_cut_a_group_are_refused(name: str, cut: str) -> None:
    """96 inputs of the small model's down_proj, and 32 outputs of its k_proj, in halves."""
    with pytest.raises(UsageError, match=f"^tensor_parallel_size: {cut}.*; use fewer ranks$"):
        loaded(checkpoint(name, "llama")[0], TensorParallel(0, 2))


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_ranks_that_would_cut_a_word_are_refused(kind: Any) -> None:
    piece = quantized.Piece("layer.up_proj", 32, 64, slice(4, 8))
    with pytest.raises(UsageError, match=r"outputs 4 to 8 of layer.up_proj cut through the words of 8"):
        quantized.load(Scheme(kind, 32), kind, [piece], NoWeights(), torch.empty, torch.empty)


def test_one_group_for_all_inputs_is_whole_on_every_rank() -> None:
    """The small model's 96 inputs in halves: 48 are six words of eight, and no group of 32 is cut."""
    packed, meant = checkpoint("gptq by column", "llama")
    layer: Any = loaded(packed, TensorParallel(1, 2)).layers[0]
    expected = load_file(meant / WHOLE)["model.layers.0.mlp.down_proj.weight"][:, 48:]
    assert torch.equal(widened(layer.mlp.down_proj.weight), expected)


# --- what is refused --------------------------------------------------------------------------------------------------

Q_PROJ = "model.layers.1.self_attn.q_proj"


def changed(name: str, folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any], **config: Any) -> Path:
    """A checkpoint with some tensors and some of its quantization_config edited."""
    packed, _ = checkpoint(name, "llama")
    tensors, values = load_file(packed / WHOLE), json.loads((packed / "config.json").read_text())
    edit(tensors)
    values["quantization_config"] |= config
    save_file(tensors, folder / WHOLE)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def refusal(folder: Path, kind: type[KvplanError]) -> str:
    with pytest.raises(kind) as error:
        engine_for(folder)
    text = str(error.value)
    assert "\n" not in text
    return text.replace(f"{folder}/", "").replace(str(folder), "DIR")


RUNS = (
    "the engine runs unquantized ones, dense layers in fp8, NVFP4 or 4 bits of AWQ, GPTQ or compressed-tensors, and "
    "experts in blocks of fp8, NVFP4, or MXFP4 as gpt-oss has them"
)


@pytest.mark.parametrize(
    ("config", "how"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}, "gptq: gptq desc_act"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"}, "gptq: gptq marlin"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "modelopt: awq"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "modelopt: nvfp4 weight-only"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes: nf4"),
    ],
)
def test_what_is_not_run_is_refused_by_name(config: dict[str, Any], how: str, tmp_path: Path) -> None:
    folder = changed("gptq", tmp_path, lambda tensors: None)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    text = refusal(folder, UnsupportedModelError)
    assert text == f"{tmp_path.name}: its weights are quantized ({how} of self_attn.qkv_proj); {RUNS}"


@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("mixtral-8x7b-awq", "awq: awq of mlp.experts.w13"),
        ("llama-3.1-8b-w8a8", "compressed-tensors: int8_channel of self_attn.qkv_proj"),
    ],
)
def test_models_of_the_catalog_that_are_not_run_are_refused(model: str, how: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        quantized.check_runs(catalog.load(model))
    assert str(error.value) == f"{model}: its weights are quantized ({how}); {RUNS}"


def test_a_method_that_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = changed("gptq", tmp_path, lambda tensors: None, quant_method="qubit")
    assert "its weights are quantized (qubit)" in refusal(folder, UnsupportedModelError)


def test_groups_in_another_order_are_refused_though_the_config_says_nothing(tmp_path: Path) -> None:
    def shuffle(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q_PROJ}.g_idx"] = tensors[f"{Q_PROJ}.g_idx"].flip(0)

    assert refusal(changed("gptq", tmp_path, shuffle), UnsupportedModelError) == (
        f"{Q_PROJ}.g_idx: groups inputs in the order of their activations (desc_act); the engine runs groups of 32 "
        "neighbors only"
    )


def test_a_zero_point_that_packers_spoil_is_refused(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q_PROJ}.qzeros"][0, 0] |= 0xF0

    text = refusal(changed("gptq", tmp_path, spoil), InvalidInputError)
    assert text.startswith(f"{Q_PROJ}.qzeros holds a zero point of 0 less one, ")


@pytest.mark.parametrize(
    ("name", "suffix", "shape"),
    [
        ("awq", "qweight", [64, 4]),
        ("awq", "qzeros", [2, 4]),
        ("awq", "scales", [4, 64]),
        ("gptq", "qweight", [64, 8]),
        ("gptq", "g_idx", [32]),
        ("fp8 per tensor", "weight_scale", [2]),
        ("fp8 per channel", "weight_scale", [64, 2]),
        ("fp8 per tensor, static", "input_scale", [64]),
        ("fp8 per block", "weight_scale_inv", [2, 2]),
    ],
)
def test_a_tensor_of_another_shape_is_named(name: str, suffix: str, shape: list[int], tmp_path: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors[f"{Q_PROJ}.{suffix}"]
        tensors[f"{Q_PROJ}.{suffix}"] = torch.zeros(shape, dtype=tensor.dtype)

    text = refusal(changed(name, tmp_path, cut), InvalidInputError)
    assert text.startswith(f"{WHOLE}: tensor '{Q_PROJ}.{suffix}' has shape {shape}, the config says [")


@pytest.mark.parametrize("suffix", ["weight_scale", "weight"])
def test_a_tensor_that_is_missing_is_named(suffix: str, tmp_path: Path) -> None:
    folder = changed("fp8 per tensor", tmp_path, lambda tensors: tensors.pop(f"{Q_PROJ}.{suffix}"))
    assert (
        refusal(folder, InvalidInputError)
        == f"DIR: tensor '{Q_PROJ}.{suffix}' is missing; the checkpoint is not complete"
    )


def test_scales_that_are_not_where_the_index_says_are_named(tmp_path: Path) -> None:
    folder = changed("awq", tmp_path, lambda tensors: None)
    names = dict.fromkeys(load_file(folder / WHOLE), WHOLE) | {f"{Q_PROJ}.scales": "other.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    save_file({"x": torch.zeros(1)}, folder / "other.safetensors")
    text = refusal(folder, InvalidInputError)
    assert text.startswith(f"other.safetensors: tensor '{Q_PROJ}.scales' cannot be read (")


def test_scales_of_a_dtype_that_is_not_read_are_named(tmp_path: Path) -> None:
    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q_PROJ}.scales"] = tensors[f"{Q_PROJ}.scales"].to(torch.int8)

    text = refusal(changed("awq", tmp_path, narrow), UnsupportedModelError)
    assert text.startswith(f"{WHOLE}: tensor '{Q_PROJ}.scales' is stored as I8; the engine reads F64, F32, ")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("fp8 per tensor", "weight_scale"),
        ("fp8 per tensor, static", "input_scale"),
        ("fp8 per channel", "weight_scale"),
        ("fp8 per block", "weight_scale_inv"),
        ("awq", "scales"),
        ("gptq", "scales"),
        ("gptq bfloat16", "scales"),
    ],
)
def test_damaged_scales_are_named(name: str, suffix: str, value: float, tmp_path: Path) -> None:
    """One is enough, wherever it is; 4-bit groups of equal weights may have a scale of 0, and its sign is any."""

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q_PROJ}.{suffix}"].view(-1)[-1] = value

    folder = changed(name, tmp_path, damage)
    if suffix == "scales" and math.isfinite(value):
        engine_for(folder)
        return
    count = {"fp8 per channel": 64, "fp8 per block": 2, "awq": 128, "gptq": 128, "gptq bfloat16": 128}.get(name, 1)
    wrong = "are no finite numbers" if suffix == "scales" else "are 0, negative or no finite numbers"
    assert refusal(folder, InvalidInputError) == (
        f"{WHOLE}: tensor '{Q_PROJ}.{suffix}' holds scales that {wrong} (1 of {count}, {value:g} first); "
        "download it again, or quantize the model anew"
    )


def test_scales_that_the_config_does_not_speak_of_are_no_surprise_later(tmp_path: Path) -> None:
    folder = changed("fp8 per tensor, static", tmp_path, lambda tensors: None, activation_scheme="dynamic")
    assert "21 tensors have no place in the model the config describes" in refusal(folder, InvalidInputError)


def test_scales_of_several_dtypes_are_refused(tmp_path: Path) -> None:
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q_PROJ}.scales"] = tensors[f"{Q_PROJ}.scales"].bfloat16()

    text = refusal(changed("awq", tmp_path, widen), UnsupportedModelError)
    assert text.startswith(f"{Q_PROJ}.scales bfloat16, model.layers.1.self_attn.k_proj.scales float16, ")
    assert text.endswith(": the engine runs 4-bit weights with scales of one 16-bit dtype")


def test_layers_that_the_config_leaves_out_are_read_as_they_are(tmp_path: Path) -> None:
    """And scales of a KV cache, which here is not kept in fp8, are stepped over."""
    plain = load_file(saved_model("llama") / WHOLE)

    def restore(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("gate_proj", "up_proj"):
            del tensors[f"model.layers.2.mlp.{part}.weight_scale"]
            tensors[f"model.layers.2.mlp.{part}.weight"] = plain[f"model.layers.2.mlp.{part}.weight"]
        for part in ("k", "v"):
            tensors[f"model.layers.1.self_attn.{part}_proj.{part}_scale"] = torch.tensor(1.0)
            tensors[f"model.layers.2.self_attn.{part}_scale"] = torch.tensor([1.0])
            tensors[f"model.layers.0.self_attn.{part}_proj.output_scale"] = torch.tensor([1.0])
        tensors[f"{Q_PROJ}.input_scale_ub"] = torch.tensor([1200.0])

    left_out = ["model.layers.2.mlp.gate_proj", "model.layers.2.mlp.up_proj", "lm_head"]
    folder = changed("fp8 per tensor", tmp_path, restore, ignored_layers=left_out)
    engine = engine_for(folder)
    mlps = [layer.mlp for layer in engine.runner.model.layers]
    kinds = [type(mlp.gate_up_proj.weight) for mlp in mlps if isinstance(mlp, Mlp)]
    assert kinds == [Fp8Matrix, Fp8Matrix, torch.Tensor]
    planned = predict(read_spec(folder), replace(INPUTS, dtype="float32"))
    assert engine.memory_report().weights == planned.weights


def test_a_bias_of_zeros_that_gptq_packers_add_is_stepped_over(tmp_path: Path) -> None:
    folder = changed("gptq", tmp_path, lambda tensors: tensors.update({f"{Q_PROJ}.bias": torch.zeros(64)}))
    assert (
        engine_for(folder).memory_report().weights == engine_for(checkpoint("gptq", "llama")[0]).memory_report().weights
    )


def test_a_bias_that_the_model_does_not_have_is_left_over(tmp_path: Path) -> None:
    folder = changed("gptq", tmp_path, lambda tensors: tensors.update({f"{Q_PROJ}.bias": torch.ones(64)}))
    assert f"1 tensors have no place in the model the config describes ({Q_PROJ}.bias)" in refusal(
        folder, InvalidInputError
    )


# --- random weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "int4 ordered"])
def test_random_quantized_weights_are_as_large_as_random_plain_ones(name: str) -> None:
    """Normal around 0 with 0.02, and the same on every rank."""
    spec = read_spec(checkpoint(name, "wide")[0])

    def down_proj(tp: TensorParallel) -> torch.Tensor:
        source = RandomWeights(1, torch.device("cpu"))
        with torch.inference_mode():
            model = Model(spec, source, torch_backend, tp, torch.float32, torch.device("cpu"), 64)
        layer: Any = model.layers[0]
        return widened(layer.mlp.down_proj.weight)

    whole = down_proj(TensorParallel())
    assert torch.equal(torch.cat([down_proj(TensorParallel(rank, 2)) for rank in range(2)], 1), whole)
    # Of 32,768 draws deviation and mean are off by about 0.02 / sqrt(32,768), here within 4 times that; fp8 rounds them
    # by up to a sixteenth. Sixteen equally likely values deviate by sqrt((16^2 - 1) / 12) = 4.61 steps, and none of
    # them is their middle: a zero point lies half a step off.
    off = 4 * 0.02 / 32_768**0.5
    assert (whole.std() - 0.02).abs() < off + 0.02 / 16
    assert whole.mean().abs() < off + (0.0 if "fp8" in name else 0.02 * 0.5 / 4.61)
    assert whole.isfinite().all()


@pytest.mark.parametrize("name", ["fp8 per tensor, static", "awq"])
def test_a_dummy_model_runs(name: str) -> None:
    packed, _ = checkpoint(name, "llama")
    engine = engine_for(packed, load_format="dummy")
    (output,) = engine.generate(random_tokens(9), greedy(4))
    assert len(output.token_ids) == 4
    assert engine.memory_report().weights == engine_for(packed).memory_report().weights


# --- the Triton kernels -----------------------------------------------------------------------------------------------


def test_layers_multiply_by_the_triton_kernels_alike() -> None:
    """In the interpreter. float32 sums of 64 products in another order: 64 roundings of 2^-24 are 4e-6."""
    names = ("fp8 per tensor", "fp8 per tensor, static", "fp8 per channel", "fp8 per block", "awq", "gptq by column")
    folders = [str(checkpoint(name, "llama")[0]) for name in names]
    command = [sys.executable, "-m", "tests.support.quantized_run", *folders]
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=root, capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stderr
    differences = dict(zip(names, map(json.loads, run.stdout.splitlines()), strict=True))
    assert {name: far for name, far in differences.items() if not far < 1e-5} == {}


@pytest.mark.full
def test_nan_stays_nan_on_the_way_to_fp8() -> None:
    """On a GPU a minimum drops it unless told; the interpreter's never does, so what is compiled is read."""
    command = [sys.executable, "-m", "tests.support.quantized_run", "--ptx", "90"]
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "0"}, cwd=root, capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stderr
    # Sizes of a row are compared as whole numbers, of which those of NaN are the largest.
    assert json.loads(run.stdout) == {
        "own": ["max.NaN.f32", "max.s32", "min.NaN.f32"],
        "given": ["max.NaN.f32", "min.NaN.f32"],
    }


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@cache
def four_bit_product(
    inputs: int, outputs: int, group: int, dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """(x [300, inputs], words, scales, zeros), and the product in float64: made once for all numbers of tokens."""
    source = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (inputs // 8, outputs), dtype=torch.int32, generator=source)
    zeros = torch.randint(-(2**31), 2**31, (inputs // group, outputs // 8), dtype=torch.int32, generator=source)
    scales = (torch.randn(inputs // group, outputs, generator=source) * 0.2 * inputs**-0.5).half()
    x = torch.randn(300, inputs, generator=source).to(dtype)
    values = torch.cat([(words >> (4 * j)) & 15 for j in range(8)])
    points = torch.stack([(zeros[:, n // 8] >> (4 * (n % 8))) & 15 for n in range(outputs)], 1)
    group_index = torch.arange(inputs) // group
    rounded = ((values - points[group_index]).float() * scales.float()[group_index]).to(
        dtype
    )  # once, as the kernel does
    return (x, words, scales, zeros), x.double() @ rounded.double()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 17, 300])
@pytest.mark.parametrize(("inputs", "outputs", "group"), [(4096, 6144, 128), (14336, 4096, 128), (896, 1152, 64)])
def test_products_with_four_bits_agree_on_a_gpu(
    inputs: int, outputs: int, group: int, num_tokens: int, dtype: torch.dtype
) -> None:
    from tests.support.interpreter_run import against

    (x, *weights), exact = four_bit_product(inputs, outputs, group, dtype)
    got = load("triton", "cuda").int4_linear(*(tensor.cuda() for tensor in (x[:num_tokens], *weights))).cpu()
    error, tolerance = against(got, exact[:num_tokens])
    assert error <= tolerance


@cache
def fp8_product(
    input_scale: float | None, dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """(x [300, 4096], values, row scales), the product in float64, and that of all their sizes."""
    source = torch.Generator().manual_seed(0)
    inputs, outputs = 4096, 6144
    values = (torch.randn(outputs, inputs, generator=source) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    row_scales = torch.rand(outputs, generator=source) * 0.01 * inputs**-0.5
    x = torch.randn(300, inputs, generator=source).to(dtype)
    scale = None if input_scale is None else torch.tensor(input_scale)
    sizes = values.float().abs().to(torch.float8_e4m3fn)
    exact = reference.fp8_linear(x, values, row_scales, input_scale=scale)
    return (x, values, row_scales), exact, reference.fp8_linear(x.abs(), sizes, row_scales, input_scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 17, 300])
@pytest.mark.parametrize("input_scale", [None, 0.02])
def test_products_with_fp8_agree_on_a_gpu(input_scale: float | None, num_tokens: int, dtype: torch.dtype) -> None:
    """Tensor cores sum fp8 products in fewer bits than float32: beside rounding, 2^-13 of the terms' own size."""
    from tests.support.interpreter_run import against

    (x, *weights), exact, terms = fp8_product(input_scale, dtype)
    scale = None if input_scale is None else torch.tensor(input_scale).cuda()
    tensors = [tensor.cuda() for tensor in (x[:num_tokens], *weights)]
    got = load("triton", "cuda").fp8_linear(*tensors, input_scale=scale).cpu()
    error, tolerance = against(got, exact[:num_tokens])
    assert error <= tolerance + 2**-13 * terms[:num_tokens].max()


@pytest.mark.gpu
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("input_scale", [None, 0.02])
def test_of_nan_come_no_numbers_on_a_gpu(input_scale: float | None, number: float) -> None:
    """And the other tokens are none the worse. A given scale cuts infinity like every number that is too large."""
    x = torch.ones(3, 64, dtype=torch.bfloat16, device="cuda")
    x[1, 5] = number
    values = torch.ones(32, 64, device="cuda").to(torch.float8_e4m3fn)
    scale = None if input_scale is None else torch.tensor(input_scale, device="cuda")
    got = load("triton", "cuda").fp8_linear(x, values, torch.ones(32, device="cuda"), input_scale=scale)
    assert got[::2].isfinite().all()
    assert got[1].isnan().all() == (math.isnan(number) or input_scale is None)
