"""Where the memory goes and who fits: identities, laws, and the first case everybody asks about."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.errors import KvplanError, UsageError
from kvplan.hardware.gpu import gpu, gpu_names
from kvplan.models import catalog
from kvplan.planning.advise import fixes
from kvplan.planning.plan import Load, Plan, Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from kvplan.workloads.lengths import parse_lengths
from tests.support.refusals import reason_of

GIB = 2**30
MODELS = (
    "llama-3.1-8b", "qwen3-30b-a3b", "gemma-3-27b", "gpt-oss-20b", "deepseek-v3", "qwen3-next-80b-a3b",
    "nemotron-h-8b", "falcon-h1-1.5b", "mistral-7b-v0.1", "llama-4-scout", "gemma-4-31b", "deepseek-v4-flash",
    "mamba-2.8b", "minimax-m2.5", "glm-5",
)  # fmt: skip


def of(model: str, gpu_name: str = "a100-80g", engine: str = "vllm", load: Load | None = None, **args: Any) -> Plan:
    return plan(Request(catalog.load(model), gpu(gpu_name), EngineArgs(**args), parse_engine(engine), load or Load()))


def rows(answer: Plan) -> int:
    return sum(getattr(answer.memory, name) for name in answer.memory.ROWS)


def check_identities(answer: Plan) -> None:
    memory, got = answer.memory, answer.capacity
    assert rows(answer) - memory.missing == memory.total == answer.request.gpu.total_memory
    detail = memory.context + memory.outside_budget + memory.slack - memory.over_budget - memory.over_gpu
    assert detail == memory.unused - memory.missing == memory.headroom
    sizes = (memory.unused, memory.missing, memory.outside_budget, memory.slack, memory.over_budget, memory.over_gpu)
    assert min(sizes) == 0 <= memory.context
    assert 0 in (memory.unused, memory.missing)
    assert memory.kv_cache == (got.num_blocks * got.bytes_per_block if answer.fits else 0)
    unsupported = answer.refusal is not None and answer.refusal.by == "unsupported"
    assert (answer.deficit > 0) == (not answer.fits and not unsupported)
    assert sum(answer.weight_groups.values()) == memory.weights <= memory.load_peak
    users = answer.concurrency
    assert 0 <= users.low <= users.max <= users.high
    assert 0 <= (users.users_low or 0) <= users.users <= (users.users_high or 0)
    # Older releases start with a pool that lacks the null block: it then holds no request of the full context.
    assert users.users >= (answer.fits and got.num_blocks > got.blocks_per_request)
    if answer.fits:
        assert memory.kv_cache <= answer.available < memory.kv_cache + got.bytes_per_block
        null_block = 1 if answer.request.release.has("null_block") else 0
        assert (got.blocks_per_request + null_block) * got.bytes_per_block <= answer.available


@given(
    st.sampled_from(MODELS),
    st.sampled_from(gpu_names()),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([None, 2048, 8192, 32768, "auto"]),
    st.sampled_from(["auto", "fp8", "bfloat16"]),
    st.booleans(),
    st.sampled_from(["vllm@0.33", "vllm@0.19", "vllm@0.11"]),
)
def test_the_rows_add_up_whatever_is_asked(
    model: str, gpu_name: str, tp: int, pp: int, context: Any, kv_dtype: str, caching: bool, engine: str
) -> None:
    try:
        answer = of(
            model, gpu_name, engine, tensor_parallel_size=tp, pipeline_parallel_size=pp, max_model_len=context,
            kv_cache_dtype=kv_dtype, enable_prefix_caching=caching,
        )  # fmt: skip
    except KvplanError:
        return
    check_identities(answer)


@given(st.sampled_from(MODELS), st.integers(16, 2047), st.sampled_from(["h200", "b200"]))
def test_a_longer_context_never_holds_more_users(model: str, context: int, gpu_name: str) -> None:
    """Each has the settings of the longer: the server cuts its token budget for contexts below it."""
    args: dict[str, Any] = {"tensor_parallel_size": 8, "max_num_batched_tokens": 2048, "max_num_seqs": 64}
    if catalog.load(model).num_heads % 8:
        args["tensor_parallel_size"] = 1
    shorter, longer = (of(model, gpu_name, max_model_len=n, **args) for n in (context, context + 1))
    assert shorter.concurrency.max >= longer.concurrency.max


@given(
    st.sampled_from(MODELS),
    st.sampled_from(["h200", "b200"]),
    st.sampled_from(["vllm@0.33", "vllm@0.19", "vllm@0.11", "sglang@0.5"]),
    st.floats(0.3, 0.94),
    st.floats(0.001, 0.05),
)
def test_more_memory_never_holds_fewer_users(
    model: str, gpu_name: str, engine: str, share: float, increase: float
) -> None:
    """Both have the same settings, and the larger share of the GPU's memory leaves no room to fall out of its range."""
    args: dict[str, Any] = {
        "tensor_parallel_size": 1 if catalog.load(model).num_heads % 8 else 8,
        "max_model_len": 2048,
    }
    try:
        less, more = (of(model, gpu_name, engine, gpu_memory_utilization=n, **args) for n in (share, share + increase))
    except KvplanError:
        return
    assert less.concurrency.max <= more.concurrency.max
    assert less.concurrency.users <= more.concurrency.users


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-27b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_an_fp8_cache_never_holds_fewer_users(model: str) -> None:
    wide, narrow = (of(model, "h200", max_model_len=8192, kv_cache_dtype=d) for d in ("bfloat16", "fp8"))
    assert narrow.concurrency.max >= wide.concurrency.max


