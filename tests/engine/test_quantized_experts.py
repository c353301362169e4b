"""Quantized experts run as the float model of the weights they stand for, and take the bytes that were planned.

Each checkpoint is packed here, value by value, from the description of its format and in the layout in which such
models are published; the float model is what transformers makes of the dequantized weights.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.directory import read_spec
from engine.kernels import torch_backend
from engine.kernels.dequantize import e2m1, mxfp4_linear
from engine.kernels.matrices import Mxfp4Matrix, shape_of
from engine.loader import Checkpoint, NoWeights, RandomWeights
from engine.memory import nbytes
from engine.models import Model
from engine.tp import TensorParallel
from kvplan.core.errors import InvalidInputError, KvplanError, UsageError
from kvplan.models import catalog
from kvplan.servers.bundled.rules import EngineInputs, predict
from tests.engine.test_quantized import CONVERTERS, fp8_block
from tests.support import small_models
from tests.support.parts import paired, some
from tests.support.small_engines import ROUNDING, engine_for, greedy, random_tokens, saved_model

WHOLE = "model.safetensors"
META = torch.device("meta")
INPUTS = EngineInputs(
    total=80 * 2**30, dtype="bfloat16", kv_cache_dtype="bfloat16", block_size=16, max_model_len=4096,
    max_num_seqs=64, max_num_batched_tokens=2048, gpu_memory_utilization=0.9, num_blocks=100,
)  # fmt: skip
# e2m1 by the OCP's microscaling formats 1.0, table 5: the value of each code.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_CONFIG = {  # of openai/gpt-oss-20b
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


# --- packing ----------------------------------------------------------------------------------------------------------


def nearest_codes(x: torch.Tensor) -> torch.Tensor:
    """The e2m1 code of the value nearest to each."""
    return (x[..., None] - torch.tensor(E2M1)).abs().argmin(-1).to(torch.uint8)


def pairs(codes: torch.Tensor) -> torch.Tensor:
    """Two codes in each byte, the first in its lower half."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., inputs] -> (blocks [..., inputs / 32, 16], scales [..., inputs / 32], what they mean).

    The shared scale is the power of two below the largest, less e2m1's largest exponent of 2 (the same, section 6.3).
    """
    grouped = weight.unflatten(-1, (-1, 32))
    powers = grouped.abs().amax(-1).log2().floor() - 2
    codes = nearest_codes(grouped / 2.0 ** powers[..., None])
    meant = torch.tensor(E2M1)[codes.int()] * 2.0 ** powers[..., None]
    return pairs(codes), (powers + 127).to(torch.uint8), meant.flatten(-2)


@cache
def gpt_oss() -> tuple[Path, Path]:
    """(directory as OpenAI publishes them, directory of the float model it stands for); not to be written to."""
    plain = saved_model("gpt_oss")
    packed, meant = plain.parent / "gpt_oss mxfp4", plain.parent / "gpt_oss mxfp4 meant"
    floats, tensors = load_file(plain / WHOLE), {}
    for name, weight in list(floats.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = weight
            continue
        blocks, scales, wide = mxfp4(weight.transpose(1, 2))  # stored [experts, inputs, outputs] where it is plain
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = wide.transpose(1, 2).contiguous()
    write(plain, packed, tensors, {"quantization_config": MXFP4_CONFIG})
    write(plain, meant, floats, {})
    return packed, meant


FP8_BLOCK = [32, 64]  # published models have 128 x 128
EXCEPT = ["lm_head", *(f"model.layers.{i}.{part}" for i in range(3) for part in ("mlp.gate", "input_layernorm"))]
FP8_CONFIG = {  # of Qwen/Qwen3-30B-A3B-FP8 and deepseek-ai/DeepSeek-V3
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": FP8_BLOCK,
    "modules_to_not_convert": EXCEPT,
}  # fmt: skip
PROJECTION = re.compile(r"\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight$")


@cache
def fp8_blocks(family: str) -> tuple[Path, Path]:
    """As gpt_oss: every projection in blocks of fp8, attention's, kv_b_proj and the experts' too."""
    plain = saved_model(family)
    packed, meant = plain.parent / f"{family} fp8", plain.parent / f"{family} fp8 meant"
    floats, tensors = load_file(plain / WHOLE), {}
    for name, weight in list(floats.items()):
        if not PROJECTION.search(name):
            tensors[name] = weight
            continue
        stored, floats[name] = fp8_block(weight)
        tensors |= {name.removesuffix("weight") + suffix: tensor for suffix, tensor in stored.items()}
    write(plain, packed, tensors, {"quantization_config": FP8_CONFIG})
    write(plain, meant, floats, {})
    return packed, meant


def nvfp4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One scale for all brings the largest scale of 16 neighbors to fp8's 448, and e2m1's largest value is 6."""
    whole = weight.abs().max() / (6 * 448)
    grouped = weight.unflatten(-1, (-1, 16))
    scales = (grouped.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    group_scales = scales.float() * whole
    codes = nearest_codes(grouped / group_scales[..., None])
    meant = (torch.tensor(E2M1)[codes.int()] * group_scales[..., None]).flatten(-2)
    return {"values": pairs(codes.flatten(-2)), "scales": scales, "whole": whole}, meant


EXCEPT_NVFP4 = ["lm_head", "model.layers.*.mlp.gate"]
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": EXCEPT_NVFP4}
NVFP4_ARGS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
COMPRESSED: dict[str, Any] = {  # by llm-compressor
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "weights": {**NVFP4_ARGS, "dynamic": False},
            "input_activations": {**NVFP4_ARGS, "dynamic": "local"},
        }
    },
}  # fmt: skip


