"""On a GPU: the Triton kernels against float64, the engine against transformers and torch, its memory report.

Nothing here runs without a GPU. Tolerances follow from the dtypes; none was set by looking at a GPU's answers.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams, kernels
from engine.memory import requested
from kvplan.models import hf_config
from tests.engine.test_engine_models import teacher_forced
from tests.support import interpreter_run, small_engines
from tests.support import kernel_reference as reference
from tests.support.interpreter_cases import (
    CASES,
    Attention,
    Best,
    Case,
    Decode,
    Draw,
    Fp8Block,
    Fp8Rows,
    Gate,
    Group,
    Int4,
    Latent,
    Moe,
    Norm,
    Nucleus,
    Prefill,
    Rotate,
    RotateStore,
    Route,
    case_id,
)

pytestmark = pytest.mark.gpu
DEVICE = "cuda"

# Half a unit in the last place of the dtype that softmax weights are rounded to before they multiply the values.
UNIT = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-9, "float8_e4m3fn": 2.0**-11}
# Scores reach about 2^4 in base 2. Their float32 sums and the GPU's exp2 leave each weight right to about 2^-17, and an
# answer is a sum of weights over another.
FLOAT32_WEIGHTS = 2.0**-16


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """One test's memory is not another's."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


# --- kernels ----------------------------------------------------------------------------------------------------------


def decode_of(**case: Any) -> Decode:
    return Decode(**{"dtype": "bfloat16", "lens": (4096, 1, 777, 2048), **case})


def prefill_of(**case: Any) -> Prefill:
    return Prefill(**{"dtype": "bfloat16", "queries": ((1024, 4096), (1, 777), (300, 300)), **case})


LLAMA_8B = {"heads": 32, "kv_heads": 8, "head_dim": 128}
SHAPES: tuple[dict[str, Any], ...] = (
    LLAMA_8B,
    {**LLAMA_8B, "dtype": "float16"},
    {**LLAMA_8B, "dtype": "float32"},
    {**LLAMA_8B, "stored": "float8_e4m3fn"},
    {**LLAMA_8B, "block_size": 64},
    {**LLAMA_8B, "layout": "HND"},
    {"heads": 28, "kv_heads": 4, "head_dim": 128},  # Qwen2.5-7B
    {"heads": 32, "kv_heads": 4, "head_dim": 128},  # Qwen3-30B-A3B
    {"heads": 16, "kv_heads": 8, "head_dim": 256, "window": 1024},  # Gemma-3-12B, its local layers
    {"heads": 16, "kv_heads": 8, "head_dim": 256, "softcap": 50.0},  # Gemma-2-9B
    {"heads": 64, "kv_heads": 8, "head_dim": 64, "window": 128, "sinks": True},  # gpt-oss-20b
    {"heads": 32, "kv_heads": 32, "head_dim": 96},  # Phi-3-mini
)
REAL: tuple[Case, ...] = (
    *(decode_of(**shape) for shape in SHAPES),
    *(prefill_of(**shape) for shape in SHAPES),
    decode_of(**LLAMA_8B, chunk=256),
    decode_of(**LLAMA_8B, lens=(65_536,)),
    decode_of(**LLAMA_8B, lens=(512,) * 256),
    Latent("bfloat16", lens=(4096, 1, 777, 2048)),  # DeepSeek-V2-Lite
    Latent("bfloat16", heads=128, lens=(4096, 1, 777)),  # DeepSeek-V3
    Latent("float32", lens=(2048, 33)),
)
ODD = tuple(case for case in CASES.values() if isinstance(case, Decode | Prefill | Latent))[::4]
ROW_WISE = tuple(
    case
    for case in CASES.values()
    if isinstance(case, Best | Draw | Group | Nucleus | Route)
    or (
        isinstance(case, Norm | Rotate | RotateStore | Gate | Moe | Int4 | Fp8Rows | Fp8Block)
        and case.dtype != "float32"
    )
)


def load_triton() -> ModuleType:
    return kernels.load("triton", "cuda")