def test_a_100_80g_holds_14_users_of_llama_at_32k() -> None:
    """An A100's own defaults (256 sequences, 2,048 tokens) leave 54 to 57.5 GiB: 13.5 to 14.4 users of 4 GiB each.

    The range is worked from logged terms: 79.25 GiB x 0.92 - 14.99 - (0.4 to 1.5 of peak, graphs and the rest).
    """
    answer = of("llama-3.1-8b", max_model_len=32768)
    assert 54 * GIB <= answer.memory.kv_cache <= 57.5 * GIB
    assert 13.5 <= answer.concurrency.max <= 14.4
    assert answer.bytes_per_token == 131_072
    assert answer.bytes_per_request == 4 * GIB


# llm-d-planner's empirical results: one H100 with 79.18 GiB, vLLM 0.11, utilization 0.9, context 16,000: KV GiB.
MEASURED = [("llama-3.1-8b", 1, 51.38), ("qwen3-0.6b", 1, 64.45), ("qwen3-32b", 2, 34.49), ("gpt-oss-20b", 1, 50.28)]


@pytest.mark.parametrize(("model", "tp", "measured"), MEASURED)
def test_kv_memory_is_within_2_percent_of_what_was_measured(model: str, tp: int, measured: float) -> None:
    answer = of(
        model, "h100-80g", "vllm@0.11", tensor_parallel_size=tp, max_model_len=16000, gpu_memory_utilization=0.9
    )
    assert answer.memory.kv_cache / GIB == pytest.approx(measured, rel=0.02)


def test_a_70b_model_on_80_gib_is_told_to_take_two() -> None:
    answer = of("llama-3.1-70b", max_model_len=32768)
    assert not answer.fits
    assert answer.memory.kv_cache == 0
    assert answer.concurrency.max == 0
    # 65.71 GiB of weights on each of two leave 0.5 to 1.1 users; fp8 entries or half the context hold one for sure.
    flags = [fix.flag for fix in fixes(answer)]
    assert flags[:2] == ["--kv-cache-dtype fp8 --tensor-parallel-size 2", "--tensor-parallel-size 4"]
    assert flags[2].startswith("--tensor-parallel-size 2 --max-model-len ")


TOO_LARGE = [
    (model, card, context)
    for model in ("qwen3-32b", "llama-3.1-70b", "gemma-3-27b", "qwen3-next-80b-a3b", "deepseek-v2-lite")
    for card in ("t4", "rtx-4090", "l40s", "a100-80g")
    for context in (8192, 32768)
    if not of(model, card, max_model_len=context).fits
]