def by_modelopt(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "weight": tensors["values"], "weight_scale": tensors["scales"], "weight_scale_2": tensors["whole"],
        "input_scale": torch.tensor(0.01),
    }  # fmt: skip


def by_llm_compressor(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """It divides by the scale of all."""
    return {
        "weight_packed": tensors["values"], "weight_scale": tensors["scales"],
        "weight_global_scale": 1 / tensors["whole"].view(1), "input_global_scale": torch.tensor([100.0]),
    }  # fmt: skip


def by_llm_compressor_alone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Its NVFP4A16, whose activations stay as they are."""
    return {name: tensor for name, tensor in by_llm_compressor(tensors).items() if name != "input_global_scale"}


GROUP_0 = {**COMPRESSED["config_groups"]["group_0"], "input_activations": None}
WEIGHTS_ALONE = {**COMPRESSED, "config_groups": {"group_0": GROUP_0}}
NVFP4 = {
    "modelopt": (MODELOPT, by_modelopt),
    "compressed": (COMPRESSED, by_llm_compressor),
    "weights alone": (WEIGHTS_ALONE, by_llm_compressor_alone),
}


@cache
def nvfp4_model(family: str, writer: str) -> tuple[Path, Path]:
    """As fp8_blocks: every projection."""
    plain, (config, named) = saved_model(family), NVFP4[writer]
    packed, meant = (plain.parent / f"{family} nvfp4 {writer}{end}" for end in ("", " meant"))
    floats, tensors = load_file(plain / WHOLE), {}
    for name, weight in list(floats.items()):
        if not PROJECTION.search(name):
            tensors[name] = weight
            continue
        stored, floats[name] = nvfp4(weight)
        tensors |= {name.removesuffix("weight") + suffix: tensor for suffix, tensor in named(stored).items()}
    write(plain, packed, tensors, {"quantization_config": config})
    write(plain, meant, floats, {})
    return packed, meant


def write(plain: Path, folder: Path, tensors: dict[str, torch.Tensor], extra: dict[str, Any]) -> None:
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **extra}))
    save_file(tensors, folder / WHOLE, metadata={"format": "pt"})


CHECKPOINTS: dict[str, Callable[[], tuple[Path, Path]]] = {
    "mxfp4": gpt_oss,
    **{f"fp8 {family}": partial(fp8_blocks, family) for family in ("qwen3_moe", "deepseek_v3", "deepseek_v2")},
    "nvfp4 modelopt qwen3_moe": partial(nvfp4_model, "qwen3_moe", "modelopt"),
    "nvfp4 modelopt deepseek_v3": partial(nvfp4_model, "deepseek_v3", "modelopt"),
    "nvfp4 compressed qwen3_moe": partial(nvfp4_model, "qwen3_moe", "compressed"),
    "nvfp4 compressed llama": partial(nvfp4_model, "llama", "compressed"),
    "nvfp4 weights alone llama": partial(nvfp4_model, "llama", "weights alone"),
}


# --- what they compute ------------------------------------------------------------------------------------------------


def logits(folder: Path, text: list[int]) -> torch.Tensor:
    """[vocab_size] after the text."""
    engine = engine_for(folder)
    rows: list[torch.Tensor] = []
    plain = engine.runner.logits

    def recorder(arrays: Any) -> torch.Tensor:
        rows.append(plain(arrays))
        return rows[-1]

    engine.runner.logits = recorder  # type: ignore[method-assign]
    engine.generate([text], greedy(1))
    return rows[-1][0]


@torch.inference_mode()
def logits_by_transformers(model: Any, text: list[int]) -> torch.Tensor:
    answer: torch.Tensor = model(torch.tensor([text]), use_cache=False).logits[0, -1]
    return answer


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_model_of_quantized_experts_is_the_float_model_of_its_weights(name: str) -> None:
    packed, meant = CHECKPOINTS[name]()
    (text,) = random_tokens(40)
    ours = logits(packed, text)
    theirs = logits_by_transformers(small_models.load_reference(meant), text)
    assert (ours - theirs).abs().max() < ROUNDING * theirs.abs().max()
    plain = logits(saved_model(meant.name.split()[0]), text)  # so that it is seen what is stored
    assert (ours - plain).abs().max() > 10 * ROUNDING * plain.abs().max()


READ_BY_TRANSFORMERS = {
    "mxfp4": transformers.Mxfp4Config(dequantize=True),
    "fp8 qwen3_moe": transformers.FineGrainedFP8Config(weight_block_size=(32, 64), dequantize=True),
}  # it refuses blocks that are cut off, as DeepSeek's kv_a_proj_with_mqa has them


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_published_layout_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own reading of the packed checkpoint, which knows nothing of what was meant here."""
    reader = import_module("transformers.quantizers.quantizer_finegrained_fp8")
    monkeypatch.setattr(reader, "is_accelerate_available", lambda: True)  # asked for, and on a CPU not needed
    packed, _ = CHECKPOINTS[name]()
    model = small_models.AUTO.from_pretrained(
        packed, quantization_config=READ_BY_TRANSFORMERS[name], dtype=torch.float32, attn_implementation="eager",
        experts_implementation="eager",
    ).eval()  # fmt: skip
    (text,) = random_tokens(40, seed=1)
    theirs = logits_by_transformers(model, text)
    assert (logits(packed, text) - theirs).abs().max() < ROUNDING * theirs.abs().max()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_compressed_tensors_widens_the_published_blocks_alike(family: str) -> None:
    """Blocks that are cut off too: the last of kv_a_proj_with_mqa has 16 rows of 32."""
    packed, meant = fp8_blocks(family)
    targets = [r"re:.*_proj(_with_mqa)?$"]
    converter: Any = import_module(f"{CONVERTERS}.fp8block_dequantizer").FP8BlockDequantizer
    theirs = converter(targets=targets, weight_block_size=tuple(FP8_BLOCK), dtype=torch.float32).process(
        load_file(packed / WHOLE)
    )
    floats = load_file(meant / WHOLE)
    assert theirs.keys() == floats.keys()
    assert [name for name, weight in floats.items() if not torch.equal(theirs[name], weight)] == []


def test_compressed_tensors_reads_nvfp4_alike() -> None:
    """Its own decompression of what is stored, and its own reading of ModelOpt's names."""
    library: Any = import_module("compressed_tensors.compressors.nvfp4.base").NVFP4PackedCompressor
    schemes: Any = import_module("compressed_tensors.quantization")
    scheme = schemes.preset_name_to_scheme("NVFP4", ["Linear"])
    packed, meant = nvfp4_model("llama", "compressed")
    tensors, floats = load_file(packed / WHOLE), load_file(meant / WHOLE)
    names = [name.removesuffix("weight_packed") for name in tensors if name.endswith("weight_packed")]
    assert len(names) == 3 * 7
    for name in names:
        expert = {key.removeprefix(name): tensor for key, tensor in tensors.items() if key.startswith(name)}
        theirs = library.decompress(expert, scheme)["weight"].float()
        # It computes in the dtype of the scales' result, at least bfloat16's eight bits.
        assert ((theirs - floats[f"{name}weight"]).abs() <= floats[f"{name}weight"].abs() * 2**-8).all()


def test_codes_are_those_of_the_format() -> None:
    """All bytes: sixteen codes in each half; and transformers' own table."""
    theirs: list[float] = import_module("transformers.integrations.mxfp4").FP4_VALUES
    assert list(E2M1) == theirs
    wide = e2m1(torch.arange(256, dtype=torch.uint8)[:, None])
    assert wide.tolist() == [[E2M1[byte & 15], E2M1[byte >> 4]] for byte in range(256)]


def test_powers_of_two_reach_from_2_to_the_minus_127_to_2_to_the_127() -> None:
    """e8m0 (section 5.4.1): 2^(byte - 127), a row for each byte but 255, which is no number."""
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    values = torch.full((255, 16), 0x02, dtype=torch.uint8)  # 1 and 0 in turn
    x = torch.zeros(1, 32)
    x[0, 0] = 1
    (y,) = mxfp4_linear(x, values, scales)
    assert y.tolist() == [2.0 ** (byte - 127) for byte in range(255)]


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_quantized_experts_take_the_bytes_that_were_planned(name: str) -> None:
    packed, _ = CHECKPOINTS[name]()
    engine = engine_for(packed, dtype="bfloat16")
    planned = predict(read_spec(packed), replace(INPUTS, max_model_len=engine.max_model_len))
    assert engine.memory_report().weights == planned.weights
    assert engine.memory_report().buffers == planned.buffers


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_quantized_experts_take_the_bytes_of_their_file(name: str) -> None:
    packed, _ = CHECKPOINTS[name]()
    stored = {name: tensor.nbytes for name, tensor in load_file(packed / WHOLE).items() if "kv_b_proj" not in name}
    assert engine_for(packed).memory_report().weights == sum(stored.values())


# At real size, without memory. gpt-oss's inner 2880 makes two shares of 45 groups.
EVERY_RUN = [("gpt-oss-20b", 1), ("gpt-oss-120b", 2), ("qwen3-30b-a3b-fp8", 2), ("deepseek-v3", 4)]
REAL = ("gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b-fp8", "deepseek-v3")


@pytest.mark.parametrize("case", some([*product(REAL, (1, 2)), ("deepseek-v3", 4)], EVERY_RUN))
def test_real_models_of_quantized_experts_take_the_bytes_that_were_planned(case: tuple[str, int]) -> None:
    name, num_ranks = case
    spec, tp = catalog.load(name), TensorParallel(num_ranks - 1, num_ranks)
    model = Model(spec, NoWeights(), torch_backend, tp, torch.bfloat16, META, 4096)
    planned = predict(spec, replace(INPUTS, tensor_parallel_size=num_ranks))
    assert nbytes(model.weights) == planned.weights
    assert nbytes(list(model.buffers.values())) == planned.buffers


def test_deepseek_v3_weighs_what_vllm_holds_of_it() -> None:
    """85,140,130,848 bytes of parameters on each of eight ranks, of which kv_b_proj is not kept here: 61 layers of 16
    heads' 256 rows of 512, and a scale for each 128 x 128 (vLLM 0.33's own parameters, tests/facts/capacity.jsonl).
    """
    planned = predict(catalog.load("deepseek-v3"), replace(INPUTS, tensor_parallel_size=8))
    assert planned.weights == 85_140_130_848 - 61 * (4096 * 512 + 4 * 32 * 4)


def test_gpt_oss_20b_weighs_what_is_published() -> None:
    """metadata.total_size of openai/gpt-oss-20b's model.safetensors.index.json."""
    model = Model(catalog.load("gpt-oss-20b"), NoWeights(), torch_backend, TensorParallel(), torch.bfloat16, META, 4096)
    assert nbytes(model.weights) == 13_761_264_768


@pytest.mark.parametrize(("name", "dtype"), paired(CHECKPOINTS, ["float32", "bfloat16"]))
def test_experts_that_are_wide_for_a_moment_are_planned(name: str, dtype: str) -> None:
    """With two tokens they are most of the peak: seven times what a plain model has."""
    limits: dict[str, Any] = {"max_num_batched_tokens": 2, "max_num_seqs": 1, "max_model_len": 16, "block_size": 4}
    packed, _ = CHECKPOINTS[name]()
    measured = engine_for(packed, dtype=dtype, **limits).memory_report().activations
    inputs = replace(INPUTS, backend="torch", dtype=dtype, kv_cache_dtype=dtype, **limits)
    assert 0.9 * measured < predict(read_spec(packed), inputs).activations <= measured


# --- ranks ------------------------------------------------------------------------------------------------------------


def loaded(folder: Path, tp: TensorParallel) -> Model:
    with torch.inference_mode():
        return Model(read_spec(folder), Checkpoint(folder), torch_backend, tp, torch.float32, torch.device("cpu"), 64)


def widened(matrix: Any, expert: int) -> torch.Tensor:
    """[outputs, inputs] float32 of one expert, by multiplying the identity."""
    inputs = shape_of(matrix)[2]
    with torch.inference_mode():
        return torch_backend.expert_linear(torch.eye(inputs), matrix, None, expert).T


def test_two_ranks_hold_the_halves_of_the_experts() -> None:
    packed, meant = gpt_oss()
    floats = load_file(meant / WHOLE)
    name = "model.layers.1.mlp.experts"
    gate_up, down = (floats[f"{name}.{part}_proj"].transpose(1, 2) for part in ("gate_up", "down"))
    for rank in range(2):
        layer: Any = loaded(packed, TensorParallel(rank, 2)).layers[1]
        half = slice(32 * rank, 32 * rank + 32)
        experts = layer.mlp.experts
        for expert in (0, 7):
            expected = torch.cat([gate_up[expert, ::2][half], gate_up[expert, 1::2][half]])
            assert torch.equal(widened(experts.w13, expert), expected)
            assert torch.equal(widened(experts.w2, expert), down[expert][:, half])


@pytest.mark.parametrize("name", ["fp8 deepseek_v3", "nvfp4 modelopt qwen3_moe"])
def test_a_rank_of_two_holds_half_of_each_experts_channels(name: str) -> None:
    """32 inner channels: two groups of NVFP4, and one block of fp8, which two ranks cannot share."""
    packed, meant = CHECKPOINTS[name]()
    if name.startswith("fp8"):
        with pytest.raises(UsageError, match=r"cut through the blocks of"):
            loaded(packed, TensorParallel(1, 2))
        return
    floats = load_file(meant / WHOLE)
    experts = loaded_experts(packed, TensorParallel(1, 2))
    for expert in (0, 7):
        gate, up, down = (
            floats[f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        assert torch.equal(widened(experts.w13, expert), torch.cat([gate[16:], up[16:]]))
        assert torch.equal(widened(experts.w2, expert), down[:, 16:])


def loaded_experts(folder: Path, tp: TensorParallel) -> Any:
    layer: Any = loaded(folder, tp).layers[1]
    return layer.mlp.experts


def test_ranks_that_would_cut_a_group_of_experts_inputs_are_refused() -> None:
    """2880 in four: 720 are 22.5 groups. vLLM pads them; this engine does not."""
    with pytest.raises(UsageError, match=r"inputs 0 to 720 of .*experts.down_proj cut through the groups of 32"):
        Model(catalog.load("gpt-oss-20b"), NoWeights(), torch_backend, TensorParallel(0, 4), torch.bfloat16, META, 64)


# --- what is refused --------------------------------------------------------------------------------------------------


def changed(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any], name: str = "mxfp4") -> Path:
    """The checkpoint with some tensors edited."""
    packed, _ = CHECKPOINTS[name]()
    tensors = load_file(packed / WHOLE)
    edit(tensors)
    save_file(tensors, folder / WHOLE)
    (folder / "config.json").write_text((packed / "config.json").read_text())
    return folder


def refusal(folder: Path, kind: type[KvplanError]) -> str:
    with pytest.raises(kind) as error:
        engine_for(folder)
    text = str(error.value)
    assert "\n" not in text
    return text.replace(f"{folder}/", "").replace(str(folder), "DIR")


BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"
SCALES = "model.layers.1.mlp.experts.down_proj_scales"


def test_scales_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[SCALES][3, 5, 1] = 255

    assert refusal(changed(tmp_path, damage), InvalidInputError) == (
        f"{WHOLE}: tensor '{SCALES}' holds scales that are no numbers (1 of 1024 are 255); "
        "download it again, or quantize the model anew"
    )


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_2"])
def test_damaged_scales_of_nvfp4_are_named(suffix: str, tmp_path: Path) -> None:
    name = f"model.layers.1.mlp.experts.3.up_proj.{suffix}"

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.full_like(tensors[name].float(), float("nan")).to(tensors[name].dtype)

    text = refusal(changed(tmp_path, damage, "nvfp4 modelopt qwen3_moe"), InvalidInputError)
    assert text.startswith(f"{WHOLE}: tensor '{name}' holds scales that are ")


@pytest.mark.parametrize("name", ["nvfp4 modelopt qwen3_moe", "nvfp4 compressed qwen3_moe"])
def test_random_weights_in_nvfp4_are_as_large_as_plain_ones(name: str) -> None:
    """32,768 draws of a deviation of 0.02, which is off by 0.02 / sqrt(65,536)."""
    spec = read_spec(CHECKPOINTS[name]()[0])
    with torch.inference_mode():
        source = RandomWeights(1, torch.device("cpu"))
        model = Model(spec, source, torch_backend, TensorParallel(), torch.float32, torch.device("cpu"), 64)
    layer: Any = model.layers[0]
    whole = torch.stack([widened(layer.mlp.experts.w13, expert) for expert in range(8)])
    assert abs(whole.std().item() - 0.02) < 4 * 0.02 / 65_536**0.5


@pytest.mark.parametrize(
    ("name", "shape"), [(BLOCKS, [8, 64, 2, 8]), (BLOCKS, [8, 64, 32]), (SCALES, [8, 64, 4]), (SCALES, [64, 2])]
)
def test_experts_of_another_shape_are_named(name: str, shape: list[int], tmp_path: Path) -> None:
    folder = changed(tmp_path, lambda tensors: tensors.update({name: torch.zeros(shape, dtype=torch.uint8)}))
    text = refusal(folder, InvalidInputError)
    assert text.startswith(f"{WHOLE}: tensor '{name}' has shape {shape}, the config says [8, 64, 2")


def test_experts_that_are_missing_are_named(tmp_path: Path) -> None:
    text = refusal(changed(tmp_path, lambda tensors: tensors.pop(SCALES)), InvalidInputError)
    assert text == f"DIR: tensor '{SCALES}' is missing; the checkpoint is not complete"


def test_plain_experts_under_a_quantized_models_config_are_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path, lambda tensors: None)
    save_file(load_file(saved_model("gpt_oss") / WHOLE), folder / WHOLE)
    text = refusal(folder, InvalidInputError)
    assert "tensor 'model.layers.0.mlp.experts.gate_up_proj_blocks' is missing" in text


# --- random weights ---------------------------------------------------------------------------------------------------


def test_random_experts_are_about_as_large_as_random_plain_ones() -> None:
    """As near 0.02 as a power of two comes: (137 / 16)^0.5 of 2^-7 are 0.0229. Ranks have parts of one model."""
    spec = read_spec(gpt_oss()[0])

    def experts(tp: TensorParallel) -> Any:
        with torch.inference_mode():
            source = RandomWeights(1, torch.device("cpu"))
            layer: Any = Model(spec, source, torch_backend, tp, torch.float32, torch.device("cpu"), 64).layers[0]
        return layer.mlp.experts

    whole = torch.stack([widened(experts(TensorParallel()).w2, expert) for expert in range(8)])
    # 32,768 draws of which the deviation is off by 0.0229 / sqrt(65,536), and the mean by 0.0229 / sqrt(32,768).
    assert abs(whole.std().item() - (137 / 16) ** 0.5 / 128) < 4 * 0.0229 / 65_536**0.5
    assert abs(whole.mean().item()) < 4 * 0.0229 / 32_768**0.5
    halves = [widened(experts(TensorParallel(rank, 2)).w2, 3) for rank in range(2)]
    assert torch.equal(torch.cat(halves, 1), whole[3])


@pytest.mark.parametrize("name", some(CHECKPOINTS, ["fp8 deepseek_v3", "nvfp4 compressed qwen3_moe"]))
def test_a_dummy_model_of_quantized_experts_runs(name: str) -> None:
    engine = engine_for(CHECKPOINTS[name]()[0], load_format="dummy")
    (output,) = engine.generate(random_tokens(9), greedy(4))
    assert len(output.token_ids) == 4


def test_weights_hold_what_the_checkpoint_does() -> None:
    layer: Any = loaded(gpt_oss()[0], TensorParallel()).layers[0]
    assert isinstance(layer.mlp.experts.w13, Mxfp4Matrix)
    assert {tensor.dtype for tensor in (layer.mlp.experts.w13.values, layer.mlp.experts.w2.scales)} == {torch.uint8}
