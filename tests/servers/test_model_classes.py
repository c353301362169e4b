"""Which classes of models a server has: refused by name, run by Transformers in their place, or not compared.

Expected: what vLLM 0.33.0's and SGLang 0.5.23's own code answered for a config that names each class. "Model
architectures ['XllamaForCausalLM'] are not supported for now", "'XllamaForCausalLM' is not a registered model in the
Transformers library"; both size HeliumForCausalLM, which neither registers, and a config whose second name they have.
"""

import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import registries
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.plans import model_classes
from kvplan.servers.releases import names_in
from kvplan.servers.sglang import classes as sglang
from kvplan.servers.vllm import classes as vllm
from tests.support.oracle_data import DATA, needs_oracle_data
from tests.support.refusals import reason_of

HOME = Path(os.environ.get("ORACLE_HOME") or "/nowhere")
needs_sources = pytest.mark.skipif(not HOME.is_dir(), reason="the servers' sources are not here (ORACLE_HOME)")
SERVERS = ("vllm", "sglang")


def named(*names: str, model: str = "llama-3.1-8b", **keys: object) -> ModelSpec:
    """A catalog model whose config names other classes."""
    spec = catalog.load(model)
    return replace(spec, architecture=names[0], config={**spec.config, "architectures": list(names), **keys})


def planned(spec: ModelSpec, engine: str) -> Plan:
    return plan(Request(spec, gpu("h100-80g"), release=parse_engine(engine)))


def notes_on(spec: ModelSpec, engine: str) -> list[str]:
    answer = planned(spec, engine)
    assert answer.refusal is None
    return [note for note in answer.notes if note.startswith("not compared for ")]


@pytest.mark.parametrize("engine", SERVERS)
def test_a_class_that_no_registry_has_is_refused_by_name(engine: str) -> None:
    reason = reason_of(planned(named("XllamaForCausalLM"), engine))
    assert reason.startswith("there is no class for XllamaForCausalLM; use another server")


@pytest.mark.parametrize("engine", ["vllm@0.26", "sglang@0.4"])
def test_a_release_whose_registry_is_not_known_refuses_none(engine: str) -> None:
    assert notes_on(named("XllamaForCausalLM"), engine) == []


@pytest.mark.parametrize("engine", SERVERS)
def test_any_of_the_names_in_a_config_counts(engine: str) -> None:
    assert notes_on(named("XllamaForCausalLM", "LlamaForCausalLM"), engine) == []


@pytest.mark.parametrize("engine", SERVERS)
def test_transformers_runs_a_class_in_the_servers_place(engine: str) -> None:
    (note,) = notes_on(named("HeliumForCausalLM"), engine)
    assert note.endswith(": HeliumForCausalLM, for which Transformers' class runs")


@pytest.mark.parametrize("engine", SERVERS)
def test_states_do_not_run_by_way_of_transformers(engine: str) -> None:
    """vLLM 0.33: "Layer 0 (linear_attention) does not dispatch through the Transformers attention interface"."""
    spec = named("MiniMaxForQuestionAnswering", model="granite-4.0-h-small")
    assert names_in(model_classes.TRANSFORMERS)[spec.architecture] == ""
    assert reason_of(planned(spec, engine)).startswith("there is no class for MiniMaxForQuestionAnswering")


@pytest.mark.parametrize(("engine", "starts"), [("vllm", True), ("sglang", False)])
def test_servers_differ_in_the_classes_of_transformers_that_they_take(engine: str, starts: bool) -> None:
    """Jamba's class does not say that its attention can be exchanged: SGLang asks for that, vLLM reads its source."""
    name = "JambaForSequenceClassification"
    assert names_in(model_classes.TRANSFORMERS)[name] == model_classes.SETTABLE
    assert (planned(named(name), engine).refusal is None) == starts


@pytest.mark.parametrize("engine", SERVERS)
def test_code_beside_a_checkpoint_is_not_judged(engine: str) -> None:
    spec = named("XllamaForCausalLM", auto_map={"AutoModelForCausalLM": "modeling_x.XllamaForCausalLM"})
    assert "the checkpoint's own code may run" in notes_on(spec, engine)[0]


@pytest.mark.parametrize(
    ("engine", "name"), [("vllm", "MuseSparkForConditionalGeneration"), ("sglang", "JetNemotronForCausalLM")]
)
def test_a_registered_class_that_was_not_compared_is_noted_once(engine: str, name: str) -> None:
    assert len(notes_on(named(name), engine)) == 1


def test_a_model_of_the_catalog_whose_class_was_not_compared_is_noted_once() -> None:
    assert len(notes_on(catalog.load("phi-4-multimodal"), "sglang")) == 1


def test_a_class_of_the_same_stem_stands_for_another() -> None:
    """vLLM 0.33 loads Qwen3ForCausalLM for it (_normalize_arch)."""
    assert notes_on(named("Qwen3ForSequenceClassification", model="qwen3-8b"), "vllm") == []


def test_a_plug_in_adds_the_class_of_a_model_that_only_its_package_serves() -> None:
    assert "a plug-in of FunAudioLLM/CosyVoice adds" in notes_on(catalog.load("cosyvoice2-0.5b"), "vllm")[0]


@pytest.mark.parametrize(
    ("classes", "others"), [(vllm, {"CosyVoice2ForCausalLM"}), (sglang, {"DeepseekV41ForCausalLM"})]
)
def test_a_row_is_of_a_registered_class(classes: ModuleType, others: set[str]) -> None:
    known = names_in(classes.REGISTRY)
    assert {name for name, row in classes.CLASSES.items() if name not in known and not row.absent} == others


def test_first_releases_are_of_registered_classes() -> None:
    """`python -m benchmarks.registries ... --releases` wrote them of 32 releases' own registries."""
    rows = {name: words.split() for name, words in names_in(vllm.SINCE).items()}
    assert rows.keys() <= names_in(vllm.REGISTRY).keys()
    assert all([*map(int, last.split("."))] < [*map(int, first.split("."))] for last, first in rows.values())
    # release notes: DeepSeek V4 came with 0.20, Qwen3-Next with 0.10.2
    assert (rows["DeepseekV4ForCausalLM"][1], rows["Qwen3NextForCausalLM"][1]) == ("0.20", "0.10.2")


@needs_sources
def test_the_registries_have_no_other_names() -> None:
    for classes, names in ((vllm, registries.vllm_names(HOME)), (sglang, registries.sglang_names(HOME))):
        stored = {name: words for name, words in names_in(classes.REGISTRY).items() if "unregistered" not in words}
        assert {name: words.removeprefix("compared") for name, words in stored.items()} == names


@needs_sources
@needs_oracle_data
@pytest.mark.full
def test_the_tables_are_those_of_the_sources() -> None:
    for file, text in registries.tables(HOME, DATA).items():
        assert file.read_text(encoding="utf-8") == text, file.name
