"""benchmarks/kernels.py: what it times is right, its shares follow from bytes and seconds, a peer costs only itself."""

import contextlib
import csv
import itertools
import json
import math
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import kernels
from benchmarks.gpu_stages import kernels as kernels_stage
from benchmarks.gpu_stages.runner import FAILURES, UNFINISHED
from benchmarks.gpu_stages.stage import Task, row
from benchmarks.kernel_bench import contenders as peers
from benchmarks.kernel_bench import figure
from benchmarks.kernel_bench import timings as timed
from benchmarks.kernel_bench.cases import cases
from benchmarks.kernel_bench.contenders import OWN, Built, Contender, NotDone
from benchmarks.kernel_bench.problems import (
    V2_LITE,
    Case,
    Heads,
    Kind,
    expected_of,
    num_contexts,
    problem_of,
)
from benchmarks.kernel_bench.timings import Findings, Rates, Timing

pytestmark = pytest.mark.full  # a script for GPUs: what it measures needs one, what it writes is checked here
ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
SMALL = Heads("small", 4, 2, 32)


def small(kind: Kind = "decode", num_seqs: int = 2, length: int = 40, **more: Any) -> Case:
    return Case(kind, num_seqs, length, **{"compute": F32, "stored": F32, "heads": SMALL, **more})


# --- bytes and operations, by hand ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "moved"),
    [
        # 32 sequences of 4096 tokens, each 8 heads * 128 * 2 bytes of keys and as many of values
        (Case("decode", 32, 4096, BF16, BF16), 32 * 4096 * 4096),
        (Case("decode", 32, 4096, BF16, FP8), 32 * 4096 * 2048),
        (Case("decode", 32, 4096, BF16, BF16, window=1024), 32 * 1024 * 4096),
        (Case("decode", 32, 512, BF16, BF16, window=1024), 32 * 512 * 4096),
        # a latent row of 576 * 2 bytes is key and value
        (Case("latent", 4, 100, BF16, BF16, heads=V2_LITE), 4 * 100 * 1152),
        # 4096 bytes of new keys and values are read, 4096 or, in fp8, 2048 stored
        (Case("store", 10, 1, BF16, BF16), 10 * 8192),
        (Case("store", 10, 1, BF16, FP8), 10 * (4096 + 2048)),
        # queries of 32 * 128 * 2 bytes are read and written back, turned
        (Case("rope+store", 10, 1, BF16, BF16), 10 * (8192 + 2 * 8192)),
    ],
)
def test_moved_bytes_are_those_that_must_be_read_and_written(case: Case, moved: int) -> None:
    assert case.moved_bytes == moved


def test_operations_of_a_prefill_count_visible_pairs() -> None:
    """3 tokens see 1 + 2 + 3 pairs; each takes 2 * 128 operations for its score and as many for its value."""
    assert Case("prefill", 2, 3, BF16, BF16).operations == 2 * 32 * 6 * 4 * 128


def test_a_gpu_reads_half_a_gigabyte_before_it_reads_anything_again() -> None:
    gpu = torch.device("cuda")
    assert num_contexts(2**20, gpu) == 512
    assert num_contexts(300 * 2**20, gpu) == 2
    assert num_contexts(2**30, gpu) == 1


def test_contexts_share_no_page_and_no_slot() -> None:
    for case in (small(), small("store", 5, 1)):
        problem = problem_of(case, CPU)
        used = [set((c.slots if c.slots is not None else c.tables).flatten().tolist()) for c in problem.contexts]
        assert len(used) == 2
        assert not used[0] & used[1]
        assert min(min(pages) for pages in used) >= 1  # the null block is nobody's


def test_the_cases_are_distinct_and_cover_what_is_promised() -> None:
    gpu_cases = cases(torch.device("cuda"))
    assert len(gpu_cases) == len(set(gpu_cases)) == len({str(case) for case in gpu_cases})
    decode = [case for case in gpu_cases if case.kind == "decode"]
    assert {case.num_seqs for case in decode} >= {1, 256}
    assert {case.length for case in decode} >= {512, 131_072}
    assert {case.block_size for case in decode} == {16, 32, 64, 128}
    assert {case.stored for case in decode} == {BF16, torch.float16, FP8}
    assert {case.kind for case in gpu_cases} == {"decode", "prefill", "store", "rope+store", "latent"}
    assert any(case.window for case in decode)
    assert any(case.softcap for case in decode)
    assert any(case.sinks for case in decode)
    assert gpu_cases[0] == Case("decode", 32, 4096, BF16, BF16)


