"""Weights are read once, in part and exactly; a directory whose files do not belong together is refused by name."""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine import Engine, loader
from engine.directory import read_spec
from engine.kernels import torch_backend
from engine.loader import Checkpoint, Others, Part, RandomWeights
from engine.models import Model
from engine.tp import TensorParallel
from kvplan.core.errors import InvalidInputError, KvplanError, UnsupportedModelError
from kvplan.models.checkpoint import INDEX_NAME as INDEX
from tests.support import small_models
from tests.support.small_engines import engine_for, faults, greedy, random_tokens, saved_model

WHOLE = "model.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A llama's directory to be damaged: one file of weights."""
    return Path(shutil.copytree(saved_model("llama"), tmp_path / "llama"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same in several files and an index."""
    return Path(shutil.copytree(_sharded(saved_model("llama")), tmp_path / "llama"))


@cache
def _sharded(whole: Path) -> Path:
    return small_models.save_small_model("llama", whole.parent / "sharded", max_shard_size="100KB")


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Edit the tensors of the one file."""
    tensors = load_file(folder / WHOLE)
    edit(tensors)
    save_file(tensors, folder / WHOLE)


def refusal(folder: Path, kind: type[KvplanError] = InvalidInputError) -> str:
    """What loading the directory is refused with, less the directory's own path."""
    with pytest.raises(kind) as error:
        engine_for(folder)
    text = str(error.value)
    assert "\n" not in text
    return text.replace(f"{folder}/", "").replace(str(folder), "DIR")


# --- files that do not belong together -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "share", [0.0, 0.001, 0.5, 0.999], ids=["empty", "in the length", "in the middle", "at the end"]
)
def test_a_truncated_file_is_named(share: float, folder: Path) -> None:
    content = (folder / WHOLE).read_bytes()
    (folder / WHOLE).write_bytes(content[: int(share * len(content))])
    text = refusal(folder)
    assert text.startswith(f"{WHOLE} is damaged or truncated (")
    assert text.endswith("); download it again")


def test_a_file_of_something_else_is_named(folder: Path) -> None:
    (folder / WHOLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert refusal(folder).startswith(f"{WHOLE} is damaged or truncated (")


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 32)}))
    assert refusal(folder) == (
        f"{WHOLE}: tensor '{Q_PROJ}' has shape [64, 32], the config says [64, 64]; "
        "weights and config.json do not belong together"
    )


def test_a_vocabulary_of_another_size_is_named(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(250, 64)}))
    assert refusal(folder).startswith(
        f"{WHOLE}: tensor 'lm_head.weight' has shape [250, 64], the config says [256, 64];"
    )


