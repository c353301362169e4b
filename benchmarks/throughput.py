"""`python -m benchmarks.throughput`: tokens/s and latency of a mix of requests: paged, contiguous, transformers.

All requests are submitted at once, as in `vllm bench throughput`, so the time to first token includes waiting. Tokens
are random and chosen greedily, and every request runs to its stated length.
"""

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn, assert_never, get_args

import numpy as np
import torch

from engine.config import DTYPES, KV_CACHE_DTYPES, EngineConfig, SamplingParams
from engine.directory import read_spec
from engine.llm import Engine
from engine.model_runner import DTYPES as TORCH_DTYPES
from engine.request import RequestOutput, TokenUpdate
from kvplan.core.errors import EnvironmentProblem, InvalidInputError, KvplanError, UsageError
from kvplan.models import catalog
from kvplan.models.spec import ModelSpec

Backend = Literal["paged", "contiguous", "transformers"]
BACKENDS = get_args(Backend)
SCHEMA = "kvplan/engine-bench@1"
NUM_WARM_UP, WARM_UP_OUTPUT_LEN = 8, 2
ALONE = (8, 600)  # tokens of prompts that warm up in steps of their own
# (temperature, top_p) of rows that warm up in one step: some are drawn, and of one the tail is cut off.
MIXED = ((0.0, 1.0), (1.0, 1.0), (1.0, 0.9))
BUG, INTERRUPTED = 70, 130  # exit codes


# --- what is asked ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt, and how many tokens follow it."""

    prompt: list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Lengths drawn evenly from least to most, both included."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> "LengthRange":
        """ "128" or "16-256"; raises UsageError."""
        least, dash, high = text.partition("-")
        try:
            lengths = cls(int(least), int(high if dash else least))
        except ValueError:
            lengths = cls(0, 0)
        if not 1 <= lengths.least <= lengths.most:
            raise UsageError(f"length: {text!r} is neither a number of tokens nor a range; write 128 or 16-256")
        return lengths

    def draw(self, source: np.random.Generator) -> int:
        return int(source.integers(self.least, self.most + 1))

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


def random_mix(
    num_prompts: int, input_len: LengthRange, output_len: LengthRange, vocab_size: int, seed: int
) -> list[BenchRequest]:
    """Requests whose lengths and tokens follow from the seed alone."""
    source = np.random.default_rng(seed)
    lens = [(input_len.draw(source), output_len.draw(source)) for _ in range(num_prompts)]
    return [BenchRequest(source.integers(0, vocab_size, n).tolist(), m) for n, m in lens]


def warm_up(mix: list[BenchRequest], vocab_size: int) -> list[BenchRequest]:
    """A few requests of the mix's lengths, ending early; their tokens differ, so that no prefix is found later."""
    source = np.random.default_rng(len(mix))
    return [
        BenchRequest(source.integers(0, vocab_size, len(r.prompt)).tolist(), min(r.output_len, WARM_UP_OUTPUT_LEN))
        for r in mix[:NUM_WARM_UP]
    ]


# --- what happened ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """One backend's run of a mix.

    elapsed_s        from the first submission to the last token
    token_times_s    per request, when each of its tokens was there, counted from the first submission
    num_running      per step, requests that held memory during it
    num_blocks       of the engine's pool, the null block included; None: transformers has none
    """

    elapsed_s: float
    token_times_s: list[list[float]]
    num_running: list[int]
    num_preemptions: int = 0
    num_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """A run in numbers; ttft is the time to first token, itl the time between two tokens of a request.

    Prompt and output tokens both count in total_tokens_per_second. itl is None where no request has two tokens.
    """

    elapsed_s: float
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    mean_ttft_ms: float
    p50_ttft_ms: float
    p99_ttft_ms: float
    mean_itl_ms: float | None
    p50_itl_ms: float | None
    p99_itl_ms: float | None
    max_running: int
    mean_running: float
    num_preemptions: int
    num_blocks: int | None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A backend that could not run here, and why."""

    skipped: str


def figures(mix: list[BenchRequest], run: Run) -> Figures:
    num_output = sum(request.output_len for request in mix)
    num_prompt = sum(len(request.prompt) for request in mix)
    ttft = [times[0] * 1000 for times in run.token_times_s]
    itl = [gap * 1000 for times in run.token_times_s for gap in np.diff(times).tolist()]
    return Figures(
        elapsed_s=run.elapsed_s,
        requests_per_second=len(mix) / run.elapsed_s,
        output_tokens_per_second=num_output / run.elapsed_s,
        total_tokens_per_second=(num_prompt + num_output) / run.elapsed_s,
        mean_ttft_ms=float(np.mean(ttft)),
        p50_ttft_ms=float(np.percentile(ttft, 50)),
        p99_ttft_ms=float(np.percentile(ttft, 99)),
        mean_itl_ms=float(np.mean(itl)) if itl else None,
        p50_itl_ms=float(np.percentile(itl, 50)) if itl else None,
        p99_itl_ms=float(np.percentile(itl, 99)) if itl else None,
        max_running=max(run.num_running),
        mean_running=float(np.mean(run.num_running)),
        num_preemptions=run.num_preemptions,
        num_blocks=run.num_blocks,
    )


