"""Several servers on one GPU: every pack starts by the servers' own arithmetic, and what does not fit, does not."""

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice, permutations
from pathlib import Path

import pytest

from kvplan.core.errors import UsageError
from kvplan.core.units import GIB
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.pack import Packing, Started, Tenant, held_by, holds, pack, tried
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.base import parse_engine, server_of
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Run, run
from tests.support.start_arithmetic import Facts, NotStarted, sglang_pool, vllm_pool

__all__ = ["run"]
DECODERS = ("qwen3-0.6b", "qwen3-4b", "qwen3-8b", "llama-3.2-1b", "llama-3.1-8b-fp8", "gemma-3-4b", "qwen3-30b-a3b")
# Only drawn under vLLM: encoders without a KV cache, poolers, vision, states, encoders and decoders.
OTHER_KINDS = (
    "bge-m3", "multilingual-e5-large", "bge-reranker-base", "qwen3-embedding-0.6b", "qwen3-reranker-0.6b",
    "qwen2.5-vl-3b", "ministral-3-3b", "granite-4.0-h-1b", "falcon-h1-1.5b",
    "whisper-large-v3", "whisper-large-v3-turbo",
)  # fmt: skip
GPUS = ("rtx-4090", "l40s", "a100-80g", "h100-80g", "h200")
ENGINES = ("vllm", "vllm", "vllm", "sglang")


@cache
def request(model: str, gpu_name: str, context: int, engine: str) -> Request:
    spec = catalog.load(model)
    context = min(context, spec.max_model_len)
    return Request(spec, gpu(gpu_name), EngineArgs(max_model_len=context), parse_engine(engine))


def facts(answer: Plan) -> Facts:
    """What the process takes; none of it depends on the share that it is given."""
    memory = answer.memory
    loaded = memory.weights + memory.buffers + memory.non_torch + memory.lora
    reserve = server_of(answer.request.release.engine).kept_back(answer)
    return Facts(memory.context, loaded, memory.activations, memory.cuda_graphs, reserve)


def check_starts(packing: Packing) -> None:
    """Start the servers one after the other by their own code; each pool is what the pack says."""
    others = packing.in_use
    for server in packing.started:
        pool, given_out = pool_of(server, packing.total, others)
        if server.plan.request.release.engine == "sglang":
            # What its pools allocate beyond the tokens that they give out is a page each; what they leave, less.
            assert abs(pool - given_out) < 3 * server.plan.capacity.bytes_per_block
        elif server.plan.request.spec.is_encoder:  # it allocates nothing of its budget beyond what it loads and runs
            assert given_out == 0 <= pool
        else:
            assert 0 <= pool - given_out < server.plan.capacity.bytes_per_block
        own = facts(server.plan)
        others += own.context + own.loaded + own.transient + own.graphs + own.reserve + given_out
        assert others <= packing.total


def pool_of(server: Started, total: int, others: int) -> tuple[int, int]:
    own = facts(server.plan)
    compute = sglang_pool if server.plan.request.release.engine == "sglang" else vllm_pool
    return compute(total, others, server.share, own), server.plan.memory.kv_cache


def drawn_tenant(draw: random.Random, name: str, gpu_name: str) -> Tenant:
    engine = draw.choice(ENGINES)
    model = draw.choice(DECODERS if engine == "sglang" or draw.random() < 0.5 else OTHER_KINDS)
    return Tenant(
        name,
        request(model, gpu_name, draw.choice((2048, 8192, 32768)), engine),
        1 if catalog.load(model).is_encoder else draw.choice((1, 1, 2, 4, 16)),
    )