@dataclass(frozen=True, slots=True)
class Problem:
    """Random inputs, whatever must not be read being NaN.

    caches   what the kernel is given: keys and values, or latents
    k, v     the same as the reference wants them
    options  the kernel's keyword arguments; shared: those that the reference has too
    """

    kernel: Any
    reference: Any
    q: torch.Tensor
    caches: list[torch.Tensor]
    k: torch.Tensor
    v: torch.Tensor
    layout: tuple[Any, ...]
    shared: dict[str, Any]
    options: dict[str, Any]


def attention_problem(case: Decode | Prefill) -> Problem:
    triton: Any = load_triton()
    kernel: Any
    exact: Any
    starts: tuple[torch.Tensor, ...] = ()
    shared = interpreter_run.features(case)
    if isinstance(case, Prefill):
        query_lens, lens = zip(*case.queries, strict=True)
        starts = (torch.tensor((0, *query_lens)).cumsum(0).int(),)
        shared["max_query_len"] = max(query_lens)
        num_queries, kernel, exact = sum(query_lens), triton.paged_prefill, reference.paged_prefill
        options: dict[str, Any] = {}
    else:
        lens, num_queries = case.lens, len(case.lens)
        kernel, exact = triton.paged_decode, reference.paged_decode
        options = {"work": interpreter_run.work_of(case)}
    tables, num_blocks = interpreter_run.block_tables(lens, case.block_size)
    widths = (case.head_dim, case.head_dim_v or case.head_dim)
    k, v = (interpreter_run.pool(num_blocks, case, width) for width in widths)
    interpreter_run.fill(k, tables, lens)
    interpreter_run.fill(v, tables, lens)
    q = interpreter_run.strided((num_queries, case.heads, case.head_dim), interpreter_run.dtype_of(case.dtype))
    layout = (tables, *starts, torch.tensor(lens, dtype=torch.int32), 2 * case.head_dim**-0.5)
    return Problem(kernel, exact, q, [k, v], k, v, layout, shared, {**shared, **options})


def latent_problem(case: Latent) -> Problem:
    """A row is the key of all heads, its first latent_dim elements are the value."""
    width = case.latent_dim + case.rope_dim
    tables, num_blocks = interpreter_run.block_tables(case.lens, case.block_size)
    shape = Attention(case.dtype, kv_heads=1, block_size=case.block_size)
    rows = interpreter_run.pool(num_blocks, shape, width)
    interpreter_run.fill(rows, tables, case.lens)
    q = interpreter_run.strided((len(case.lens), case.heads, width), interpreter_run.dtype_of(case.dtype))
    layout = (tables, torch.tensor(case.lens, dtype=torch.int32), 2 * width**-0.5)
    options = {"latent_dim": case.latent_dim, "work": interpreter_run.work_of(case)}
    kernel = load_triton().latent_decode
    values = rows[..., : case.latent_dim]
    return Problem(kernel, reference.paged_decode, q, [rows[:, :, 0]], rows, values, layout, {}, options)