@pytest.mark.parametrize(("model", "card", "context"), TOO_LARGE)
def test_every_fix_fits_when_its_flags_are_given_and_none_beats_another(model: str, card: str, context: int) -> None:
    offered = fixes(of(model, card, max_model_len=context))
    for fix in offered:
        args: dict[str, Any] = {"max_model_len": context}
        words = fix.flag.split()
        if "--enforce-eager" in words:
            words.remove("--enforce-eager")
            args["enforce_eager"] = True
        values = dict(zip(words[::2], words[1::2], strict=True))
        bigger = values.pop("--gpu", card)
        for flag, value in values.items():
            name = flag.removeprefix("--").replace("-", "_")
            args[name] = value if "dtype" in name else float(value) if "." in value else int(value)
        answer = of(model, bigger, **args)
        assert answer.fits
        assert answer.concurrency == fix.plan.concurrency
    sure = {fix.plan.concurrency.low >= 1 for fix in offered}
    assert len(sure) <= 1  # likely ones only where none is sure
    for fix, other in itertools.permutations(offered, 2):
        assert not all(level <= more for level, more in zip(fix.levels, other.levels, strict=True))
    assert [fix.cost for fix in offered] == sorted(fix.cost for fix in offered)


def test_fp8_is_no_fix_where_no_backend_reads_it() -> None:
    """A T4 has compute capability 7.5; a larger GPU that reads an fp8 cache may have one."""
    offered = fixes(of("llama-3.1-8b", "t4", max_model_len=32768))
    assert offered
    for fix in offered:
        assert "fp8" not in fix.flag or fix.plan.request.gpu.sm >= 80


def test_online_quantisation_settles_at_half_but_loads_whole() -> None:
    answer = of("llama-3.1-8b", max_model_len=8192, quantization="fp8")
    assert answer.memory.load_peak == 16_060_522_496
    # 6,979,321,856 linear weights in 8 bits with 4 B for each of 32 x 7 matrices; the rest stays in 16.
    assert answer.memory.weights == 6_979_321_856 + 32 * 7 * 4 + 2 * (8_030_261_248 - 6_979_321_856)


def test_a_quantization_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="--quantization awq"):
        of("llama-3.1-8b", max_model_len=8192, quantization="awq")


def test_graphs_come_out_of_the_budget_since_0_20() -> None:
    new, old = (of("llama-3.1-8b", "h100-80g", f"vllm@{v}", gpu_memory_utilization=0.9) for v in ("0.20", "0.19"))
    assert new.memory.budget == old.memory.budget
    taken = new.memory.cuda_graphs
    assert taken > 0
    assert new.available == old.available - taken


def test_a_mean_length_and_a_shared_prefix_hold_more() -> None:
    full = of("llama-3.1-8b", max_model_len=32768)
    mean = of("llama-3.1-8b", max_model_len=32768, load=Load(mean_tokens=4096))
    shared = of("llama-3.1-8b", max_model_len=32768, load=Load(mean_tokens=4096, shared_prefix=900))
    usable = full.capacity.num_blocks - 1
    assert full.concurrency.users == usable // 2048
    assert mean.concurrency.users == usable // 256  # 4,096 tokens are 256 blocks of 16
    # 900 shared tokens are 56 whole blocks, stored once; each user has 200 of its own.
    assert shared.concurrency.users == (usable - 56) // 200


def test_windows_hold_less_than_they_are_charged() -> None:
    answer = of("gpt-oss-20b", "h100-80g", max_model_len=131072)
    # 131,072 tokens are 8,192 blocks of 16. A window of 128 is 9 blocks at most; a request whose prompt is computed, in
    # two batches of 8,192 tokens in flight, has ceil((127 + 16,384) / 16) + 1 = 1,033 there; one more passes its bound.
    assert answer.concurrency.users == 1 + (answer.capacity.num_blocks - 1 - 8192 - 1033 - 1) // (8192 + 9)
    assert answer.concurrency.users > answer.concurrency.max


def test_a_distribution_of_one_length_is_that_length() -> None:
    load = Load(mean_tokens=4096, lengths=parse_lengths("const:4096", 32768))
    answer = of("llama-3.1-8b", max_model_len=32768, load=load).concurrency
    assert answer.users == of("llama-3.1-8b", max_model_len=32768, load=Load(mean_tokens=4096)).concurrency.users


def test_a_draft_model_takes_weights_and_cache() -> None:
    alone = of("llama-3.1-70b", "h200", tensor_parallel_size=2, max_model_len=8192)
    draft = plan(replace(alone.request, draft=catalog.load("llama-3.2-1b")))
    # Llama-3.2-1B on two ranks: half of what is split, and the norms whole: 2 x 16 layers + 1, 2,048 wide.
    assert draft.weight_groups["draft"] == (2_471_628_800 - 33 * 4096) // 2 + 33 * 4096
    assert draft.bytes_per_token == alone.bytes_per_token + 16 * 4 * 64 * 2 * 2
    check_identities(draft)


