"""Every architecture of drafts that a server registers is sized, and compared, or refused with its reason.

tests/facts/draft_architectures.jsonl: the names in vLLM 0.33.0's registry (_SPECULATIVE_DECODING_MODELS) and the draft
classes of SGLang 0.5.23. Where the servers' sources lie at hand (ORACLE_HOME), they are read again there.
"""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import UnsupportedModelError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog, hf_config
from kvplan.models.families import draft_names, eagle, mtp
from kvplan.planning.plan import Request, plan
from kvplan.servers.base import terms_of
from kvplan.servers.words.arguments import EngineArgs
from tests.conftest import check_golden
from tests.support import draft_names_sglang as sglang_names

FACTS = Path(__file__).parents[1] / "facts"


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FACTS / name).read_text(encoding="utf-8").splitlines()]


NAMES = {row["server"]: row["names"] for row in rows_of("draft_architectures.jsonl")}
RELEASES = {row["server"]: row["release"] for row in rows_of("draft_architectures.jsonl")}
HOME = Path(os.environ.get("ORACLE_HOME") or "/nowhere")
SGLANG_DRAFT = re.compile(r"NextN|MTP|Eagle|DFlash|DSpark|Assistant|LiLiCorr")
# A model type's class of MTP heads, from vLLM 0.33 config/speculative.py (hf_config_override).
MTP_CLASSES = {
    "deepseek_v3": "DeepSeekMTPModel", "deepseek_v32": "DeepseekV32MTPModel", "glm_moe_dsa": "DeepseekV32MTPModel",
    "glm4_moe": "Glm4MoeMTPModel", "glm4_moe_lite": "Glm4MoeLiteMTPModel", "glm_ocr_text": "GlmOcrMTPModel",
    "qwen3_next": "Qwen3NextMTP", "qwen3_5_text": "Qwen3_5MTP", "qwen3_5_moe_text": "Qwen3_5MoeMTP",
    "deepseek_v4": "DeepSeekV4MTPModel", "minimax_m3": "MiniMaxM3MTP", "minimax_m3_vl": "MiniMaxM3MTP",
    "glm5_next_text": "Glm5NextMTPModel", "mimo": "MiMoMTPModel", "mimo_v2_flash": "MiMoV2MTPModel",
    "nemotron_h": "NemotronHMTPModel", "gemma4_text": "Gemma4MTPModel",
}  # fmt: skip
# Models whose configs the catalog lacks, and their types.
PUBLISHED = {"nvidia__MiniMax-M3-NVFP4": "minimax_m3_vl", "glm-4.7-flash-mtp": "glm4_moe_lite"}
PREFIXES = {"eagle": "Eagle", "eagle3": "Eagle3", "dflash": "DFlash", "dspark": ""}


def registered(method: str, architecture: str) -> str:
    """The name that vLLM asks its registry for: transformers_utils/configs/eagle.py (EAGLEConfig)."""
    return architecture if architecture in draft_names.VLLM else PREFIXES[method] + architecture


def compared() -> set[str]:
    """Names of the drafts in tests/facts/speculation.jsonl that vLLM answered for."""
    names = set()
    for row in rows_of("speculation.jsonl"):
        config, model = row["inputs"]["engine_args"]["speculative_config"], row["inputs"]["model"]
        if "failed" in row or config.get("method") in (None, "ngram", "ngram_gpu"):
            continue
        if config["method"] == "mtp":
            kind = PUBLISHED.get(model) or ("" if "__" in model else catalog.load(model).model_type)
            names.add(MTP_CLASSES.get(kind, ""))
        elif config["method"] == "dspark" and "model" not in config:
            names.add("DSparkDraftModel")
        else:
            spec = hf_config.load_spec(FACTS / "heads" / config["model"])
            names.add(registered(config["method"], eagle.architecture_of(spec.config)))
    return names


def page() -> str:
    """docs/drafts.md."""
    lines = [
        "# Draft architectures",
        "",
        "Every architecture of a draft that a server registers: *sized*, with a KV cache (vLLM: and weights) equal to",
        "the server's own code in every case compared, or *refused* and why. Independent models are not in the list.",
    ]
    for server, table in (("vllm", draft_names.VLLM), ("sglang", sglang_names.SGLANG)):
        count = sum(reason == draft_names.SIZED for reason in table.values())
        lines += ["", f"## {terms_of(server).title} {RELEASES[server]}", ""]
        lines += [
            f"{count} sized, {len(table) - count} refused.",
            "",
            "| architecture | standing | why |",
            "|---|---|---|",
        ]
        lines += [f"| `{name}` | {'refused' if why else 'sized'} | {why} |" for name, why in sorted(table.items())]
    return "\n".join(lines) + "\n"


def test_the_page_is_made_from_the_table(update: bool) -> None:
    check_golden(FACTS.parents[1] / "docs/drafts.md", page(), update=update)


def test_the_table_has_the_names_of_vllms_registry() -> None:
    assert sorted(draft_names.VLLM) == sorted(NAMES["vllm"])
    assert len(NAMES["vllm"]) == 68


def test_the_table_has_sglangs_draft_classes() -> None:
    assert sorted(sglang_names.SGLANG) == sorted(NAMES["sglang"])


@pytest.mark.skipif(not HOME.is_dir(), reason="the servers' sources are not here (ORACLE_HOME)")
def test_the_registries_have_no_other_names() -> None:
    source = (HOME / "vllm-src/vllm/model_executor/models/registry.py").read_text(encoding="utf-8")
    block = source[source.index("_SPECULATIVE_DECODING_MODELS = {") :].split("\n}\n")[0]
    assert sorted(re.findall(r'^    "(\w+)":', block, re.M)) == sorted(NAMES["vllm"])
    classes = set()
    for file in (HOME / "sglang-src/sglang/srt/models").glob("*.py"):
        entry = re.search(r"^EntryClass = (\[[^\]]*\]|\w+)", file.read_text(encoding="utf-8"), re.M)
        classes |= {name for name in re.findall(r"\w+", entry[1]) if SGLANG_DRAFT.search(name)} if entry else set()
    assert sorted(classes) == sorted(NAMES["sglang"])


def test_what_is_called_sized_was_compared() -> None:
    assert {name for name, reason in draft_names.VLLM.items() if reason == draft_names.SIZED} <= compared()


def test_every_head_that_is_read_stands_in_the_table_as_sized() -> None:
    for method, architectures in eagle.ARCHITECTURES.items():
        for name in architectures:
            assert draft_names.VLLM[registered(method, name)] == draft_names.SIZED, name
    assert {draft_names.VLLM[MTP_CLASSES[kind]] for kind in mtp.HEADS} == {draft_names.SIZED}


def head(architecture: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((FACTS / "heads/eagle3-llama-3.1-8b/config.json").read_text(encoding="utf-8"))
    return config | {"architectures": [architecture]}


@pytest.mark.parametrize("name", [name for name, why in draft_names.VLLM.items() if why and "MTP" not in name])
def test_a_head_that_is_not_sized_is_refused_with_its_reason(name: str) -> None:
    method = next((key for key in ("dspark", "dflash", "eagle3", "eagle") if key in name.lower()), "dflash")
    spec = replace(hf_config.load_spec(FACTS / "heads/eagle3-llama-3.1-8b"), config=head(name))
    args = EngineArgs(speculative_method=method, num_speculative_tokens=3, max_model_len=8192)
    with pytest.raises(UnsupportedModelError, match=f"{name}.*{re.escape(draft_names.VLLM[name])}"):
        plan(Request(catalog.load("llama-3.1-8b"), gpu("h200"), args, draft=spec))