# --- the engine -------------------------------------------------------------------------------------------------


def run_engine(engine: Engine, mix: list[BenchRequest]) -> Run:
    """Serve the mix in one continuous batch; raises InvalidInputError for a request that cannot be served."""
    times: list[list[float]] = [[] for _ in mix]
    num_running: list[int] = []
    preemptions = engine.stats().num_preemptions
    _check_lengths(engine.max_model_len, mix)
    start = time.perf_counter()
    for request, own in zip(mix, times, strict=True):
        params = SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True)
        engine.add_request(request.prompt, params, on_token=_clock(own, start))
    while engine.has_unfinished:
        ended = engine.step()
        num_running.append(engine.stats().num_requests_running + len(ended))
        _check(ended)
    elapsed = time.perf_counter() - start
    num_blocks = engine.memory_report().num_blocks
    return Run(elapsed, times, num_running, engine.stats().num_preemptions - preemptions, num_blocks)


def run_warm_up(engine: Engine, mix: list[BenchRequest]) -> None:
    """Serve what has every kernel compiled that the mix may launch; clipped to what the engine takes.

    A kernel's tile follows from a step's longest chunk, or from all of its tokens: a short prompt beside long ones
    compiles nothing. So a step of a few tokens and one of some hundred follow alone, for prefill's small tile and the
    middle one of mixtures of experts. A last step has greedy rows beside drawn ones: choosing among some rows, and
    above a floor, is compiled apart from taking the best token of each.
    """
    vocab_size = engine.spec.vocab_size
    run_engine(engine, warm_up(mix, vocab_size))
    num_slots = (engine.memory_report().num_blocks - 1) * engine.config.block_size // len(engine.runner.groups)
    max_len = min(engine.max_model_len, num_slots) - WARM_UP_OUTPUT_LEN
    for length in (max(1, min(length, max_len)) for length in ALONE):
        tokens = np.random.default_rng((len(mix), length)).integers(0, vocab_size, length).tolist()
        run_engine(engine, [BenchRequest(tokens, min(WARM_UP_OUTPUT_LEN, engine.max_model_len - length))])
    mixed = [SamplingParams(temperature=heat, top_p=top_p, max_tokens=1, ignore_eos=True) for heat, top_p in MIXED]
    _check(engine.generate([[0]] * len(mixed), mixed))


def _check_lengths(max_model_len: int, mix: list[BenchRequest]) -> None:
    longest = max(len(request.prompt) + request.output_len for request in mix)
    if longest > max_model_len:
        raise UsageError(f"mix: a request has {longest} tokens, max_model_len is {max_model_len}; raise it")


def _clock(times: list[float], start: float) -> Callable[[TokenUpdate], None]:
    return lambda update: times.append(time.perf_counter() - start)


def _check(ended: list[RequestOutput]) -> None:
    for output in ended:
        if output.error is not None:
            raise InvalidInputError(output.error)


# --- transformers -----------------------------------------------------------------------------------------------


def run_transformers(model: Any, mix: list[BenchRequest], batch_size: int = 1) -> Run:
    """`generate` batch after batch, in order; a batch is padded on the left and runs to its longest output.

    model  a transformers causal LM; what it generates past a request's own length is counted nowhere
    """
    model.generation_config.eos_token_id = None  # every request runs to its stated length
    times: list[list[float]] = []
    num_running: list[int] = []
    start = time.perf_counter()
    for first in range(0, len(mix), batch_size):
        batch = mix[first : first + batch_size]
        times_of_batch = _generate(model, batch, start)
        times += [times_of_batch[: request.output_len] for request in batch]
        num_running += [len(batch)] * len(times_of_batch)
    return Run(time.perf_counter() - start, times, num_running)


