"""SGLang's rules against what its servers logged, and the command line in front of them."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.errors import KvplanError, UnsupportedModelError, UsageError
from kvplan.core.units import GIB
from kvplan.hardware.gpu import custom_gpu, gpu, gpu_names
from kvplan.models import catalog
from kvplan.planning.cures import flag_text
from kvplan.planning.plan import Plan, Request, plan, serve_command
from kvplan.servers.base import parse_engine
from kvplan.servers.sglang import pool as sglang_pool
from kvplan.servers.sglang import rules as sglang
from kvplan.servers.sglang.pool import SglangPool
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.refusals import reason_of


def sglang_plan(model: str, gpu_name: str, engine: str = "sglang", **args: Any) -> Plan:
    return plan(Request(catalog.load(model), gpu(gpu_name), EngineArgs(**args), parse_engine(engine)))


class TestThePoolAsServersLoggedIt:
    def test_llama_3_8b_on_h200(self) -> None:
        """sgl-project/sglang#6753: 0.8718 and chunks of 16,384 gave 871,371 tokens in 106.36 GiB."""
        answer = sglang_plan(
            "llama-3-8b", "h200", mem_fraction_static=0.8717961202189594, max_num_batched_tokens=16_384
        )
        assert answer.capacity.tokens == pytest.approx(871_371, rel=0.002)
        assert answer.available == pytest.approx(106.36 * GIB, rel=0.002)
        assert answer.available_low < 106.36 * GIB < answer.available_high

    def test_an_rtx_4090_by_its_defaults_and_what_larger_graphs_cost(self) -> None:
        """MuhammadHaseebUlHaqq/llm-inference-optimization, sglang main at 141febf3, Qwen2.5-0.5B, 12,288 B a token:
        1,330,288 tokens by default, 14,110 fewer with graphs up to 128 in place of 48; 4,096 requests.
        """
        default = sglang_plan("qwen2.5-0.5b", "rtx-4090")
        wide = sglang_plan("qwen2.5-0.5b", "rtx-4090", cuda_graph_max_bs=128)
        assert default.bytes_per_token == 12_288
        assert default.capacity.tokens == pytest.approx(1_330_288, rel=0.01)
        assert default.capacity.tokens - wide.capacity.tokens == pytest.approx(14_110, rel=0.01)
        assert default.settings.max_num_seqs == 4096

    def test_a_stated_pool_takes_the_bytes_that_were_logged(self) -> None:
        """sgl-project/sglang#4257: max_total_tokens=10240 on two A100-40G, K and V of 0.47 GiB each."""
        answer = sglang_plan(
            "deepseek-r1-distill-qwen-14b", "a100-40g", "sglang@0.4.3", tensor_parallel_size=2, max_total_tokens=10_240,
            max_model_len=8192,
        )  # fmt: skip
        assert answer.capacity.tokens == 10_240
        assert answer.memory.kv_cache == pytest.approx(0.94 * GIB, abs=0.01 * GIB)
        assert answer.settings.gpu_memory_utilization == 0.87  # logged too: the table by tensor parallel size

    def test_states_and_tokens_of_what_a_qwen_3_5_27b_had(self) -> None:
        """A log of August 2026 (H100, Qwen3.8-27B-FP8, the same layers): pools of 10.08 + 10.08 + 0.34 + 17.58 GiB hold
        124 slots and 330,323 tokens. A request takes 5 of them in 0.5.23, as its own code says (124 // 5; 3 in 0.5.9).
        """
        spec = catalog.load("qwen3.5-27b")
        for engine, limit, requests in (("sglang", 32, 24), ("sglang", None, 24), ("sglang@0.5.9", 32, 32)):
            args = EngineArgs(mem_fraction_static=0.85, max_num_seqs=limit)
            settings = sglang.resolve(spec, gpu("h100-80g"), args, parse_engine(engine))
            pool = sglang_pool.pool(spec, settings, args, 90)
            pages, slots, _ = sglang_pool.pages_in(pool, args, [int(38.08 * GIB)])
            assert slots == 124
            assert pages == pytest.approx(330_323, rel=0.001)  # two decimals of a GiB, four times
            assert sglang_pool.max_requests(pool, settings, args, pages, slots) == requests

    def test_window_layers_have_a_pool_of_four_fifths(self) -> None:
        """gpt-oss-20b: 12 layers in full, 12 in windows, 2,048 B each a token: 1 + 0.8 of them for each token."""
        answer = sglang_plan("gpt-oss-20b", "h100-80g", mem_fraction_static=0.83)
        assert answer.capacity.tokens == 10 * answer.available // (12 * 2048 * 18)
        pool = answer.pool
        assert isinstance(pool, SglangPool)
        windows = int(answer.capacity.tokens * 0.8)  # a log of gemma-4-E4B has 644,444 beside 805,556
        assert answer.memory.kv_cache == 12 * 2048 * (answer.capacity.tokens + 1 + windows + 1)

    def test_a_latent_is_whole_on_every_rank(self) -> None:
        """Kimi-K2 in SGLang: 61 layers x 576 x 2 B whatever the ranks (facts of the logs); DeepSeek-V3 has the same."""
        assert sglang_plan("deepseek-v3", "h200", tensor_parallel_size=8).bytes_per_token == 61 * 576 * 2


