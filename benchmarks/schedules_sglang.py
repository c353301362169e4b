"""Ask SGLang's own scheduler what it runs at each step, and write the steps as facts.

    python -m benchmarks.schedules_sglang ORACLE MODEL            print whether the stored file equals fresh answers
    python -m benchmarks.schedules_sglang ORACLE MODEL --write    store them

ORACLE is a folder with SGLang 0.5.23's own code and a stand-in for each GPU (`venv`, `sglang-src`, `scripts`), MODEL
the folder of any model's config.json. Scheduler, SchedulePolicy, PrefillAdder, ScheduleBatch, the allocators and
UnifiedRadixCache are SGLang's; tokens are made up in place of a model, and parts that have no say (metrics, grammars,
adapters) are `Nothing`.

tests/facts/sglang_schedules.jsonl: the rows without `page_size` and `verified` are kept and their steps compared; those
of `PAGED` and `DRAFTED` are the same requests with larger pages, and with drafts looked up in the text (NGRAM).
tests/simulate/test_prompts_first.py says what a step is.
"""

import argparse
import json
import os
import subprocess
import sys
from array import array
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
SCHEDULES = ROOT / "tests" / "facts" / "sglang_schedules.jsonl"
CONTEXT = 131_072
# Requests of another row, tokens in a page, steps.
PAGED = (
    ("shared", 16, 132), ("shared_tight", 64, 110), ("chunks", 64, 110), ("tight", 16, 110), ("retract", 16, 150),
    ("no_radix", 32, 110), ("no_overlap", 16, 110), ("no_chunking", 64, 110), ("evicting", 32, 110),
    ("evicting_shared_retract", 8, 200), ("no_overlap_retract", 4, 150), ("no_radix_retract", 16, 150),
    ("steady", 64, 90), ("long", 128, 110), ("prefill_cap", 16, 50), ("retract_hard", 8, 150),
)  # fmt: skip
# Of a row, plain or paged: tokens verified in a step, drafts accepted in turn (request i begins at its i-th), steps.
DRAFTED = (
    ("roomy", 4, (0, 3, 1, 2), 110), ("tight", 3, (2, 1, 0), 120), ("retract", 5, (1, 4, 0, 2), 120),
    ("no_overlap_retract", 4, (3, 0, 1), 120), ("shared_tight", 4, (1, 3), 100),
    ("no_radix_retract", 2, (1, 0, 1), 120), ("steady", 4, (3, 3, 2), 60), ("tight_16", 4, (2, 0, 3), 110),
    ("retract_16", 4, (0, 2, 1, 3), 120),
    ("no_overlap_16", 6, (5, 1, 0), 100), ("retract_hard_8", 3, (2, 0, 1), 120),
)  # fmt: skip


def requests_of(row: dict[str, Any], number: int) -> list[tuple[str, "array[int]", int]]:
    """Name, prompt and most new tokens of each request that arrives before a step."""
    arriving = []
    for name, (arrival, prompt_len, max_tokens, shared, prefix) in enumerate(row["requests"]):
        if arrival == number:
            own = range(10**8 * (name + 1), 10**8 * (name + 1) + prompt_len - shared)
            common = range(10**6 * (prefix + 1), 10**6 * (prefix + 1) + shared)
            arriving.append((str(name), array("q", [*common, *own]), max_tokens))
    return arriving


# --- in the oracle's Python -------------------------------------------------------------------------------------------


class Nothing:
    """A part that has no say: false, empty, and what it is asked is the same."""

    def __bool__(self) -> bool:
        return False

    def __call__(self, *args: object, **kwargs: object) -> "Nothing":
        return self

    def __getattr__(self, name: str) -> "Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class Sampling(Nothing):
    penalizer_orchestrator = SimpleNamespace(is_required=False)


class Model(Nothing):
    vocab_size, is_encoder_decoder, is_multimodal = 10**12, False, False
    self_opened_think_start_ids = None


class Beams(Nothing):
    def pending_member_rows(self, batch: Any) -> int:
        return 0

    def commit_decode(self, batch: Any) -> set[int]:
        return set()


def write_rows(rows: Any, table: Any, starts: Any, ends: Any, slots: Any, num: int) -> None:
    """What SGLang's kernel does: the new slots of each request follow each other."""
    first = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[first : first + end - start]
        first += end - start