@pytest.mark.parametrize("name", [Q_PROJ, "model.norm.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(name: str, folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop(name))
    assert refusal(folder) == f"DIR: tensor '{name}' is missing; the checkpoint is not complete"


def test_weights_without_an_embedding_are_no_decoders(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert refusal(folder) == "DIR has no tensor ...embed_tokens.weight; this is no decoder's weights"


def test_tensors_left_over_are_counted_and_named(folder: Path) -> None:
    extra = {f"model.layers.{i}.self_attn.q_proj.bias": torch.zeros(64) for i in range(3)} | {
        "adapter.a": torch.zeros(1)
    }
    change(folder, lambda tensors: tensors.update(extra))
    assert refusal(folder) == (
        "DIR: 4 tensors have no place in the model the config describes (adapter.a, "
        "model.layers.0.self_attn.q_proj.bias, model.layers.1.self_attn.q_proj.bias, ...); "
        "weights and config.json do not belong together"
    )


def test_layers_that_the_config_leaves_out_are_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    text = refusal(folder)
    assert text.startswith("DIR: 9 tensors have no place in the model the config describes (model.layers.2.")
    assert text.endswith("weights and config.json do not belong together")


def test_a_layer_is_no_draft_because_another_one_is(folder: Path) -> None:
    plain = "model.layers.3.mlp.up_proj.weight"
    both = {plain: torch.zeros(1), "model.layers.4.enorm.weight": torch.zeros(1)}
    change(folder, lambda tensors: tensors.update(both))
    assert refusal(folder).startswith(f"DIR: 1 tensors have no place in the model the config describes ({plain});")


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1].name
    (sharded / shard).unlink()
    assert refusal(sharded) == f"{shard} is named in model.safetensors.index.json and does not exist; download it"


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert refusal(sharded).startswith(f"{shard.name} is damaged or truncated (")


def test_a_tensor_that_its_shard_does_not_hold_is_named(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = next(file for file in sorted(set(index["weight_map"].values())) if file != index["weight_map"][Q_PROJ])
    index["weight_map"][Q_PROJ] = shard
    path.write_text(json.dumps(index))
    assert refusal(sharded).startswith(f"{shard}: tensor '{Q_PROJ}' cannot be read (")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "line 1 column 2: not JSON"),
        ("[]", "the top level is a list"),
        ("{}", "is not an index of safetensors files ("),
        ('{"weight_map": ["a"]}', "is not an index of safetensors files ("),
        ("[" * 10_000, "nested more than 100 levels deep"),
    ],
    ids=["cut off", "a list", "empty", "no map", "deep"],
)
def test_an_index_that_is_none_is_named(content: str, problem: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(content)
    text = refusal(sharded)
    assert text.startswith(INDEX)
    assert problem in text


@pytest.mark.parametrize("name", ["model.safetensors", INDEX, "generation_config.json", "tokenizer.json"])
def test_a_fifo_is_refused_instead_of_waited_for(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert refusal(folder) == f"{name}: not a regular file; copy its content to a file first"


@pytest.mark.parametrize("name", [INDEX, "generation_config.json", "tokenizer.json"])
def test_a_file_that_is_too_large_is_refused(name: str, folder: Path) -> None:
    (folder / name).touch()
    os.truncate(folder / name, 1 << 40)  # no disk has as much: it is a hole
    assert refusal(folder).startswith(f"{name}: too large (1,099,511,627,776 bytes, at most ")


@pytest.mark.parametrize("other", ["pytorch_model.bin", None], ids=["pickled", "no weights"])
def test_pickled_weights_are_not_opened(other: str | None, folder: Path) -> None:
    (folder / WHOLE).unlink()
    if other is not None:
        (folder / other).write_bytes(b"\x80\x04")
    assert refusal(folder) == "DIR holds no .safetensors file; pickled weights are not read, convert them first"


QUANTISED = {  # all of them: tests/engine/test_quantized.py
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}, "qweight"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, "qweight"),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "weight"),
}


@pytest.mark.parametrize("method", QUANTISED)
def test_plain_weights_under_a_quantized_models_config_are_refused(method: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    changes, first = QUANTISED[method]
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": changes}))
    name = f"model.layers.0.self_attn.q_proj.{first}"
    assert refusal(folder) == (
        f"{WHOLE}: tensor '{name}' is stored as F32, the config's quantization_config says F8_E4M3; "
        "weights and config.json do not belong together"
        if method == "fp8"
        else f"DIR: tensor '{name.replace('qweight', 'scales')}' is missing; the checkpoint is not complete"
    )


@pytest.mark.parametrize("content", [None, "{", "[]"], ids=["missing", "cut off", "a list"])
def test_a_config_that_cannot_be_read_is_named(content: str | None, folder: Path) -> None:
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    assert "config.json" in refusal(folder)


# --- files that do -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "name"), [(torch.int32, "I32"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_quantized_weights_of_which_the_config_says_nothing_are_refused(
    dtype: torch.dtype, name: str, folder: Path
) -> None:
    change(folder, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(dtype)}))
    assert refusal(folder, UnsupportedModelError) == (
        f"{WHOLE}: tensor '{Q_PROJ}' is stored as {name}, as quantized weights are, and the config's "
        "quantization_config does not say so; the engine reads no others"
    )