class TestTheDefaultFraction:
    @pytest.mark.parametrize(
        ("engine", "gpu_name", "tp", "logged"),
        [
            ("sglang@0.4.7", "h100-80g", 1, 0.874),  # sgl-project/sglang#7495, 0.4.7.post1
            ("sglang@0.4.3.post4", "a100-40g", 2, 0.87),  # sgl-project/sglang#4257
            ("sglang@0.4.0.post1", "rtx-3060-12g", 1, 0.88),  # sgl-project/sglang#2527, an RTX 3070
        ],
    )
    def test_is_what_older_servers_logged(self, engine: str, gpu_name: str, tp: int, logged: float) -> None:
        args = EngineArgs(tensor_parallel_size=tp)
        fraction = sglang.default_fraction(catalog.load("qwen3-0.6b"), gpu(gpu_name), args, parse_engine(engine))
        assert fraction == logged

    def test_counts_the_graphs_of_a_prefill(self) -> None:
        assert sglang.num_prefill_graphs(8192) == 58  # 8 + 14 + 8 + 8 + 12 of the table, 8 more to 8,192
        assert sglang.num_prefill_graphs(4096) == 50

    def test_keeps_back_at_least_ten_gib_of_a_large_gpu(self) -> None:
        """512 + 1.5 x 2,048 + 128 = 3,712 MiB without graphs, so the floor decides: 1 - 10,240 / 81,559."""
        args = EngineArgs(enforce_eager=True, max_num_batched_tokens=2048)
        fraction = sglang.default_fraction(catalog.load("qwen3-0.6b"), gpu("h100-80g"), args, parse_engine("sglang"))
        assert fraction == round(1 - 10_240 / 81_559, 3)

    @pytest.mark.parametrize(
        ("model", "factor"),
        [
            # 27 layers of 1,152: 1.4238 times a ViT-L of 24 layers of 1,024, so 0.95 x (1 - 0.04238)
            ("gemma-4-31b", 0.95 * (1 - 0.1 * (27 * 1152**2 / (24 * 1024**2) - 1))),
            # its config has `depth` in place of num_hidden_layers, so SGLang takes 24: 0.95 x (1 - 0.05625)
            ("qwen2.5-vl-7b", 0.95 * 0.94375),
        ],
    )
    def test_is_lower_the_larger_the_vision_tower(self, model: str, factor: float) -> None:
        """0.835 without graphs of the prefill, which models of images have not: 1 - 13,440 / 81,559."""
        fraction = sglang_plan(model, "h100-80g", max_model_len=1024).settings.gpu_memory_utilization
        assert fraction == pytest.approx(0.835 * factor, rel=1e-12)

    def test_of_gemma_3_is_that_of_a_text_model_unless_images_are_asked_for(self) -> None:
        """SGLang's own answers: 0.83, and with --enable-multimodal 0.7596298339843749."""
        plain, images = (sglang_plan("gemma-3-27b", "h100-80g", max_model_len=1024, enable_multimodal=on)
                         for on in (None, True))  # fmt: skip
        assert plain.settings.gpu_memory_utilization == 0.83
        assert images.settings.gpu_memory_utilization == pytest.approx(0.7596298339843749, rel=1e-12)
        # 100 MiB of embeddings of images come after the pool
        assert plain.available - images.available > 100 * 2**20

    @pytest.mark.parametrize("args", [{"max_num_batched_tokens": 100_000}, {"cuda_graph_max_bs": 60_000}])
    def test_that_leaves_nothing_is_asked_back(self, args: dict[str, Any]) -> None:
        with pytest.raises(UsageError, match="leaves nothing of 81,559 MiB"):
            sglang_plan("llama-3.1-8b", "h100-80g", **args)