def test_stated_weights_are_spread_over_the_ranks() -> None:
    request = of("llama-3.1-8b", max_model_len=8192, tensor_parallel_size=2).request
    assert plan(replace(request, weights_bytes=10 * GIB)).memory.weights == 5 * GIB


def test_the_tightest_stage_decides() -> None:
    answer = of("qwen3.5-27b", "a100-80g", pipeline_parallel_size=2, max_model_len=8192)
    other = plan(answer.request)
    assert answer.stage == other.stage
    check_identities(answer)


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (Load(mean_tokens=40_000), "beyond the context"),
        (Load(mean_tokens=100, shared_prefix=200), "longer than the mean"),
        (Load(shared_prefix=32768), "leaves no room"),
    ],
)
def test_loads_that_contradict_themselves_are_refused(load: Load, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        of("llama-3.1-8b", max_model_len=32768, load=load)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match="does not divide the 32 attention heads"):
        of("llama-3.1-8b", max_model_len=8192, tensor_parallel_size=3)


# --- what a server would refuse -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "gpu_name", "args", "says"),
    [
        (
            "llama-3.1-8b", "a100-80g", {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024},
            "must hold the whole context",
        ),
        ("llama-3.1-8b", "a100-80g", {"max_num_seqs": 4096}, "more than max_num_batched_tokens"),
    ],
)  # fmt: skip
def test_what_the_server_refuses_is_refused(model: str, gpu_name: str, args: dict[str, Any], says: str) -> None:
    """Each as vLLM 0.33's own checks have it (config/scheduler.py, config/model.py, quantization/*.py)."""
    with pytest.raises(UsageError, match=says):
        of(model, gpu_name, max_model_len=8192, **args)


@pytest.mark.parametrize(
    ("model", "gpu_name", "args", "says"),
    [
        ("llama-3.1-8b", "a100-80g", {"enable_expert_parallel": True}, "has no experts"),
        ("llama-3.1-8b", "t4", {"dtype": "bfloat16"}, "--dtype bfloat16 needs compute capability 8.0"),
        ("gemma-3-4b", "a100-80g", {"dtype": "float16"}, "gemma-3-4b is not supported in float16"),
        ("qwen3-32b-fp8", "h100-80g", {"dtype": "float32"}, "not supported in float32"),
    ],
)
def test_what_the_server_refuses_of_a_model_does_not_fit(
    model: str, gpu_name: str, args: dict[str, Any], says: str
) -> None:
    """What can be sized is a plan; the fix is another value of the argument, as vLLM 0.33's own checks have it."""
    answer = of(model, gpu_name, max_model_len=4096, **args)
    assert says in reason_of(answer)
    cures = [cure.flag for cure in fixes(answer)]
    assert cures
    assert not any(f"{name.replace('_', '-')} {value}" in flag for name, value in args.items() for flag in cures)


@pytest.mark.parametrize(
    ("model", "gpu_name", "ranks", "says"),
    [
        ("gpt-oss-20b", "t4", 2, "Minimum capability: 80"),
        ("qwen3-30b-a3b-fp8", "v100-32g", 4, "Minimum capability: 75"),
        ("deepseek-v3.2", "a100-80g", 16, "no attention backend runs deepseek-v3.2 on compute capability 8.0"),
    ],
)
def test_what_the_server_does_not_start_on_a_gpu_does_not_fit(model: str, gpu_name: str, ranks: int, says: str) -> None:
    """vLLM 0.33's get_min_capability of each method, and its backends' supports_compute_capability."""
    answer = of(model, gpu_name, max_model_len=8192, tensor_parallel_size=ranks)
    assert not answer.fits
    assert answer.refusal is not None
    assert answer.refusal.by == "unsupported"
    assert says in answer.refusal.text


def test_bfloat16_becomes_float16_where_there_is_none() -> None:
    assert of("llama-3.1-8b", "v100-32g", max_model_len=4096).settings.dtype == "float16"


