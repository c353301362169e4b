"""Adapters that peft itself makes and saves, against peft's own merged models: what nobody here wrote."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]  # peft warns of its own business
pytest.importorskip("peft", reason="peft is not installed; `pip install peft` to compare with it")

import peft  # noqa: E402

from kvplan.core.errors import UnsupportedModelError  # noqa: E402
from tests.engine.test_lora import with_adapters  # noqa: E402
from tests.support import small_models  # noqa: E402
from tests.support.small_engines import ROUNDING, greedy, random_tokens, saved_model  # noqa: E402

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 24, "target_modules": ALL},
    "linear": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "queries": {"r": 2, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 2]},
    "patterns": {"r": 4, "lora_alpha": 8, "target_modules": ALL, "use_rslora": True,
                 "rank_pattern": {"k_proj": 2, "layers.1.mlp.up_proj": 8}, "alpha_pattern": {"^.*o_proj": 32}},
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_pefts_merged_model(family: str, name: str, tmp_path: Path) -> None:
    model = peft.get_peft_model(small_models.load_reference(saved_model(family)), peft.LoraConfig(**CONFIGS[name]))
    source = torch.Generator().manual_seed(0)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:  # 0 in a fresh adapter
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=source))
    model.save_pretrained(tmp_path)
    merged = model.merge_and_unload().eval()
    engine = with_adapters(family, {"x": tmp_path})
    prompts = random_tokens(5, 30)
    changed = 0
    for output, plain in zip(
        engine.generate(prompts, greedy(8), adapter="x"), engine.generate(prompts, greedy(8)), strict=True
    ):
        changed += output.token_ids != plain.token_ids
        with torch.inference_mode():
            text = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
            logits = merged(text, use_cache=False).logits[0, -9:-1]
        for row, token in zip(logits, output.token_ids, strict=True):
            best = row.topk(2).values
            assert row[token] >= best[0] - ROUNDING * row.abs().max()
    assert changed == len(prompts)


def test_what_peft_calls_otherwise_is_refused(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    peft.get_peft_model(small_models.load_reference(saved_model("llama")), config).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["use_dora"]
    with pytest.raises(UnsupportedModelError, match="use_dora"):
        with_adapters("llama", {"x": tmp_path})
