"""What differs between releases of vLLM, against what servers of those releases logged."""

import re
from pathlib import Path

import pytest

from kvplan import catalog
from kvplan.errors import UnsupportedModelError, UsageError
from kvplan.gpu import gpu
from kvplan.overheads import SAMPLER_TO_010, SAMPLER_TO_016, sampler_of
from kvplan.rules import vllm, vllm_pages, vllm_pool
from kvplan.rules.releases import CHANGES, Version
from kvplan.rules.vllm import EngineArgs, Settings
from kvplan.rules.vllm_pool import Capacity
from kvplan.units import GIB
from tests.cli import Run
from tests.cli import run as run  # the fixture

PACKAGE = Path(vllm.__file__).parents[1]


def settings_of(model: str, device: str, number: tuple[int, int], args: EngineArgs) -> Settings:
    return vllm.resolve(catalog.load(model), gpu(device), args, vllm.version(number))


def capacity(model: str, device: str, number: tuple[int, int], kv_gib: float, args: EngineArgs) -> Capacity:
    """What a pool of the logged size holds; the log's second decimal leaves 0.005 GiB open."""
    spec, settings = catalog.load(model), settings_of(model, device, number, args)
    pool = vllm_pool.pool(spec, vllm_pages.paging(spec, settings, args, gpu(device).sm))
    return vllm_pool.capacity(pool, settings, args, [int(kv_gib * GIB)])


def half_digit(bytes_per_block: int) -> int:
    """Blocks that half of the last digit of "18.03 GiB" may be."""
    return GIB // 200 // bytes_per_block + 1


def test_before_the_hybrid_manager_windows_were_kept_in_full() -> None:
    # vllm-project/vllm#16378: Gemma 3 27B on four A100-40G, smallest rank 18.03 GiB, 9,526 blocks, 2.33x at 65,536
    args = EngineArgs(tensor_parallel_size=4, max_model_len=65536)
    found = capacity("gemma-3-27b", "a100-40g", (0, 8), 18.03, args)
    assert found.num_blocks == pytest.approx(9526, abs=half_digit(found.bytes_per_block))
    assert 9526 / found.blocks_per_request == pytest.approx(2.33, abs=0.005)
    assert capacity("gemma-3-27b", "a100-40g", (0, 11), 18.03, args).max_concurrency > 2 * found.max_concurrency


def test_the_first_engine_padded_a_latent_to_640_elements() -> None:
    # DeepSeek-R1 on 8 H200 under V0: 21.43 GiB, 18,418 blocks of 16 tokens: 61 layers x 1,280 B instead of 1,152
    args = EngineArgs(tensor_parallel_size=8, max_model_len=128000)
    found = capacity("deepseek-r1", "h200", (0, 7), 21.43, args)
    assert found.bytes_per_block == 61 * 16 * 1280
    assert found.num_blocks == pytest.approx(18418, abs=half_digit(found.bytes_per_block))
    assert found.max_concurrency == pytest.approx(2.30, abs=0.005)
    assert capacity("deepseek-r1", "h200", (0, 8), 21.43, args).bytes_per_block == 61 * 16 * 1152


def test_before_0_21_a_state_took_one_block_of_a_request() -> None:
    # Nemotron-3-Super TP4 under 0.14.1: 7.94 GiB, block 4,160, 690,560 tokens of one of six groups, 14.49x at 262,144:
    # 64 blocks of attention and one for each of five groups of states
    args = EngineArgs(tensor_parallel_size=4, max_model_len=262144, kv_cache_dtype="fp8", max_num_batched_tokens=16384)
    found = capacity("nemotron-3-super-120b-a12b", "h100-80g", (0, 14), 7.94, args)
    assert found.blocks_per_request == 64 + 5
    assert found.tokens == 690_560
    assert found.max_concurrency == pytest.approx(14.49, abs=0.02)


def test_decode_context_parallel_ranks_count_in_the_logged_tokens() -> None:
    # Kimi-K2-Thinking on 8 H200 under 0.11.1: 46.80 GiB are 715,072 tokens, and with DCP 8 5,721,088
    for dcp, tokens in ((1, 715_072), (8, 5_721_088)):
        args = EngineArgs(tensor_parallel_size=8, decode_context_parallel_size=dcp)
        found = capacity("kimi-k2", "h200", (0, 11), 46.80, args)
        assert found.tokens == pytest.approx(tokens, abs=16 * dcp * half_digit(found.bytes_per_block))


