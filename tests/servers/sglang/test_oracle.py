"""SGLang's rules against SGLang 0.5.23's own code: settings, pools and requests, case by case."""

import itertools
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import UnsupportedModelError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog, hf_config
from kvplan.planning.plan import Plan, Request, plan, serve_command
from kvplan.servers.base import parse_engine
from kvplan.servers.releases import Version
from kvplan.servers.sglang import rules as sglang
from kvplan.servers.sglang.changes import CHANGES
from kvplan.servers.sglang.pool import SglangPool
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.weights import stage_layers
from tests import oracles
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.oracle_data import DATA, needs_oracle_data
from tests.support.refusals import reason_of

FACTS = Path(__file__).parents[2] / "facts" / "sglang_cases.jsonl"
ROWS = [json.loads(line) for line in FACTS.read_text().splitlines()]


def name_of(row: dict[str, Any]) -> str:
    return " ".join(str(value) for value in row["inputs"].values())


def sglang_plan(model: str, gpu_name: str, engine: str = "sglang", **args: Any) -> Plan:
    return plan(Request(catalog.load(model), gpu(gpu_name), EngineArgs(**args), parse_engine(engine)))


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_answers_what_sglang_answers(row: dict[str, Any]) -> None:
    """Rows of SGLang 0.5.23's own code: settings after its hooks, and the pools that stated memory holds."""
    assert oracles.compare_sglang(row, catalog.load) == (oracles.EQUAL, [])


@needs_oracle_data
def test_no_row_of_the_oracles_data_differs(capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(DATA / name) for name in ("small_configs", "models")]
    assert oracles.run(["sglang", str(DATA / "sglang_cases.jsonl"), *folders]) == 0
    counts = capsys.readouterr().out.splitlines()[-1]
    assert " 0 different" in counts
    refused = int(counts.split(" refused")[0].split("/ ")[-1])
    assert refused <= 8  # drafts, DP attention, DeepSeek-V4, MiniMax-M3, heads that do not divide, a type not read


@needs_oracle_data
def test_a_row_that_differs_is_printed_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (DATA / "sglang_cases.jsonl").open() as lines:
        row = next(row for row in map(json.loads, lines) if row["inputs"]["model"] == "Qwen__Qwen2.5-0.5B")
    row["resolved"]["mem_fraction_static"] += 0.001
    row["results"][0]["max_total_num_tokens"] += 1
    file = tmp_path / "cases.jsonl"
    file.write_text(json.dumps(row) + "\n")
    assert oracles.run(["sglang", str(file), str(DATA / "models")]) == 1
    output = capsys.readouterr().out
    assert "different: mem_fraction_static" in output
    assert "max_total_num_tokens" in output
    assert output.endswith("0 equal / 0 refused by name / 1 different\n")