def silence() -> None:
    """Replace what needs a GPU or a model: sampling, a kernel that writes indices, statistics."""
    from sglang.srt.managers import schedule_batch, scheduler  # type: ignore[import-not-found]
    from sglang.srt.mem_cache import allocation  # type: ignore[import-not-found]

    allocation.support_triton = lambda backend: False
    allocation.assign_req_to_token_pool_func, allocation.get_last_loc = write_rows, allocation.get_last_loc_torch
    schedule_batch.SamplingBatchInfo = SimpleNamespace(from_schedule_batch=lambda *args: Sampling())
    scheduler.PrefillStats = SimpleNamespace(from_adder=lambda *args, **kwargs: None)


def publish(row: dict[str, Any], model: Path) -> None:
    """Set the arguments that the scheduler's parts read."""
    from sglang.srt.runtime_context import SpawnRanks, get_parallel  # type: ignore[import-not-found]
    from sglang.srt.runtime_context import publish as set_arguments
    from sglang.srt.server_args import prepare_server_args  # type: ignore[import-not-found]

    flags = {
        "model-path": model, "page-size": row.get("page_size", 1), "chunked-prefill-size": row["chunk"] or -1,
        "max-prefill-tokens": row["max_prefill_tokens"], "schedule-conservativeness": row["conservativeness"],
        "max-running-requests": row["max_running"],
    }  # fmt: skip
    words = ["--skip-tokenizer-init", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]
    words += [] if row["overlap"] else ["--disable-overlap-schedule"]
    words += [] if row["radix"] else ["--disable-radix-cache"]
    if "verified" in row:
        words += ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(row["verified"])]
        words += ["--speculative-ngram-max-bfs-breadth", "1"] if "page_size" in row else []  # else 10
    args = prepare_server_args(words)
    args.resolve_once()
    set_arguments(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    get_parallel().override_permanently(pp_max_micro_batch_size=row["max_running"])


def memory(row: dict[str, Any]) -> tuple[Any, Any, Any]:
    """SGLang's rows of requests, allocator and prefix cache, on the CPU."""
    import torch
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # type: ignore[import-not-found]
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator  # type: ignore[import-not-found]
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # type: ignore[import-not-found]
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # type: ignore[import-not-found]
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # type: ignore[import-not-found]
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # type: ignore[import-not-found]

    page_size = row.get("page_size", 1)
    rows = ReqToTokenPool(row["max_running"], row["num_tokens"] + 4096, "cpu", enable_memory_saver=False)
    common = {"dtype": torch.bfloat16, "device": "cpu", "kvcache": Nothing(), "need_sort": False}
    if page_size == 1:
        pool = TokenToKVPoolAllocator(row["num_tokens"], **common)
    else:
        pool = PagedTokenToKVPoolAllocator(row["num_tokens"], page_size, **common)
        pool.use_triton_kernels = False
    params = CacheInitParams(not row["radix"], rows, pool, page_size, tree_components=(ComponentType.FULL,))
    return rows, pool, UnifiedRadixCache(params)


def scheduler_of(row: dict[str, Any]) -> Any:
    """SGLang's Scheduler with only what decides the order; its `results` takes in a batch's tokens."""
    from sglang.srt.managers import scheduler as module
    from sglang.srt.managers.schedule_policy import SchedulePolicy  # type: ignore[import-not-found]
    from sglang.srt.managers.scheduler_components.batch_result_processor import (  # type: ignore[import-not-found]
        SchedulerBatchResultProcessor as Results,
    )
    from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import (  # type: ignore[import-not-found]
        NewTokenRatioTracker,
    )
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # type: ignore[import-not-found]

    class Bare(module.Scheduler, Nothing):  # type: ignore[misc]
        def __init__(self) -> None: ...

    rows, pool, tree = memory(row)
    reporter = SimpleNamespace(
        num_retracted_reqs=0, enable_metrics=False, num_generated_tokens=0, forward_ct_decode=0,
        report_decode_stats=Nothing(), report_prefill_stats=Nothing(), snapshot_spec_decode_metrics=Nothing(),
        update_spec_metrics=Nothing(),
    )  # fmt: skip
    shared = {
        "model_config": Model(), "req_to_token_pool": rows, "token_to_kv_pool_allocator": pool, "tree_cache": tree,
        "beam_coordinator": Beams(), "metrics_reporter": reporter, "enable_overlap": row["overlap"],
        "hisparse_coordinator": None, "decode_offload_manager": None, "draft_worker": None, "is_generation": True,
        "disaggregation_mode": module.DisaggregationMode.NULL,
    }  # fmt: skip
    own = {
        "page_size": row.get("page_size", 1), "max_total_num_tokens": row["num_tokens"], "kv_shard_widening": 1,
        "max_req_len": min(CONTEXT, row["num_tokens"]) - 1, "max_running_requests": row["max_running"],
        "max_prefill_tokens": row["max_prefill_tokens"], "chunked_prefill_size": row["chunk"],
        "enable_skip_finishing_decode": row["overlap"], "result_queue": deque(), "waiting_queue": [],
        "running_batch": module.ScheduleBatch(reqs=[], batch_is_full=False), "policy": SchedulePolicy(
            "fcfs", tree, False, False, False
        ),
        "new_token_ratio_tracker": NewTokenRatioTracker.from_config(),
        "spec_algorithm": SpeculativeAlgorithm.NGRAM if "verified" in row else SpeculativeAlgorithm.NONE,
        "ngram_embedding_manager": SimpleNamespace(prepare_for_forward=lambda batch, **_: batch),
        "dp_attn_adapter": SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda batch, **_: batch, maybe_convert_decode_to_extend=lambda batch: batch
        ),
        "tp_worker": SimpleNamespace(model_runner=SimpleNamespace(attn_backend=object(), prefill_aware_swa=False)),
    }  # fmt: skip
    unset = ("chunked_req", "last_batch", "dllm_config", "prefill_delayer", "min_free_slots_delayer",
             "truncation_align_size", "dynamic_chunk_sizer", "max_new_tokens_limit", "sliding_window_size",
             "scripted_scheduler_hook")  # fmt: skip
    zero = ("max_prefill_bs", "prefill_decode_interval", "_prefill_decode_interval_remaining", "forward_ct")
    bare = Bare()
    for name, value in {**dict.fromkeys(unset), **dict.fromkeys(zero, 0), **shared, **own}.items():
        setattr(bare, name, value)
    bare.results = Results(**{name: shared.get(name, Nothing()) for name in Results.__dataclass_fields__})
    return bare