# --- right answers ----------------------------------------------------------------------------------------------------


def brute_force(case: Case, problem: Any) -> torch.Tensor:
    """Attention of the first sequence's last token in float64, token by token."""
    first = problem.contexts[0]
    q = problem.q[case.length - 1 if case.kind == "prefill" else 0].double()
    k_cache, v_cache = (x.double() for x in first.caches)
    places = [(int(first.tables[0, t // case.block_size]), t % case.block_size) for t in range(case.length)]
    out = torch.zeros(case.heads.heads, case.heads.head_dim, dtype=torch.float64)
    for head in range(case.heads.heads):
        kv_head = head // case.heads.group
        scores = []
        for position, (block, slot) in enumerate(places):
            score = float(q[head] @ k_cache[block, slot, kv_head]) * problem.scale
            score = case.softcap * math.tanh(score / case.softcap) if case.softcap else score
            scores.append(score if not case.window or position >= case.length - case.window else -math.inf)
        weights = [math.exp(score) for score in scores]
        total = sum(weights) + (math.exp(float(problem.sinks[head])) if case.sinks else 0)
        for weight, (block, slot) in zip(weights, places, strict=True):
            out[head] += weight / total * v_cache[block, slot, kv_head]
    return out


@pytest.mark.parametrize(
    "case",
    [
        small(),
        small(window=7),
        small(softcap=2.0, sinks=True),
        small(stored=FP8, block_size=32),
        small("prefill", 2, 33),
    ],
    ids=str,
)
def test_every_contender_gives_the_answer_of_brute_force(case: Case) -> None:
    torch.manual_seed(0)
    problem = problem_of(case, CPU)
    exact = brute_force(case, problem)
    assert torch.allclose(expected_of(problem).exact[-1 if case.kind == "prefill" else 0], exact, atol=1e-12)
    tried = []
    for contender in peers.contenders(CPU):
        try:
            built = contender.build(problem)
        except NotDone:
            continue
        row = case.length - 1 if case.kind == "prefill" else 0
        answer = built.answer(built.calls[0]())[row].double()
        assert (answer - exact).abs().max() < 1e-5, contender.name  # float32 sums of values below 1
        tried.append(contender.name)
    plain = case.is_plain and case.stored == F32
    assert tried == ([OWN, "torch sdpa", "torch flex"] if plain or case.window else [OWN])


def test_latents_are_key_and_value_of_all_heads() -> None:
    """As a multi-query attention written out for one head."""
    case = small("latent", 1, 20, heads=Heads("mla", 2, 1, 576), block_size=64)
    problem = problem_of(case, CPU)
    rows = problem.contexts[0].rows(problem.contexts[0].caches[0])[0].double()
    weights = (rows @ problem.q[0, 1].double() * problem.scale).softmax(0)
    expected = expected_of(problem)
    assert torch.allclose(expected.exact[0, 1], weights @ rows[:, :512], atol=1e-12)
    for contender in peers.contenders(CPU)[:2]:
        built = contender.build(problem)
        assert expected.error(built.answer(built.calls[0]())) < 1e-5, contender.name


@pytest.mark.parametrize("stored", [F32, FP8])
def test_writes_put_keys_and_values_where_they_belong(stored: torch.dtype) -> None:
    problem = problem_of(small("store", 5, 1, stored=stored), CPU)
    first = problem.contexts[0]
    peers.contenders(CPU)[0].build(problem).calls[0]()
    for cache, new in zip(first.caches, first.new[1:], strict=True):
        for token, slot in enumerate(first.slots.tolist() if first.slots is not None else []):
            assert torch.equal(cache[slot // 16, slot % 16].float(), new[token].to(stored).float())


@pytest.mark.parametrize("kind", ["store", "rope+store"])
def test_torch_writes_without_asking_the_device_for_a_value(kind: Kind) -> None:
    """A CUDA graph allows no such question; a tensor without data has no answer to one."""
    problem = problem_of(small(kind, 5, 1), torch.device("meta"))
    peers.torch_writes(problem).calls[0]()
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(problem.q.isfinite().all())


def test_keys_are_turned_before_they_are_stored() -> None:
    """A token of position p turns the pair (i, i + 16) of 32 by p * 10000^(-2i / 32)."""
    problem = problem_of(small("rope+store", 3, 1), CPU)
    first = problem.contexts[0]
    k = first.new[1].clone()
    peers.contenders(CPU)[0].build(problem).calls[0]()
    assert first.slots is not None
    stored = first.caches[0].flatten(0, 1)[first.slots[2]]
    angle = 2 * 10_000 ** (-2 * 5 / 32)
    turned = k[2, 1, 5] * math.cos(angle) - k[2, 1, 21] * math.sin(angle)
    assert float(stored[1, 5]) == pytest.approx(float(turned), abs=1e-6)


def test_triton_kernels_are_called_as_they_want_to_be() -> None:
    """All small cases through the launchers, in the interpreter and so in a process of its own."""
    code = """
import json, torch
from benchmarks.kernel_bench.cases import cases
from benchmarks.kernel_bench.contenders import contenders, poisoned_answer
from benchmarks.kernel_bench.problems import expected_of, problem_of
from engine.kernels import triton_backend
cpu, found = torch.device("cpu"), {}
own = contenders(cpu, own=triton_backend)[0]
for case in cases(cpu):
    problem = problem_of(case, cpu)
    expected = expected_of(problem)
    found[str(case)] = expected.error(poisoned_answer(own.build(problem)))
print(json.dumps(found))
"""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    errors = json.loads(done.stdout)
    assert len(errors) == len(cases(CPU))
    assert {name: error for name, error in errors.items() if not error < 1e-5} == {}


# --- peers ------------------------------------------------------------------------------------------------------------


def constant_rates() -> Rates:
    return Rates(row("copy", "bytes/s", [1e12]), row("matmul", "FLOP/s", [1e15]))


def measured(tmp_path: Path, *who: Contender, cases: tuple[Case, ...] = (small(),)) -> Findings:
    findings = Findings(constant_rates())
    timed.measure(Task(tmp_path, CPU, Namespace()), cases, time.monotonic() + 900, findings, who)
    return findings


def broken(problem: Any) -> Built:
    raise ImportError("undefined symbol: _ZN3c10")


def wrong(problem: Any) -> Built:
    return Built([lambda: problem.q * 1.1], peers.same)


def not_finite(problem: Any) -> Built:
    return Built([lambda: problem.q * math.nan], peers.same)


def test_a_kernel_that_writes_nothing_is_wrong_whatever_was_in_its_memory() -> None:
    """It answers with what an earlier, right call left behind."""
    problem = problem_of(small(), CPU)
    built = peers.contenders(CPU)[0].build(problem)
    right = built.answer(built.calls[0]())
    left_behind = torch.empty

    def lazy(backend: Any = None) -> torch.Tensor:
        return torch.empty(right.shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **options: right.clone())
        assert expected_of(problem).error(lazy()) < 1e-5
        assert expected_of(problem).error(peers.poisoned_answer(Built([lazy], peers.same))) == math.inf
    assert torch.empty is left_behind


def test_the_first_and_the_last_sequence_are_checked() -> None:
    for kind in ("decode", "latent"):
        heads = Heads("mla", 2, 1, 576) if kind == "latent" else SMALL
        problem = problem_of(small(kind, 3, 20, heads=heads, block_size=64), CPU)
        built = peers.contenders(CPU)[0].build(problem)
        answer, expected = built.answer(built.calls[0]()), expected_of(problem)
        assert expected.error(answer) < 1e-5
        for seq in (0, 2):
            spoilt = answer.clone()
            spoilt[seq, 0, 0] += 1
            assert expected.error(spoilt) > 0.01
        spoilt[1, 0, 0] = math.nan
        assert expected.error(spoilt) == math.inf


def test_a_peer_that_fails_or_answers_wrongly_costs_its_own_rows(tmp_path: Path) -> None:
    own = peers.contenders(CPU)[0]
    who = (own, Contender("broken", broken), Contender("wrong", wrong), Contender("nan", not_finite))
    findings = measured(tmp_path, *who, cases=(small(), small("prefill", 1, 32)))
    assert [row.who for row in findings.timings] == [OWN, OWN]
    assert findings.failures == {}
    first = str(small())
    assert findings.missing[f"{first}, broken"] == "ImportError: undefined symbol: _ZN3c10"
    assert "its answer is wrong by" in findings.missing[f"{first}, wrong"]
    assert "its answer is wrong by inf" in findings.missing[f"{first}, nan"]


def test_our_own_failure_is_a_failure_and_the_peers_are_still_timed(tmp_path: Path) -> None:
    findings = measured(tmp_path, Contender(OWN, wrong), peers.contenders(CPU)[1])
    assert list(findings.failures) == [f"{small()}, {OWN}"]
    assert [row.who for row in findings.timings] == ["torch sdpa"]
    assert (tmp_path / "result.json").exists()


@pytest.mark.parametrize(
    ("error", "what"),
    [(torch.OutOfMemoryError("CUDA out of memory.\nTried"), "missing"), (RuntimeError("illegal access"), "failures")],
)
def test_data_that_do_not_fit_are_nobodys_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError, what: str
) -> None:
    """The case is told, and the next one timed; whatever else goes wrong on the way there stays a failure."""
    large = small(num_seqs=9)

    def problem_or_error(case: Case, device: torch.device) -> Any:
        if case == large:
            raise error
        return problem_of(case, device)

    monkeypatch.setattr(timed, "problem_of", problem_or_error)
    findings = measured(tmp_path, peers.contenders(CPU)[0], cases=(large, small()))
    reasons = {"missing": findings.missing, "failures": findings.failures}
    assert reasons.pop(what) == {str(large): f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    assert list(reasons.values()) == [{}]
    assert [row.case for row in findings.timings] == [small()]


def test_a_write_after_turning_leaves_the_new_keys_to_the_next_contender() -> None:
    """Only the queries may be turned in place: the right answer is worked out once for all."""
    problem = problem_of(small("rope+store", 5, 1), CPU)
    keys = [context.new[1].clone() for context in problem.contexts]
    exact = expected_of(problem).exact
    for contender in peers.contenders(CPU):
        with contextlib.suppress(NotDone):
            for call in contender.build(problem).calls:
                call()
    assert all(torch.equal(c.new[1], k) for c, k in zip(problem.contexts, keys, strict=True))
    assert torch.equal(expected_of(problem).exact, exact)


def test_no_peer_goes_on_after_the_time_is_up() -> None:
    """Whatever is left of its share; before that its share is what it has."""
    shares = timed.Shares(1000.0, time.monotonic() - 1)
    assert shares.left_s("slow") < 0
    assert timed.Shares(2.0, time.monotonic() + 1000).left_s("slow") == 2


def slow(problem: Any) -> Built:
    time.sleep(600)
    raise AssertionError


def test_a_peer_that_takes_long_has_a_quarter_of_the_time_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second instead, here; the next case does not try it again. Our own kernels are not stopped."""
    original, shares_s = timed.Shares, []

    def of_a_second(each_s: float, until_s: float) -> timed.Shares:
        shares_s.append(each_s)
        return original(1.0, until_s)

    monkeypatch.setattr(timed, "Shares", of_a_second)
    findings = Findings(constant_rates())
    own = peers.contenders(CPU)[0]
    who = (own, Contender("slow", slow))
    two = [small(), small(num_seqs=3)]
    until_s = time.monotonic() + 400
    timed.measure(Task(tmp_path, CPU, Namespace()), two, until_s, findings, who)
    assert (until_s - time.monotonic()) / 4 <= shares_s[0] <= 100
    assert findings.missing == {f"{small()}, slow": "TimeoutError: its share of the time is used up"}
    assert [row.who for row in findings.timings] == [OWN, OWN]
    shares = original(-1.0)
    with shares.taken(OWN):
        time.sleep(0.3)


def test_what_the_time_does_not_allow_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    findings = Findings(constant_rates())
    timed.measure(Task(tmp_path, CPU, Namespace()), [small()], time.monotonic() - 1, findings)
    assert findings.timings == []
    assert "left out, like all after it; the time is up" in capsys.readouterr().out


def test_what_a_gpu_cannot_hold_or_store_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 GiB of KV on a GPU of 80: 256 sequences of 131,072 tokens of 4096 bytes. An A100 is 8.0."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Namespace(total_memory=80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert timed.unfit(Case("decode", 256, 131_072, BF16, BF16), gpu) == "its KV takes 128 GiB"
    assert timed.unfit(Case("decode", 1, 512, BF16, FP8), gpu) == "the device has no float8"
    assert timed.unfit(Case("decode", 32, 4096, BF16, BF16), gpu) is None


def test_no_library_is_needed_and_an_absent_one_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: name if name == "xformers" else None)
    names = [contender.name for contender in peers.contenders(torch.device("cuda"), own=ModuleType("kernels"))]
    assert names == [OWN, "torch sdpa", "torch flex", "torch index_put", "xformers"]


class FakeFlashinfer:
    """flashinfer's paged decode as its documentation has it, in float64: pages and positions from what is planned."""

    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool) -> None:
            assert (workspace.dtype, layout, use_tensor_cores) == (torch.uint8, "NHD", False)

        def plan(
            self,
            indptr: torch.Tensor,
            indices: torch.Tensor,
            last_page_len: torch.Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim: int,
            page_size: int,
            *,
            window_left: int,
            logits_soft_cap: float | None,
            sm_scale: float,
            q_data_type: torch.dtype,
            kv_data_type: torch.dtype,
        ) -> None:
            assert (num_qo_heads, num_kv_heads, head_dim) == (4, 2, 32)
            assert (window_left, logits_soft_cap) == (6, None)
            self.pages = [indices[a:b] for a, b in itertools.pairwise(indptr)]
            self.lens = [(len(p) - 1) * page_size + int(n) for p, n in zip(self.pages, last_page_len, strict=True)]
            self.window, self.scale = window_left + 1, sm_scale

        def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            out = torch.empty_like(q)
            for i, (pages, length) in enumerate(zip(self.pages, self.lens, strict=True)):
                k, v = (
                    cache[pages.long()].flatten(0, 1)[max(0, length - self.window) : length].repeat_interleave(2, 1)
                    for cache in caches
                )
                weights = (torch.einsum("hd,khd->hk", q[i], k) * self.scale).softmax(-1)
                out[i] = torch.einsum("hk,khd->hd", weights, v)
            return out


def test_flashinfer_is_asked_for_the_same_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", FakeFlashinfer)
    problem = problem_of(small(window=7, length=37), CPU)
    built = peers.flashinfer(problem)
    assert len(built.calls) == len(problem.contexts)
    assert expected_of(problem).error(built.answer(built.calls[0]())) < 1e-5


def test_flash_attn_and_xformers_are_asked_for_the_same_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with the libraries' signatures and layouts, on torch's attention."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attention: Any = torch.nn.functional.scaled_dot_product_attention
        out: torch.Tensor = attention(q, k, v, scale=scale, is_causal=causal and q.shape[2] > 1, enable_gqa=True)
        return out.transpose(1, 2)

    def flash_attn_func(q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool, **more: Any) -> torch.Tensor:
        assert more == {"window_size": (-1, -1), "softcap": 0.0}
        return attend(q, k, v, softmax_scale, causal)

    def forward(q: Any, k: Any, v: Any, *, attn_bias: Any, scale: float) -> torch.Tensor:
        assert k.stride(3) == 0  # a group shares its keys
        q, k, v = (x.flatten(2, 3) for x in (q, k, v))
        answer = attend(q, k, v, scale, attn_bias == "triangle")
        return answer.view(*answer.shape[:2], 2, 2, -1)

    flash, fmha = ModuleType("flash_attn"), ModuleType("xformers.ops.fmha")
    flash.flash_attn_func = flash.flash_attn_with_kvcache = flash_attn_func  # type: ignore[attr-defined]
    fmha.memory_efficient_attention_forward = forward  # type: ignore[attr-defined]
    fmha.attn_bias = Namespace(LowerTriangularMask=lambda: "triangle")  # type: ignore[attr-defined]
    for name, module in (
        ("flash_attn", flash),
        ("xformers", fmha),
        ("xformers.ops", fmha),
        ("xformers.ops.fmha", fmha),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    for case in (small(), small("prefill", 2, 33)):
        problem = problem_of(case, CPU)
        for build in (peers.flash_attn, peers.xformers):
            built = build(problem)
            assert expected_of(problem).error(built.answer(built.calls[0]())) < 1e-5


# --- in stages, call after call ---------------------------------------------------------------------------------------

FOUR = [small(), small(num_seqs=3), small(window=7), small("store", 5, 1)]


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Exit code of the stage `kernels`, or of `kernels-grid` beside it, with time for so many cases of FOUR."""

    right = peers.contenders(CPU)[0]

    def run(name: str, num_cases: int, own: Contender = right, commit: str | None = "c0ffee") -> int:
        def measure(task: Task, todo: list[Case], until_s: float, findings: Findings) -> None:
            timed.measure(task, todo[:num_cases], until_s, findings, (own,))

        monkeypatch.setattr(kernels_stage, "measure", measure)
        monkeypatch.setattr(kernels_stage, "cases", lambda device: FOUR)
        monkeypatch.setattr(kernels_stage, "begin", lambda device: Findings(constant_rates()))
        (tmp_path / name).mkdir(exist_ok=True)
        task = Task(tmp_path / name, CPU, Namespace(limit=60, end=None, commit=commit))
        return kernels_stage.run(task) if name == "kernels" else kernels_stage.run_rest(task)

    return run


def saved(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def timed_cases(result: dict[str, Any]) -> list[str]:
    return [line["metric"].removesuffix(f", {OWN}") for line in result["rows"] if line["unit"] == "us"]


def test_the_grid_measures_what_the_first_stage_did_not_come_to_and_goes_on(
    stages: Callable[..., int], tmp_path: Path
) -> None:
    """One case, then one, then the rest; each is measured once, and told with those before it."""
    names = [str(case) for case in FOUR]
    assert stages("kernels", 1) == 0  # its time is up: that is what it is for
    assert saved(tmp_path / "kernels")["numbers"]["cases"] == names[:1]
    assert stages("kernels-grid", 1) == UNFINISHED
    first = saved(tmp_path / "kernels-grid")
    assert (first["numbers"]["cases"], timed_cases(first)) == (names[1:2], names[1:2])
    assert first["headline"].endswith("; 2 of 4 cases are left")
    assert stages("kernels-grid", 9) == 0
    last = saved(tmp_path / "kernels-grid")
    assert (last["numbers"]["cases"], timed_cases(last)) == (names[1:], names[1:])
    assert last["rows"][: len(first["rows"])] == first["rows"]


def test_without_a_first_stage_the_grid_is_all_there_is(stages: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "result.json").write_text("cut off {")
    assert stages("kernels-grid", 9) == 0
    assert timed_cases(saved(tmp_path / "kernels-grid")) == [str(case) for case in FOUR]


def test_after_a_whole_first_stage_the_grid_has_nothing_to_do(stages: Callable[..., int], tmp_path: Path) -> None:
    stages("kernels", 9)
    assert stages("kernels-grid", 9) == 0
    assert saved(tmp_path / "kernels-grid")["headline"] == "all 4 cases were measured before"


@pytest.mark.parametrize(
    ("first", "grid", "left"),
    [("c0ffee", "c0ffee", 2), ("badcafe", "c0ffee", 4), (None, "c0ffee", 4), ("c0ffee", None, 4), (None, None, 2)],
)
def test_the_grid_leaves_out_what_its_own_code_has_been_measured_on(
    stages: Callable[..., int], tmp_path: Path, first: str | None, grid: str | None, left: int
) -> None:
    """Of unknown code there is no earlier call to go on from: both stages are of this one."""
    stages("kernels", 2, commit=first)
    assert stages("kernels-grid", 9, commit=grid) == 0
    assert timed_cases(saved(tmp_path / "kernels-grid")) == [str(case) for case in FOUR[-left:]]
    assert saved(tmp_path / "kernels-grid")["commit"] == grid


def test_a_first_stage_that_did_not_say_its_code_is_measured_again(stages: Callable[..., int], tmp_path: Path) -> None:
    """As results were written before they held a commit."""
    stages("kernels", 2)
    old = {name: value for name, value in saved(tmp_path / "kernels").items() if name != "commit"}
    (tmp_path / "kernels" / "result.json").write_text(json.dumps(old))
    stages("kernels-grid", 9)
    assert timed_cases(saved(tmp_path / "kernels-grid")) == [str(case) for case in FOUR]


@pytest.mark.parametrize("name", ["kernels", "kernels-grid"])
def test_the_numbers_are_saved_before_the_figure_is_drawn_and_outlive_its_failure(
    stages: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:  # fmt: skip
    """Of the grid also how many cases are left; the exit code is that of the measuring."""
    at_drawing = []

    def draw(*_: Any) -> bool:
        at_drawing.append(saved(tmp_path / name))
        raise ValueError("no font is found\nTraceback")

    monkeypatch.setattr(kernels_stage, "draw", draw)
    assert stages(name, 2) == (UNFINISHED if name == "kernels-grid" else 0)
    assert at_drawing == [saved(tmp_path / name)]
    assert at_drawing[0]["numbers"]["cases"] == [str(case) for case in FOUR[:2]]
    assert ("2 of 4 cases are left" in at_drawing[0]["headline"]) == (name == "kernels-grid")
    assert "kernels.svg: not drawn: ValueError: no font is found\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["kernels", "kernels-grid"])
def test_a_figure_that_fails_does_not_hide_why_the_measuring_ended(
    stages: Callable[..., int], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def draw(*_: Any) -> bool:
        raise ValueError("no font is found")

    def measure(*_: Any) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(kernels_stage, "draw", draw)
    monkeypatch.setattr(timed, "measure", measure)
    with pytest.raises(SystemExit, match="143"):
        stages(name, 2)


def test_a_kernel_that_fails_is_told_and_not_tried_again(stages: Callable[..., int], tmp_path: Path) -> None:
    """Of the grid in its first call: also when what is left then goes well."""
    assert stages("kernels", 1, Contender(OWN, wrong)) == FAILURES
    assert saved(tmp_path / "kernels")["headline"].endswith("; 1 failed")
    assert stages("kernels-grid", 1, Contender(OWN, wrong)) == UNFINISHED
    assert stages("kernels-grid", 9) == FAILURES
    result = saved(tmp_path / "kernels-grid")
    assert list(result["numbers"]["failures"]) == [f"{FOUR[1]}, {OWN}"]
    assert timed_cases(result) == [str(case) for case in FOUR[2:]]


def test_the_goals_of_two_calls_are_the_worst_of_both() -> None:
    """536.9 MB in 600 us are 0.895 of 1 TB/s."""
    findings = Findings(constant_rates(), timings=[timing(Case("decode", 32, 4096, BF16, BF16), 600)])
    findings.before = {"goals": {"decode-bandwidth": 0.7, "decode-single-peer": 1.3}}
    assert findings.numbers["goals"] == {"decode-bandwidth": 0.7, "decode-single-peer": 1.3}
    findings.before = {"goals": {"decode-bandwidth": 0.99}}
    assert findings.numbers["goals"]["decode-bandwidth"] == pytest.approx(0.895, abs=1e-3)


# --- what is said -----------------------------------------------------------------------------------------------------


def timing(case: Case, us: float, who: str = OWN, beyond: float = 0.0) -> Timing:
    return Timing(case, who, [us / 1e6], 1e-3, beyond)


def test_rows_are_bytes_over_time_as_a_share_of_a_copy() -> None:
    """512 MiB of KV in 671 us are 0.8 of 1 TB/s; 1.0995e12 operations in 2.2 ms half of 1 PFLOP/s."""
    share = timed.rows_of(timing(Case("decode", 32, 4096, BF16, BF16), 671.089), constant_rates())
    assert [(r.metric.rsplit(",", 1)[1], r.unit) for r in share] == [
        (" kvplan", "us"),
        (" kvplan: bandwidth", "share of copy"),
        (" kvplan: error", "relative L2"),
    ]
    assert share[1].value == pytest.approx(0.8, rel=1e-5)
    # 32 heads * 4 * 128 operations * 8192 * 8193 / 2 pairs = 5.498e11
    rate = timed.rows_of(timing(Case("prefill", 1, 8192, BF16, BF16), 1099.6), constant_rates())
    assert rate[1].unit == "share of matmul"
    assert rate[1].value == pytest.approx(0.5, rel=1e-3)


def test_goals_take_the_worst_of_the_shapes_they_are_about() -> None:
    """Of 1 TB/s; a shape of less than 64 MB, another block size and one sequence are not the first goal's."""
    a, b = Case("decode", 32, 4096, BF16, BF16), Case("decode", 64, 2048, BF16, BF16)  # 536.9 MB each
    fp8 = replace(a, stored=FP8)
    single = Case("decode", 1, 131_072, BF16, BF16)  # 536.9 MB
    timings = [
        timing(a, 600),
        timing(a, 660, "torch sdpa"),
        timing(a, 630, "flashinfer"),
        timing(b, 620),
        timing(b, 1000, "torch sdpa"),
        timing(replace(a, block_size=64), 9000),
        timing(Case("decode", 8, 512, BF16, BF16), 9000),
        timing(fp8, 350),
        timing(replace(fp8, compute=torch.float16), 340, beyond=3.1e-4),
        timing(single, 800),
        timing(single, 700, "flashinfer"),
        timing(Case("prefill", 1, 8192, BF16, BF16), 1000),
        timing(Case("prefill", 4, 2048, BF16, BF16), 9000),
    ]
    numbers = timed.goal_numbers(timings, constant_rates())
    assert numbers == pytest.approx(
        {
            "decode-bandwidth": 536_870_912 / 620e-6 / 1e12,
            "decode-peer": 630 / 600,
            "decode-fp8-bandwidth": 268_435_456 / 350e-6 / 1e12,
            "decode-fp8-error": 3.1e-4,
            "decode-single-bandwidth": 536_870_912 / 800e-6 / 1e12,
            "decode-single-peer": 800 / 700,
            "prefill-matmul": 32 * 4 * 128 * 8192 * 8193 / 2 / 1000e-6 / 1e15,
        }
    )


def test_without_measurements_there_are_no_goals() -> None:
    assert timed.goal_numbers([], constant_rates()) == {}
    no_peer = [timing(Case("decode", 32, 4096, BF16, BF16), 600)]
    assert list(timed.goal_numbers(no_peer, constant_rates())) == ["decode-bandwidth"]


def test_the_figure_has_a_line_per_kernel_and_contender(tmp_path: Path) -> None:
    """Two shapes of 512 MiB in 600 and 1200 us are 0.895 and 0.447 of 1 TB/s, at one place of the line."""
    shapes = [Case("decode", 32, 4096, BF16, BF16), Case("decode", 64, 2048, BF16, BF16)]
    timings = [timing(case, us, who) for case, us in zip(shapes, (600, 1200), strict=True) for who in (OWN, "sdpa")]
    other = [replace(shapes[0], block_size=64), replace(shapes[0], softcap=50.0), Case("store", 9, 1, BF16, BF16)]
    lines = figure.lines_of([*timings, *(timing(case, 600) for case in other)], constant_rates())
    assert list(lines) == [("decode llama-3.1-8b bfloat16", OWN), ("decode llama-3.1-8b bfloat16", "sdpa")]
    ((x, shares),) = lines["decode llama-3.1-8b bfloat16", OWN]
    assert x == 512
    assert shares == pytest.approx([0.8948, 0.4474], abs=1e-4)
    assert figure.draw(tmp_path / "a.svg", timings, constant_rates(), "H200")
    ElementTree.parse(tmp_path / "a.svg")
    assert figure.draw(tmp_path / "none.svg", [], constant_rates(), "H200")


def test_without_matplotlib_there_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not figure.draw(tmp_path / "a.svg", [], constant_rates(), "H200")
    assert list(tmp_path.iterdir()) == []


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_leaves_rows_a_figure_and_goals_that_claim_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(tmp_path / "out"), "--device", "cpu", "--kinds", "decode,store", "--commit", "c0ffee"]
    assert kernels.main(argv) == 0
    out, err = capsys.readouterr()
    rows_of_goals = [line for line in out.splitlines() if line.startswith("| ")][2:]
    assert len(rows_of_goals) == 10
    assert all("| never run on a GPU; stage " in line for line in rows_of_goals)
    assert "say nothing about a GPU" in err
    with (tmp_path / "out" / "kernels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "metric", "unit", "value", "p20", "p80", "n", "model", "gpu", "driver", "torch", "kvplan", "commit", "utc",
    ]  # fmt: skip
    assert {(r["gpu"], r["commit"]) for r in rows} == {("cpu", "c0ffee")}
    assert {r["metric"].split()[0] for r in rows} == {"copy", "bfloat16", "decode", "store"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "kernels.csv", "kernels.svg", "goals.md", "result.json",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--kinds", "decod"], "--kinds: 'decod' is none; there are decode, prefill, store, rope+store and latent"),
        (["--budget", "0"], "--budget must be above 0 (0)"),
        (["--budget", "nan"], "--budget must be above 0 (nan)"),
        (["--device", "gpu"], "--device: 'gpu' is none; use cuda:N or cpu"),
        (["--device", "meta"], "--device: 'meta' is neither a CUDA device nor cpu; use cuda:N or cpu"),
    ],
)
def test_a_wrong_call_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    assert kernels.main([str(tmp_path / "out"), "--device", "cpu", *arguments]) == 2
    assert capsys.readouterr().err == f"kernels.py: error: {error}\n"
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert kernels.main([str(tmp_path / "file"), "--device", "cpu"]) == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_starts_as_its_text_says() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "python -m benchmarks.kernels OUT" in done.stdout