class TestARelease:
    @pytest.mark.parametrize(
        ("model", "gpu_name", "args"),
        [
            ("llama-3.1-8b", "h100-80g", {"max_model_len": 32_768}),
            ("gpt-oss-20b", "h100-80g", {}),
            ("qwen3-next-80b-a3b", "h200", {"tensor_parallel_size": 4}),
            ("gemma-2-9b", "b200", {}),
        ],
    )
    @pytest.mark.parametrize("engine", ["sglang@0.5", "sglang@0.5.9"])
    def test_keeps_its_rules_when_a_newer_one_is_added(
        self, monkeypatch: pytest.MonkeyPatch, model: str, gpu_name: str, args: dict[str, Any], engine: str
    ) -> None:
        before = sglang_plan(model, gpu_name, engine, **args)
        monkeypatch.setattr(sglang, "NEWEST", (0, 6))
        after = sglang_plan(model, gpu_name, engine, **args)
        assert (after.settings, after.capacity, after.memory) == (before.settings, before.capacity, before.memory)
        assert sglang_plan(model, gpu_name, "sglang", **args).settings.version.label == "sglang@0.6"

    def test_is_called_compared_only_where_its_own_answers_were(self) -> None:
        compared = [Version((0, 33)), Version((0, 5), "sglang"), Version((0, 5), "sglang", 23)]
        others = [Version((0, 34)), Version((0, 5), "sglang", 9), Version((0, 6), "sglang"), Version((0, 4), "sglang")]
        assert all(release.is_compared for release in compared)
        assert not any(release.is_compared for release in others)

    def test_has_the_changes_that_came_with_it_or_before(self) -> None:
        """Read in the wheels of 0.4.4, 0.4.9, 0.5.2, 0.5.5, 0.5.9, 0.5.12, 0.5.15 and 0.5.23."""
        labels = ("0.4.4", "0.4.9", "0.5.2", "0.5.5", "0.5.9", "0.5.12", "0.5.15", "0.5.23")
        names = [{name for name in CHANGES if parse_engine(f"sglang@{label}").has(name)} for label in labels]
        added = [later - earlier for earlier, later in itertools.pairwise([set(), *names])]
        assert added == [
            set(),
            {"fraction_by_memory"},
            {"window_pools", "state_pools", "adapter_pools"},
            {"reserve_by_parts"},
            {"datacenter_pages", "padded_host_pools"},
            {"prefill_graphs"},
            {"tracked_states", "decode_graph_flag", "fp4_before_blackwell"},
            {
                "wider_small_gpus",
                "graphs_by_requests",
                "image_reservation",
                "request_windows",
                "drafts",
                "expert_adapters",
                "halves",
                "weights_on_host",
                "whole_towers",
                "own_stages",
                "drafts_of_gemma",
                "named_backends",
            },
        ]
        assert names[-1] == set(CHANGES)

    @pytest.mark.parametrize(
        ("engine", "fraction"),
        [
            # 0.5.2 server_args.py: 1 - (2.8 + 1 / 10) x 1,024 / 24,564
            ("sglang@0.5.2", 0.879),
            # 0.5.9: 512 + 1.5 x 2,048 + 2 x 24 + 128 = 3,760 MiB; 0.5.12: 8 more for each of
            # the 8 + 14 + 8 + 8 + 4 graphs of up to 2,048 tokens
            ("sglang@0.5.9", 0.847),
            ("sglang@0.5.12", 0.833),
        ],
    )
    def test_has_its_own_default_fraction_on_a_24_gib_gpu(self, engine: str, fraction: float) -> None:
        spec, release = catalog.load("qwen3-0.6b"), parse_engine(engine)
        assert sglang.default_fraction(spec, gpu("rtx-4090"), EngineArgs(), release) == fraction

    def test_shares_no_change_with_vllm(self) -> None:
        assert not any(vllm.version(vllm.NEWEST).has(name) for name in CHANGES)

    @pytest.mark.parametrize(
        ("engine", "flag"), [("sglang", "--cuda-graph-max-bs-decode"), ("sglang@0.5.9", "--cuda-graph-max-bs")]
    )
    def test_prints_its_own_spelling_of_a_flag(self, engine: str, flag: str) -> None:
        """0.5.23 refuses --cuda-graph-max-bs as ambiguous; 0.5.9 knows no other."""
        words = serve_command(sglang_plan("llama-3.1-8b", "h100-80g", engine, max_model_len=8192, cuda_graph_max_bs=64))
        assert words[words.index(flag) + 1] == "64"

    @pytest.mark.parametrize(
        "flag", ["--cuda-graph-max-bs", "--cuda-graph-max-bs-decode", "--cuda-graph-bs", "--cuda-graph-bs-decode"]
    )
    def test_takes_either_spelling(self, run: Run, flag: str) -> None:
        command = f"sglang serve --model-path llama-3.1-8b --context-length 8192 {flag} 64"
        done = run("estimate", "--gpu", "h100-80g", "--from-command", command, "--format", "json")
        assert done.json["inputs"]["args"]["cuda_graph_max_bs"] == 64
        assert ("SGLang 0.5.23 does not start with it" in done.err) is (
            flag in ("--cuda-graph-max-bs", "--cuda-graph-bs")
        )


