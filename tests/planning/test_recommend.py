"""`kvplan recommend`: every command holds the users and starts; nothing smaller does; costs follow their laws."""

import csv
import io
import itertools
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.hardware.gpu import custom_gpu, gpu
from kvplan.hardware.prices import read as read_prices
from kvplan.models import catalog
from kvplan.planning.plan import Load, Plan, Request, plan
from kvplan.planning.recommend import bound, seqs_for
from kvplan.planning.users import KnownPools, pool_holds, pool_users, users_for_lengths
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from kvplan.workloads.lengths import Lengths
from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture
from tests.support.parts import some

SIX = {"rtx-4090": 0.5, "l40s": 1.2, "a100-80g": 2.0, "h100-80g": 3.0, "h200": 3.8, "b200": 6.0}


def price_file(folder: Path, prices: dict[str, float]) -> Path:
    path = folder / "prices.yaml"
    path.write_text("".join(f"{name}: {price:.2f}\n" for name, price in prices.items()), encoding="utf-8")
    return path


ANSWERED: dict[tuple[str | Path, ...], str] = {}  # a third of the questions are asked by several tests


def recommended(run: Run, *words: str | Path) -> dict[str, Any]:
    if words not in ANSWERED:
        ran = run("recommend", *words, "--format", "json", "-q")
        assert ran.code == 0, ran.err
        if "--prices" in words:  # a file, which may be another one next time
            return ran.json
        ANSWERED[words] = ran.out
    answer: dict[str, Any] = json.loads(ANSWERED[words])
    return answer


def estimated(run: Run, *words: str) -> dict[str, Any]:
    ran = run("estimate", *words, "--format", "json", "-q")
    assert ran.code == 0, ran.err
    return ran.json


def changed(argv: list[str], **flags: object) -> str:
    """A command with flags in place of those it has, or beside them."""
    words = list(argv)
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if flag in words:
            words[words.index(flag) + 1] = str(value)
        else:
            words += [flag, str(value)]
    return shlex.join(words)


