"""What differs between releases of vLLM, against what servers of those releases logged."""

import re
from functools import partial
from pathlib import Path

import pytest

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.units import GIB
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.plans.pool import Capacity, charged_blocks
from kvplan.servers.releases import Version
from kvplan.servers.vllm import pages as vllm_pages
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.vllm.activations import activations
from kvplan.servers.vllm.changes import CHANGES
from kvplan.servers.vllm.overheads import (
    SAMPLER_FLASHINFER,
    SAMPLER_SORTS,
    SAMPLER_TO_011,
    SAMPLER_TO_024,
    SAMPLER_V2,
    SAMPLER_V2_TO_027,
    SAMPLER_V2_TO_032,
    SAMPLER_V2_TRITON,
    Sampler,
    buffers,
    cuda_graphs,
    sampler_of,
)
from kvplan.servers.words.arguments import EngineArgs, Settings
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.refusals import reason_of

PACKAGE = Path(vllm.__file__).parents[2]


def settings_of(model: str, device: str, number: tuple[int, int], args: EngineArgs) -> Settings:
    return vllm.resolve(catalog.load(model), gpu(device), args, vllm.version(number))


def capacity(model: str, device: str, number: tuple[int, int], kv_gib: float, args: EngineArgs) -> Capacity:
    """What a pool of the logged size holds; the log's second decimal leaves 0.005 GiB open."""
    spec, settings = catalog.load(model), settings_of(model, device, number, args)
    pool = vllm_pages.pool(spec, vllm_pages.paging(spec, settings, args, gpu(device).sm))
    return vllm_pages.capacity(pool, settings, args, [int(kv_gib * GIB)])


def half_digit(bytes_per_block: int) -> int:
    """Blocks that half of the last digit of "18.03 GiB" may be."""
    return GIB // 200 // bytes_per_block + 1


def test_before_the_hybrid_manager_windows_were_kept_in_full() -> None:
    # vllm-project/vllm#16378: Gemma 3 27B on four A100-40G, smallest rank 18.03 GiB, 9,526 blocks, 2.33x at 65,536
    args = EngineArgs(tensor_parallel_size=4, max_model_len=65536)
    pool = capacity("gemma-3-27b", "a100-40g", (0, 8), 18.03, args)
    assert pool.num_blocks == pytest.approx(9526, abs=half_digit(pool.bytes_per_block))
    assert 9526 / pool.blocks_per_request == pytest.approx(2.33, abs=0.005)
    assert capacity("gemma-3-27b", "a100-40g", (0, 11), 18.03, args).max_concurrency > 2 * pool.max_concurrency


def test_the_first_engine_padded_a_latent_to_640_elements() -> None:
    # DeepSeek-R1 on 8 H200 under V0: 21.43 GiB, 18,418 blocks of 16 tokens: 61 layers x 1,280 B instead of 1,152
    args = EngineArgs(tensor_parallel_size=8, max_model_len=128000)
    pool = capacity("deepseek-r1", "h200", (0, 7), 21.43, args)
    assert pool.bytes_per_block == 61 * 16 * 1280
    assert pool.num_blocks == pytest.approx(18418, abs=half_digit(pool.bytes_per_block))
    assert pool.max_concurrency == pytest.approx(2.30, abs=0.005)
    assert capacity("deepseek-r1", "h200", (0, 8), 21.43, args).bytes_per_block == 61 * 16 * 1152


def test_before_0_21_a_state_took_one_block_of_a_request() -> None:
    # Nemotron-3-Super TP4 under 0.14.1: 7.94 GiB, block 4,160, 690,560 tokens of one of six groups, 14.49x at 262,144:
    # 64 blocks of attention and one for each of five groups of states
    args = EngineArgs(tensor_parallel_size=4, max_model_len=262144, kv_cache_dtype="fp8", max_num_batched_tokens=16384)
    pool = capacity("nemotron-3-super-120b-a12b", "h100-80g", (0, 14), 7.94, args)
    assert pool.blocks_per_request == 64 + 5
    assert pool.tokens == 690_560
    assert pool.max_concurrency == pytest.approx(14.49, abs=0.02)