def test_a_model_that_float16_breaks_is_float32_there() -> None:
    """Gemma 3 4B has 4,300,079,472 parameters: 17.2 GB in float32 are more than a T4 has."""
    answer = of("gemma-3-4b", "t4", max_model_len=4096)
    assert answer.settings.dtype == "float32"
    assert answer.memory.weights == 4 * 4_300_079_472
    assert not answer.fits


def test_replicas_share_the_experts_without_expert_parallelism() -> None:
    """Mixtral: 45,097,156,608 expert parameters over 2 replicas, the other 1,605,636,096 whole on each."""
    answer = of("mixtral-8x7b", "h100-80g", data_parallel_size=2, max_model_len=8192)
    assert answer.memory.weights == 2 * (45_097_156_608 // 2 + 1_605_636_096)


def test_a_default_of_more_sequences_than_state_blocks_is_lowered_and_said() -> None:
    answer = of("qwen3.5-35b-a3b", "h100-80g", max_model_len=32768)
    assert answer.capacity.num_blocks >= answer.settings.max_num_seqs
    assert any(
        f"using {answer.settings.max_num_seqs}, the most with which it starts; the default is " in note
        for note in answer.notes
    )


def test_a_pool_beyond_the_gpu_does_not_start_and_is_warned_of_where_it_only_may() -> None:
    never = of("llama-3.1-8b", max_model_len=8192, kv_cache_memory_bytes=200 * GIB)
    assert not never.fits
    assert never.refusal is not None
    assert never.refusal.by == "stated_pool"
    (room,) = never.refusal.values
    assert isinstance(room, int)
    perhaps = of("llama-3.1-8b", max_model_len=8192, kv_cache_memory_bytes=int(room) + 100 * 2**20)
    assert perhaps.fits  # the estimates beside it are 1 GiB at their lowest, 1.5 GiB likely
    assert any("more than the GPU's" in note for note in perhaps.notes)


def test_throughput_mode_doubles_the_defaults() -> None:
    answer = of("llama-3.1-8b", max_model_len=8192, performance_mode="throughput")
    assert (answer.settings.max_num_batched_tokens, answer.settings.max_num_seqs) == (4096, 512)


def test_no_kind_of_cache_holds_more_than_it_is_charged() -> None:
    for model, engine in (*((model, "vllm") for model in MODELS), ("llama-3.2-11b-vision", "vllm@0.10")):
        answer = of(model, "b200", engine, max_model_len=2048, max_num_batched_tokens=2048, max_num_seqs=64)
        for group in answer.pool.groups:
            for tokens in (1, 15, 16, 17, 1000, 2048):
                assert group.allocated_blocks(tokens, 1) <= group.charged(2048, answer.settings, 1), (
                    model,
                    group.first,
                )


def test_no_fix_offers_more_context_than_was_asked_for() -> None:
    context = 65536
    for fix in fixes(of("llama-3.1-70b", max_model_len=context)):
        assert fix.plan.capacity.max_model_len <= context


def test_the_nearest_larger_gpu_is_offered() -> None:
    flags = [fix.flag for fix in fixes(of("qwen2.5-7b", "rtx-4090", max_model_len=32768, max_num_seqs=64,
                                          enforce_eager=True, gpu_memory_utilization=0.6))]  # fmt: skip
    # 0.6 of 31.4 GiB holds what 0.6 of 23.6 GiB does not.
    assert "--gpu rtx-5090" in flags


@pytest.mark.parametrize(
    ("engine", "model", "args"),
    [
        ("vllm", "llama-3.1-8b", {}),
        ("vllm", "deepseek-v3", {"tensor_parallel_size": 8}),
        ("vllm", "gemma-3-27b", {"quantization": "fp8"}),
        ("vllm", "mistral-7b-v0.1", {"disable_sliding_window": True}),
        ("sglang", "deepseek-v3", {"tensor_parallel_size": 8}),
        ("sglang", "qwen3-next-80b-a3b", {"tensor_parallel_size": 4}),
    ],
)
def test_plans_of_one_model_share_what_the_server_makes_of_it(engine: str, model: str, args: dict[str, Any]) -> None:
    """Sizes are kept by model, and models compared by identity: so a search sizes a rank of many plans once."""
    first, second = (of(model, "h200", engine, max_num_seqs=n, max_model_len=4096, **args) for n in (8, 16))
    assert first.request.spec is second.request.spec