def check(case: Case) -> None:
    """The kernel's answer is float64's but for rounding, and it read and wrote nothing that it should not."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        assert isinstance(case, Decode | Prefill | Latent)
        problem = latent_problem(case) if isinstance(case, Latent) else attention_problem(case)
        inputs = {"q": problem.q} | {f"cache {i}": cache for i, cache in enumerate(problem.caches)}
        with interpreter_run.guarded_allocations() as faults:
            got = interpreter_run.unchanged(
                faults, lambda: problem.kernel(problem.q, *problem.caches, *problem.layout, **problem.options), **inputs
            )
        exact, spread = (
            problem.reference(problem.q.double(), problem.k, v, *problem.layout, **problem.shared)
            for v in (problem.v, problem.v.double().abs())
        )
    assert faults == []
    assert got.isfinite().all()
    unit = UNIT[getattr(case, "stored", "") or case.dtype] if case.dtype != "float32" else 0.0
    assert worst_share(got, exact, spread, unit) <= 1


def worst_share(got: torch.Tensor, exact: torch.Tensor, spread: torch.Tensor, unit: float) -> float:
    """The largest error of any row as a share of what it may be.

    Rounding to got's dtype may cost 1.6 times what it costs the exact answer; rounding the weights of the values a
    share of `spread`, the answer with absolute values.
    """
    rows = [x.double().flatten(1) for x in (got, exact, exact.to(got.dtype), spread)]
    errors = (rows[0] - rows[1]).abs().amax(1)
    floors = (rows[2] - rows[1]).abs().amax(1)
    allowed = 1.6 * floors + (unit + FLOAT32_WEIGHTS) * rows[3].amax(1) + 1e-30
    return float((errors / allowed).max())


@pytest.mark.parametrize("case", REAL, ids=case_id)
def test_attention_of_real_shapes_agrees_with_float64(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", ODD, ids=case_id)
def test_attention_of_odd_shapes_agrees_with_float64(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", ROW_WISE, ids=case_id)
def test_other_kernels_agree_with_float64(case: Case) -> None:
    with torch.device(DEVICE):
        verdict = interpreter_run.run(case)
    assert verdict["faults"] == []
    assert verdict["error"] <= verdict["tolerance"]


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn], ids=["bfloat16", "float8"])
def test_kv_is_stored_bit_for_bit_as_on_a_cpu(stored: torch.dtype) -> None:
    torch.manual_seed(0)
    k, v = (torch.randn(300, 8, 128).mul(100).bfloat16() for _ in range(2))
    slots = torch.randperm(64 * 16)[:300]
    slots[7] = -1
    scales = (0.5, 2.0) if stored == torch.float8_e4m3fn else (1.0, 1.0)
    k_cache, v_cache = (torch.zeros(64, 16, 8, 128).to(stored) for _ in range(2))
    k_on_gpu, v_on_gpu = k_cache.to(DEVICE), v_cache.to(DEVICE)
    reference.store_kv(k, v, k_cache, v_cache, slots, *scales)
    load_triton().store_kv(k.to(DEVICE), v.to(DEVICE), k_on_gpu, v_on_gpu, slots.to(DEVICE), *scales)
    for ours, theirs in ((k_on_gpu, k_cache), (v_on_gpu, v_cache)):
        assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))


# --- the engine -------------------------------------------------------------------------------------------------------

FAMILIES = (*small_engines.FAMILIES, "gemma2", "qwen3_moe")
PROMPT_LENS = (5, 17, 40)


def engine_on_gpu(family: str, **changes: Any) -> Engine:
    """Small and in float32; the kernels take blocks of 16 tokens and more."""
    return small_engines.engine_for(family, **{"device": DEVICE, "block_size": 16, "num_blocks": 400, **changes})


def forced_logits(family: str, **changes: Any) -> list[torch.Tensor]:
    """Logits on the CPU for the same three texts, whatever the engine: 24 tokens after prompts of PROMPT_LENS."""
    texts = small_engines.random_tokens(*(n + 24 for n in PROMPT_LENS), seed=7)
    # Without overlap: tokens that are not sampled cannot be in flight.
    rows = teacher_forced(engine_on_gpu(family, async_scheduling=False, **changes), texts, PROMPT_LENS)
    return [logits.cpu() for logits in rows]


def difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest, as a share of the largest logit."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_triton_and_torch_give_the_same_logits(family: str) -> None:
    triton = forced_logits(family, backend="triton", enforce_eager=True)
    assert difference(triton, forced_logits(family, backend="torch")) < small_engines.ROUNDING


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_graph_gives_the_logits_of_an_eager_step(family: str) -> None:
    graph = forced_logits(family)
    assert difference(graph, forced_logits(family, enforce_eager=True)) < small_engines.ROUNDING


@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, is_eager: bool) -> None:
    engine = engine_on_gpu(family, enforce_eager=is_eager)
    assert bool(engine.runner.graphs) != is_eager
    outputs = engine.generate(small_engines.random_tokens(*PROMPT_LENS, 1, 33), small_engines.greedy(32))
    assert small_engines.faults(family, outputs, 32) == []


def test_a_replayed_graph_does_not_remember_the_last_batch() -> None:
    """Three sequences, then one, in the same engine: padding rows and old slots must not show."""
    engine = engine_on_gpu("llama")
    prompts = small_engines.random_tokens(*PROMPT_LENS)
    together = engine.generate(prompts, small_engines.greedy(16))
    alone = [engine.generate([prompt], small_engines.greedy(16))[0] for prompt in prompts]
    for outputs in (together, alone):
        assert small_engines.faults("llama", outputs, 16) == []


# --- memory -----------------------------------------------------------------------------------------------------------

# Of a few layers, large enough that rows are megabytes.
MEDIUM = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 32_000, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MEDIUM_PARAMETERS = 2 * 32_000 * 1024 + 4 * ((1024 + 2 * 256) * 1024 + 1024 * 1024 + 3 * 1024 * 4096 + 2 * 1024) + 1024
SMALL_BUFFERS = 2**16  # bytes of the scale of the embedding, and for each of 64 rows what was sampled and is asked for
SMALLEST_WORKSPACE = (2 * 4096 + 8 * 16) * 2**10  # cuBLAS's, as its documentation has it; Hopper's is four times that


def medium_engine(**changes: Any) -> Engine:
    spec = hf_config.read_config(MEDIUM, "medium", "medium")
    options = {"max_model_len": 2048, "max_num_seqs": 64, "num_blocks": 1000, "load_format": "dummy", **changes}
    return Engine(spec, EngineConfig(device=DEVICE, **options))


def asked_for() -> int:
    """Bytes of all tensors and workspaces, without what the allocator rounds their blocks up by."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return requested(torch.device(DEVICE))