def _generate(model: Any, batch: list[BenchRequest], start: float) -> list[float]:
    """When each token of a static batch was there."""
    input_len = max(len(request.prompt) for request in batch)
    output_len = max(request.output_len for request in batch)
    padded = [[0] * (input_len - len(request.prompt)) + request.prompt for request in batch]
    mask = [[0] * (input_len - len(request.prompt)) + [1] * len(request.prompt) for request in batch]
    times: list[float] = []

    def clock(input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """A stopping criterion that stops nothing: generate asks it after every token."""
        if input_ids.device.type == "cuda":
            torch.cuda.synchronize(input_ids.device)
        times.append(time.perf_counter() - start)
        return torch.zeros(len(batch), dtype=torch.bool, device=input_ids.device)

    model.generate(
        input_ids=torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=output_len,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=[clock],
    )
    return times


def load_transformers(model: str, config: EngineConfig, spec: ModelSpec) -> Any:
    """The causal LM of a directory, or one of that shape with random weights."""
    transformers = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    causal_lm = transformers.AutoModelForCausalLM
    dtype = TORCH_DTYPES[spec.dtype if config.dtype == "auto" else config.dtype]
    if config.load_format == "auto":
        loaded = causal_lm.from_pretrained(model, dtype=dtype)
    else:
        loaded = causal_lm.from_config(_transformers_config(transformers, model), dtype=dtype)
    device = "cuda" if config.device == "auto" and torch.cuda.is_available() else config.device.replace("auto", "cpu")
    return loaded.to(device).eval()


def _transformers_config(transformers: Any, model: str) -> Any:
    if Path(model).is_dir():
        return transformers.AutoConfig.from_pretrained(model)
    values = catalog.expand(catalog.facts(model)["config"])
    return transformers.AutoConfig.for_model(**values)


# --- backends ---------------------------------------------------------------------------------------------------


def bench(
    model: str,
    config: EngineConfig,
    mix_of: Callable[[int], list[BenchRequest]],
    backends: Many[Backend],
    batch_size: int,
) -> dict[str, Figures | Skipped]:
    """The same mix through each backend, one after the other; paged and contiguous get pools of one size.

    mix_of  the requests for a vocabulary of this size
    """
    spec = read_spec(Path(model)) if Path(model).is_dir() else catalog.load(model)
    mix = mix_of(spec.vocab_size)
    results: dict[str, Figures | Skipped] = {}
    for backend in backends:
        match backend:
            case "transformers":
                results[backend] = _bench_transformers(model, config, spec, mix, batch_size)
            case "paged" | "contiguous":
                engine = Engine(model if Path(model).is_dir() else spec, replace(config, allocator=backend))
                config = replace(config, num_blocks=engine.memory_report().num_blocks)
                run_warm_up(engine, mix)
                results[backend] = figures(mix, run_engine(engine, mix))
                del engine
            case _:
                assert_never(backend)
        gc.collect()  # the next one gets the memory of this one
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return results


def _bench_transformers(
    model: str, config: EngineConfig, spec: ModelSpec, mix: list[BenchRequest], batch_size: int
) -> Figures | Skipped:
    if find_spec("transformers") is None:
        return Skipped("transformers is not installed; pip install transformers")
    loaded = load_transformers(model, config, spec)
    run_transformers(loaded, warm_up(mix, spec.vocab_size), batch_size)
    return figures(mix, run_transformers(loaded, mix, batch_size))


# --- what is said -----------------------------------------------------------------------------------------------

ROWS = (
    ("elapsed_s", "elapsed", "s"),
    ("requests_per_second", "requests", "/s"),
    ("output_tokens_per_second", "output tokens", "/s"),
    ("total_tokens_per_second", "prompt + output tokens", "/s"),
    ("mean_ttft_ms", "time to first token, mean", "ms"),
    ("p50_ttft_ms", "p50", "ms"),
    ("p99_ttft_ms", "p99", "ms"),
    ("mean_itl_ms", "inter-token latency, mean", "ms"),
    ("p50_itl_ms", "p50", "ms"),
    ("p99_itl_ms", "p99", "ms"),
    ("max_running", "requests running, most", ""),
    ("mean_running", "mean over steps", ""),
    ("num_preemptions", "preemptions", ""),
    ("num_blocks", "blocks of the KV pool", ""),
)


def table(results: dict[str, Figures | Skipped]) -> str:
    """One column per backend; a line for each that was skipped."""
    ran = {name: result for name, result in results.items() if isinstance(result, Figures)}
    lines = [f"{'':<31}" + "".join(f"{name:>14}" for name in ran)] if ran else []
    for key, label, unit in ROWS if ran else ():
        indent = "  " if label in ("p50", "p99") else ""
        lines.append(f"{indent + label:<27}{unit:<4}" + "".join(_cell(getattr(result, key)) for result in ran.values()))
    lines += [f"{name}: skipped, {r.skipped}" for name, r in results.items() if isinstance(r, Skipped)]
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    if value is None:
        return f"{'-':>14}"
    return f"{value:>14,}" if isinstance(value, int) else f"{value:>14,.2f}"


def document(
    options: argparse.Namespace, config: EngineConfig, results: dict[str, Figures | Skipped]
) -> dict[str, Any]:
    """Everything that was asked, where it ran, and what came out."""
    return {
        "schema": SCHEMA,
        "model": options.model,
        "mix": {
            "num_prompts": options.num_prompts,
            "input_len": str(options.input_len),
            "output_len": str(options.output_len),
            "seed": options.seed,
        },
        "hf_max_batch_size": options.hf_max_batch_size,
        "config": asdict(config),
        "environment": {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
            "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(),
        },
        "backends": {name: asdict(result) for name, result in results.items()},
    }


# --- the command ------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """One that raises instead of exiting, so that every refusal is one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


def parser() -> Parser:
    default = EngineConfig()
    own = Parser(
        "python -m benchmarks.throughput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = own.add_argument
    add("--model", required=True, help="a Hugging Face directory, or a name of models.yaml (random weights)")
    add("--backends", default=",".join(BACKENDS), help="which to run, in this order (%(default)s)")
    add("--num-prompts", type=int, default=32, help="requests, all submitted at once (%(default)s)")
    add("--input-len", default="16-256", help="tokens of a prompt: one length or an even range (%(default)s)")
    add("--output-len", default="16-128", help="tokens to generate, likewise (%(default)s)")
    add("--seed", type=int, default=0, help="of lengths, tokens and random weights (%(default)s)")
    add("--hf-max-batch-size", type=int, default=1, help="requests per static batch of transformers (%(default)s)")
    add("--device", default=default.device, help="auto, cpu, cuda or cuda:N (%(default)s)")
    add("--dtype", default=default.dtype, choices=DTYPES, help="of weights and activations (%(default)s)")
    add("--kv-cache-dtype", default=default.kv_cache_dtype, choices=KV_CACHE_DTYPES, help="(%(default)s)")
    add("--load-format", default=default.load_format, choices=("auto", "dummy"), help="dummy: random weights")
    add("--max-num-seqs", type=int, help="requests at once, at most (256, or as many as a step has tokens)")
    add("--max-num-batched-tokens", type=int, default=default.max_num_batched_tokens, help="per step (%(default)s)")
    add("--max-model-len", type=int, help="tokens of a request, at most; what `contiguous` reserves (the model's)")
    add("--block-size", type=int, default=default.block_size, help="tokens (%(default)s)")
    add("--num-blocks", type=int, help="of the KV pool; otherwise what --gpu-memory-utilization leaves")
    add("--gpu-memory-utilization", type=float, default=default.gpu_memory_utilization, help="(%(default)s)")
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add("--output-json", type=Path, metavar="FILE", help="write the figures there too")
    return own


def read_options(argv: Many[str]) -> argparse.Namespace:
    """Parsed options, ranges and lists read; raises UsageError."""
    options = parser().parse_args(argv)
    options.backends = options.backends.split(",")
    unknown = [name for name in options.backends if name not in BACKENDS]
    if unknown:
        raise UsageError(f"--backends: {unknown[0]!r} is not known; choose from {', '.join(BACKENDS)}")
    for name in ("num_prompts", "hf_max_batch_size"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')}: must be at least 1 ({getattr(options, name)})")
    options.input_len = LengthRange.parse(options.input_len)
    options.output_len = LengthRange.parse(options.output_len)
    return options


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """A name of the catalog has no weights: it gets random ones."""
    return EngineConfig(
        device=options.device,
        dtype=options.dtype,
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_dtype=options.kv_cache_dtype,
        enforce_eager=options.enforce_eager,
        load_format=options.load_format if Path(options.model).is_dir() else "dummy",
        seed=options.seed,
    )


def run_command(argv: Many[str]) -> None:
    options = read_options(argv)
    config = engine_config(options)

    def mix_of(vocab_size: int) -> list[BenchRequest]:
        return random_mix(options.num_prompts, options.input_len, options.output_len, vocab_size, options.seed)

    results = bench(options.model, config, mix_of, options.backends, options.hf_max_batch_size)
    print(table(results))
    if options.output_json is not None:
        _write(options.output_json, document(options, config, results))


def _write(path: Path, values: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise EnvironmentProblem(
            f"{path}: cannot be written ({error.strerror}); choose another --output-json"
        ) from error


def main(argv: Many[str] | None = None) -> int:
    """Run the command line and return its exit code; what went wrong is one line on standard error."""
    try:
        run_command(sys.argv[1:] if argv is None else argv)
    except KvplanError as error:
        print(f"benchmarks.throughput: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("KVPLAN_DEBUG") == "1":
            raise
        print(f"benchmarks.throughput: error: a bug: {error!r}; set KVPLAN_DEBUG=1 and report it", file=sys.stderr)
        return BUG
    return 0


if __name__ == "__main__":
    sys.exit(main())