def test_decode_context_parallel_ranks_count_in_the_logged_tokens() -> None:
    # Kimi-K2-Thinking on 8 H200 under 0.11.1: 46.80 GiB are 715,072 tokens, and with DCP 8 5,721,088
    for dcp, tokens in ((1, 715_072), (8, 5_721_088)):
        args = EngineArgs(tensor_parallel_size=8, decode_context_parallel_size=dcp)
        pool = capacity("kimi-k2", "h200", (0, 11), 46.80, args)
        assert pool.tokens == pytest.approx(tokens, abs=16 * dcp * half_digit(pool.bytes_per_block))


def test_sparse_attention_keeps_656_bytes_on_workstation_blackwell() -> None:
    # GLM-5.1 TP8 on RTX PRO 6000: 19.55 GiB are 341,504 tokens: 78 layers x (656 + 132) B
    args = EngineArgs(tensor_parallel_size=8, kv_cache_dtype="fp8", max_model_len=202752)
    pool = capacity("glm-5.1", "rtx-pro-6000", (0, 20), 19.55, args)
    assert pool.bytes_per_block == 64 * 78 * (656 + 132)
    assert pool.tokens == pytest.approx(341_504, abs=64 * half_digit(pool.bytes_per_block))
    assert settings_of("glm-5.1", "b200", (0, 20), args).kv_dtype == "fp8"


def test_gemma_3_ran_in_float16_until_0_9() -> None:
    args = EngineArgs(tensor_parallel_size=8, dtype="float16", max_model_len=16384)  # vllm-project/vllm#15766
    of = partial(Request, catalog.load("gemma-3-27b"), gpu("t4"), args)
    assert plan(of(vllm.version((0, 8)))).refusal is None
    assert "not supported in float16" in reason_of(plan(of(vllm.version((0, 9)))))


def test_latent_attention_before_0_7_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"vLLM 0\.6 kept full heads.*use vllm@0\.7 or newer"):
        settings_of("deepseek-v2-lite", "h100-80g", (0, 6), EngineArgs())


@pytest.mark.parametrize(
    ("model", "last"), [("llama-3.2-11b-vision", (0, 10)), ("qwen-72b", (0, 23)), ("mpt-7b", (0, 28))]
)
def test_an_architecture_is_refused_from_the_release_that_no_longer_runs_it(model: str, last: tuple[int, int]) -> None:
    """vLLM 0.33 registry.py, _PREVIOUSLY_SUPPORTED_MODELS: Mllama until 0.10.2, QWen until 0.23.0, MPT until 0.28.0."""
    args = EngineArgs(max_model_len=2048, tensor_parallel_size=4)
    of = partial(Request, catalog.load(model), gpu("h100-80g"), args)
    assert plan(of(vllm.version(last))).fits
    for release in (vllm.version((last[0], last[1] + 1)), vllm.version((0, 33))):
        assert f"{last[0]}.{last[1]} was the last to do so" in reason_of(plan(of(release)))


@pytest.mark.parametrize("model", ["llama-3.2-11b-vision", "jamba-1.5-mini"])
def test_a_cache_of_the_first_engine_that_is_not_known_is_refused(model: str) -> None:
    # images' keys, and states, which lay outside the pool and took a share per sequence of the profile run's memory
    spec, args = catalog.load(model), EngineArgs(max_model_len=8192)
    settings = settings_of(model, "a100-80g", (0, 7), args)
    with pytest.raises(UnsupportedModelError, match=r"first engine is not modeled; use vllm@0\.11 or newer"):
        vllm_pages.pool(spec, vllm_pages.paging(spec, settings, args, 80))


