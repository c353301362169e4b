"""A model's own layers for multi-token prediction, against the answers of llama.cpp's own code.

Source of the rows: llama.cpp at commit 0c1e57098 with CUDA devices played to it, which loads a model with its layers
for multi-token prediction and creates the drafts' context beside its own, as llama-server does; `--fit` measures both.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.models import catalog
from kvplan.models.gguf_model import GGUFModel, gguf_of
from kvplan.servers.llamacpp.asked import check_nextn
from kvplan.servers.llamacpp.fit import fit
from kvplan.servers.llamacpp.measure import Server
from tests.oracles import read_lines
from tests.support.llamacpp_rows import device, fit_differences, label, settings_of

ROWS = read_lines(Path(__file__).parents[2] / "facts/llamacpp_mtp.jsonl")


def file_of(name: str, quantization: str) -> GGUFModel:
    own = catalog.find(name)
    assert own is not None
    spec = catalog.load(own)
    if spec.model_type == "glm4_moe_lite":  # whose config in the catalog does not say that it has one
        spec = replace(spec, config={**spec.config, "num_nextn_predict_layers": 1})
    return gguf_of(spec, quantization, drafts=True)


def title(row: dict[str, Any]) -> str:
    how = "allocated" if row["allocated"] else "expected"
    return " ".join([row["model"], row["quant"], *row["gpus"], *row["flags"], str(row["tokens"]), how])


@pytest.mark.parametrize("row", ROWS, ids=title)
def test_both_contexts_are_the_servers_to_the_byte(row: dict[str, Any]) -> None:
    server = Server(file_of(row["model"], row["quant"]), list(map(device, row["gpus"])))
    settings = settings_of(row["flags"])
    outputs = min(settings.batch, settings.num_slots * (1 + row["tokens"]))
    settings = replace(settings, mtp_tokens=row["tokens"], outputs=outputs)
    if settings.fit:
        choice = fit(server, settings)
        settings = choice.settings
        assert list(fit_differences(settings, choice.problem, len(row["gpus"]), row["fit"])) == []
    measured = server.allocate(settings) if row["allocated"] else server.measure(settings)
    assert measured.draft is not None
    for number, memory in measured.places.items():
        own, (cache, graph) = row["own"].get(label(number), [0, 0, 0]), row["drafts"].get(label(number), [0, 0])
        assert list(memory) == [own[0], own[1] + cache, own[2] + graph]
        assert list(measured.draft.places[number]) == [0, cache, graph]


def test_a_file_that_llama_cpp_does_not_draft_with_is_refused() -> None:
    with pytest.raises(UsageError, match="the model's file has no layer for it"):
        check_nextn(gguf_of(catalog.load("qwen3-8b"), drafts=True))
    several = gguf_of(catalog.load("qwen3.6-27b"), drafts=True)
    several.metadata["qwen35.nextn_predict_layers"] = 2  # type: ignore[index]
    with pytest.raises(UnsupportedModelError, match="no graph for 2 such layers of 'qwen35'"):
        check_nextn(several)