@pytest.mark.parametrize("mark", ["eh_proj", "enorm", "hnorm", "shared_head.norm", "embed_tokens"])
def test_what_lies_beside_the_decoder_is_stepped_over(mark: str, folder: Path) -> None:
    beside = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        f"model.layers.3.{mark}.weight": torch.zeros(64, 128),  # a draft layer after the last of 3
        "model.layers.3.self_attn.q_proj.weight": torch.zeros(64, 64),
        "vision_tower.patch_embed.weight": torch.zeros(4, 4),
    }
    change(folder, lambda tensors: tensors.update(beside))
    assert faults("llama", engine_for(folder).generate(random_tokens(9), greedy(8)), 8) == []


def test_qwen3_nexts_layers_for_further_tokens_are_skipped_as_transformers_skips_them(tmp_path: Path) -> None:
    """The Hub counts 81,324,862,720 parameters in Qwen3-Next-80B-A3B, transformers' class 79,674,391,296 without them.

    1,650,471,424 more is one layer of attention with experts, `fc` and three norms: 512 * 3 * 2048 * 512 of experts,
    513 * 2048 of their gates, 3 * 2048 * 512 + 2048 * (16 * 512 + 2 * 512 + 16 * 256) + 2 * 256 of the shared expert
    and attention, 2 * 2048 * 2048 of fc, 5 * 2048 of norms.
    """
    folder = small_models.save_small_model("qwen3_next", tmp_path / "qwen3_next")
    alone = engine_for(folder, enable_prefix_caching=False).generate(random_tokens(9), greedy(8))[0].token_ids
    layer = "model.layers.3."  # with attention

    def add(tensors: dict[str, torch.Tensor]) -> None:
        copies = {name: x.clone() for name, x in tensors.items() if name.startswith(layer)}
        tensors.update({"mtp.layers.0." + name.removeprefix(layer): x for name, x in copies.items()})
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        tensors.update({f"mtp.{norm}.weight": torch.zeros(64) for norm in norms})
        tensors["mtp.fc.weight"] = torch.zeros(64, 128)
        tensors["mtp.embed_tokens.weight"] = torch.zeros(8, 64)  # where a config says mtp_use_dedicated_embeddings

    assert any(name.startswith(layer + "self_attn.") for name in load_file(folder / WHOLE))
    change(folder, add)
    assert unexpected_keys(folder) == set()
    assert engine_for(folder, enable_prefix_caching=False).generate(random_tokens(9), greedy(8))[0].token_ids == alone
    change(folder, lambda tensors: tensors.update({"other.fc.weight": torch.zeros(1)}))
    assert unexpected_keys(folder) == {"other.fc.weight"}
    with pytest.raises(InvalidInputError, match=r"1 tensors have no place .* \(other\.fc\.weight\)"):
        engine_for(folder, enable_prefix_caching=False)


def unexpected_keys(folder: Path) -> set[str]:
    """The tensors that transformers reports as left over."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return set(report["unexpected_keys"])


def test_a_tied_model_may_carry_its_head_twice(tmp_path: Path) -> None:
    tied = small_models.save_small_model("llama_tied", tmp_path / "tied")
    plain = engine_for(tied).generate(random_tokens(9), greedy(8))[0]
    change(tied, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert engine_for(tied).generate(random_tokens(9), greedy(8))[0].token_ids == plain.token_ids


def test_a_text_model_inside_a_larger_one_is_found(folder: Path) -> None:
    def nest(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors["language_model." + name] = tensors.pop(name)

    change(folder, nest)
    assert faults("llama", engine_for(folder).generate(random_tokens(9), greedy(8)), 8) == []


def test_weights_of_another_dtype_are_converted(folder: Path) -> None:
    exact = load_file(folder / WHOLE)[Q_PROJ].bfloat16()
    change(folder, lambda tensors: tensors.update({name: x.bfloat16() for name, x in tensors.items()}))
    engine = engine_for(folder)
    assert torch.equal(q_proj(engine), exact.float())
    halves = engine_for(folder, dtype="bfloat16")
    assert torch.equal(q_proj(halves), exact)
    assert 2 * halves.memory_report().weights == engine.memory_report().weights


def q_proj(engine: Engine) -> torch.Tensor:
    """Layer 1's queries: the first 64 rows of the fused projection."""
    attention: Any = engine.runner.model.layers[1].attention
    rows: torch.Tensor = attention.qkv_proj.weight[:64]
    return rows