@pytest.mark.parametrize(
    ("device", "engine", "sampler"),
    [
        ("a100-80g", "vllm@0.7", SAMPLER_SORTS),
        # 0.8 to 0.11: FlashInfer is an extra of the wheel, so that pip sorts; container images have it
        ("a100-80g", "vllm@0.10", SAMPLER_TO_011),
        ("a100-80g", "vllm@0.10+flashinfer", SAMPLER_FLASHINFER),
        ("a100-80g", "vllm@0.10+no-flashinfer", SAMPLER_SORTS),
        ("a100-80g", "vllm@0.10+v0", SAMPLER_SORTS),
        ("t4", "vllm@0.10", SAMPLER_SORTS),
        ("t4", "vllm@0.10+v1", SAMPLER_TO_011),
        ("h100-80g", "vllm@0.11", SAMPLER_TO_011),
        ("h100-80g", "vllm@0.12", SAMPLER_SORTS),
        ("h100-80g", "vllm@0.11+flashinfer", SAMPLER_FLASHINFER),
        ("h100-80g", "vllm@0.24+runner-v1", SAMPLER_TO_024),
        ("h100-80g", "vllm@0.24", SAMPLER_V2_TO_027),  # Qwen3ForCausalLM is in its list
        ("h100-80g", "vllm@0.27", SAMPLER_V2_TO_027),
        ("h100-80g", "vllm@0.28", SAMPLER_V2_TO_032),
        ("h100-80g", "vllm@0.32", SAMPLER_V2_TO_032),
        ("h100-80g", "vllm@0.33", SAMPLER_V2),
        # flashinfer_sampler_supported: compute capability 8.0 to 12.1
        ("t4", "vllm@0.33", SAMPLER_V2_TRITON),
        ("mi300x", "vllm@0.33", SAMPLER_V2_TRITON),
        ("h100-80g", "vllm@0.33+no-flashinfer", SAMPLER_V2_TRITON),
    ],
)
def test_which_sampler_is_in_the_peak(device: str, engine: str, sampler: Sampler) -> None:
    args = EngineArgs(max_model_len=4096)
    settings = vllm.resolve(catalog.load("qwen3-8b"), gpu(device), args, parse_engine(engine))
    assert sampler_of(settings, gpu(device)) is sampler


def test_a_server_with_flashinfer_has_the_pool_it_logged() -> None:
    # gpt-oss-120b on four A100-80G under 0.10.1.1 (dennislee22/vLLM-benchmarking): 45.32 GiB at 0.8
    from kvplan.planning.plan import Request, plan

    args = EngineArgs(16384, 4, max_num_batched_tokens=2048, gpu_memory_utilization=0.8)
    spec, device = catalog.load("gpt-oss-120b"), gpu("a100-80g")
    sampled = plan(Request(spec, device, args, parse_engine("vllm@0.10+flashinfer")))
    assert sampled.available_low <= 45.32 * GIB <= sampled.available_high
    assert plan(Request(spec, device, args, parse_engine("vllm@0.10+no-flashinfer"))).available_high < 45.32 * GIB


def test_flashinfer_sampled_on_0_11_where_it_was_installed() -> None:
    """Mistral-Small-3.2 on H100 under 0.11.0 (llm-d-planner): a peak of 2.12 GiB and 28.20 GiB for the KV cache."""
    from kvplan.planning.plan import Request, plan

    args = EngineArgs(16_000, gpu_memory_utilization=0.95, block_size=128)
    spec, device = catalog.load("mistral-small-3.2-24b"), gpu("h100-80g")
    answer = plan(Request(spec, device, args, parse_engine("vllm@0.11+flashinfer")))
    peak = answer.estimates["activations"]
    assert peak.low <= 2.12 * GIB <= peak.high
    assert answer.available / GIB == pytest.approx(28.20, rel=0.005)