def test_the_reports_rows_are_what_the_allocator_holds() -> None:
    medium_engine(enforce_eager=True)  # libraries allocate their workspaces once per process
    before = asked_for()
    engine = medium_engine(enforce_eager=True)
    report = engine.memory_report()
    assert report.weights == 2 * MEDIUM_PARAMETERS
    assert report.buffers == 2048 * 64 * 4  # positions, cosines and sines of half a head, float32
    assert report.kv_cache == 1000 * 16 * 4 * 2 * 4 * 64 * 2  # blocks, slots, layers, K and V, heads, head_dim, bytes
    rows = report.weights + report.buffers + report.kv_cache
    assert rows <= asked_for() - before <= rows + SMALL_BUFFERS


def test_the_workspaces_of_libraries_are_in_the_report() -> None:
    engine = medium_engine(enforce_eager=True)
    report = engine.memory_report()
    assert SMALLEST_WORKSPACE <= report.workspaces <= report.non_torch
    rows = report.weights + report.buffers + report.kv_cache + report.workspaces
    assert rows <= asked_for() <= rows + SMALL_BUFFERS


def test_no_step_holds_more_than_the_profile_run_saw() -> None:
    engine = medium_engine(enforce_eager=True, max_num_batched_tokens=1024)
    before = asked_for()
    torch.cuda.reset_peak_memory_stats()
    prompts = small_engines.random_tokens(*[200] * 64)
    engine.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    peak = requested(torch.device(DEVICE), "peak") - before
    assert 0 < peak <= engine.memory_report().activations + SMALL_BUFFERS


def test_what_the_pool_leaves_is_what_the_device_has_free() -> None:
    """With half of the device granted, the pool is what remains of it beside all other rows.

    The activations of the profile run are free again, and more than what the allocator rounds blocks up by.
    """
    engine = medium_engine(num_blocks=None, gpu_memory_utilization=0.5, enforce_eager=True)
    report = engine.memory_report()
    assert report.budget == report.total // 2
    taken = report.weights + report.buffers + report.activations + report.non_torch + report.kv_cache
    assert 0 <= report.budget - taken < report.block_bytes
    free, total = torch.cuda.mem_get_info()
    assert total - free <= report.budget


def test_capturing_graphs_is_in_the_report() -> None:
    engine = medium_engine()
    graphs = engine.runner.graphs
    assert graphs is not None
    recorded = sum(graphs.num_bytes.values())
    assert recorded > 0
    assert engine.memory_report().cuda_graphs == graphs.shared_bytes + recorded
    assert medium_engine(enforce_eager=True).memory_report().cuda_graphs == 0