def test_sparse_attention_keeps_656_bytes_on_workstation_blackwell() -> None:
    # GLM-5.1 TP8 on RTX PRO 6000: 19.55 GiB are 341,504 tokens: 78 layers x (656 + 132) B
    args = EngineArgs(tensor_parallel_size=8, kv_cache_dtype="fp8", max_model_len=202752)
    found = capacity("glm-5.1", "rtx-pro-6000", (0, 20), 19.55, args)
    assert found.bytes_per_block == 64 * 78 * (656 + 132)
    assert found.tokens == pytest.approx(341_504, abs=64 * half_digit(found.bytes_per_block))
    assert settings_of("glm-5.1", "b200", (0, 20), args).kv_dtype == "fp8"


def test_gemma_3_ran_in_float16_until_0_9() -> None:
    args = EngineArgs(tensor_parallel_size=8, dtype="float16", max_model_len=16384)  # vllm-project/vllm#15766
    assert settings_of("gemma-3-27b", "t4", (0, 8), args).dtype == "float16"
    with pytest.raises(UsageError, match=r"refuses gemma-3-27b in float16"):
        settings_of("gemma-3-27b", "t4", (0, 9), args)


def test_latent_attention_before_0_7_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"vLLM 0\.6 kept full heads.*use vllm@0\.7 or newer"):
        settings_of("deepseek-v2-lite", "h100-80g", (0, 6), EngineArgs())


@pytest.mark.parametrize("model", ["llama-3.2-11b-vision", "jamba-1.5-mini"])
def test_a_cache_of_the_first_engine_that_is_not_known_is_refused(model: str) -> None:
    # images' keys, and states, which lay outside the pool and took a share per sequence of the profile run's memory
    spec, args = catalog.load(model), EngineArgs(max_model_len=8192)
    settings = settings_of(model, "a100-80g", (0, 7), args)
    with pytest.raises(UnsupportedModelError, match=r"first engine is not modelled; use vllm@0\.11 or newer"):
        vllm_pool.pool(spec, vllm_pages.paging(spec, settings, args, 80))


@pytest.mark.parametrize(
    ("device", "number", "sorts"),
    [("a100-80g", (0, 7), True), ("a100-80g", (0, 10), False), ("t4", (0, 10), True), ("h100-80g", (0, 11), True)],
)
def test_which_sampler_sorts(device: str, number: tuple[int, int], sorts: bool) -> None:
    found = sampler_of(settings_of("qwen3-8b", device, number, EngineArgs(max_model_len=4096)))
    assert found is (SAMPLER_TO_016 if sorts else SAMPLER_TO_010)


def test_experts_are_quantised_while_loading_and_nothing_else_is() -> None:
    from kvplan.plan import Request, rank_weights

    spec, device = catalog.load("jamba-1.5-mini"), gpu("a100-80g")
    plain = rank_weights(Request(spec, device), 0)
    int8 = rank_weights(Request(spec, device, EngineArgs(quantization="experts_int8")), 0)
    assert {name for name in plain if plain[name] != int8[name]} == {"experts"}
    # one byte for two, and a float32 scale per row: 16 experts x (2 x 14,336 + 4,096) rows in 16 of 32 layers
    assert int8["experts"] == plain["experts"] // 2 + 4 * 16 * 16 * (2 * 14336 + 4096)


class TestTheTableOfChanges:
    def test_every_change_is_one_that_the_rules_ask_for(self) -> None:
        """An entry that nothing reads would be a claim without an effect."""
        asked = set[str]()
        for path in PACKAGE.rglob("*.py"):
            asked |= set(re.findall(r"""(?:\.has|since)\("(\w+)"\)""", path.read_text(encoding="utf-8")))
        assert set(CHANGES) <= asked

    def test_is_in_the_order_of_the_releases(self) -> None:
        numbers = [change.since for change in CHANGES.values()]
        assert numbers == sorted(numbers)
        assert min(numbers) > vllm.OLDEST
        assert max(numbers) <= vllm.NEWEST

    def test_what_a_release_lacks_is_what_came_after_it(self) -> None:
        said = [change.what for change in Version((0, 21)).lacks()]
        assert any("V2" in what for what in said)
        assert not any("0.92" in what for what in said)
        assert not list(Version(vllm.NEWEST).lacks())

    @pytest.mark.parametrize(("engine", "told"), [("vllm@0.19", True), ("vllm", False), ("sglang", False)])
    def test_an_older_release_is_explained_by_what_later_ones_change(self, run: Run, engine: str, told: bool) -> None:
        done = run("estimate", "qwen3-8b", "--gpu", "l4", "--ctx", "4k", "--engine", engine, "--explain")
        assert ("from 0.25 on: model runner V2" in done.out) is told