def num_users(doc: dict[str, Any], end: str = "low", mean: int | None = None) -> int:
    """Users of one estimate: the pool's blocks but one divided by a user's, at most
    those that the scheduler runs."""
    users = doc["concurrency"]
    if not doc["fits"]:
        return 0
    blocks = round(users[end] * doc["kv"]["blocks_per_request"]) - 1
    user_blocks = math.ceil((mean or doc["kv"]["max_model_len"]) / doc["kv"]["block_size"])
    return min(int(blocks // user_blocks), int(users["max_num_seqs"]))


# --- what is recommended holds, and no less does ----------------------------------------------------------------------

QUESTIONS = [
    ("llama-3.1-8b", 200, "16k", None),
    pytest.param("llama-3.1-8b", 333, "4k", None, marks=pytest.mark.full),
    ("llama-3.1-8b", 200, "16k", 6000),
    ("llama-3.1-70b", 50, "16k", None),
    ("qwen2.5-7b", 100, "32k", None),
]


@pytest.mark.parametrize(("model", "users", "context", "mean"), QUESTIONS)
def test_every_command_holds_the_users(run: Run, model: str, users: int, context: str, mean: int | None) -> None:
    load = [] if mean is None else ["--mean-tokens", str(mean)]
    doc = recommended(run, model, "--users", str(users), "--ctx", context, *load)
    assert {placement["gpu"] for placement in doc["placements"]} == set(SIX)
    for placement in doc["placements"]:
        answer = estimated(run, "--from-command", placement["command"], "--gpu", placement["gpu"], *load)
        assert placement["replicas"] * num_users(answer, "low", mean) == placement["users_low"] >= users
        assert placement["replicas"] * num_users(answer, "max", mean) == placement["users_likely"]
        assert answer["concurrency"]["low"] > 1
        assert not any("does not start" in note for note in answer["notes"])
        ranks = placement["tensor_parallel_size"] * placement["pipeline_parallel_size"]
        assert (answer["inputs"]["num_gpus"], placement["num_gpus"]) == (ranks, ranks * placement["replicas"])


@pytest.mark.parametrize(("model", "users", "context", "mean"), QUESTIONS)
def test_one_server_fewer_does_not_hold_them(run: Run, model: str, users: int, context: str, mean: int | None) -> None:
    load = [] if mean is None else ["--mean-tokens", str(mean)]
    doc = recommended(run, model, "--users", str(users), "--ctx", context, *load)
    several = [placement for placement in doc["placements"] if placement["replicas"] > 1]
    assert several
    for placement in several:
        share = math.ceil(users / (placement["replicas"] - 1))
        # Exactly as many sequences as users leaves the most memory for them.
        fewer = changed(placement["argv"], max_num_seqs=share)
        answer = run("estimate", "--from-command", fewer, "--gpu", placement["gpu"], *load, "--format", "json", "-q")
        if answer.code == 2:  # more sequences than a step has tokens
            assert "max_num_batched_tokens" in answer.err
        else:
            assert num_users(answer.json, "low", mean) < share


@pytest.mark.parametrize("gpu", some(["a100-80g", "h200", "l40s"], ["l40s"]))
def test_no_other_split_of_a_gpu_needs_fewer(run: Run, gpu: str) -> None:
    (best, *_) = recommended(run, "llama-3.1-8b", "--users", "200", "--ctx", "16k", "--gpus", gpu)["placements"]
    for tp in (1, 2, 4, 8):
        (placement, *_) = recommended(
            run, "llama-3.1-8b", "--users", "200", "--ctx", "16k", "--gpus", gpu, "--tp", str(tp)
        )["placements"]
        assert placement["tensor_parallel_size"] == tp
        assert best["num_gpus"] <= placement["num_gpus"]


def test_a_higher_utilization_is_taken_only_where_it_saves_a_gpu_and_leaves_the_context_its_room(run: Run) -> None:
    savings = []
    for users in range(20, 260, 13):
        words = ("--users", str(users), "--ctx", "16k", "--gpus", "a100-80g,l40s", "--pp", "1")
        doc = recommended(run, "llama-3.1-8b", *words)
        savings += [
            (users, placement) for placement in doc["placements"] if placement["gpu_memory_utilization"] != 0.92
        ]
    assert savings
    for users, placement in savings:
        usual = recommended(
            run, "llama-3.1-8b", "--users", str(users), "--ctx", "16k", "--gpus", placement["gpu"],
            "--gpu-memory-utilization", "0.92", "--pp", "1",
            "--kv-cache-dtype", "fp8" if placement["changes"] else "auto",
        )["placements"][0]  # fmt: skip
        assert usual["num_gpus"] > placement["num_gpus"]
        answer = estimated(run, "--from-command", placement["command"], "--gpu", placement["gpu"])
        context = next(assumption for assumption in answer["assumptions"] if assumption["name"] == "context")
        total = answer["inputs"]["gpu"]["total_memory_low"]
        assert 0.92 < placement["gpu_memory_utilization"] <= 0.95
        assert total * (1 - placement["gpu_memory_utilization"]) >= context["high"]


def test_sequences_are_a_round_number_at_least_the_users() -> None:
    assert [seqs_for(n) for n in (1, 8, 9, 64, 65, 200, 256, 257, 384, 385, 1000)] == [
        8, 8, 16, 64, 128, 256, 256, 384, 384, 512, 1024,
    ]  # fmt: skip


def test_states_leave_a_block_for_every_sequence(run: Run) -> None:
    doc = recommended(run, "qwen3-next-80b-a3b", "--users", "500", "--ctx", "8k")
    for placement in doc["placements"]:
        answer = estimated(run, "--from-command", placement["command"], "--gpu", placement["gpu"])
        assert round(answer["concurrency"]["low"] * answer["kv"]["blocks_per_request"]) >= placement["max_num_seqs"]


def test_a_state_block_for_every_sequence_decides_how_many_there_are(run: Run) -> None:
    spec, seqs = catalog.load("qwen3-next-80b-a3b"), 8
    args = EngineArgs(max_model_len=256, enable_prefix_caching=False, max_num_seqs=seqs)
    # A request takes 4 blocks. Where the pool has room for it, but not for the states of eight:
    size = next(
        mib
        for mib in range(160_000, 180_000, 8)
        if (answer := plan(Request(spec, custom_gpu(mib * 2**20), args))).refusal is not None
        and answer.refusal.by == "state_blocks"
    )
    words = ("qwen3-next-80b-a3b", "--users", "1", "--ctx", "256", "--no-enable-prefix-caching", "--gpu-memory")
    fit = recommended(run, *words, f"{size}MiB", "--max-num-seqs", str(seqs), "--gpu-memory-utilization", "0.92")["fit"]
    assert not fit["as_asked"]["holds"]
    assert "needs a block for its state" in fit["reason"]


def test_a_server_that_may_not_start_holds_nobody(run: Run) -> None:
    alone = estimated(run, "llama-3.1-8b", "--gpu", "rtx-4090", "--ctx", "44k", "--max-num-seqs", "8")
    assert alone["concurrency"]["low"] < 1 < alone["concurrency"]["max"]
    words = ("llama-3.1-8b", "--gpu", "rtx-4090", "--ctx", "44k", "--mean-tokens", "1k", "--users", "2")
    assert not recommended(run, *words)["fit"]["as_asked"]["holds"]
    assert recommended(run, *words, "--optimistic")["fit"]["as_asked"]["holds"]


def pool_of(num_blocks: int, load: Load) -> Plan:
    """Llama-3.1-8B with a pool of so many blocks of 16 tokens; 0.20 starts with one that holds no whole request."""
    args = EngineArgs(
        max_model_len=16_384, num_gpu_blocks_override=num_blocks, max_num_seqs=4096, max_num_batched_tokens=8192
    )
    return plan(Request(catalog.load("llama-3.1-8b"), gpu("h200"), args, parse_engine("vllm@0.20"), load))


def test_one_block_of_a_pool_is_nobodys() -> None:
    # A request of 160 tokens holds 10 blocks, and block 0 is no request's.
    for end in ("low", "likely", "high"):
        assert pool_users(pool_of(101, Load(mean_tokens=160)), end) == 10
        assert pool_users(pool_of(100, Load(mean_tokens=160)), end) == 9
    assert pool_users(pool_of(101, Load(mean_tokens=160, shared_prefix=80)), "low") == 19  # (100 - 5) / 5


SKEWED = Lengths(((16, 0.995), (16_384, 0.005)))  # one block, and seldom 1,024
WIDE = Lengths(((100, 0.3), (1000, 0.4), (4000, 0.3)))


@pytest.mark.parametrize("lengths", [SKEWED, WIDE])
@pytest.mark.parametrize("num_blocks", [3, 40, 700, 5_000, 20_000])
def test_the_bound_is_never_below_the_users(lengths: Lengths, num_blocks: int) -> None:
    pool = pool_of(num_blocks, Load(lengths=lengths))
    exact = users_for_lengths(lambda tokens: -(-tokens // 16), num_blocks - 1, lengths, 0.01).users
    assert bound(pool.request, pool, "low") >= exact


@settings(max_examples=5)
@given(st.lists(st.tuples(st.integers(300, 3000), st.integers(1, 40)), min_size=1, max_size=8))
def test_what_is_known_of_other_pools_gives_the_same_answers(queries: list[tuple[int, int]]) -> None:
    pools = KnownPools()
    for num_blocks, users in queries:
        pool = pool_of(num_blocks, Load(lengths=WIDE))
        exact = users_for_lengths(lambda tokens: -(-tokens // 16), num_blocks - 1, WIDE, 0.01).users
        assert pool_holds(pool, "low", users, pools) == (exact >= users)


def test_lengths_are_held_as_estimate_counts_them(run: Run) -> None:
    dist = ("--lengths", "lognormal:median=800,p95=3000")
    doc = recommended(run, "llama-3.1-8b", "--users", "150", "--ctx", "8k", "--gpus", "l40s,a100-80g", *dist)
    for placement in doc["placements"]:
        answer = estimated(run, "--from-command", placement["command"], "--gpu", placement["gpu"], *dist)["concurrency"]
        likely = answer["users"]
        assert placement["replicas"] * likely == placement["users_likely"] >= placement["users_low"] >= 150


def test_the_likely_figure_never_needs_more_than_the_low_end(run: Run) -> None:
    words = ("llama-3.1-8b", "--users", "200", "--ctx", "16k")
    low, likely = recommended(run, *words), recommended(run, *words, "--optimistic")
    assert (low["question"]["end"], likely["question"]["end"]) == ("low", "likely")
    counts = [
        {placement["gpu"]: placement["num_gpus"] for placement in doc["placements"] if not placement["changes"]}
        for doc in (low, likely)
    ]
    assert counts[0].keys() == counts[1].keys()
    assert all(counts[1][key] <= counts[0][key] for key in counts[0])
    assert counts[0] != counts[1]
    assert all(placement["users_likely"] >= 200 for placement in likely["placements"])


# --- the laws of costs ------------------------------------------------------------------------------------------------


def test_more_users_never_cost_less(run: Run, tmp_path: Path) -> None:
    prices = price_file(tmp_path, SIX)
    costs: dict[tuple[str, bool], list[float]] = {}
    best = []
    for users in (1, 13, 64, 65, 257, 3000):
        placements = recommended(run, "llama-3.1-8b", "--users", str(users), "--ctx", "8k", "--prices", prices)[
            "placements"
        ]
        best.append(placements[0]["price_per_hour"])
        for name, unchanged in itertools.product(SIX, (True, False)):
            offers = [
                placement
                for placement in placements
                if placement["gpu"] == name and not (unchanged and placement["changes"])
            ]
            costs.setdefault((name, unchanged), []).append(min(placement["price_per_hour"] for placement in offers))
    assert best == sorted(best)
    for prices_of_gpu in costs.values():
        assert len(prices_of_gpu) == len(best)
        assert prices_of_gpu == sorted(prices_of_gpu)


def test_one_more_gpu_to_choose_from_never_makes_it_dearer(run: Run, tmp_path: Path) -> None:
    prices = price_file(tmp_path, SIX)
    words = ("llama-3.1-8b", "--users", "64", "--ctx", "8k", "--prices", prices)
    best = []
    for count in range(1, len(SIX) + 1):
        doc = recommended(run, *words, "--gpus", ",".join(list(SIX)[-count:]))
        best.append(doc["placements"][0]["price_per_hour"])
    assert best == sorted(best, reverse=True)
    assert len(set(best)) > 2


def test_twice_the_prices_leave_the_order(run: Run, tmp_path: Path) -> None:
    words = ("llama-3.1-8b", "--users", "200", "--ctx", "16k", "--prices")
    once = recommended(run, *words, price_file(tmp_path, SIX))["placements"]
    twice = recommended(run, *words, price_file(tmp_path, {k: 2 * v for k, v in SIX.items()}))["placements"]
    assert [placement["command"] for placement in once] == [placement["command"] for placement in twice]
    assert [2 * placement["price_per_hour"] for placement in once] == [
        placement["price_per_hour"] for placement in twice
    ]
    assert all(placement["price_per_user"] == placement["price_per_hour"] / 200 for placement in once)


def test_placements_are_ranked_by_cost_and_unchanged_precision_comes_first(run: Run, tmp_path: Path) -> None:
    prices = price_file(tmp_path, SIX)
    words = ("llama-3.1-8b", "--users", "200", "--ctx", "16k", "--pp", "1")
    placements = recommended(run, *words, "--prices", prices)["placements"]
    changed = [bool({*placement["changes"]} - {"smaller steps"}) for placement in placements]
    for group in (
        [placement for placement, less in zip(placements, changed, strict=True) if less is kind]
        for kind in (False, True)
    ):
        assert [placement["price_per_hour"] for placement in group] == sorted(
            placement["price_per_hour"] for placement in group
        )
    assert changed == sorted(changed)
    assert sum(placement["changes"] == ["fp8 KV"] for placement in placements) == 6  # fp8 saves on each of the six
    free = recommended(run, *words)["placements"]
    for placement, other in itertools.pairwise(placement for placement in free if not placement["changes"]):
        assert (placement["num_gpus"], placement["total_memory"]) <= (other["num_gpus"], other["total_memory"])


# --- what is searched -------------------------------------------------------------------------------------------------


def test_less_precision_is_proposed_as_allowed_and_marked(run: Run) -> None:
    words = ("llama-3.1-8b", "--users", "100", "--ctx", "16k", "--gpus", "a100-80g")
    changes = [placement["changes"] for placement in recommended(run, *words)["placements"]]
    assert changes == [[], ["fp8 KV"]]
    # 131 GiB of weights do not fit one H200 beside any user; in fp8 they do.
    large = recommended(
        run, "llama-3.1-70b", "--users", "20", "--ctx", "8k", "--gpus", "h200", "--fp8-weights", "--no-fp8"
    )["placements"]
    assert [(placement["num_gpus"], placement["changes"]) for placement in large] == [(2, []), (1, ["fp8 weights"])]
    assert [placement["changes"] for placement in recommended(run, *words, "--no-fp8")["placements"]] == [[]]
    stated = recommended(run, *words, "--kv-cache-dtype", "fp8")["placements"]
    assert [(placement["changes"], placement["kv_dtype"]) for placement in stated] == [([], "fp8")]
    table = run("recommend", *words).out
    assert "fp8 *" in table
    assert "* less precise than the checkpoint's own" in table
    assert "*" not in run("recommend", *words, "--no-fp8").out


def test_a_default_that_does_not_start_is_lowered(run: Run) -> None:
    """The contexts of eight T4 leave less than 0.92 of each free: a server asks for what there is."""
    doc = recommended(run, "llama-3.1-8b", "--users", "300", "--ctx", "2k", "--gpus", "t4", "--pp", "1", "--tp", "4")
    (best,) = (placement for placement in doc["placements"] if not placement["changes"])
    assert best["gpu_memory_utilization"] < 0.92
    answer = estimated(run, "--from-command", best["command"], "--gpu", "t4")
    assert answer["fits"]
    lines = run("recommend", "llama-3.1-8b", "--users", "300", "--ctx", "2k", "--gpu", "4xt4").out.splitlines()
    assert lines[0].startswith("No: llama-3.1-8b on 4 x t4 has memory for none of 300 users")
    assert lines[1].startswith("  it needs 13.56 GiB free")


@pytest.mark.parametrize(("more", "least", "highest"), [((), 0.80, 0.85), (("--memory-in-use", "4GiB"), 0.92, 0.92)])
def test_gpus_that_share_memory_with_the_host_are_planned_at_what_is_free(
    more: tuple[str, ...], least: float, highest: float, run: Run
) -> None:
    """GB10s were seen with 102 GiB free of 121.69 at the least: 0.83 of it, and the default wants 0.92."""
    words = ("llama-3.1-8b", "--users", "10", "--ctx", "16k", "--gpus", "gb10", *more)
    best = recommended(run, *words)["placements"][0]
    assert best["num_gpus"] == 1
    assert least <= best["gpu_memory_utilization"] <= highest
    answer = estimated(run, "--from-command", best["command"], "--gpu", "gb10", *more)
    assert answer["concurrency"]["users_low"] >= 10


def test_a_batch_without_state_blocks_at_the_low_end_is_said_as_that(run: Run) -> None:
    words = ("qwen3.5-27b", "--users", "10", "--ctx", "16k", "--max-num-seqs", "365", "--gpus", "h100-80g")
    assert (
        "at the low end of the range the pool has no state block for each of 365 sequences"
        in run("recommend", *words).out
    )


@pytest.mark.parametrize(
    ("model", "gpu", "fp8"),
    [
        ("llama-3.1-8b", "t4", False),  # 7.5: no backend
        ("llama-3.1-8b", "a100-80g", True),  # 8.0: FlashInfer
        ("deepseek-v2-lite", "a100-80g", False),  # MLA there is Triton's, which needs 8.9
        ("gpt-oss-20b", "a100-80g", False),  # attention sinks there too
        ("phi-2", "a100-80g", False),  # heads of 80
        ("deepseek-v2-lite", "l40s", True),  # 8.9
        ("gpt-oss-20b", "h100-80g", True),
    ],
)
def test_an_fp8_cache_is_proposed_only_where_a_backend_reads_it(run: Run, model: str, gpu: str, fp8: bool) -> None:
    words = (model, "--users", "3000", "--ctx", "2k")  # so many that a smaller cache saves a GPU
    placements = recommended(run, *words, "--gpus", gpu, "--pp", "1")["placements"]
    assert [placement["changes"] for placement in placements] == ([[], ["fp8 KV"]] if fp8 else [[]])
    dtypes = [choice["value"] for choice in recommended(run, *words, "--gpu", gpu)["fit"]["kv_dtypes"]]
    assert dtypes == (["auto", "fp8"] if fp8 else ["auto"])


def test_a_model_that_no_node_holds_is_served_in_pipeline_stages(run: Run) -> None:
    # 671 billion parameters of one byte and more: 627 GiB; eight A100 have 634, of which a server may use 583.
    doc = recommended(run, "deepseek-v3", "--users", "16", "--ctx", "8k", "--gpus", "a100-80g,h200", "--no-fp8")
    unchanged = [
        (placement["gpu"], placement["num_gpus"]) for placement in doc["placements"] if not placement["changes"]
    ]
    assert unchanged == [("h200", 8)]
    (a100,) = (
        placement
        for placement in doc["placements"]
        if placement["gpu"] == "a100-80g" and SHARED_EXPERTS not in placement["changes"]
    )
    assert (a100["pipeline_parallel_size"] > 1, a100["changes"]) == (True, ["pipeline stages"])
    assert any((failure["gpu"], failure["num_gpus"]) == ("a100-80g", 8) for failure in doc["failures"])


SHARED_EXPERTS = "experts over data-parallel ranks"


@pytest.mark.parametrize(
    ("model", "gpu", "users", "ranks", "tp"),
    [
        ("kimi-k2", "h200", 64, 16, 1),
        ("deepseek-v3", "h100-80g", 64, 8, 2),  # with fp8 KV: 16 ranks of one GPU hold 32
        ("deepseek-v3", "h100-80g", 20, 8, 2),  # at full precision: 16 ranks of one GPU hold none
    ],
)
def test_models_of_latent_attention_share_experts_over_data_parallel_ranks(
    run: Run, model: str, gpu: str, users: int, ranks: int, tp: int
) -> None:
    doc = recommended(run, model, "--users", str(users), "--ctx", "32k", "--gpus", gpu)
    wide = min(
        (placement for placement in doc["placements"] if SHARED_EXPERTS in placement["changes"]),
        key=lambda placement: int(placement["num_gpus"]),
    )
    assert (wide["replicas"], wide["data_parallel_size"], wide["tensor_parallel_size"]) == (ranks, ranks, tp)
    assert wide["num_gpus"] == ranks * tp
    assert f"--data-parallel-size {ranks} --enable-expert-parallel" in wide["command"]
    assert (f"--tensor-parallel-size {tp} " in wide["command"]) == (tp > 1)
    answer = estimated(run, "--from-command", wide["command"], "--gpu", gpu)
    assert answer["concurrency"]["replicas"] == ranks
    assert ranks * num_users(answer, "low", None) == wide["users_low"] >= users


def test_ranks_of_several_gpus_are_written_as_such(run: Run) -> None:
    words = "deepseek-v3", "--users", "20", "--ctx", "32k"
    out = run("recommend", *words, "--gpus", "h100").out
    assert out.startswith("16 x h100-80g with experts over data-parallel ranks have memory for 20 users")
    assert re.search(r"\nh100-80g +16 +2 x 1 x 8 \*\*\* ", out)
    output = run("recommend", *words, "--gpu", "8xh100").out
    assert re.search(r"16 x h100-80g and 8 data-parallel ranks .* 1 server of DP 8 x TP 2\n", output)
    for command in (out, output):  # 16 GPUs are two nodes
        assert "--data-parallel-size-local 4 --data-parallel-address HEAD_NODE" in command
    refused = run("recommend", "deepseek-v3", "--ctx", "32k", "--gpus", "h200", "--users", "400", "--output", "k8s")
    assert refused.code == 2
    assert "add --tp 8 --pp 1" in refused.err
    assert "kind: Deployment" in run(
        "recommend", "deepseek-v3", "--ctx", "32k", "--gpus", "h200", "--users", "400", "--output", "k8s",
        "--tp", "8", "--pp", "1",
    ).out  # fmt: skip


@pytest.mark.parametrize("model", ["deepseek-v3", "kimi-k2"])
def test_ranks_that_share_experts_come_before_stages_and_before_many_more_gpus(run: Run, model: str) -> None:
    """The order of the vendors' guides: DeepSeek serves V3 with DP attention and EP, not with pipeline stages."""
    doc = recommended(run, model, "--users", "400", "--ctx", "32k", "--gpus", "h200,b200")
    best = doc["placements"][0]
    assert best["changes"] == [SHARED_EXPERTS]
    assert best["replicas"] == best["num_gpus"]
    best_name = f"{best['num_gpus']} x {best['gpu']} with {SHARED_EXPERTS}"
    assert doc["answer"].startswith(f"{best_name} have memory for 400 users")
    document = recommended(run, model, "--users", "400", "--ctx", "32k", "--gpu", "h200", "--num-gpus", "8")
    cures = [cure for cure in document["fit"]["cures"] if cure["max_model_len"] == 32768]
    staged = ["pipeline stages" in cure["changes"] for cure in cures]
    assert SHARED_EXPERTS in cures[0]["changes"]
    assert staged == sorted(staged)
    assert "data-parallel ranks sharing the experts" in document["fit"]["cures"][0]["needs"][-1]


def test_a_stated_split_is_not_widened(run: Run) -> None:
    doc = recommended(run, "deepseek-v3", "--users", "64", "--ctx", "32k", "--gpus", "h200", "--tp", "8")
    assert not any(SHARED_EXPERTS in placement["changes"] for placement in doc["placements"])


STAGED = [
    # (model, GPU, users, context, mean): Llama-3.1-70B's 131.42 GiB are too much for one of either GPU, and two hold
    # few users or none; five A100 and three H200 in stages hold 100 where 4 x 2 and 2 x 2 in tensor parallel do.
    ("llama-3.1-70b", "a100-80g", 100, "16k", 6144),
    ("llama-3.1-70b", "h200", 100, "16k", 6144),
    ("deepseek-v3", "a100-80g", 16, "8k", None),
    ("qwen2.5-7b", "l40s", 312, "8k", None),
]


@pytest.mark.parametrize(("model", "gpu", "users", "context", "mean"), STAGED)
def test_no_split_over_stages_holds_them_on_fewer_gpus(
    run: Run, model: str, gpu: str, users: int, context: str, mean: int | None
) -> None:
    load = [] if mean is None else ["--mean-tokens", str(mean)]
    words = (model, "--ctx", context, "--gpu-memory-utilization", "0.92")
    doc = recommended(run, *words, "--users", str(users), *load, "--gpus", gpu, "--no-fp8")
    (best,) = (placement for placement in doc["placements"] if placement["changes"] == ["pipeline stages"])
    assert all(best["num_gpus"] < placement["num_gpus"] for placement in doc["placements"] if not placement["changes"])
    answer = estimated(run, "--from-command", best["command"], "--gpu", gpu, *load)
    assert best["replicas"] * num_users(answer, "low", mean) == best["users_low"] >= users
    tried = 0
    for tp, pp in itertools.product((1, 2, 4, 8), range(1, 9)):
        replicas = (best["num_gpus"] - 1) // (tp * pp)
        if tp * pp > 16 or replicas == 0:
            continue
        share = math.ceil(users / replicas)  # and as many sequences: no more memory is left for requests otherwise
        split = ("--gpu", gpu, "--tp", str(tp), "--pp", str(pp), "--max-num-seqs", str(share))
        ran = run("estimate", *words, *split, *load, "--format", "json", "-q")
        if ran.code == 2:
            assert "does not divide" in ran.err or "max_num_batched_tokens" in ran.err
        else:
            assert num_users(ran.json, "low", mean) < share, (tp, pp)
        tried += ran.code == 0
    assert tried >= 3


def test_pipeline_stages_are_marked_and_come_after_what_needs_none(run: Run, tmp_path: Path) -> None:
    prices = price_file(tmp_path, {"a100-80g": 2.0, "h200": 3.8})
    words = ("llama-3.1-70b", "--users", "100", "--ctx", "16k", "--mean-tokens", "6k", "--prices", prices, "--no-fp8")
    placements = recommended(run, *words)["placements"]
    assert [(placement["gpu"], placement["num_gpus"], placement["changes"]) for placement in placements] == [
        ("h200", 4, []), ("a100-80g", 8, []), ("a100-80g", 5, ["pipeline stages"]), ("h200", 3, ["pipeline stages"]),
    ]  # fmt: skip
    assert [round(placement["price_per_hour"], 2) for placement in placements[2:]] == [10.0, 11.4]
    out = run("recommend", *words).out
    assert "1 x 5 x 1 **" in out
    assert "** pipeline stages: each adds latency, and all are busy only with many requests in flight" in out
    assert "less precise" not in out
    assert "Serve (on 5 x a100-80g, pipeline stages)" in out
    for stated in ("1", "2"):
        output = run("recommend", *words, "--pp", stated).out
        assert f" x {stated} x " in output
        assert "**" not in output


def test_what_holds_nobody_says_why(run: Run) -> None:
    doc = recommended(run, "llama-3.1-70b", "--users", "10", "--ctx", "8k", "--gpus", "l40s,a100-80g")
    reasons = {(failure["gpu"], failure["num_gpus"]): failure["reason"] for failure in doc["failures"]}
    # 70,553,706,496 parameters of 2 bytes are 131.42 GiB.
    assert reasons["l40s", 1] == "the weights alone (131.42 GiB) exceed the budget of 40.76 GiB"
    assert ("l40s", 4) not in reasons
    out = run("recommend", "llama-3.1-70b", "--users", "10", "--ctx", "8k", "--gpus", "l40s,a100-80g").out
    assert "l40s x2 and fewer: the weights alone (65.71 GiB) exceed" in out


def test_a_gpu_that_a_model_cannot_be_split_over_is_told_apart(run: Run) -> None:
    doc = recommended(run, "qwen2.5-7b", "--users", "4000", "--ctx", "32k", "--gpus", "l40s")
    (eight,) = (failure for failure in doc["failures"] if failure["num_gpus"] == 8)
    assert eight["refused"]
    assert eight["reason"].startswith("--tp 8 does not divide the 28 attention heads")


def test_nothing_that_holds_is_an_answer(run: Run) -> None:
    words = ("recommend", "llama-3.1-70b", "--users", "10", "--ctx", "8k", "--gpus", "t4", "--tp", "1")
    ran = run(*words)
    assert ran.code == 0
    assert ran.out.startswith("No: none of these GPUs has memory for 10 users of llama-3.1-70b at 8,192 tokens")
    assert "t4 x8 and fewer: the weights alone" in ran.out  # eight stages
    assert run(*words, "--exit-code").code == 1
    assert run("recommend", "llama-3.1-8b", "--users", "10", "--ctx", "8k", "--exit-code").code == 0
    assert run(*words, "--format", "markdown").out.count("none of these GPUs") == 1


def test_what_is_stated_is_kept(run: Run) -> None:
    doc = recommended(
        run, "llama-3.1-8b", "--users", "100", "--ctx", "8k", "--gpus", "h200", "--tp", "2", "--max-num-seqs", "30",
        "--gpu-memory-utilization", "0.8", "--enforce-eager",
    )  # fmt: skip
    for placement in doc["placements"]:
        assert (placement["tensor_parallel_size"], placement["max_num_seqs"], placement["gpu_memory_utilization"]) == (
            2,
            30,
            0.8,
        )
        assert placement["replicas"] == 4  # 30 at once each
        assert "--enforce-eager" in placement["argv"]
    command = "vllm serve meta-llama/Llama-3.1-8B --max-model-len 8192 --max-num-seqs 50"
    pasted = recommended(run, "--from-command", command, "--users", "100", "--gpus", "h200")
    assert {placement["max_num_seqs"] for placement in pasted["placements"]} == {50}


# --- what one GPU needs -----------------------------------------------------------------------------------------------

FIXED = ("llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "16k")


@pytest.mark.parametrize(("gpu", "users"), [("a100-80g", 20), ("a100-80g", 1), ("b200", 1), ("b200", 70)])
def test_the_lowest_utilization_holds_and_a_hundredth_less_does_not(run: Run, gpu: str, users: int) -> None:
    words = ("llama-3.1-8b", "--gpu", gpu, "--ctx", "16k", "--users", str(users))
    utilization = recommended(run, *words)["fit"]["utilization"]
    argv = utilization["settings"]["argv"]
    assert num_users(estimated(run, "--from-command", shlex.join(argv), "--gpu", gpu)) >= users
    less = changed(argv, gpu_memory_utilization=round(utilization["value"] - 0.01, 2), max_num_seqs=users)
    assert num_users(estimated(run, "--from-command", less, "--gpu", gpu)) < users


@pytest.mark.parametrize("users", [1, 7, 20])
def test_the_longest_context_holds_and_a_block_more_does_not(run: Run, users: int) -> None:
    context = recommended(run, *FIXED, "--users", str(users))["fit"]["context"]
    argv = context["settings"]["argv"]
    assert context["value"] % 16 == 0
    assert num_users(estimated(run, "--from-command", shlex.join(argv), "--gpu", "a100-80g")) >= users
    if context["value"] == 131_072:
        return  # the model's own end
    more = changed(argv, max_model_len=context["value"] + 16, max_num_seqs=users)
    assert num_users(estimated(run, "--from-command", more, "--gpu", "a100-80g")) < users


def test_one_user_has_the_whole_context_of_the_model(run: Run) -> None:
    assert recommended(run, *FIXED, "--users", "1")["fit"]["context"]["value"] == 131_072


def test_the_most_users_are_held_and_one_more_is_not(run: Run) -> None:
    doc = recommended(run, *FIXED, "--users", "500")["fit"]
    assert not doc["as_asked"]["holds"]
    max_users = doc["as_asked"]["most_users"]
    assert recommended(run, *FIXED, "--users", str(max_users))["fit"]["as_asked"]["holds"]
    assert not recommended(run, *FIXED, "--users", str(max_users + 1))["fit"]["as_asked"]["holds"]
    # The same by hand: of Llama's 128 KiB per token, a request of 16,384 takes 2 GiB.
    low = estimated(run, "llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "16k", "--max-num-seqs", str(max_users))
    assert low["memory"]["available_low"] // 2**31 == max_users


def test_the_kv_dtypes_that_hold_them_are_named(run: Run) -> None:
    doc = recommended(run, *FIXED, "--users", "40")["fit"]
    assert {choice["value"]: choice["holds"] for choice in doc["kv_dtypes"]} == {"auto": False, "fp8": True}
    fp8 = doc["kv_dtypes"][1]
    assert fp8["most_users"] > 2 * 0.95 * doc["as_asked"]["most_users"]  # half the bytes per token
    out = run("recommend", *FIXED, "--users", "40").out
    assert "utilization   no value up to 0.99 is enough: at most" in out
    assert "Serve (fp8 KV)\n" in out  # the command to follow: nothing that changes less does


def test_a_utilization_that_crowds_the_cuda_context_is_marked(run: Run) -> None:
    fits = [recommended(run, *FIXED, "--users", str(users))["fit"] for users in range(20, 32)]
    high = [fit for fit in fits if fit["utilization"]["holds"]]
    tight = [fit["utilization"]["value"] for fit in high if fit["utilization_is_tight"]]
    easy = [fit["utilization"]["value"] for fit in high if not fit["utilization_is_tight"]]
    # The context takes at most 0.65 GiB of 79.14: 0.82%.
    assert max(easy) <= 0.99
    assert all(value > 0.99 for value in tight)
    small = recommended(run, "qwen2.5-7b", "--gpu", "rtx-4090", "--tp", "2", "--ctx", "32k", "--users", "12")["fit"]
    # The contexts of two ranks take up to 3.35 GiB of 23.64: 14%.
    assert small["utilization_is_tight"] == (small["utilization"]["value"] > 0.85)


def test_several_gpus_are_one_server_or_replicas_of_the_split_that_is_stated(run: Run) -> None:
    words = (*FIXED, "--users", "100", "--num-gpus", "4")
    fit = recommended(run, *words)["fit"]
    assert (fit["num_gpus"], fit["replicas"], fit["users_per_replica"]) == (4, 1, 100)
    assert "--tensor-parallel-size 4" in fit["context"]["settings"]["command"]
    two = recommended(run, *words, "--tp", "2")["fit"]
    assert (two["num_gpus"], two["replicas"], two["users_per_replica"]) == (4, 2, 50)


@pytest.mark.full
def test_given_gpus_hold_a_mean_length_and_lengths(run: Run) -> None:
    by_mean = recommended(run, *FIXED, "--users", "60", "--mean-tokens", "5000")["fit"]
    argv = by_mean["utilization"]["settings"]["argv"]
    answer = estimated(run, "--from-command", shlex.join(argv), "--gpu", "a100-80g", "--mean-tokens", "5000")
    assert num_users(answer, "low", 5000) >= 60
    dist = ("--lengths", "lognormal:median=3000,p95=9000")
    utilization = recommended(run, *FIXED, "--users", "60", *dist)["fit"]["utilization"]
    command = utilization["settings"]["command"]
    counted = estimated(run, "--from-command", command, "--gpu", "a100-80g", *dist)["concurrency"]
    assert counted["users"] == utilization["users_likely"] >= utilization["users_low"] >= 60


# --- formats ----------------------------------------------------------------------------------------------------------


def test_the_json_follows_its_schema(run: Run, tmp_path: Path) -> None:
    validator = jsonschema.Draft202012Validator(run("schema", "recommendation").json)
    prices = str(price_file(tmp_path, SIX))
    search = ("llama-3.1-8b", "--users", "30", "--ctx", "8k")
    for words in (
        search,
        (*search, "--prices", prices, "--mean-tokens", "2k"),
        ("llama-3.1-70b", "--users", "10", "--ctx", "8k", "--gpus", "t4", "--tp", "1"),
        (*FIXED, "--users", "20"),
        (*FIXED, "--users", "5000"),
        (*FIXED, "--users", "20", "--gpu-memory-utilization", "0.9"),
    ):
        validator.validate(recommended(run, *words))


def test_csv_and_json_hold_the_same(run: Run) -> None:
    words = ("llama-3.1-70b", "--users", "30", "--ctx", "8k")
    doc = recommended(run, *words)
    read = list(csv.DictReader(io.StringIO(run("recommend", *words, "--format", "csv", "-q").out)))
    assert [row["command"] for row in read if row["command"]] == [
        placement["command"] for placement in doc["placements"]
    ]
    assert [row["reason"] for row in read if row["reason"]] == [failure["reason"] for failure in doc["failures"]]
    fixed = list(csv.DictReader(io.StringIO(run("recommend", *FIXED, "--users", "20", "--format", "csv").out)))
    assert [row["setting"] for row in fixed] == ["as set", "utilization", "context", "KV dtype", "KV dtype"]


def test_reports_are_what_standard_output_would_be(run: Run, tmp_path: Path) -> None:
    words = ("recommend", "llama-3.1-8b", "--users", "30", "--ctx", "8k")
    paths = [tmp_path / name for name in ("a.json", "b.csv", "c.md")]
    assert run(*words, *(word for path in paths for word in ("--report", str(path)))).code == 0
    for path, format in zip(paths, ("json", "csv", "markdown"), strict=True):
        text = path.read_text(encoding="utf-8").removesuffix("<!-- kvplan -->\n")
        assert text == run(*words, "--format", format).out


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ((), "--users: missing"),
        (("--users", "0"), "--users must be at least 1"),
        (("--users", "-5"), "--users must be at least 1"),
        (("--users", "1000001"), "--users must be at most 1,000,000"),
        (("--users", "9", "--ctx", "4k,8k"), "--ctx: recommend takes one context"),
        (("--users", "9", "--ctx", "auto"), "--ctx: recommend takes one context"),
        (("--users", "9", "--ctx", "1M"), "--ctx 1,048,576: llama-3.1-8b supports up to"),
        (("--users", "9", "--ctx", "4k", "--mean-tokens", "8k"), "mean length 8,192 is beyond the context"),
        (("--users", "9", "--gpus", "h200,,l40s"), "--gpus contains an empty name"),
        (("--users", "9", "--gpus", "nosuch"), "gpu 'nosuch'"),
        (("--users", "9", "--gpu", "h200", "--gpus", "l40s"), "--gpu and --gpus"),
        (("--users", "9", "--gpu", "h200,l40s"), "--gpu takes one GPU here"),
        (("--users", "9", "--num-gpus", "4"), "--num-gpus counts GPUs of one kind"),
        (("--users", "9", "--gpu", "h200", "--num-gpus", "3", "--tp", "2"), "--num-gpus 3 is not a multiple"),
        (("--users", "9", "--gpu", "h200", "--num-gpus", "3"), "--num-gpus 3: --tp 3 does not divide the 32"),
        (("--users", "9", "--tp", "3"), "--tp 3 does not divide the 32"),
        (("--users", "9", "--dp", "2"), "--dp: the number of replicas is computed"),
        (("--users", "9", "--kv-cache-memory-bytes", "8GiB"), "--kv-cache-memory-bytes: the size of the pool"),
        (("--users", "9", "--engine-arg", "num_gpu_blocks_override=100"), "--num-gpu-blocks-override: the size of"),
        (
            ("--users", "9", "--quantization", "modelopt_fp4"),
            "--quantization modelopt_fp4: llama-3.1-8b is not quantized",
        ),
        (("--users", "9", "--kv-cache-dtype", "fp9"), "--kv-cache-dtype 'fp9' is unknown to kvplan; use one of auto, "),
        (("--users", "9", "--gpu", "h200", "--prices", "x.yaml"), "--prices: rank several GPUs"),
    ],
)
def test_what_makes_no_sense_is_refused(run: Run, words: tuple[str, ...], fault: str) -> None:
    base = ["recommend", "llama-3.1-8b", *([] if "--ctx" in words else ["--ctx", "8k"])]
    assert fault in refused(run(*base, *words))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a100-80g: 2.00\nnosuch: 1\n", "prices.yaml:2:1: gpu 'nosuch'"),
        ("a100-80g: -2\n", "a100-80g: its price is no positive number of dollars ('-2')"),
        ("a100-80g: 0\n", "is no positive number of dollars ('0')"),
        ("a100-80g: 2.00 EUR\n", "is no positive number of dollars ('2.00 EUR')"),
        ("a100-80g: $2\n", "is no positive number of dollars ('$2')"),
        ("a100-80g: .nan\n", "prices.yaml:1:11"),
        ("a100-80g: 1e9\n", "prices.yaml:1:11"),
        ("a100-80g:\n", "prices.yaml:1:"),
        ("a100-80g: [2]\n", "prices.yaml:1:11"),
        ("a100-80g: 2\na100-80g: 3\n", "prices.yaml:2:1: duplicate key"),
        ("a100-80g: 2\nA100-80GB: 3\n", "prices.yaml:2:1: a100-80g has a price in line 1 already"),
        ("- 1\n", "prices.yaml:1:1: the top level is a list"),
        ("", "prices.yaml:1:1: the file is empty"),
    ],
)
def test_a_fault_in_the_prices_is_named_with_its_line(run: Run, tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text, encoding="utf-8")
    assert fault in refused(run("recommend", "llama-3.1-8b", "--users", "9", "--ctx", "8k", "--prices", path))


def test_prices_are_read_from_csv_too(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("gpu,dollars_per_hour\r\na100-80g,2.00\r\n\r\nH200,3.8\r\n", encoding="utf-8")
    assert read_prices(path).per_hour == {"a100-80g": 2.0, "h200": 3.8}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a100-80g,2\n", "prices.csv:1:1: the header is not gpu,dollars_per_hour"),
        ("gpu,dollars_per_hour\na100-80g,2,3\n", "prices.csv:2:1: has 3 columns"),
        ("gpu,dollars_per_hour\na100-80g,x\n", "prices.csv:2:1: a100-80g: its price is no positive number"),
        ('gpu,dollars_per_hour\n"a100-80g,2\n', "is not CSV"),
        ("gpu,dollars_per_hour\n", "contains no price"),
        ("", "prices.csv:1:1: the header is not"),
    ],
)
def test_a_fault_in_a_csv_of_prices_is_named_with_its_line(run: Run, tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(text, encoding="utf-8")
    assert fault in refused(run("recommend", "llama-3.1-8b", "--users", "9", "--ctx", "8k", "--prices", path))


def test_gpus_with_a_price_are_those_to_choose_from(run: Run, tmp_path: Path) -> None:
    prices = price_file(tmp_path, {"a100-80g": 2.0, "mi300x": 3.0})
    words = ("llama-3.1-8b", "--users", "9", "--ctx", "8k", "--prices", prices)
    assert {placement["gpu"] for placement in recommended(run, *words)["placements"]} == {"a100-80g", "mi300x"}
    rows = recommended(run, *words, "--gpus", "a100-80g,h200")["placements"]
    assert [(row["gpu"], row["price_per_hour"]) for row in rows] == [("a100-80g", 2.0), ("h200", None)]


# --- the first word is the answer, and what would hold the users is a plan that was made ------------------------------

LLAMA = ("llama-3.1-8b", "--ctx", "16k")
# (question, first words of the answer)
ANSWERS = [
    # 28 users of 2 GiB in an A100's pool of 57 GiB: the README's own figures
    (
        (*LLAMA, "--users", "28", "--gpu", "a100-80g"),
        "Yes: llama-3.1-8b on a100-80g has memory for 28 users at 16,384 tokens e",
    ),
    ((*LLAMA, "--users", "29", "--gpu", "a100-80g"), "Yes: llama-3.1-8b on a100-80g with utilization 0.9"),
    ((*LLAMA, "--users", "40", "--gpu", "a100-80g"), "No: llama-3.1-8b on a100-80g has memory for 28 of 40 users"),
    (
        (*LLAMA, "--users", "1", "--gpu", "h200"),
        "Yes: llama-3.1-8b on h200 has memory for 1 user at 16,384 tokens (conservativ",
    ),
    (
        (*LLAMA, "--users", "40", "--gpu", "a100-80g", "--optimistic"),
        "No: llama-3.1-8b on a100-80g has memory for 28 of 40",
    ),
    (
        ("llama-3.1-8b-awq", "--users", "200", "--ctx", "8k", "--gpu", "l40s", "--num-gpus", "2"),
        "No: llama-3.1-8b-awq on 2 x l40s has memory for 71 of 200 users at 8,192 tokens",
    ),
    (
        ("llama-3.1-405b", "--users", "2", "--ctx", "16k", "--gpu", "l40s"),
        "No: llama-3.1-405b on l40s has memory for none of 2",
    ),
    (
        (*LLAMA, "--users", "200"),
        "3 x b200 have memory for 200 users of llama-3.1-8b at 16,384 tokens each (conservative estimate); so",
    ),
    (
        (*LLAMA, "--users", "20", "--gpus", "h200"),
        "1 x h200 has memory for 20 users of llama-3.1-8b at 16,384 tokens each (",
    ),
    (
        (*LLAMA, "--users", "20", "--gpus", "h200", "--mean-tokens", "4k"),
        "1 x h200 has memory for 20 users of llama-3.1-8b, averaging 4,096 of 16,384 tokens",
    ),
    (
        ("llama-3.1-70b", "--users", "9", "--ctx", "8k", "--gpus", "t4", "--tp", "1"),
        "No: none of these GPUs has memory for 9 ",
    ),
]


@pytest.mark.parametrize(("words", "answer"), ANSWERS)
def test_the_first_word_is_the_answer(run: Run, words: tuple[str, ...], answer: str) -> None:
    ran = run("recommend", *words, "--exit-code")
    assert ran.out.startswith(answer)
    doc = recommended(run, *words)
    first = ran.out.partition("\n")[0]
    assert doc["answer"] == first
    assert doc["holds"] == (not first.startswith("No"))
    assert ran.code == int(not doc["holds"])
    assert run("recommend", *words, "--format", "markdown").out.replace("\\", "").startswith(f"**{first}**\n")


def test_prices_stand_in_the_answer(run: Run, tmp_path: Path) -> None:
    out = run("recommend", *LLAMA, "--users", "20", "--prices", price_file(tmp_path, {"h200": 3.8})).out
    assert out.startswith(
        "1 x h200 ($3.80 per hour) has memory for 20 users of llama-3.1-8b at 16,384 tokens each (conservative"
    )


def test_gpus_that_hold_them_in_another_split_are_a_yes(run: Run) -> None:
    """Ranks of one server hold the same latents, two servers different ones."""
    words = ("deepseek-v2-lite", "--ctx", "16k", "--users", "150", "--gpu", "a100-80g", "--num-gpus", "2")
    doc = recommended(run, *words)
    assert not doc["fit"]["as_asked"]["holds"]
    assert doc["answer"].startswith(
        "Yes: deepseek-v2-lite on 2 x a100-80g with 2 servers of TP 1 has memory for 150 users at"
    )
    assert (doc["fit"]["solution"]["num_gpus"], doc["fit"]["solution"]["replicas"]) == (2, 2)
    assert "\nServe (each of 2 on a100-80g)\n" in run("recommend", *words).out
    assert recommended(run, *words, "--tp", "2")["answer"].startswith("No: ")


CURED = [
    ("llama-3.1-8b-awq", "l40s", 2, 200, "8k", ()),
    ("llama-3.1-8b", "a100-80g", 1, 40, "16k", ()),
    ("llama-3.1-8b", "a100-80g", 1, 200, "16k", ("--fp8-weights",)),
    ("llama-3.1-8b", "l40s", 1, 90, "16k", ("--no-fp8",)),
    ("llama-3.1-70b", "a100-80g", 4, 100, "32k", ("--mean-tokens", "20k")),
    ("deepseek-v3", "h100-80g", 8, 300, "16k", ()),
    ("qwen3-next-80b-a3b", "l40s", 4, 100, "32k", ()),
    ("gemma-3-27b", "h100-80g", 1, 100, "32k", ("--pp", "1")),
    ("qwen2.5-7b", "rtx-4090", 2, 50, "32k", ("--tp", "1")),
]


@pytest.mark.parametrize(("model", "gpu", "num_gpus", "users", "context", "more"), CURED)
def test_every_cure_holds_the_users_when_it_is_asked_for(
    run: Run, model: str, gpu: str, num_gpus: int, users: int, context: str, more: tuple[str, ...]
) -> None:
    words = (model, "--gpu", gpu, "--num-gpus", str(num_gpus), "--users", str(users), "--ctx", context, *more)
    doc = recommended(run, *words)
    cures = doc["fit"]["cures"]
    assert not doc["holds"]
    assert cures
    load = more if "--mean-tokens" in more else ()
    out = run("recommend", *words).out
    for cure in cures:
        ranks = cure["tensor_parallel_size"] * cure["pipeline_parallel_size"]
        assert cure["num_gpus"] == ranks * cure["replicas"]
        if SHARED_EXPERTS in cure["changes"]:  # `recommend` counts replicas itself: `estimate` takes the ranks
            answer = estimated(run, "--from-command", cure["command"], "--gpu", gpu)
            assert answer["concurrency"]["replicas"] == cure["data_parallel_size"] > 1
            assert cure["replicas"] * num_users(answer, "low", None) == cure["users_low"] >= users
            continue
        asked_again = recommended(
            run, "--from-command", cure["command"], "--gpu", gpu, "--num-gpus", str(cure["num_gpus"]),
            "--tp", str(cure["tensor_parallel_size"]), "--users", str(users), *load,
        )  # fmt: skip
        assert asked_again["fit"]["as_asked"]["holds"]
        assert asked_again["fit"]["as_asked"]["users_low"] == cure["users_low"] >= users
        assert asked_again["fit"]["as_asked"]["users_likely"] == cure["users_likely"]
        low, likely = cure["users_low"], cure["users_likely"]
        needs = " and ".join(cure["needs"]).replace(" and ", ", ", len(cure["needs"]) - 2)
        assert re.search(rf"\n  {re.escape(needs)} +{low:,}{f'-{likely:,}' * (low < likely)} users", out)


@pytest.mark.parametrize(("model", "gpu", "num_gpus", "users", "context", "more"), CURED)
def test_no_cure_is_beaten_by_another(
    run: Run, model: str, gpu: str, num_gpus: int, users: int, context: str, more: tuple[str, ...]
) -> None:
    words = (model, "--gpu", gpu, "--num-gpus", str(num_gpus), "--users", str(users), "--ctx", context, *more)
    cures = recommended(run, *words)["fit"]["cures"]
    for cure, other in itertools.permutations(cures, 2):
        assert not (
            other["max_model_len"] >= cure["max_model_len"]
            and other["num_gpus"] <= cure["num_gpus"]
            and set(other["changes"]) <= set(cure["changes"])
        ), (cure["needs"], other["needs"])
    ranks = [
        (-cure["max_model_len"], cure["pipeline_parallel_size"] > 1, cure["num_gpus"], len(cure["changes"]))
        for cure in cures
    ]
    assert ranks == sorted(ranks)


def test_cures_are_combined(run: Run) -> None:
    """fp8 halves the bytes of a token: 200 users of 8,192 do not fit, and of 2 x 2,784 they do."""
    words = ("llama-3.1-8b-awq", "--users", "200", "--ctx", "8k", "--gpu", "l40s", "--num-gpus", "2")
    cures = {
        (cure["max_model_len"], cure["num_gpus"], *cure["changes"]) for cure in recommended(run, *words)["fit"]["cures"]
    }
    shortest = min(tokens for tokens, *_ in cures)
    assert (shortest, 2) in cures
    assert any((2 * (shortest + odd), 2, "fp8 KV") in cures for odd in range(16))  # whole blocks of half the bytes
    (whole,) = (cure for cure in cures if cure[0] == 8192 and cure[2:] == ())
    (fewer,) = (cure for cure in cures if cure[0] == 8192 and cure[2:] == ("fp8 KV",))
    assert 2 < fewer[1] < whole[1]


def test_a_shorter_context_is_not_passed_off_as_what_was_asked(run: Run) -> None:
    command = ("recommend", "llama-3.1-8b", "--users", "200", "--ctx", "16k", "--gpu", "l40s", "--no-fp8")
    fit = recommended(run, *command[1:])["fit"]
    enough, short = fit["cures"][0], fit["cures"][-1]
    assert (enough["max_model_len"], short["max_model_len"]) == (16_384, fit["context"]["value"])
    out = run(*command).out
    assert f"Serve ({short['max_model_len']:,} tokens)\n  vllm serve meta-llama/Llama-3.1-8B" in out
    assert f"\n  {enough['num_gpus']} x l40s" in out
    assert f"  {enough['command']}\n" in out.split(f"Serve ({enough['num_gpus']} x l40s")[1]
    markdown = run(*command, "--format", "markdown").out
    assert f"| {short['max_model_len']:,} tokens |" in markdown.replace("\\", "")
    rows = list(csv.DictReader(io.StringIO(run(*command, "--format", "csv").out)))
    cures = [(row["value"], row["num_gpus"]) for row in rows if row["setting"] == "cure"]
    assert cures[0] == (f"{enough['num_gpus']} x l40s", str(enough["num_gpus"]))
    assert len(cures) == len(fit["cures"])


def test_the_gpus_that_hold_them_as_asked_are_those_a_search_of_that_gpu_finds(run: Run) -> None:
    words = ("llama-3.1-8b", "--users", "200", "--ctx", "16k")
    cures = recommended(run, *words, "--gpu", "l40s")["fit"]["cures"]
    more = [{name: cure[name] for name in cure if name != "needs"} for cure in cures if cure["max_model_len"] == 16_384]
    searched = recommended(run, *words, "--gpus", "l40s")["placements"]
    assert sorted(more, key=lambda placement: placement["num_gpus"]) == sorted(
        searched, key=lambda placement: placement["num_gpus"]
    )


@pytest.mark.parametrize("words", [("--gpu", "h200", "--users", "20"), ("--gpu", "a100-80g", "--users", "28")])
def test_no_cure_is_named_where_the_gpus_hold_them(run: Run, words: tuple[str, ...]) -> None:
    """An H200 holds 20 users of 16k as it is, an A100 28."""
    command = ("recommend", "llama-3.1-8b", "--ctx", "16k", *words)
    fit = recommended(run, *command[1:])["fit"]
    assert (fit["cures"], fit["solution"]["needs"], fit["reason"]) == ([], [], None)
    out = run(*command).out
    assert "What would serve these users" not in out
    assert "\nServe\n" in out


def test_where_no_server_holds_a_user_that_is_said(run: Run) -> None:
    """811 GB of weights, and 16 L40S have 768 GB at most."""
    out = run("recommend", "llama-3.1-405b", "--users", "2", "--ctx", "16k", "--gpu", "l40s").out
    assert out.splitlines()[1] == "  the weights alone (755.96 GiB) exceed the budget of 40.76 GiB"
    assert (
        "\nNo fix found: tried an fp8 KV cache, smaller steps, shorter contexts and servers on up to two nodes.\n"
        in out
    )
    assert "Serve" not in out


def test_gpus_without_a_name_and_stages_are_told_in_words(run: Run) -> None:
    words = ("--users", "300", "--ctx", "16k", "--format", "table")
    out = run("recommend", "llama-3.1-8b", "--gpu-memory", "24GiB", *words).out
    assert re.search(r"\n  [0-9]+ such GPUs +[0-9-]+ users, [0-9]+ servers of TP [0-9]\n", out)
    assert "custom" not in out
    staged = run("recommend", "deepseek-v3", "--gpu", "h100-80g", "--num-gpus", "8", "--tp", "8", *words).out
    fixed = r"fp8 KV, [0-9]+ x h100-80g and [0-9] pipeline stages"
    assert re.search(rf"\n  {fixed} +[0-9-]+ users, [0-9]+ servers of TP [0-9] x PP", staged)
    assert re.search(r"\nServe \(.*[0-9] pipeline stages.*: each of [0-9]+ on [0-9]+ x h100-80g\)\n", staged)


def test_every_setting_of_a_gpu_that_shares_its_memory_is_a_plan_that_starts(run: Run) -> None:
    """vLLM wants 111.95 GiB of a GB10 free at its default, and posted ones have 110.4 at most: the settings that are
    sought are planned at what is free, not at the default."""
    fit = recommended(run, "qwen3-32b", "--users", "4", "--ctx", "8k", "--gpu", "gb10")["fit"]
    assert (fit["as_asked"]["holds"], fit["as_asked"]["most_users"]) == (False, 0)  # at 0.92
    for answer in (fit["context"], *fit["kv_dtypes"]):
        assert answer["holds"]
        assert answer["settings"]["gpu_memory_utilization"] == fit["startable_utilization"] <= 110.4 / 121.69
        assert estimated(run, "--from-command", answer["settings"]["command"], "--gpu", "gb10")["fits"]
    output = run("recommend", "qwen3-32b", "--users", "4", "--ctx", "8k", "--gpu", "gb10").out
    assert output.count("as the default does not start") == 3
    discrete = recommended(run, "llama-3.1-8b", "--users", "4", "--ctx", "8k", "--gpu", "h100-80g")["fit"]
    assert discrete["startable_utilization"] is None


@pytest.mark.parametrize(
    ("words", "heading", "others"),
    [
        (("qwen3-32b", "--gpus", "gb10", "--gpu-memory-utilization", "0.92"), "Would not start", "Too small"),
        (("llama-3.1-70b", "--gpus", "t4", "--tp", "2", "--pp", "1"), "Too small for one user", "Would"),
        (("qwen2.5-7b", "--gpus", "l40s"), "Not possible", "Too small"),  # 28 heads over 8 ranks
    ],
)
@pytest.mark.parametrize("form", ["table", "markdown"])
def test_what_holds_nobody_stands_under_its_reason(
    words: tuple[str, ...], heading: str, others: str, form: str, run: Run
) -> None:
    output = run("recommend", *words, "--users", "4000", "--ctx", "8k", "--format", form).out
    assert re.search(rf"^{heading}:?$", output, re.MULTILINE), output
    assert others not in output


def test_a_shortage_below_a_hundredth_of_a_gib_is_said_in_a_unit_that_shows_it(run: Run) -> None:
    """A request takes 2,048 blocks of 2 MiB and the pool one more, the null block: of 2,048 one is missing."""
    words = ("llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "32k", "--kv-cache-memory-bytes")
    short = run("estimate", *words, str(2048 * 2**21)).out.splitlines()[0]
    assert short == "llama-3.1-8b on h100-80g does not fit at 32,768 tokens, 2 MiB short"
    assert run("estimate", *words, str(2049 * 2**21), "--format", "json").json["fits"]


# --- smaller steps, stages and nodes ----------------------------------------------------------------------------------

GPT_OSS = ("gpt-oss-120b", "--users", "1", "--ctx", "128k")


def test_smaller_steps_save_a_gpu_where_memory_is_short(run: Run) -> None:
    """vLLM's recipe for gpt-oss-120b: on one H100 raise the utilization to 0.95 or lower the batched tokens."""
    words = (*GPT_OSS, "--gpus", "h100-80g", "--gpu-memory-utilization", "0.93")
    best, *others = recommended(run, *words)["placements"]
    assert (best["num_gpus"], best["changes"], best["max_num_batched_tokens"]) == (1, ["smaller steps"], 4096)
    assert "--max-num-batched-tokens 4096" in best["command"]
    assert min(placement["num_gpus"] for placement in others if not placement["changes"]) == 2
    out = run("recommend", *words).out
    assert out.startswith("1 x h100-80g with smaller steps has memory for 1 user")
    assert "batched tokens below vLLM's default" in out
    assert "h100-80g x1:" not in out
    assert "l40s x1:" in run("recommend", *GPT_OSS).out
    stated = recommended(run, *words, "--max-num-batched-tokens", "8192")["placements"]
    assert all("smaller steps" not in placement["changes"] for placement in stated)


def test_given_gpus_are_answered_with_smaller_steps_before_others(run: Run) -> None:
    words = (*GPT_OSS, "--gpu", "h100-80g", "--gpu-memory-utilization", "0.93")
    answer = recommended(run, *words)
    assert answer["answer"].startswith("Yes: gpt-oss-120b on h100-80g with steps of 4,096 tokens has memory for 1 user")
    assert "--max-num-batched-tokens 4096" in answer["fit"]["solution"]["command"]


def test_the_first_line_names_pipeline_stages_at_full_precision(run: Run) -> None:
    words = ("llama-3.3-70b", "--users", "50", "--ctx", "32k", "--gpus", "h100-80g")
    out = run("recommend", *words).out
    first, *_ = out.splitlines()
    assert "; so do 10 x h100-80g with pipeline stages, or 6 x h100-80g with fp8 KV and pipeline stages" in first
    assert "beyond 8 GPUs a server runs over several nodes" in out
    assert "several nodes" not in run("recommend", *words, "--pp", "1").out


def test_gpus_that_do_not_divide_the_heads_get_ways_that_do(run: Run) -> None:
    words = ("recommend", "llama-3.3-70b", "--users", "4", "--ctx", "8k", "--gpu", "14xh200")
    assert "add --tp 2 --pp 7 for one server with pipeline stages, or add --tp 2 for 7 servers" in refused(run(*words))
    assert run(*words, "--tp", "2").code == run(*words, "--tp", "2", "--pp", "7").code == 0