class TestWhatIsPrinted:
    @pytest.mark.parametrize(
        ("model", "gpu_name", "args"),
        [
            ("gpt-oss-20b", "h100-80g", {"enable_prefix_caching": False, "max_num_seqs": 64}),
            ("gemma-3-27b", "h100-80g", {"enable_multimodal": True, "max_model_len": 8192}),
            ("nemotron-nano-9b-v2", "h100-80g", {"async_scheduling": False, "max_model_len": 8192}),
            ("deepseek-v3.2", "b200", {"tensor_parallel_size": 8}),
            ("deepseek-v3", "h200", {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}),
            ("qwen3-next-80b-a3b", "h200", {"tensor_parallel_size": 4, "max_mamba_cache_size": 200}),
            ("llama-3.1-8b", "b200", {"max_model_len": 8192, "decode_attention_backend": "flashinfer"}),
        ],
    )
    def test_starts_the_same_plan(self, run: Run, model: str, gpu_name: str, args: dict[str, Any]) -> None:
        first = sglang_plan(model, gpu_name, **args)
        words = shlex.join(serve_command(first))
        again = run("estimate", "--gpu", gpu_name, "--from-command", words, "--format", "json")
        assert again.code == 0, again.err
        assert again.json["kv"]["tokens"] == first.capacity.tokens
        assert again.json["flags"]["command"] == words

    def test_replicas_say_how_many_gpus_they_take(self, run: Run) -> None:
        """With --enable-dp-attention the 16 ranks would lie inside the 16 of --tp; plain --dp-size is 16 servers."""
        done = run("estimate", "deepseek-v3", "--gpu", "h200", "--engine", "sglang", "--tp", "16", "--dp", "16")
        assert "16 servers of 16 GPUs each, 256 GPUs in all" in done.err
        assert "--enable-dp-attention" in done.err

    def test_pages_of_another_size_say_why(self, run: Run) -> None:
        flags = ("--gpu", "b200", "--ctx", "8k", "--engine", "sglang", "--explain")
        assert "page size 64: what the backend trtllm_mha requires" in run("estimate", "llama-3.1-8b", *flags).out

    def test_a_model_without_a_class_is_refused(self) -> None:
        assert reason_of(sglang_plan("jamba-1.5-mini", "h100-80g")).startswith("there is no class for JambaForCausalLM")


def test_one_pool_for_layers_of_several_shapes_is_refused() -> None:
    """Gemma 4: 4 heads x 256 in windows and 2 x 512 in full; SGLang's plain pool counts every layer as a full one."""
    with pytest.raises(UnsupportedModelError, match="layers of several shapes"):
        sglang_plan("gemma-4-31b", "h100-80g", disable_hybrid_kv_cache_manager=True, max_model_len=1024)
    flat = sglang_plan("gpt-oss-20b", "h100-80g", disable_hybrid_kv_cache_manager=True)
    assert flat.bytes_per_token == 24 * 2048
    assert isinstance(flat.pool, SglangPool)
    assert flat.pool.full == (24 * 2048,)  # one shape: windows are counted in full


def test_layers_that_stages_cannot_share_go_to_the_last() -> None:
    """sglang 0.5.23 distributed/utils.py: 61 layers on 2 stages are 30 and 31, 10 on 4 are 2, 2, 3 and 3."""
    assert [len(stage) for stage in stage_layers(61, 2, rest_last=True)] == [30, 31]
    assert [len(stage) for stage in stage_layers(10, 4, rest_last=True)] == [2, 2, 3, 3]