class TestThePlan:
    @pytest.mark.parametrize("model", catalog.model_names())
    def test_adds_up_for_every_model_that_can_be_sized(self, model: str) -> None:
        try:
            answer = sglang_plan(model, "b200", tensor_parallel_size=8, max_model_len=2048)
        except (UnsupportedModelError, UsageError) as refusal:
            pytest.skip(str(refusal))
        memory = answer.memory
        assert sum(getattr(memory, row) for row in memory.ROWS) - memory.missing == memory.total
        assert min(memory.unused, memory.missing, memory.outside_budget, memory.slack) == 0
        detail = memory.context + memory.outside_budget + memory.slack - memory.over_budget - memory.over_gpu
        assert memory.headroom == memory.unused - memory.missing == detail
        if answer.fits:
            pool = answer.pool
            assert isinstance(pool, SglangPool)
            window_page = pool.block_size * pool.windows[answer.stage]  # both pools are cut to whole pages
            assert 0 <= memory.slack <= pool.stage_bytes[answer.stage] + window_page + pool.state[answer.stage]

    @given(
        share=st.floats(0.3, 0.99), ratio=st.sampled_from([0.0001, 0.05, 0.5, 0.80049, 1.0, 3.0]),
        page=st.sampled_from([1, 16, 64]), context=st.integers(1, 131_072),
    )  # fmt: skip
    def test_window_pools_never_take_more_than_there_is(
        self, share: float, ratio: float, page: int, context: int
    ) -> None:
        answer = sglang_plan(
            "gpt-oss-20b", "h100-80g", mem_fraction_static=share, swa_full_tokens_ratio=ratio, block_size=page,
            max_model_len=context,
        )  # fmt: skip
        pool = answer.pool
        assert isinstance(pool, SglangPool)
        pages = answer.capacity.num_blocks - 1
        windows = int(pages * page * pool.swa_ratio) // page
        if answer.fits:
            assert (pages * 12 * 2048 + windows * 12 * 2048) * page <= answer.available
            # SGLang counts a window of 128 without the newest token (models.counted_window); it may straddle a page.
            users, window_pages = answer.concurrency.pool.users, -(-min(context, 127) // page) + 1
            assert users * -(-context // page) <= pages
            if context > 128 + page:
                assert users * window_pages <= windows + 1

    def test_states_the_deficit_that_would_make_it_fit(self) -> None:
        short = sglang_plan("llama-3.1-8b", "rtx-4090", max_model_len=131_072)
        assert not short.fits
        spec, release = catalog.load("llama-3.1-8b"), parse_engine("sglang")
        pin = EngineArgs(max_model_len=131_072, mem_fraction_static=0.704)
        more = custom_gpu(gpu("rtx-4090").total_memory + int(short.deficit / 0.704) + 2 * 131_072)
        assert plan(Request(spec, more, pin, release)).fits

    def test_fits_the_context_to_the_memory(self) -> None:
        answer = sglang_plan("llama-3.1-8b", "rtx-4090", max_model_len="auto")
        assert answer.capacity.max_model_len == answer.capacity.tokens
        assert answer.concurrency.users == 1

    def test_pipeline_stages_share_the_least_room(self) -> None:
        """Free memory is the least of all ranks, whichever stage it is on."""
        spec, release = catalog.load("deepseek-r1-distill-llama-70b"), parse_engine("sglang")
        args = EngineArgs(pipeline_parallel_size=2)
        settings = sglang.resolve(spec, gpu("b200"), args, release)
        pool = sglang_pool.pool(spec, settings, args, 100)
        assert pool.full == (40 * 8 * 128 * 2 * 2,) * 2
        pages, slots, _ = sglang_pool.pages_in(pool, args, [50 * GIB, 40 * GIB])
        assert (pages, slots) == (40 * GIB // pool.full[0] // 64, 0)  # pages of 64 tokens: trtllm_mha

    def test_replicas_are_servers_of_their_own(self) -> None:
        """Without DP attention nothing is shared: each holds every expert, and needs no NCCL for the others."""
        first, two = (sglang_plan("qwen3-30b-a3b", "h200", data_parallel_size=n, max_model_len=8192) for n in (1, 2))
        assert two.memory == first.memory
        assert two.concurrency.replicas == 2

    def test_no_slot_for_states_is_no_server(self) -> None:
        short = sglang_plan("qwen3-next-80b-a3b", "h200", tensor_parallel_size=2, mamba_full_memory_ratio=0.00001)
        assert not short.fits

    def test_a_pool_that_was_stated_too_small_says_so(self, run: Run) -> None:
        done = run(
            "estimate", "llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "32k", "--engine", "sglang", "--max-total-tokens",
            "20000",
        )  # fmt: skip
        assert "--max-total-tokens 20,000 is less than a request of 32,768 tokens" in done.out
        assert "--max-total-tokens 32768" in done.out

    def test_sparse_attention_has_pages_of_64_tokens(self) -> None:
        assert sglang_plan("deepseek-v3.2", "h200", tensor_parallel_size=8).capacity.tokens % 64 == 0

    def test_a_plan_that_fits_is_never_over_its_budget(self) -> None:
        answer = sglang_plan("llama-3.1-8b", "h100-80g", block_size=64, max_model_len=8192)
        assert 0 <= answer.memory.slack < answer.capacity.bytes_per_block

    @pytest.mark.parametrize(
        ("argv", "note"),
        [
            (("llama-3.1-8b", "--ctx", "8k"), "using 0.83"),
            (("llama-3.1-8b", "--ctx", "8k", "--mem-fraction-static", "0.99"), "0.79 GiB are reserved"),
            (("qwen3.5-9b", "--ctx", "8k"), "slots for recurrent states"),
            (("gemma-2-9b", "--ctx", "4k"), "counted in full"),
        ],
    )
    def test_what_no_row_shows_is_a_note(self, run: Run, argv: tuple[str, ...], note: str) -> None:
        done = run("estimate", *argv, "--gpu", "h100-80g", "--engine", "sglang")
        assert note in done.err
        assert note not in run("estimate", *argv, "--gpu", "h100-80g", "--engine", "sglang", "-q").err

    @pytest.mark.parametrize("name", gpu_names())
    def test_every_gpu_has_a_default(self, name: str) -> None:
        fraction = sglang.default_fraction(catalog.load("qwen3-0.6b"), gpu(name), EngineArgs(), parse_engine("sglang"))
        assert 0.25 < fraction < 0.95  # a laptop's 6 GB are the least


class TestRefusals:
    @pytest.mark.parametrize(
        ("args", "problem"),
        [
            ({"gpu_memory_utilization": 0.9}, "--mem-fraction-static"),
            ({"kv_cache_memory_bytes": 2**30}, "max_total_tokens"),
            ({"kv_cache_dtype": "nvfp4"}, "fp8_e5m2"),
            ({"max_loras": 1}, "adapters"),
            ({"decode_context_parallel_size": 2, "tensor_parallel_size": 2}, "no such flag"),
            ({"performance_mode": "throughput"}, "no such flag"),
            ({"quantization": "experts_int8"}, "not one that is modeled for SGLang"),
        ],
    )
    def test_flags_that_sglang_has_not(self, args: dict[str, Any], problem: str) -> None:
        with pytest.raises(UsageError, match=problem):
            sglang_plan("llama-3.1-8b", "a100-80g", **args)

    @pytest.mark.parametrize("name", ["mem_fraction_static", "cuda_graph_max_bs"])
    def test_flags_that_vllm_has_not(self, name: str) -> None:
        with pytest.raises(UsageError, match="is a flag of SGLang"):
            sglang_plan("llama-3.1-8b", "a100-80g", "vllm", **{name: 1})

    def test_states_before_0_5(self) -> None:
        with pytest.raises(UnsupportedModelError, match=r"use sglang@0\.5"):
            sglang_plan("qwen3-next-80b-a3b", "h200", "sglang@0.4.9", tensor_parallel_size=2)

    @pytest.mark.parametrize("engine", ["vllm", "sglang"])
    def test_a_dtype_of_states_that_does_not_exist(self, engine: str) -> None:
        with pytest.raises(UsageError, match="mamba_ssm_cache_dtype 'foo' is not one of float32"):
            sglang_plan("qwen3-next-80b-a3b", "h200", engine, tensor_parallel_size=2, mamba_ssm_cache_dtype="foo")

    def test_pools_that_are_not_modelled(self) -> None:
        with pytest.raises(KvplanError, match="no layer keeps all tokens"):
            sglang_plan("mamba-2.8b", "b200")
        with pytest.raises(KvplanError, match="SGLang's pools with it are not modeled"):
            sglang_plan("deepseek-v4-flash", "b200", tensor_parallel_size=8, enable_hierarchical_cache=True)

    @pytest.mark.parametrize("model", ["jamba-v0.1", "falcon-7b", "glm-4-9b-chat", "qwen2.5-omni-7b"])
    def test_models_without_a_class_do_not_start(self, model: str) -> None:
        """`... has no SGlang implementation` or `Cannot find model module`: SGLang 0.5.23's own registry."""
        assert "there is no class for " in reason_of(sglang_plan(model, "b200"))

    @pytest.mark.parametrize("engine", ["sglang@0.3", "sglang@0.6", "sglang@1", "sglang@0.4.x", "trtllm"])
    def test_releases_that_are_not_known(self, engine: str) -> None:
        with pytest.raises(UsageError, match="--engine"):
            parse_engine(engine)


class TestTheCommandLine:
    COMMAND = (
        "python3 -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B --tp 2 --mem-fraction-static 0.8 "
        "--context-length 16384 --kv-cache-dtype fp8_e5m2 --disable-radix-cache --host 0.0.0.0 --trust-remote-code"
    )

    def test_reads_a_pasted_command(self, run: Run) -> None:
        done = run("estimate", "--gpu", "a100-80g", "--from-command", self.COMMAND, "--format", "json")
        assert done.code == 0, done.err
        inputs = done.json["inputs"]
        assert inputs["engine"] == "sglang@0.5"
        assert inputs["settings"]["max_model_len"] == 16_384
        assert (inputs["num_gpus"], inputs["settings"]["kv_dtype"]) == (2, "fp8_e5m2")
        assert inputs["args"]["enable_prefix_caching"] is False

    @pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b", "qwen3-next-80b-a3b", "deepseek-v3"])
    def test_the_printed_command_is_the_same_plan(self, run: Run, model: str) -> None:
        first = sglang_plan(model, "h200", tensor_parallel_size=8, max_model_len=8192)
        words = shlex.join(serve_command(first))
        done = run("estimate", "--gpu", "h200", "--from-command", words, "--format", "json")
        assert done.code == 0, done.err
        again = done.json
        assert again["kv"]["tokens"] == first.capacity.tokens
        assert again["flags"]["command"] == words

    @pytest.mark.parametrize(
        ("flags", "fraction"),
        [
            # memory_hook.py: 512 + 1.5 x tokens + 1,024 / 8 + 2 x 256 graphs of 143,771 MiB; no graphs of prefills
            ("", 0.821),  # 16,384 tokens: 25,728 MiB
            ("--max-prefill-tokens 8192", 0.907),  # 13,440 MiB
            ("--max-prefill-tokens 32768", 0.65),  # 50,304 MiB
        ],
    )
    def test_without_chunks_reserves_for_the_tokens_of_a_steps_prompts(
        self, run: Run, flags: str, fraction: float
    ) -> None:
        command = f"sglang serve --model-path qwen3-8b --context-length 8192 --chunked-prefill-size -1 {flags}"
        done = run("estimate", "--gpu", "h200", "--from-command", command, "--format", "json")
        assert done.code == 0, done.err
        assert done.json["inputs"]["settings"]["gpu_memory_utilization"] == fraction
        printed = done.json["flags"]["command"]
        assert "--chunked-prefill-size -1" in printed
        assert printed.count("--max-prefill-tokens") == (1 if flags else 0)
        assert flags in printed

    @pytest.mark.parametrize(
        ("flags", "problem"),
        [
            ("--speculative-algorithm LOOKAHEAD", "LOOKAHEAD is not modeled"),
            ("--tp 8 --attn-dp-size 8", "inside --tp-size, which is not modeled"),
            ("--context-length 8192 --attention-backend cutlass_mla", "has no such backend"),
            ("--context-length 8192 --enable-eplb", "requires several ranks of experts"),
            (
                "--context-length 8192 --speculative-algorithm EAGLE --speculative-num-draft-tokens 4",
                "requires --speculative-num-steps",
            ),
            ("--context-length 8192 --speculative-algorithm NGRAM --page-size 16", "drafts branch"),
            ("--tp 4 --ep-size 2", "experts over all"),
            ("--mem-fraction-static 1.5", "must be greater than 0"),
            ("--disable-radix-cache yes", "without a flag"),
            ("--mem-fraction-statc 0.5", "did you mean --mem-fraction-static"),
            ("--gpu-memory-utilization 0.5", "is a flag of vLLM"),
            ("--context-length 32k", "not a whole number"),
            ("--context-length -1", "not a whole number"),
            ("--mem-fraction-static 90%", "is not a number"),
        ],
    )
    def test_refuses_what_it_cannot_size(self, run: Run, flags: str, problem: str) -> None:
        command = f"sglang serve --model-path qwen3-8b {flags}"
        done = run("estimate", "--gpu", "h200", "--from-command", command)
        assert done.code in (2, 3), done.err
        assert problem in done.err
        assert len(done.err.strip().splitlines()) == 1

    @pytest.mark.parametrize("flag", ["--mem-fraction", "--mem-fraction-static"])
    def test_takes_the_beginning_of_a_flag_as_argparse_does(self, run: Run, flag: str) -> None:
        command = f"sglang serve --model qwen3-8b {flag} 0.5 --tensor-parallel 2"
        inputs = run("estimate", "--gpu", "h200", "--from-command", command, "--format", "json").json["inputs"]
        assert inputs["args"]["mem_fraction_static"] == 0.5
        assert inputs["num_gpus"] == 2

    def test_reads_the_release_from_an_image(self, run: Run) -> None:
        image = "lmsysorg/sglang:v0.4.3.post4-cu124"
        command = f"docker run --gpus all {image} python3 -m sglang.launch_server --model-path qwen3-8b"
        inputs = run("estimate", "--gpu", "h200", "--from-command", command, "--format", "json").json["inputs"]
        assert inputs["engine"] == "sglang@0.4.3"
        assert inputs["settings"]["gpu_memory_utilization"] == 0.88

    def test_a_rule_about_headroom_is_refused(self, run: Run, tmp_path: Path) -> None:
        policy = tmp_path / "p.yaml"
        policy.write_text(
            "version: 1\ntargets:\n  - id: a\n    model: qwen3-8b\n    gpu: h200\n    engine: sglang\n"
            "    max_model_len: 8k\n    rules: {min_headroom: 5%}\n"
        )
        done = run("check", policy)
        assert done.code == 2
        assert "min_headroom is not modeled for SGLang" in done.err

    def test_says_which_flags_it_did_not_count(self, run: Run) -> None:
        command = "sglang serve --model-path qwen3-8b --moe-runner-backend triton --new-flag 3 --port 1"
        done = run("estimate", "--gpu", "h200", "--from-command", command)
        assert done.code == 0
        assert "--new-flag" in done.err
        assert "--moe-runner-backend" in done.err

    def test_stands_beside_vllm_in_a_sweep(self, run: Run) -> None:
        done = run(
            "sweep", "llama-3.1-8b", "--gpu", "h200", "--ctx", "8k", "--engine", "vllm,sglang", "--format", "csv"
        )
        assert done.code == 0, done.err
        assert "sglang@0.5" in done.out
        assert "vllm@" in done.out

    def test_explains_itself_without_vllms_words(self, run: Run) -> None:
        done = run("estimate", "qwen3-next-80b-a3b", "--gpu", "h200", "--tp", "2", "--engine", "sglang", "--explain")
        assert done.code == 0, done.err
        assert "mem_fraction_static" in done.out
        for word in ("vLLM may", "Maximum concurrency", "null block", "--max-num-seqs"):
            assert word not in done.out

    def test_commands_that_know_vllm_alone_say_so(self, run: Run) -> None:
        words = ("llama-3.1-8b", "--gpu", "h200", "--ctx", "8k", "--engine", "sglang", "--users", "4")
        done = run("recommend", *words)
        assert done.code == 2
        assert "vLLM" in done.err


def test_an_encoder_decoder_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="pool for an encoder's tokens is not modeled; use vllm"):
        plan(Request(catalog.load("whisper-large-v3"), gpu("h100-80g"), EngineArgs(), parse_engine("sglang")))


def test_the_context_that_a_note_names_is_the_one_that_is_taken(run: Run) -> None:
    """SGLang takes the long context of longrope models (0.5.23: 131,072 of Phi-3-mini-128k), vLLM the original one."""
    for engine, tokens in (("sglang", "131,072"), ("vllm", "4,096")):
        ran = run("estimate", "phi-3-mini-128k", "--gpu", "h100-80g", "--engine", engine)
        assert f"no --ctx: using the model's maximum of {tokens} tokens" in ran.err
        assert f"at {tokens} tokens each" in ran.out.splitlines()[0]


def test_where_slots_bound_the_requests_their_share_is_what_is_raised(run: Run) -> None:
    """SGLang runs slots // 5 requests whatever --max-running-requests allows; more of the memory for states helps."""
    words = ("estimate", "nemotron-nano-9b-v2", "--gpu", "h100-80g", "--ctx", "16k", "--engine", "sglang")
    plain = run(*words)
    assert "raise --mamba-full-memory-ratio" in plain.out
    assert "run at once (--mamba-full-memory-ratio)." in plain.out
    users = [
        run(*words, *more, "--format", "json").json["concurrency"]["users"]
        for more in ((), ("--max-num-seqs", "60"), ("--engine-arg", "mamba_full_memory_ratio=1.8"))
    ]
    assert users[0] == users[1] < users[2]
    assert "raise --max-running-requests" in run(*words, "--max-num-seqs", "20").out


@pytest.mark.parametrize(
    ("name", "tp", "budget", "cell", "tokens"),
    [
        # SGLang 0.5.23's own KVCacheConfigurator with --kv-cache-dtype fp4_mx_block16 on a B200: half a byte per value
        # and a byte per 16 of them. Qwen3-8B: 36 layers x 8 heads x 2 x (64 + 8); Qwen3-Next: 12 x 1 x 2 x (128 + 16).
        ("qwen3-8b", 1, 21_525_401_600, 41_472, 518_976),
        ("qwen3-next-80b-a3b", 4, 11_345_481_728, 3_456, 3_282_836),
    ],
)
def test_a_cache_of_four_bits_that_a_log_states_is_sized_as_by_sglang(
    name: str, tp: int, budget: int, cell: int, tokens: int
) -> None:
    args = EngineArgs(kv_cache_dtype="nvfp4", tensor_parallel_size=tp)
    request = Request(catalog.load(name), gpu("b200"), args, parse_engine("sglang"), started=True)
    settings = sglang.resolve(request.spec, request.gpu, args, request.release)
    layout = sglang_pool.pool(request.spec, settings, args, request.gpu.sm)
    assert layout.full == (cell,)
    assert budget // (cell * layout.block_size) * layout.block_size == tokens
    assert plan(request).capacity.tokens > 0
    with pytest.raises(UsageError, match="is not one that is modeled for SGLang"):
        plan(replace(request, started=False))


def test_windows_of_four_bits_are_not_sized() -> None:
    request = Request(
        catalog.load("gpt-oss-20b"), gpu("b200"), EngineArgs(kv_cache_dtype="nvfp4"), parse_engine("sglang"),
        started=True,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="pools for windows in 4 bits are not modeled"):
        plan(request)


@pytest.mark.parametrize("typed", ["fp8", "fp8_e4m3"])
def test_an_fp8_cache_has_sglangs_name_in_every_part_of_an_answer(run: Run, typed: str) -> None:
    command = f"estimate llama-3.1-8b --gpu h100-80g --engine sglang --ctx 8k -q --kv-cache-dtype {typed}".split()
    answer, text = run(*command, "--format", "json").json, run(*command).out
    inputs = answer["inputs"]
    names = {answer["kv"]["dtype"], inputs["settings"]["kv_dtype"], inputs["args"]["kv_cache_dtype"]}
    assert names == {"fp8_e4m3"}
    assert answer["flags"]["command"].endswith("--kv-cache-dtype fp8_e4m3")
    assert re.findall(r"\bfp8\w*", text) == ["fp8_e4m3", "fp8_e4m3"]  # the heading of the cache, and the command


def test_only_a_cache_dtype_is_renamed() -> None:
    assert flag_text("sglang", "kv_cache_dtype", "fp8") == "--kv-cache-dtype fp8_e4m3"
    assert flag_text("sglang", "quantization", "fp8") == "--quantization fp8"  # as its own server_args.py names it


def test_blocks_of_a_prefill_are_said_beside_those_that_a_request_keeps() -> None:
    """16,384 tokens are 64 pages of 256; windows of 128 behind a chunk of 8,192 lie in 34 pages of a tenth as many."""
    answer = sglang_plan("deepseek-v4-flash", "h200", tensor_parallel_size=8, max_model_len=16384)
    assert "takes 340 blocks while its prompt is computed (windows keep a chunk), 64 while it decodes" in " ".join(
        answer.notes
    )