def drawn(draw: random.Random) -> tuple[list[Tenant], int]:
    gpu_name = draw.choice(GPUS)
    tenants = [drawn_tenant(draw, f"s{number}", gpu_name) for number in range(draw.choice((1, 2, 2, 3, 4)))]
    return tenants, draw.choice((0, 0, GIB // 2, 2 * GIB))


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 20), (1, 20), *(pytest.param(seed, 250, marks=pytest.mark.full) for seed in range(2, 6))]
)
def test_random_packs_start_by_the_servers_own_arithmetic(seed: int, count: int) -> None:
    draw = random.Random(seed)
    fitting = 0
    for _ in range(count):
        tenants, in_use = drawn(draw)
        try:
            packing = pack(tenants, in_use)
        except UsageError:  # one is too large even alone
            continue
        if packing.fits:
            fitting += 1
            check_starts(packing)
            assert [server.tenant.name for server in sorted(packing.started, key=lambda s: s.tenant.name)] == [
                tenant.name for tenant in tenants
            ]
    assert 4 * fitting > count


def test_a_larger_share_for_anyone_would_not_start() -> None:
    tenants = [
        Tenant("chat", request("qwen3-8b", "l40s", 16384, "vllm"), 4),
        Tenant("embed", request("qwen3-0.6b", "l40s", 8192, "vllm"), 4),
    ]
    packing = pack(tenants, 0)
    check_starts(packing)
    first, last = packing.started
    usage = packing.total - packing.left - facts(last.plan).context
    with pytest.raises(NotStarted):
        vllm_pool(packing.total, first.resident, last.share + 0.01, facts(last.plan))
    assert packing.total - usage < 0.02 * packing.total  # what is left went to the first


def test_an_embedder_beside_a_chat_model_finds_its_share_free(run: Run) -> None:
    """vLLM 0.33 v1/worker/gpu_worker.py (init_device) checks the free memory before it loads a model of any kind."""
    words = ("pack", "--gpu", "rtx-3090", "--format", "json")
    chat, embed = "chat=qwen2.5-7b-awq --max-model-len 8192 --users 4", "embed=multilingual-e5-large"
    document = run(*words, "--server", chat, "--server", embed).json
    assert {server["name"] for server in document["servers"]} == {"chat", "embed"}
    packing = pack([Tenant("chat", request("qwen2.5-7b-awq", "rtx-3090", 8192, "vllm"), 4),
                    Tenant("embed", request("multilingual-e5-large", "rtx-3090", 512, "vllm"))], 0)  # fmt: skip
    assert packing.fits
    check_starts(packing)


def test_what_is_left_goes_to_the_server_that_is_named() -> None:
    tenants = [
        Tenant("chat", request("qwen3-8b", "l40s", 16384, "vllm"), 4),
        Tenant("embed", request("qwen3-0.6b", "l40s", 8192, "vllm"), 4),
    ]
    by_default, to_embed = pack(tenants, 0), pack(tenants, 0, rest="embed")
    assert by_default.started[0].share > to_embed.started[0].share
    assert by_default.started[1].share < to_embed.started[1].share
    check_starts(to_embed)


def test_before_0_9_what_others_hold_counts_against_the_share() -> None:
    # vLLM 0.8.5 v1/worker/gpu_worker.py: non_torch_allocations are all that is used but for torch's own tensors, so
    # the second of two servers that are alike is told about twice the first one's share.
    tenants = [Tenant(name, request("qwen3-0.6b", "l40s", 8192, "vllm@0.8.5"), 4) for name in ("a", "b")]
    first, second = pack(tenants, 0, rest="b").started
    least = pack(tenants[:1], 0).started[0]
    assert least.share > 0.9  # alone it is given what is left
    assert second.share > first.share + 0.1
    alone = plan(second.plan.request)
    assert alone.memory.kv_cache == second.plan.memory.kv_cache


def test_what_does_not_fit_says_what_is_missing(run: Run) -> None:
    servers = ("a=qwen3-8b --max-model-len 8192", "b=qwen3-8b --max-model-len 4096 --users 2")
    words = ("pack", "--gpu", "rtx-4090", *(word for server in servers for word in ("--server", server)))
    ran = run(*words, "--format", "json", "--exit-code")
    assert ran.code == 1
    assert not ran.json["fits"]
    # Two copies of 15.26 GiB alone are more than the GPU's 23.5 GiB.
    assert ran.json["left"] < 23.6 * GIB - 2 * 15.25 * GIB
    assert sum(server["held"] for server in ran.json["servers"]) == ran.json["total"] - ran.json["left"]
    assert run(*words).out.startswith("2 servers do not fit on rtx-4090")