class Loop:
    """SGLang's event loop, step by step; with overlap a batch's tokens are taken in after the next one is scheduled."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row, self.scheduler = row, scheduler_of(row)
        self.names: list[int] = []
        self.done: list[int] = []
        self.retracted: list[int] = []
        self.num_checks: dict[str, int] = {}
        self.scheduler._add_request_to_queue = self._requeue

    def _requeue(self, request: Any, is_retracted: bool = False) -> None:
        self.retracted.append(int(request.rid))
        self.scheduler.waiting_queue.append(request)

    def _arrive(self, number: int) -> None:
        from sglang.srt.managers.schedule_batch import Req  # type: ignore[import-not-found]
        from sglang.srt.sampling.sampling_params import SamplingParams  # type: ignore[import-not-found]

        for name, tokens, max_tokens in requests_of(self.row, number):
            request = Req(name, "", tokens, SamplingParams(max_new_tokens=max_tokens, temperature=0))
            request.sampling_params.normalize(None)
            self.scheduler.init_req_max_new_tokens(request)
            self.scheduler.waiting_queue.append(request)

    def _take_in(self, batch: Any) -> None:
        """Append a token to each request: the one after its last; the first is in no prompt."""
        import torch
        from sglang.srt.managers.utils import GenerationBatchResult  # type: ignore[import-not-found]

        before = {request.rid for request in batch.reqs if request.finished()}
        last = [(r.output_ids or [(r.origin_input_ids[0] ^ (1 << 61)) - 1])[-1] for r in batch.reqs]
        tokens = torch.tensor(last, dtype=torch.int64) + 1
        kind = "prefill" if batch.forward_mode.is_extend() else "decode"
        drafts = {}
        if kind == "decode" and (width := self.row.get("verified", 1)) > 1:
            lengths = [1 + self._accepted(request.rid) for request in batch.reqs]
            tokens = (tokens[:, None] + torch.arange(width)).flatten()
            drafts = {"accept_lens": torch.tensor(lengths), "speculative_num_draft_tokens": width}
        result = GenerationBatchResult(logits_output=None, next_token_ids=tokens, can_run_cuda_graph=False, **drafts)
        getattr(self.scheduler.results, f"process_batch_result_{kind}")(batch, result)
        self.done += [int(request.rid) for request in batch.reqs if request.finished() and request.rid not in before]

    def _accepted(self, name: str) -> int:
        turn, pattern = self.num_checks.get(name, 0), self.row["accept"]
        self.num_checks[name] = turn + 1
        return int(pattern[(int(name) + turn) % len(pattern)])

    def step(self, number: int) -> list[Any]:
        scheduler = self.scheduler
        self.done, self.retracted = [], []
        self._arrive(number)
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        batch, scheduler.running_batch = plan.batch_to_run, plan.running_batch
        kind = "-" if batch is None else "p" if batch.forward_mode.is_extend() else "d"
        names = [] if batch is None else [int(request.rid) for request in batch.reqs]
        lengths, starts = (list(batch.extend_lens), list(batch.prefix_lens)) if kind == "p" else ([], [])
        if batch is not None:
            scheduler.result_queue.append((batch.copy(), None))
        if scheduler.last_batch if self.row["overlap"] else batch:
            self._take_in(scheduler.result_queue.popleft()[0])
        if batch is None and scheduler.last_batch is None:
            scheduler.new_token_ratio_tracker.reset()  # on_idle
        scheduler.last_batch = batch
        same, self.names = kind == "d" and names == self.names, names
        free, evictable = scheduler.token_to_kv_pool_allocator.available_size(), scheduler.tree_cache.evictable_size()
        ratio = round(scheduler.new_token_ratio_tracker.current, 6)
        return [kind, "=" if same else names, lengths, starts, self.done, self.retracted, free, evictable, ratio]


def child(home: Path, model: Path) -> None:
    """Answer each row on standard input with its steps."""
    sys.path[:1] = [str(home / folder) for folder in ("sglang-src", "scripts/sglang", "scripts/common")]
    import oracle_cases  # type: ignore[import-not-found]

    os.environ.update(oracle_cases.ENVIRONMENT)
    import pretend  # type: ignore[import-not-found]

    pretend.load("H100")
    silence()
    for row in map(json.loads, sys.stdin.read().splitlines()):
        publish(row, model)
        loop = Loop(row)
        if "verified" in row:
            from sglang.srt.mem_cache.allocation_sizing import (  # type: ignore[import-not-found]
                get_alloc_reserve_per_decode,
            )

            row["reserve"] = get_alloc_reserve_per_decode()
        print("\n" + json.dumps({**row, "steps": [loop.step(number) for number in range(len(row["steps"]))]}))


# --- here -------------------------------------------------------------------------------------------------------------


def questions() -> list[dict[str, Any]]:
    """The rows of the stored file with pages of one token, and those of `PAGED`, with as many steps as wanted."""
    stored = [json.loads(line) for line in SCHEDULES.read_text(encoding="utf-8").splitlines()]
    plain = {row["name"]: row for row in stored if "page_size" not in row and "verified" not in row}
    paged = []
    for name, page_size, num_steps in PAGED:
        row = plain[name]
        num_tokens = row["num_tokens"] // page_size * page_size
        own = {"name": f"{name}_{page_size}", "page_size": page_size, "num_tokens": num_tokens}
        paged.append({**row, **own, "steps": [None] * num_steps})
    named, drafted = plain | {row["name"]: row for row in paged}, []
    for name, verified, accept, num_steps in DRAFTED:
        own = {"name": f"{name}_drafts", "verified": verified, "accept": accept, "steps": [None] * num_steps}
        drafted.append({**named[name], **own})
    return [*plain.values(), *paged, *drafted]


def answered(home: Path, model: Path) -> str:
    words = [str(home / "venv" / "bin" / "python"), __file__, str(home), str(model), "--child"]
    text = "".join(f"{json.dumps(row)}\n" for row in questions())
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return "".join(f"{json.dumps(row, separators=(',', ':'))}\n" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("oracle", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.oracle, options.model)
        return 0
    if not (options.oracle / "sglang-src").is_dir():
        print(f"skipped: {options.oracle} has no sglang-src")
        return 0
    from benchmarks.start_attention import settle

    return settle(SCHEDULES, answered(options.oracle, options.model), write=options.write)


if __name__ == "__main__":
    sys.exit(main())