def test_a_stage_with_more_layers_weighs_more() -> None:
    """DeepSeek-V3: the last of two stages has 31 of 61 layers and the head, the first 30 and the embedding."""
    request = Request(
        catalog.load("deepseek-v3"), gpu("h200"), EngineArgs(tensor_parallel_size=8, pipeline_parallel_size=2),
        parse_engine("sglang"),
    )  # fmt: skip
    answer = plan(replace(request, args=replace(request.args, max_model_len=8192)))
    pool = answer.pool
    assert isinstance(pool, SglangPool)
    assert pool.full == (30 * 576 * 2, 31 * 576 * 2)  # the oracle's 34,560 and 35,712 bytes a token
    assert answer.stage == 1


@pytest.mark.parametrize(
    ("model", "gpu_name", "args", "requests"),
    [
        ("qwen3.5-27b", "h100-80g", {}, (5, 5, 6)),
        ("qwen3-next-80b-a3b", "h200", {"tensor_parallel_size": 2}, (128, 133, 135)),
        ("falcon-h1-7b", "h100-80g", {}, (36, 36, 36)),
        ("granite-4.0-h-small", "h100-80g", {}, (3, 3, 3)),
        ("qwen3.5-27b", "h200", {"enable_prefix_caching": False, "max_num_seqs": 64}, (64, 64, 64)),
    ],
)
def test_users_that_state_slots_bound_have_a_range(
    model: str, gpu_name: str, args: dict[str, Any], requests: tuple[int, int, int]
) -> None:
    """max_running_requests is SGLang 0.5.23's own answer for the bytes that the plan has at the low end of its range,
    likely and at the high end: slots are a share of the memory, so the range of that is theirs."""
    bounded = sglang_plan(model, gpu_name, max_model_len=8192, **args)
    answer = bounded.concurrency
    assert (answer.seqs_low, answer.max_num_seqs, answer.seqs_high) == requests
    assert answer.pool.users > answer.max_num_seqs  # what bounds them are the slots
    assert (answer.users_low, answer.users, answer.users_high) == requests


# --- what is kept back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "fraction", "starts"),
    [
        (8192, 1.0, False),
        (8192, 0.99, True),  # 0.79 GiB of 78.68 are kept; the table takes 4,096 x 8,196 x 4 bytes at most, 0.13 GiB
        (131_072, 0.99, False),  # 2,048 requests x 131,076 tokens x 4 bytes are 1.00 GiB
        (131_072, 0.98, True),  # 1.57 GiB are kept
    ],
)
def test_a_fraction_that_leaves_no_room_for_the_table_of_requests_does_not_start(
    context: int, fraction: float, starts: bool
) -> None:
    """SGLang checks nothing: what its pool leaves must hold the rest (ReqToTokenPool: int32 of requests x context)."""
    answer = sglang_plan("llama-3.1-8b", "h100-80g", max_model_len=context, mem_fraction_static=fraction)
    assert answer.capacity.fits
    assert answer.fits == starts
    assert (answer.refusal is None) == starts
    if answer.refusal is not None:
        assert answer.refusal.by == "kept_back"
        assert answer.concurrency.users == 0
        share = float(answer.refusal.flag.removeprefix("--mem-fraction-static "))
        assert sglang_plan("llama-3.1-8b", "h100-80g", max_model_len=context, mem_fraction_static=share).fits


def test_a_stated_pool_leaves_what_the_fraction_does_not() -> None:
    answer = sglang_plan(
        "llama-3.1-8b", "h100-80g", max_model_len=8192, mem_fraction_static=1.0, max_total_tokens=100_000
    )
    assert answer.fits


