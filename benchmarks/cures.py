"""Ask a server's own code whether every cure that `kvplan why` prints with a figure starts, and with what pool.

    python benchmarks/cures.py write SERVER MODELS CASES.jsonl [--failures FILE] [--every N]
    python benchmarks/cures.py compare ANSWERS.jsonl MODELS [--facts FILE --each N]

`write` composes one log of each cause that a memory flag can cure for every model of the folder MODELS
(MODEL/config.json), reads it as a user's, and writes each cure that a plan was made of as a question: the server's
arguments and the bytes that the plan leaves for the KV cache. FILE adds the texts of public failures. Another program
answers, with the server's own code; `compare` counts the cures that are equal, different, or could not be asked, and
why. Facts keep every Nth answer for the tests.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.diagnoses import lines_of
from kvplan.asked.form import Form
from kvplan.core.errors import KvplanError
from kvplan.core.units import GIB
from kvplan.hardware.gpu import gpu
from kvplan.measure.diagnosis import Diagnosis
from kvplan.measure.why import PREEMPTION, diagnose
from kvplan.models.hf_config import load_spec
from kvplan.models.spec import ModelSpec, RecurrentState
from kvplan.planning.case import Cure
from kvplan.planning.cures import estimated_context
from kvplan.planning.plan import Plan, Request, plan, serve_command
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from tests import oracles

RELEASES = {"vllm": "vllm@0.33", "sglang": "sglang@0.5.23"}
CARDS = ("H100", "H100", "A100", "L40S", "RTX4090", "H200", "A10G", "RTX5090", "B200")
RANKS = (1, 2, 4, 8)
KEPT = "cures"  # the key of a question under which it keeps what asked it


# --- one log of each cause --------------------------------------------------------------------------------------------


def start_lines(server: str, model: str, args: dict[str, Any]) -> list[str]:
    """What a server says of itself at its start."""
    if server == "vllm":
        arguments = {"model_tag": model, "model": model, **args}
        return [
            "INFO 11-02 09:14:02 [utils.py:299]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.33.0",
            f"INFO 11-02 09:14:02 [utils.py:235] non-default args: {arguments}",
        ]
    arguments = ", ".join(f"{name}={value!r}" for name, value in {"model_path": model, **args}.items())
    return [f"[2026-11-02 09:14:02] server_args=ServerArgs({arguments})"]


def torch_line(tried: float, free: float, total: float) -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried:.2f} GiB. GPU 0 has a total capacity of "
        f"{total:.2f} GiB of which {free:.2f} GiB is free."
    )


def vllm_failures(the_plan: Plan, draw: random.Random) -> Iterator[tuple[str, list[str]]]:
    """(cause, lines) of every cause whose cures a plan can be made of."""
    for cause, text in (*short_memory(the_plan, draw), *refused_settings(the_plan, draw)):
        yield cause, text.splitlines()
    total, tried, free = the_plan.request.gpu.total_memory / GIB, draw.uniform(0.3, 3), draw.uniform(0.02, 0.25)
    frames = {
        "oom_loading_weights": ("base_loader.py", "load_model"),
        "oom_profile_run": ("gpu_model_runner.py", "profile_run"),
        "oom_cuda_graph_capture": ("gpu_model_runner.py", "capture_model"),
        "oom_runtime": ("core.py", "run_busy_loop"),
        "lora_memory": ("model_manager.py", "create_lora_manager"),
    }
    for cause, (file, function) in frames.items():
        frame = f'  File "/usr/lib/vllm/{file}", line 912, in {function}'
        yield cause, ["Traceback (most recent call last):", frame, torch_line(tried, free, total)]
    sampler = "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try"
    yield "oom_sampler_warmup", [torch_line(tried, free, total), sampler]


def short_memory(the_plan: Plan, draw: random.Random) -> Iterator[tuple[str, str]]:
    """(cause, text) of caches that vLLM found too small."""
    context, needed, pool = the_plan.settings.max_model_len, the_plan.bytes_per_request, draw.uniform(0.15, 0.9)
    estimate = estimated_context(the_plan.request, int(needed * pool))
    if needed > 0.2 * GIB and estimate:
        text = (
            f"ValueError: To serve at least one request with the model's max seq len ({context}), "
            f"({needed / GIB:.2f} GiB KV cache is needed, which is larger than the available KV cache memory "
            f"({needed * pool / GIB:.2f} GiB). Based on the available memory, the estimated maximum model length is "
            f"{estimate}. Try increasing"
        )
        yield "kv_too_small_for_max_len", text
    yield "no_kv_memory", "ValueError: No available memory for the cache blocks. Try increasing"
    total = the_plan.request.gpu.total_memory / GIB
    text = (
        f"ValueError: Free memory on device cuda:0 ({total * draw.uniform(0.6, 0.9):.2f}/{total:.2f} GiB) on "
        f"startup is less than desired GPU memory utilization (0.92, {total * 0.92:.2f} GiB). Decrease"
    )
    yield "free_memory_below_utilization", text
    if any(isinstance(cache, RecurrentState) for caches in the_plan.request.spec.layers for cache in caches):
        max_seqs = the_plan.settings.max_num_seqs
        blocks = draw.randrange(20, max_seqs)
        text = (
            f"ValueError: max_num_seqs ({max_seqs}) exceeds available Mamba cache blocks ({blocks}). "
            "Each decode sequence requires one Mamba cache block"
        )
        yield "mamba_blocks_below_max_num_seqs", text
    running = 4 * max(1, int(the_plan.concurrency.max))
    text = (
        "(APIServer pid=1) INFO:     Application startup complete.\n"
        "(APIServer pid=1) INFO 11-02 09:00:00 [loggers.py:257] Engine 000: Avg prompt throughput: 2130.4 tokens/s, "
        f"Running: {running} reqs, Waiting: 44 reqs, Preemptions: 312, GPU KV cache usage: 99.3%"
    )
    yield PREEMPTION, text


def refused_settings(the_plan: Plan, draw: random.Random) -> Iterator[tuple[str, str]]:
    """(cause, text) of settings that vLLM refused."""
    item, max_len = draw.choice((4096, 12288, 16384)), the_plan.request.spec.max_model_len
    text = (
        f"ValueError: Chunked MM input disabled but max_tokens_per_mm_item ({item}) is larger than "
        "max_num_batched_tokens (2048). Please increase max_num_batched_tokens."
    )
    yield "encoder_cache_too_small", text
    text = (
        f"ValueError: User-specified max_model_len ({2 * max_len}) is greater than the derived max_model_len "
        f"(max_position_embeddings={max_len}.0 or model_max_length=None in model's config.json)."
    )
    yield "max_len_above_model", text
    text = (
        f"ValueError: Total number of attention heads ({the_plan.request.spec.num_heads}) must be divisible by tensor "
        "parallel size (3)."
    )
    yield "heads_not_divisible_by_tp", text
    yield "too_few_gpus", "ValueError: World size (16) is larger than the number of available GPUs (8) in this node."
    yield "kv_dtype_unsupported", "ValueError: FP8 KV cache is not supported by the Triton attention backend on this"


def sglang_failures(the_plan: Plan, draw: random.Random) -> Iterator[tuple[str, list[str]]]:
    total, tried, free = the_plan.request.gpu.total_memory / GIB, draw.uniform(0.3, 3), draw.uniform(0.02, 0.25)
    yield (
        "sglang_not_enough_memory",
        [
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
            "mem_fraction_static=0.2"
        ],
    )
    yield (
        "sglang_oom_decode_retract",
        [
            "[2026-11-02 09:20:02 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 3, "
            "#new_tokens_gained: 90"
        ],
    )
    yield (
        "sglang_oom_prefill",
        [
            "RuntimeError: Prefill out of memory. Try to lower your batch size. Try to allocate "
            f"{draw.randrange(4000, 9000)} "
            "tokens. Available tokens: 2100"
        ],
    )
    frames = {
        "sglang_oom_prefill": "forward_extend",
        "sglang_cuda_graph_failed": "capture_one_batch_size",
        "oom_loading_weights": "load_model",
        "oom_runtime": "forward_decode",
        "lora_memory": "init_lora_manager",
    }
    for cause, function in frames.items():
        yield (
            cause,
            [
                "Traceback (most recent call last):",
                '  File "/sgl-workspace/sglang/python/sglang/srt/model_executor/model_runner.py", '
                f"line 9, in {function}",
                torch_line(tried, free, total),
            ],
        )
    max_len = the_plan.request.spec.max_model_len
    yield (
        "max_len_above_model",
        [
            f"ValueError: Warning: User-specified context_length ({2 * max_len}) is greater than the "
            "derived context_length "
            f"({max_len}). This may lead to incorrect model outputs"
        ],
    )


FAILURES = {"vllm": vllm_failures, "sglang": sglang_failures}
TP = {"vllm": "tensor_parallel_size", "sglang": "tp_size"}
CONTEXT = {"vllm": "max_model_len", "sglang": "context_length"}


def composed(server: str, folder: Path, draw: random.Random) -> Iterator[tuple[str, str, Diagnosis]]:
    """(cause, the oracle's name of the GPU, the answer) of a log of each cause for a model."""
    spec = load_spec(folder)
    for cause, card, lines in logs_of(server, spec, draw):
        name = oracles.GPUS[card]
        yield cause, card, diagnose(Form({"model": str(folder), "gpu": [name], "engine": RELEASES[server]}), lines)


def logs_of(server: str, spec: ModelSpec, draw: random.Random) -> Iterator[tuple[str, str, list[str]]]:
    the_plan, card = start_of(server, spec, draw.choice(CARDS))
    own = {TP[server]: the_plan.request.args.tensor_parallel_size, CONTEXT[server]: the_plan.settings.max_model_len}
    for cause, lines in FAILURES[server](the_plan, draw):
        args = dict(own)
        if cause == "no_kv_memory":
            args["gpu_memory_utilization"] = 0.4
        if cause == "sglang_not_enough_memory":
            args["mem_fraction_static"] = 0.2
        if cause == "oom_loading_weights":
            args[TP[server]] = 1
        if cause == "heads_not_divisible_by_tp":
            args[TP[server]] = 3
        if cause == "too_few_gpus":
            args[TP[server]] = 16
        if cause == "kv_dtype_unsupported":
            args["kv_cache_dtype"] = "fp8"
        if cause == "encoder_cache_too_small":
            args["max_num_batched_tokens"] = 2048
        if cause == "lora_memory":
            args |= {"enable_lora": True, "max_loras": 8}
        yield cause, card, [*start_lines(server, spec.name, args), *lines]


def start_of(server: str, spec: ModelSpec, card: str) -> tuple[Plan, str]:
    """A plan that starts: the card that was drawn with as many ranks as it takes, else eight of the largest."""
    for name, ranks in [*((card, ranks) for ranks in RANKS), ("H200", 8), ("B200", 8)]:
        for context in (spec.max_model_len, 32768, 4096):
            args = EngineArgs(max_model_len=min(context, spec.max_model_len), tensor_parallel_size=ranks)
            try:
                the_plan = plan(Request(spec, gpu(oracles.GPUS[name]), args, parse_engine(RELEASES[server])))
            except KvplanError:
                continue
            if the_plan.fits:
                return the_plan, name
    raise KvplanError(f"{spec.name}: starts nowhere")


# --- questions --------------------------------------------------------------------------------------------------------


def question(cure: Cure, model: str, card: str) -> dict[str, Any]:
    """A cure as the oracle is asked: arguments, and the bytes that its plan leaves on each rank."""
    the_plan = cure.plan
    assert the_plan is not None
    args = the_plan.request.args
    row: dict[str, Any] = {"model": model, "gpu": card}
    if the_plan.request.release.engine == "sglang":
        words = serve_command(the_plan)
        row["argv"] = argv_of(words[words.index("sglang.launch_server") + 1 :])
    else:
        usual = EngineArgs()
        own = {field.name: getattr(args, field.name) for field in fields(EngineArgs)}
        own = {name: value for name, value in own.items() if value != getattr(usual, name) and name != "usage"}
        row |= {key: own.pop(key) for key in oracles.DIRECT if key in own}
        row |= {"tp": own.pop("tensor_parallel_size", 1), "pp": own.pop("pipeline_parallel_size", 1)}
        row |= {"engine_args": own} if own else {}
    row["available_memory"] = [the_plan.available]
    return row


def argv_of(words: list[str]) -> list[str]:
    """A command's words without the model."""
    place = words.index("--model-path")
    return [*words[:place], *words[place + 2 :]]


def write(server: str, models: Path, out: Path, failures: Path | None, part: slice) -> None:
    draw, questions = random.Random(17), dict[str, dict[str, Any]]()
    printed, without = Counter[str](), Counter[str]()
    folders = [folder for folder in sorted(models.iterdir()) if (folder / "config.json").is_file()][part]
    for folder in folders:
        try:
            answers = list(composed(server, folder, draw))
        except KvplanError as error:
            without[f"no plan: {error}"[:70]] += 1
            continue
        for cause, card, diagnosis in answers:
            add(diagnosis, folder.name, card, cause, questions, printed, without)
    for record in [] if failures is None else map(json.loads, failures.read_text(encoding="utf-8").splitlines()):
        add_record(record, server, models, questions, printed, without)
    out.write_text("".join(f"{json.dumps(row)}\n" for row in questions.values()), encoding="utf-8")
    print(f"{sum(printed.values()):,} cures printed with a plan, {len(questions):,} questions; by cause:")
    for counts in (printed, without):
        for name, count in counts.most_common():
            print(f"{count:6,} {name}")


def add_record(
    record: dict[str, Any], server: str, models: Path, questions: dict[str, dict[str, Any]], printed: Counter[str],
    without: Counter[str],
) -> None:  # fmt: skip
    diagnosis = diagnose(Form({"engine": RELEASES[server]}), lines_of(record))
    if diagnosis.request is None or diagnosis.case.server != server:
        return
    cards = [name for name, own in oracles.GPUS.items() if own == diagnosis.request.gpu.name]
    spec = diagnosis.request.spec.name.replace("/", "__")
    if not cards or not (models / spec / "config.json").is_file():
        planned = sum(cure.plan is not None for cure in diagnosis.cures)
        without["a GPU or a config that the oracle lacks"] += planned
        return
    add(diagnosis, spec, cards[0], f"thread: {record['cause']}", questions, printed, without)


def add(
    diagnosis: Diagnosis, model: str, card: str, cause: str, questions: dict[str, dict[str, Any]],
    printed: Counter[str], without: Counter[str],
) -> None:  # fmt: skip
    read_as = diagnosis.failure.cause or (PREEMPTION if diagnosis.failure.figures.preemptions else "none")
    if read_as not in cause:
        without[f"read as {read_as}: {cause}"] += 1
    if diagnosis.request is None:
        without[f"no plan: {diagnosis.differs}"[:90]] += 1
    for cure in diagnosis.cures:
        if cure.plan is None:
            continue
        printed[cause] += 1
        row = question(cure, model, card)
        key = json.dumps({name: value for name, value in row.items() if name != "available_memory"}, sort_keys=True)
        known = questions.setdefault(key, row | {KEPT: [], "available_memory": []})
        budget = row["available_memory"][0]
        if budget not in known["available_memory"]:
            known["available_memory"].append(budget)
        known[KEPT].append([cause, " ".join(cure.flags), budget])


# --- answers ----------------------------------------------------------------------------------------------------------


def differences(row: dict[str, Any], models: Path) -> tuple[str, list[str]]:
    """The outcome of a question, and why."""
    if "argv" in row["inputs"]:
        return oracles.compare_sglang(row, lambda name: oracles.spec_in(models / name))
    return oracles.compare_case(row, models)


def compare(answers: Path, models: Path, facts: Path | None, stride: int) -> int:
    counts, reasons, lines_kept = Counter[str](), Counter[str](), list[str]()
    for number, row in enumerate(oracles.read_lines(answers)):
        questions = row["inputs"].pop(KEPT)
        outcome, why = not_asked(row) or differences(row, models)
        counts[outcome] += len(questions)
        refused = [result for result in row.get("results", ()) if result.get("error")]
        if refused and outcome == oracles.EQUAL:
            outcome, why = "refused by the server", [refused[0]["error"][:150]]
            counts[oracles.EQUAL] -= len(questions)
            counts[outcome] += len(questions)
        if outcome != oracles.EQUAL:
            reasons[f"{outcome}: {(why or [''])[0][:150]}"] += len(questions)
            inputs = {name: value for name, value in row["inputs"].items() if name != "available_memory"}
            print(f"{outcome}: {json.dumps(inputs)}: {questions[0][:2]}: {'; '.join(why)[:300]}")
        elif facts is not None and number % stride == 0:
            lines_kept.append(json.dumps(fact_of(row, number, questions)))
    for outcome, count in counts.most_common():
        print(f"{count:6,} {outcome}")
    for reason, count in reasons.most_common():
        print(f"{count:6,} {reason}")
    if facts is not None:
        facts.write_text("".join(f"{line}\n" for line in lines_kept), encoding="utf-8")
    return 1 if counts[oracles.DIFFERENT] or counts["refused by the server"] else 0


def not_asked(row: dict[str, Any]) -> tuple[str, list[str]] | None:
    failed = row.get("failed", "")
    return (oracles.NOT_ASKED, [failed]) if any(text in failed for text in oracles.OUT_OF_REACH) else None


def fact_of(row: dict[str, Any], number: int, questions: list[Any]) -> dict[str, Any]:
    fields_kept = ("available_memory", "num_gpu_blocks", "kv_cache_size_tokens", "max_concurrency", "max_model_len")
    results = [{name: result[name] for name in fields_kept if name in result} for result in row["results"]]
    return {"number": number, "vllm_version": row["vllm_version"], "inputs": row["inputs"], "results": results,
            KEPT: questions}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writer = commands.add_parser("write")
    writer.add_argument("server", choices=sorted(RELEASES))
    writer.add_argument("models", type=Path)
    writer.add_argument("out", type=Path)
    writer.add_argument("--failures", type=Path)
    writer.add_argument("--every", type=int, default=1, help="ask of every Nth model")
    writer.add_argument("--first", type=int, default=0, help="from this one on")
    reader = commands.add_parser("compare")
    reader.add_argument("answers", type=Path)
    reader.add_argument("models", type=Path)
    reader.add_argument("--facts", type=Path)
    reader.add_argument("--each", type=int, default=1)
    args = parser.parse_args()
    if args.command == "write":
        write(args.server, args.models, args.out, args.failures, slice(args.first, None, args.every))
        return 0
    return compare(args.answers, args.models, args.facts, args.each)


if __name__ == "__main__":
    sys.exit(main())
