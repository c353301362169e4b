"""Adapters and drafts beside a model, and --fit with a draft, against the answers of llama.cpp's own code.

Source of the rows: llama.cpp at commit 0c1e57098 with CUDA devices played to it, which loads a model, then adapters of
zeros (and reserves its graph again with them) or a draft, as llama-server does, and reports its buffers.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import InvalidInputError, UnsupportedModelError
from kvplan.models import catalog
from kvplan.models.ggml_types import tensor_bytes
from kvplan.models.gguf_model import GGUFModel, GGUFTensor, gguf_of
from kvplan.models.tensors import Checkpoint
from kvplan.servers.llamacpp.beside import Beside, adapter_tensors, placed, tower_tensors
from kvplan.servers.llamacpp.fit import fit
from kvplan.servers.llamacpp.measure import Server
from kvplan.servers.llamacpp.placement import place
from kvplan.servers.llamacpp.settings import MIB, Device, Settings
from kvplan.servers.llamacpp.shape import shape_of
from kvplan.servers.llamacpp.size import fitted
from tests.oracles import read_lines
from tests.support.llamacpp_rows import device, fit_differences, label, settings_of

ROWS = read_lines(Path(__file__).parents[2] / "facts/llamacpp_beside.jsonl")
GPU = Device(24_000 * MIB, 23_000 * MIB)


def file_of(name: str, quantization: str) -> GGUFModel:
    own = catalog.find(name)
    assert own is not None
    return gguf_of(catalog.load(own), quantization)


def tensor(name: str, kind: str, *shape: int) -> GGUFTensor:
    return GGUFTensor(name, shape, kind, tensor_bytes(kind, shape))


def adapter_of(model: GGUFModel, tensors: str, rank: int, kind: str) -> Iterator[GGUFTensor]:
    """The pairs that a training of these tensors would leave."""
    for base in model.tensors:
        if re.search(tensors, base.name):
            columns, rows, *experts = base.shape
            yield tensor(f"{base.name}.lora_a", kind, columns, rank, *experts)
            yield tensor(f"{base.name}.lora_b", kind, rank, rows, *experts)


def server_of(row: dict[str, Any]) -> Server:
    model = file_of(row["model"], row["quant"])
    adapters = (
        tuple(adapter_of(model, adapter["tensors"], adapter["rank"], adapter["type"]))
        for adapter in row.get("adapters", ())
    )
    draft = row.get("draft")
    drafter = None if draft is None else file_of(draft["model"], draft["quant"])
    beside = Beside(tuple(adapters), drafter, draft.get("layers") if draft else None)
    return Server(model, [device(gpu) for gpu in row["gpus"]], beside)


def title(row: dict[str, Any]) -> str:
    parts = [f"rank {adapter['rank']}" for adapter in row.get("adapters", ())] + [str(row.get("draft", ""))]
    return " ".join([row["model"], *row["gpus"], *row["flags"], *parts])


@pytest.mark.parametrize("row", ROWS, ids=title)
def test_every_place_is_the_servers_to_the_byte(row: dict[str, Any]) -> None:
    server, settings = server_of(row), settings_of(row["flags"])
    if tokens := row.get("draft", {}).get("tokens"):
        settings = replace(settings, outputs=settings.num_slots * (1 + tokens))
    if settings.fit:
        choice = fit(server, settings)
        settings = choice.settings
        assert list(fit_differences(settings, choice.problem, len(row["gpus"]), row["fit"])) == []
    places = server.allocate(settings).places
    assert {label(number): list(memory) for number, memory in places.items()} == row["places"]


def stored(**metadata: object) -> Checkpoint:
    return Checkpoint("gguf", (), 0, (), (), metadata)


ADAPTER = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "qwen3"}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.type": "model"}, "is not a LoRA adapter"),
        (ADAPTER | {"general.architecture": "llama"}, "is an adapter for llama, and the model is qwen3"),
    ],
)
def test_another_file_is_no_adapter(metadata: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        adapter_tensors(stored(**metadata), (), "qwen3", "file")


def test_norms_of_an_adapter_are_not_loaded() -> None:
    norm, pair = tensor("blk.0.attn_norm.weight", "F32", 8), tensor("blk.0.attn_q.weight.lora_a", "F16", 8, 4)
    assert adapter_tensors(stored(**ADAPTER), (norm, pair), "qwen3", "file") == (pair,)


@pytest.mark.parametrize(
    ("name", "shapes", "error", "message"),
    [
        ("blk.0.attn_q.weight", [(4096, 8)], InvalidInputError, "is not one of a pair"),
        ("blk.99.attn_q.weight", [(4096, 8), (8, 4096)], InvalidInputError, "the model has no blk.99.attn_q.weight"),
        ("blk.0.attn_q.weight", [(2048, 8), (8, 4096)], InvalidInputError, "does not fit"),
        ("token_embd.weight", [(4096, 8), (8, 4096)], UnsupportedModelError, "adapters of the embedding"),
    ],
)
def test_pairs_that_the_model_does_not_take_are_refused(
    name: str, shapes: list[tuple[int, ...]], error: type[Exception], message: str
) -> None:
    model = file_of("qwen3-8b", "Q8_0")
    parts = [tensor(f"{name}.lora_{part}", "F16", *shape) for part, shape in zip("ab", shapes, strict=False)]
    with pytest.raises(error, match=message):
        placed([tuple(parts)], place(model, shape_of(model), Settings(), [GPU]))


def test_a_tower_is_whole_on_the_first_gpu_and_fit_leaves_room_for_it() -> None:
    tower = (tensor("v.blk.0.ffn_up.weight", "F16", 1024, 4096),)  # 8 MiB
    model = file_of("qwen3-8b", "Q4_K_M")
    alone, beside = Server(model, [GPU, GPU]), Server(model, [GPU, GPU], Beside(tower=tower))
    settings = Settings(ctx=8192, slots=1)
    before, after = alone.allocate(settings).places, beside.allocate(settings).places
    assert after[0].weights - before[0].weights == 8 * MIB
    assert (after[1], after[None]) == (before[1], before[None])
    on_host = Server(model, [GPU, GPU], Beside(tower=tower, on_gpu=False)).allocate(settings).places
    assert (on_host[0], on_host[None].weights - before[None].weights) == (before[0], 8 * MIB)
    short = Device(12_000 * MIB, 8_000 * MIB)
    free = Settings(slots=1)
    with_tower = fitted(Server(model, [short], Beside(tower=tower)), free).settings
    assert with_tower.ctx < fitted(Server(model, [short]), free).settings.ctx
    assert with_tower.fit_target == free.fit_target


def test_a_language_model_is_no_tower() -> None:
    with pytest.raises(InvalidInputError, match="is not a tower"):
        tower_tensors(stored(**{"general.architecture": "qwen3"}), (), "file")