@pytest.mark.parametrize(
    "part",
    [(), (slice(16, 32), slice(None)), (slice(None), slice(8, 24)), (slice(1, 60, 2), slice(None)),
     (slice(None), slice(4, 20, 3))],
    ids=["all", "rows", "columns", "every second row", "every third column"],
)  # fmt: skip
def test_a_part_of_a_tensor_is_that_part(part: tuple[slice, ...], folder: Path) -> None:
    whole = load_file(folder / WHOLE)[Q_PROJ]
    out = torch.full(whole[part].shape, float("nan"))
    Checkpoint(folder).fill(out, Q_PROJ, (64, 64), part)
    assert torch.equal(out, whole[part])


def test_random_weights_are_a_seeds() -> None:
    def filled(seed: int, name: str) -> torch.Tensor:
        out = torch.full((40, 50), float("nan"))
        RandomWeights(seed, torch.device("cpu")).fill(out, name, (40, 50))
        return out

    assert torch.equal(filled(1, "a.weight"), filled(1, "a.weight"))
    assert not torch.equal(filled(1, "a.weight"), filled(2, "a.weight"))
    # 2,000 draws: their mean is off by 0.02 / sqrt(2,000), here within 4 times that
    assert filled(1, "a.weight").mean().abs() < 4 * 0.02 / 2_000**0.5
    assert torch.equal(filled(1, "model.layers.0.input_layernorm.weight"), torch.ones(40, 50))


@dataclass(frozen=True, slots=True)
class Noted:
    """Random weights that remember what they were asked for: name -> (whole shape, part, what was filled in)."""

    weights: RandomWeights
    parts: dict[str, list[tuple[tuple[int, ...], Part, torch.Tensor]]] = field(default_factory=dict)

    def fill(self, out: torch.Tensor, name: str, shape: tuple[int, ...], part: Part = ()) -> None:
        self.weights.fill(out, name, shape, part)
        self.parts.setdefault(name, []).append((shape, part, out))

    def dtype_of(self, name: str) -> torch.dtype | None:
        return self.weights.dtype_of(name)

    def place(self, name: str) -> str:
        return self.weights.place(name)

    def finish(self, num_layers: int, others: Others | None = None) -> None:
        self.weights.finish(num_layers, others)


def random_tensors(family: str, tp: TensorParallel) -> dict[str, torch.Tensor]:
    """Each whole tensor of a family's small model as this rank holds it: NaN where it does not."""
    spec = read_spec(saved_model(family))
    noted = Noted(RandomWeights(1, torch.device("cpu")))
    Model(spec, noted, torch_backend, tp, torch.float32, torch.device("cpu"), 64)
    wholes = {}
    for name, parts in noted.parts.items():
        wholes[name] = torch.full(parts[0][0], float("nan"))
        for _, part, out in parts:
            wholes[name][part] = out
    return wholes