def test_the_first_engine_is_told_by_a_word_of_the_label() -> None:
    args = EngineArgs(max_model_len=4096)
    first_engine, usual = (
        vllm.resolve(catalog.load("qwen3-8b"), gpu("a100-80g"), args, parse_engine(text))
        for text in ("vllm@0.9+v0", "vllm@0.9")
    )
    assert (first_engine.first_engine, usual.first_engine) == (True, False)
    assert (first_engine.max_num_batched_tokens, first_engine.max_num_seqs) == (4096, 256)  # V0 took whole prompts
    assert first_engine.version.label == "vllm@0.9+v0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm@0.12+v0", r"applies to vLLM before 0\.11; remove it"),
        ("vllm@0.7+v1", r"applies to vLLM from 0\.8 on"),
        ("vllm@0.20+flashinfer", r"before 0\.17"),
        ("vllm@0.21+runner-v2", r"from 0\.22 on"),
        ("vllm@0.9+fast", r"\+fast is not a word kvplan knows; use v0, "),
        ("vllm@0.9+v0+v1", r"contradicts itself"),
        ("sglang@0.5+v0", r"is supported only by vLLM"),
        ("vllm+indexer-0", r"is not a word"),
    ],
)
def test_a_word_that_a_release_cannot_be_told_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_engine(text)


@pytest.mark.parametrize(
    "text", ["vllm@0.33", "vllm@0.9+flashinfer", "vllm@0.28+runner-v1+no-graph-estimate", "vllm@0.33+indexer-256"]
)
def test_a_label_is_read_back(text: str) -> None:
    assert parse_engine(text).label == text


class TestModelRunnerV2:
    """config/vllm.py of 0.21 to 0.33: _is_default_v2_model_runner_model and DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES."""

    @pytest.mark.parametrize(
        ("model", "first"),
        [
            ("qwen3-8b", 22),
            ("llama-3.1-8b", 23),
            ("mistral-7b", 23),
            ("deepseek-v2-lite", 24),  # DeepseekV2ForCausalLM is listed, DeepseekV3ForCausalLM is not
            ("qwen1.5-moe-a2.7b", 24),
            ("qwen2.5-7b", 25),  # dense
            ("gemma-3-27b", 25),
            ("deepseek-v4-flash", 28),
            ("deepseek-v3", 29),
            ("qwen3-30b-a3b", 29),
            ("gpt-oss-20b", 29),
            ("qwen3.5-27b", 29),  # recurrent states
            ("mamba-2.8b", 29),
        ],
    )
    def test_takes_a_model_from_a_release_on(self, model: str, first: int) -> None:
        spec = catalog.load(model)
        took = [minor for minor in range(19, 34) if vllm.runs_v2(spec, vllm.version((0, minor)))]
        # Qwen3, Llama and Mistral left the list in 0.25, being dense
        assert took == list(range(first, 34))

    def test_an_amd_gpu_keeps_runner_v1_for_two_architectures_until_0_32(self) -> None:
        spec = catalog.load("deepseek-v3.2")
        assert [vllm.runs_v2(spec, vllm.version((0, minor)), amd=True) for minor in (28, 29, 31, 32, 33)] == [
            False, False, False, True, True,
        ]  # fmt: skip
        glm = catalog.load("glm-5.1")
        assert [vllm.runs_v2(glm, vllm.version((0, minor)), amd=True) for minor in (29, 30, 31, 32)] == [
            True, False, False, True,
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("model", "device", "engine", "taken_off"),
        [
            ("llama-3.1-8b", "h100-80g", "vllm@0.19", False),
            ("llama-3.1-8b", "h100-80g", "vllm@0.20", True),
            ("llama-3.1-8b", "h100-80g", "vllm@0.22", True),  # runner V1
            ("llama-3.1-8b", "h100-80g", "vllm@0.23", False),  # V2's profile_cudagraph_memory returns 0 until 0.28
            ("llama-3.1-8b", "h100-80g", "vllm@0.28", False),
            ("llama-3.1-8b", "h100-80g", "vllm@0.28+runner-v1", True),
            ("llama-3.1-8b", "h100-80g", "vllm@0.29", True),
            ("llama-3.1-8b", "h100-80g", "vllm@0.29+no-graph-estimate", False),
            ("qwen3-30b-a3b", "h100-80g", "vllm@0.28", True),
            ("qwen3-30b-a3b", "mi300x", "vllm@0.25", False),  # is_cuda() until 0.25, is_cuda_alike() after
            ("qwen3-30b-a3b", "mi300x", "vllm@0.26", True),
        ],
    )
    def test_takes_graphs_off_the_budget_where_it_estimates_them(
        self, model: str, device: str, engine: str, taken_off: bool
    ) -> None:
        spec, args, release = catalog.load(model), EngineArgs(max_model_len=8192), parse_engine(engine)
        settings = vllm.resolve(spec, gpu(device), args, release)
        assert settings.graphs_in_budget is taken_off
        outside = "outside the budget" in cuda_graphs(spec, settings, args, release).formula
        assert outside is not taken_off

    def test_its_peak_is_that_of_a_log_of_0_27(self) -> None:
        # Qwen2.5-0.5B on 0.27.1, a card of 23.99 GiB, 256 sequences: 0.25 GiB at the peak, no graphs in it
        spec, args = catalog.load("qwen2.5-0.5b"), EngineArgs(max_model_len=2048)
        settings = settings_of("qwen2.5-0.5b", "rtx-4090", (0, 27), args)
        assert activations(spec, settings, args, settings.version, gpu("rtx-4090")).likely / GIB == pytest.approx(
            0.25, abs=0.005
        )

    @pytest.mark.parametrize(("number", "sets_aside"), [((0, 26), 0), ((0, 27), 256 * 4.25 * 151936)])
    def test_its_table_for_penalties_is_counted_since_the_server_counts_what_is_consumed(
        self, number: tuple[int, int], sets_aside: float
    ) -> None:
        # Made after the weights and before the profile run: until 0.26 neither of the two sums has it.
        spec, args = catalog.load("qwen2.5-0.5b"), EngineArgs(max_model_len=2048)
        settings = settings_of("qwen2.5-0.5b", "rtx-4090", number, args)
        usual = buffers(spec, settings_of("qwen2.5-0.5b", "rtx-4090", (0, 20), args), args).likely
        assert buffers(spec, settings, args).likely - usual == pytest.approx(sets_aside, rel=0.001)