def test_a_policy_is_packed_as_its_rules_ask(run: Run, tmp_path: Path) -> None:
    policy = tmp_path / "kvplan.policy.yaml"
    policy.write_text(
        "version: 1\ndefaults: {gpu: l40s, max_model_len: 8k}\ntargets:\n"
        "  - {id: chat, model: qwen3-8b, rules: {min_users: 6}}\n"
        "  - {id: small, model: qwen3-0.6b, rules: {min_users: 3}}\n"
    )
    servers = run("pack", str(policy), "--format", "json").json["servers"]
    assert [server["users_needed"] for server in servers] == [6, 3]
    assert all(server["users_low"] >= server["users_needed"] for server in servers)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "MODEL, POLICY or --server: missing"),
        (("--server", "qwen3-8b"), "--gpu: missing"),
        (("--gpu", "l40s", "--server", "qwen3-8b --users x"), "--users"),
        (("--gpu", "l40s", "--server", "qwen3-8b 'x"), "cannot be split into words"),
        (("--gpu", "l40s", "--server", " "), "is empty"),
        (("--gpu", "l40s", "--server", "qwen3-8b", "--server", "qwen3-8b"), "is named twice"),
        (("--gpu", "l40s", "--server", "qwen3-8b", "--rest", "x"), "--rest x: no such server"),
        (
            ("--gpu", "l40s", "--server", "a=qwen3-8b", "--server", "b=qwen3-0.6b --tensor-parallel-size 2"),
            "runs on 2 GPUs",
        ),
        (("--gpu", "rtx-4090", "--server", "qwen3-32b"), "cannot serve 1 user on rtx-4090 even alone"),
        (("--gpu", "l40s", "--server", "no-such-model"), "no-such-model"),
        (
            ("--gpu", "l40s", "--server", "qwen3-8b --ctx 8k"),
            "--server 'qwen3-8b --ctx 8k': command --ctx is not a flag",
        ),
    ],
)
def test_what_cannot_be_packed_is_one_line(run: Run, words: tuple[str, ...], problem: str) -> None:
    ran = run("pack", *words)
    assert ran.code == 2
    assert len(ran.errors) == 1
    assert problem in ran.errors[0]


# --- a refusal is right: no other shares would do ---------------------------------------------------------------------

GRID = range(2, 100, 4)  # hundredths


def all_start(order: Sequence[Tenant], before: int, total: int) -> bool:
    """Whether some shares of a grid start every server with its users, one after the other; each as it is planned."""
    if not order:
        return before <= total
    for step in GRID:
        answer = tried(order[0], step, before)
        if answer is not None and holds(answer, order[0]) and all_start(order[1:], before + held_by(answer), total):
            return True
    return False


def refused_sets(seed: int) -> Iterator[tuple[list[Tenant], int]]:
    """Sets of two servers that are refused, though not far from fitting."""
    draw = random.Random(seed)
    while True:
        tenants, in_use = drawn(draw)
        if len(tenants) != 2:
            continue
        try:
            packing = pack(tenants, in_use)
        except UsageError:
            continue
        if not packing.fits and packing.left > -0.35 * packing.total:
            yield tenants, in_use


@pytest.mark.parametrize(("seed", "count"), [(0, 2), pytest.param(1, 20, marks=pytest.mark.full)])
def test_of_what_is_refused_no_shares_start_all(seed: int, count: int) -> None:
    for tenants, in_use in islice(refused_sets(seed), count):
        total = tenants[0].request.gpu.total_memory
        for order in permutations(tenants):
            assert not all_start(order, in_use, total), [tenant.name for tenant in order]