LAYER = "model.layers.1."
# What a rank of two holds half of, by rows and by columns, and what it holds whole.
HALVES = {
    "llama": ["self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"],
    "mixtral": ["block_sparse_moe.experts.2.w1.weight", "block_sparse_moe.experts.2.w2.weight"],
    "gpt_oss": ["self_attn.sinks", "self_attn.q_proj.bias", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "deepseek_v3": ["self_attn.kv_b_proj.weight", "self_attn.o_proj.weight"],
}
WHOLES = {
    "llama": ["input_layernorm.weight"],
    "mixtral": ["block_sparse_moe.gate.weight"],
    "gpt_oss": ["mlp.router.weight", "mlp.router.bias", "mlp.experts.down_proj_bias"],
    "deepseek_v3": ["self_attn.kv_a_proj_with_mqa.weight"],
}


@pytest.mark.parametrize("block", [loader.BLOCK_ELEMENTS, 1_000], ids=["in one block", "in many blocks"])
@pytest.mark.parametrize("family", HALVES)
def test_random_ranks_together_hold_the_model_of_one(family: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "BLOCK_ELEMENTS", block)
    alone = random_tensors(family, TensorParallel())
    ranks = [random_tensors(family, TensorParallel(rank, 2)) for rank in range(2)]
    masks = [{name: ~tensor.isnan() for name, tensor in rank.items()} for rank in ranks]
    assert alone.keys() == ranks[0].keys() == ranks[1].keys()
    for name, whole in alone.items():
        assert not whole.isnan().any()
        assert (masks[0][name] | masks[1][name]).all()
        for rank, mine in zip(ranks, masks, strict=True):
            assert torch.equal(rank[name][mine[name]], whole[mine[name]])
    shares = {name: tuple(mine[name].double().mean().item() for mine in masks) for name in alone}
    assert shares["model.embed_tokens.weight"] == (0.5, 0.5)
    assert [shares[LAYER + name] for name in HALVES[family]] == [(0.5, 0.5)] * len(HALVES[family])
    assert [shares[LAYER + name] for name in WHOLES[family]] == [(1, 1)] * len(WHOLES[family])


def test_a_random_tensor_is_its_names_whatever_was_filled_before() -> None:
    def filled(*names: str) -> dict[str, torch.Tensor]:
        weights, tensors = RandomWeights(1, torch.device("cpu")), {name: torch.empty(40, 50) for name in names}
        for name, tensor in tensors.items():
            weights.fill(tensor, name, (40, 50))
        return tensors

    forwards, backwards = filled("a.weight", "b.weight"), filled("b.weight", "a.weight")
    assert torch.equal(forwards["a.weight"], backwards["a.weight"])
    assert torch.equal(forwards["b.weight"], backwards["b.weight"])
    assert not torch.equal(forwards["a.weight"], forwards["b.weight"])


def test_no_row_of_a_random_tensor_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "BLOCK_ELEMENTS", 100)  # two rows
    out = torch.empty(40, 50)
    RandomWeights(1, torch.device("cpu")).fill(out, "a.weight", (40, 50))
    assert len({tuple(row) for row in out.tolist()}) == 40


@pytest.mark.parametrize(
    "part",
    [(slice(3, 31), slice(None)), (slice(None), slice(8, 24)), (slice(1, 40, 7), slice(4, 20, 3)), (slice(5, 5),)],
    ids=["rows", "columns", "every so many of both", "nothing"],
)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["contiguous", "transposed"])
def test_a_part_of_a_random_tensor_is_that_part(
    part: Part, order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "BLOCK_ELEMENTS", 1_000)  # two rows
    weights, whole = RandomWeights(1, torch.device("cpu")), torch.empty(40, 50, 10)
    weights.fill(whole, "a.weight", (40, 50, 10))
    expected = whole[part]
    # The same shape, its elements elsewhere in memory.
    out = torch.full([expected.shape[i] for i in order], float("nan")).permute(order)
    weights.fill(out, "a.weight", (40, 50, 10), part)
    assert torch.equal(out, expected)


def test_a_whole_random_tensor_is_filled_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "BLOCK_ELEMENTS", 100)
    out = torch.empty(41, 50)
    monkeypatch.delattr(torch, "empty")
    RandomWeights(1, torch.device("cpu")).fill(out, "a.weight", (41, 50), (slice(0, 41), slice(None)))
    assert out.std() == pytest.approx(0.02, rel=4 / (2 * 2_050) ** 0.5)  # 4 standard errors of 2,050 draws