class TestBatchesInFlight:
    """v1/kv_cache_interface.py: max_num_batched_tokens until 0.25, max_in_flight_tokens from 0.26."""

    @pytest.mark.parametrize(
        ("number", "pp", "batches"),
        [((0, 20), 1, 1), ((0, 25), 1, 1), ((0, 25), 2, 1), ((0, 26), 1, 2), ((0, 26), 2, 3), ((0, 33), 2, 3)],
    )
    def test_that_windows_are_charged_for(self, number: tuple[int, int], pp: int, batches: int) -> None:
        args = EngineArgs(max_model_len=32768, pipeline_parallel_size=pp, max_num_batched_tokens=2048)
        settings = settings_of("gemma-3-27b", "h100-80g", number, args)
        assert settings.in_flight_tokens == batches * 2048

    def test_on_several_stages_runner_v1_does_not_run_ahead(self) -> None:
        # max_concurrent_batches of 0.26 to 0.28; gpt-oss is run by runner V1 until 0.28
        args = EngineArgs(max_model_len=32768, pipeline_parallel_size=2, max_num_batched_tokens=2048)
        assert settings_of("gpt-oss-20b", "h100-80g", (0, 28), args).batches == 2
        assert settings_of("gpt-oss-20b", "h100-80g", (0, 29), args).batches == 3

    def test_are_still_scheduled_where_they_are_not_charged_for(self) -> None:
        settings = settings_of("gemma-3-27b", "h100-80g", (0, 25), EngineArgs(max_num_batched_tokens=2048))
        assert (settings.batches, settings.in_flight_tokens) == (2, 2048)