def test_a_server_that_keeps_nothing_back_is_said_in_sglangs_words(run: Run) -> None:
    words = ("estimate", "llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "8k", "--engine", "sglang")
    answer = run(*words, "--mem-fraction-static", "1.0", "--exit-code")
    assert answer.code == 1
    assert "does not start at 8,192 tokens: a fraction of 1 reserves 0.00 GiB" in answer.out.splitlines()[0]
    assert "SGLang does not start" in answer.out
    assert "vLLM" not in answer.out
    assert "--mem-fraction-static 0.83" in answer.out


@pytest.mark.parametrize(("gpu_name", "fraction"), [("h200", 0.841498125), ("b200", 0.7992825)])
def test_kimi_k3_captures_no_prefills_and_its_tower_is_read_by_its_own_names(gpu_name: str, fraction: float) -> None:
    """SGLang 0.5.23's own default for the catalog's config over 8 ranks: KDA layers switch prefill graphs off, and the
    tower has 27 layers of 1,024."""
    args = EngineArgs(tensor_parallel_size=8, max_model_len=8192)
    spec, release = catalog.load("kimi-k3"), parse_engine("sglang")
    assert sglang.default_fraction(spec, gpu(gpu_name), args, release) == pytest.approx(fraction, abs=1e-12)


@needs_oracle_data
def test_minimax_m3s_tower_counts_as_the_usual_one() -> None:
    """SGLang 0.5.23's own default over 8 ranks: its class leaves vision_config a dict, of which nothing is read."""
    spec = hf_config.load_spec(DATA / "models" / "nvidia__MiniMax-M3-NVFP4")
    args = EngineArgs(tensor_parallel_size=8, max_model_len=8192)
    assert sglang.default_fraction(spec, gpu("b200"), args, parse_engine("sglang")) == pytest.approx(0.80655, abs=1e-12)


@pytest.mark.parametrize(("model", "dtype"), [("qwen3-8b", "auto"), ("gemma-3-12b", "auto"), ("qwen3-8b", "bfloat16")])
def test_before_ampere_everything_is_float16(model: str, dtype: str) -> None:
    """load_model_utils.py, maybe_downgrade_dtype_for_legacy_gpu: below 8.0 whatever was said; below 7.5 it stops."""
    assert sglang_plan(model, "t4", tensor_parallel_size=8, dtype=dtype, max_model_len=4096).settings.dtype == "float16"
    refusal = sglang_plan(model, "v100", tensor_parallel_size=8, dtype=dtype, max_model_len=4096).refusal
    assert refusal is not None
    assert refusal.text == "it needs compute capability 7.5, this GPU has 7.0"


@pytest.mark.parametrize(("gpu_name", "kv_dtype", "starts"), [
    ("b200", "fp8_e5m2", False), ("b300", "fp8_e5m2", False), ("b200", "bfloat16", True), ("h200", "fp8_e5m2", True),
])  # fmt: skip
def test_the_default_backend_of_latent_attention_on_blackwell_takes_no_e5m2(
    gpu_name: str, kv_dtype: str, starts: bool
) -> None:
    """arg_groups/overrides.py: "TensorRT-LLM MLA backend only supports kv-cache-dtype of fp8_e4m3, bf16, or auto."."""
    planned = sglang_plan("deepseek-v3", gpu_name, tensor_parallel_size=8, kv_cache_dtype=kv_dtype, max_model_len=4096)
    assert (planned.refusal is None) == starts


def test_dp_attention_divides_a_stated_number_of_state_slots() -> None:
    """kv_cache_configurator.py: max_mamba_cache_size // attn_dp_size, on each data-parallel rank."""
    flags: dict[str, Any] = {"tensor_parallel_size": 4, "max_mamba_cache_size": 32, "max_model_len": 4096}
    whole = sglang_plan("qwen3.5-35b-a3b", "h200", **flags)
    shared = sglang_plan("qwen3.5-35b-a3b", "h200", **flags, data_parallel_size=2, enable_dp_attention=True)
    slots = [next(note for note in answer.notes if "slots for recurrent states" in note) for answer in (whole, shared)]
    assert ("are 32 slots" in slots[0], "are 16 slots" in slots[1]) == (True, True)