class TestCachedStates:
    def test_are_off_by_default_until_0_27(self) -> None:
        # Qwen3.5-4B on 0.23.0, an RTX 4090: 10.21 GiB are 235,706 tokens, 57.54x at 4,096
        pool = capacity("qwen3.5-4b", "rtx-4090", (0, 23), 10.21, EngineArgs(max_model_len=4096))
        assert pool.tokens == pytest.approx(235_706, rel=0.001)
        for number in ((0, 25), (0, 26), (0, 27)):
            assert capacity("qwen3.5-4b", "rtx-4090", number, 10.21, EngineArgs(max_model_len=4096)) == pool
        cached = capacity("qwen3.5-4b", "rtx-4090", (0, 28), 10.21, EngineArgs(max_model_len=4096))
        assert cached.tokens < 200_000

    def test_are_off_in_a_log_of_0_27_1(self) -> None:
        # Qwen3.8-27B on GB10, with the cache of Qwen3.6-27B: 51.7 GiB are 24.00 requests of 32,768 tokens, and 1,080
        # blocks of 784 tokens x 65,536 B; so each takes 45: 42 of tokens, and one for each of 3 groups of states
        pool = capacity("qwen3.6-27b", "gb10", (0, 27), 51.7, EngineArgs(max_model_len=32768))
        assert (pool.num_blocks, pool.blocks_per_request, pool.tokens) == (1080, 45, 786_432)

    def test_a_flag_wins_before(self) -> None:
        args = EngineArgs(max_model_len=4096, enable_prefix_caching=True)
        pool = capacity("qwen3.5-4b", "rtx-4090", (0, 23), 10.21, args)
        assert pool.tokens == capacity("qwen3.5-4b", "rtx-4090", (0, 27), 10.21, args).tokens

    @pytest.mark.parametrize(("number", "block", "blocks"), [((0, 27), 784, 2), ((0, 32), 784, 2), ((0, 33), 832, 3)])
    def test_of_gated_delta_nets_keep_checkpoints_from_0_33(
        self, number: tuple[int, int], block: int, blocks: int
    ) -> None:
        # A log of Qwen3.6-27B on 0.27.1 and H200 has 44.73x, which are blocks of 784 tokens (832: 40.91x)
        spec, args = catalog.load("qwen3.6-27b"), EngineArgs(max_model_len=32768, enable_prefix_caching=True)
        settings = settings_of("qwen3.6-27b", "h200", number, args)
        specs = [page for _, page in vllm_pages.layer_specs(spec, vllm_pages.paging(spec, settings, args, 90))]
        assert {page.block_size for page in specs} == {block}
        assert {page.blocks for page in specs if page.kind == "state"} == {blocks}

    @pytest.mark.parametrize(
        ("number", "blocks"),
        # model_executor/models/config.py: `all` until 0.27 where a class supports it, `align` after; +1 from 0.32
        [((0, 25), None), ((0, 27), None), ((0, 28), 2), ((0, 31), 2), ((0, 32), 3)],
    )
    def test_of_mamba_were_kept_for_every_block_until_0_27(self, number: tuple[int, int], blocks: int | None) -> None:
        spec = catalog.load("nemotron-3-nano-30b-a3b")
        args = EngineArgs(max_model_len=65536, enable_prefix_caching=True)
        settings = settings_of("nemotron-3-nano-30b-a3b", "h100-80g", number, args)
        specs = [page for _, page in vllm_pages.layer_specs(spec, vllm_pages.paging(spec, settings, args, 90))]
        state = next(page for page in specs if page.kind == "state")
        assert state.blocks == blocks
        charged = charged_blocks(state, 65536, settings, 1)
        assert charged == (blocks or -(-65536 // state.block_size))
        if blocks is None:
            assert state.block_size % 128 == 0  # its config's chunk_size


def test_experts_are_quantised_while_loading_and_nothing_else_is() -> None:
    from kvplan.planning.plan import Request
    from kvplan.servers.plans.weights import rank_weights

    spec, device = catalog.load("jamba-1.5-mini"), gpu("a100-80g")
    plain = rank_weights(Request(spec, device), 0)
    int8 = rank_weights(Request(spec, device, EngineArgs(quantization="experts_int8")), 0)
    assert {name for name in plain if plain[name] != int8[name]} == {"experts"}
    # one byte for two, and a float32 scale per row: 16 experts x (2 x 14,336 + 4,096) rows in 16 of 32 layers
    assert int8["experts"] == plain["experts"] // 2 + 4 * 16 * 16 * (2 * 14336 + 4096)


class TestTheTableOfChanges:
    def test_every_change_is_one_that_the_rules_ask_for(self) -> None:
        """An entry that nothing reads would be a claim without an effect."""
        names_in_rules = set[str]()
        for path in PACKAGE.rglob("*.py"):
            names_in_rules |= set(
                re.findall(r"""(?:(?:\.has|since)\(|since=)"(\w+)"[,)]""", path.read_text(encoding="utf-8"))
            )
        assert set(CHANGES) <= names_in_rules

    def test_every_change_says_what_was_read_of_it(self) -> None:
        evidence = [change.evidence for change in CHANGES.values()]
        assert all("; read in 0." in text or text.endswith("; inferred, no wheel read") for text in evidence)
        assert sum("; read in 0." in text for text in evidence) >= 20

    def test_is_in_the_order_of_the_releases(self) -> None:
        numbers = [change.since for change in CHANGES.values()]
        assert numbers == sorted(numbers)
        assert min(numbers) > vllm.OLDEST
        assert max(numbers) <= vllm.NEWEST

    @pytest.mark.parametrize("release", [Version((0, 8)), Version((0, 8), patch=4), Version((0, 21))])
    def test_no_release_has_a_change_that_came_after_it(self, release: Version) -> None:
        """vllm@0.8 without a third field is the last of its line: it has what came with 0.8.5."""
        later = release.lacks()
        assert [name for name, change in CHANGES.items() if (change in later) is release.has(name)] == []

    def test_what_a_release_lacks_is_what_came_after_it(self) -> None:
        changes = [change.what for change in Version((0, 21)).lacks()]
        assert any("V2 for every dense model" in what for what in changes)
        assert not any("0.92" in what for what in changes)
        assert not list(Version(vllm.NEWEST).lacks())

    @pytest.mark.parametrize(("engine", "is_explained"), [("vllm@0.19", True), ("vllm", False), ("sglang", False)])
    def test_an_older_release_is_explained_by_what_later_ones_change(
        self, run: Run, engine: str, is_explained: bool
    ) -> None:
        done = run("estimate", "qwen3-8b", "--gpu", "l4", "--ctx", "4k", "--engine", engine, "--explain")
        assert ("from 0.25 on: model runner V2" in done.out) is is_explained
        assert ("read in 0.24 to 0.33" in done.out) is is_explained


@pytest.mark.parametrize(
    "model", ["llama-3.1-8b", "gemma-3-27b", "qwen3.5-27b", "deepseek-v3.2", "nemotron-3-nano-30b-a3b"]
)
@pytest.mark.parametrize("number", [(0, 19), (0, 25), (0, 28), (0, 31), (0, 33)])
def test_a_release_to_come_changes_no_answer_about_one_that_is_known(
    model: str, number: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvplan.planning.plan import Request, plan

    def answer() -> tuple[int, int, int, float]:
        args = EngineArgs(max_model_len=32768, tensor_parallel_size=8)
        answer = plan(Request(catalog.load(model), gpu("h200"), args, vllm.version(number)))
        return answer.available_low, answer.available, answer.available_high, answer.capacity.max_concurrency

    before = answer()
    monkeypatch.setattr(vllm, "NEWEST", (0, 35))
    assert answer() == before


def test_states_that_are_kept_for_every_block_are_explained(run: Run) -> None:
    words = ("estimate", "nemotron-3-nano-30b-a3b", "--gpu", "h100-80g", "--ctx", "64k", "--engine", "vllm@0.27")
    done = run(*words, "--engine-arg", "enable_prefix_caching=true", "--explain")
    assert "a state for every block of its context, ceil(65,536 / " in " ".join(done.out.split())
    caching = ("--engine-arg", "enable_prefix_caching=true")
    refused = run("simulate", *words[1:], *caching, "--profile", "azure-2023-conv", "--rate", "1")
    assert refused.code == 2
    assert "a state for every block, as vLLM kept them until 0.27, cannot be simulated" in refused.err
