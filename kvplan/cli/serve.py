"""`kvplan serve`: an OpenAI-compatible server over the bundled engine, or over its twin that computes nothing."""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict, cast

from kvplan.cli import output
from kvplan.cli.inputs import MODEL_CURE, read, refuse_missing, say, says_model
from kvplan.cli.options import PlanOptions, flag_of
from kvplan.cli.serve_options import ServeOptions
from kvplan.core.errors import EnvironmentProblem, UsageError
from kvplan.core.files import printable
from kvplan.core.units import GIB, parse_count, parse_duration, parse_tokens
from kvplan.servers.arguments import ARGUMENTS, gib, read_argument
from kvplan.servers.base import terms_of

if TYPE_CHECKING:
    from engine import EngineConfig
    from engine.draft_rules import SpeculativeConfig
    from kvplan.serve.app import Served
    from kvplan.serve.start import Start

LIBRARIES: Final = ("starlette", "uvicorn", "prometheus_client", "jinja2", "tokenizers")
LEAST_QUEUED: Final = 1024
MOST_SPEED: Final = 1e6
OF_TWIN: Final = ("speed", "output_tokens", "efficiency")
TIERS: Final = ("kv_offloading_size", "kv_transfer_config")
OF_ENGINE: Final = ("device", "seed", "speculative_config", "kv_offloading_dir", "kv_offloading_disk_size")
SPECULATIVE: Final = ("method", "num_speculative_tokens", "model", "prompt_lookup_min", "prompt_lookup_max")
# Engine argument -> field of the engine's own configuration.
SETTINGS: Final[Mapping[str, str]] = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "dtype": "dtype",
    "kv_cache_dtype": "kv_cache_dtype",
    "block_size": "block_size",
    "num_gpu_blocks_override": "num_blocks",
    "enable_prefix_caching": "enable_prefix_caching",
    "async_scheduling": "async_scheduling",
    "enforce_eager": "enforce_eager",
    "tensor_parallel_size": "tensor_parallel_size",
    "max_lora_rank": "max_lora_rank",
    "fully_sharded_loras": "fully_sharded_loras",
    "kv_offloading_size": "kv_offloading_size",
}
HOST, PORT = "127.0.0.1", "8000"


def serve(options: ServeOptions) -> int:
    """Serve until told to stop; the exit code is then that of the signal."""
    require_libraries()
    refuse_missing(("MODEL", says_model(options), MODEL_CURE))
    if options.gpu is None:
        for name in OF_TWIN:
            if getattr(options, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')}", "is for --simulate", "name a GPU with --simulate")
        start = of_engine(options)
        return 0 if start is None else answer(options, start)
    for name in OF_ENGINE:
        if getattr(options, name) is not None:
            raise UsageError(flag_of(name), "is for the engine", "leave it out with --simulate")
    return answer(options, simulated(options))


def require_libraries() -> None:
    from importlib.util import find_spec

    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise EnvironmentProblem(
            ", ".join(missing), "not installed", "run `pip install '.[serve]'` in kvplan's sources"
        )


def simulated(options: ServeOptions) -> "Start":
    """The twin of a planned server."""
    from engine.directory import read_eos_token_ids
    from kvplan.cli.simulate import shares_of
    from kvplan.planning.plan import plan
    from kvplan.serve.start import Start, cache_config, twin_log
    from kvplan.serve.text import tokenizer_of
    from kvplan.serve.twin import Twin
    from kvplan.serve.worker import Hooks
    from kvplan.simulate.setup import check
    from kvplan.simulate.steptime import step_time

    inputs = read(options)
    if len(inputs.requests) != 1:
        raise UsageError("serve", f"{len(inputs.requests)} plans requested", "name one GPU and one --ctx")
    say(inputs, quiet=options.quiet)
    the_plan = plan(inputs.requests[0])
    check(the_plan)
    if terms_of(the_plan.request.release.engine).prompts_first is not None:
        raise UsageError("serve", "the twin has vLLM's scheduler", "use --engine vllm, or `kvplan simulate`")
    for name in TIERS:
        if getattr(the_plan.request.args, name):
            raise UsageError(
                flag_of(name), "the twin has no KV cache outside of the GPU", "leave it out, or use `kvplan simulate`"
            )
    spec = the_plan.request.spec
    directory = None if options.tokenizer is None else Path(options.tokenizer)
    count = None if options.output_tokens is None else parse_tokens(options.output_tokens, "--output-tokens")
    modules = modules_of(options, the_plan.request.args.max_loras)
    backend = Twin(
        the_plan,
        step_time(the_plan, shares_of(options.efficiency), options.calibration),
        tokenizer_of(directory, spec.vocab_size),
        eos_token_ids=frozenset() if directory is None else read_eos_token_ids(directory),
        speed=speed_of(options.speed),
        output_tokens=count or 128,
        adapters=modules,
    )
    major, minor = the_plan.request.release.number[:2]
    log = twin_log(the_plan, f"{major}.{minor}.0")
    return Start(backend, cache_config(the_plan), log, spec.name, spec.vocab_size, Hooks(backend.delay), modules)


def of_engine(options: ServeOptions) -> "Start | None":
    """The bundled engine with a directory's weights, or with random ones; None where this rank only followed rank 0."""
    refuse_others(options)
    modules = modules_of(options, slots_of(options))
    rank = rank_of(options)
    try:
        import torch  # noqa: F401 -- whether it is there
    except ImportError as error:
        raise EnvironmentProblem(
            "serve", "torch is not installed", "run `pip install '.[engine]'` in kvplan's sources, or use --simulate"
        ) from error
    from engine import Engine
    from kvplan.cli.inputs import contexts_of
    from kvplan.cli.resolve import Source, resolve
    from kvplan.serve.ranks import follow
    from kvplan.serve.real import start_of
    from kvplan.serve.text import stand_in, tokenizer_of

    assert options.model is not None
    directory = Path(options.model) if has_weights(Path(options.model)) else None
    spec = None if directory else resolve(options.model, Source(options.revision, options.offline)).spec
    (context,) = contexts_of(options, None)
    if context == "auto":
        raise UsageError("--max-model-len auto", "is for --simulate", "state the tokens")
    config = config_of(options, context, is_dummy=directory is None)
    if spec is not None and not options.quiet and not rank:
        output.tell("note", f"serve: {printable(spec.name, 200)} has random weights; name a directory for its own")
    source: Any = spec if directory is None else directory
    engine = Engine(source, config)
    for name, path in modules.items():
        engine.load_adapter(name, path)
    if options.tokenizer is not None:
        engine.tokenizer = tokenizer_of(Path(options.tokenizer), engine.spec.vocab_size)
    elif engine.tokenizer is None:
        engine.tokenizer = stand_in(engine.spec.vocab_size)
    if rank:
        follow(engine)
        return None
    return replace(start_of(engine), adapters=modules)


def slots_of(options: ServeOptions) -> int:
    """Slots for adapters of the bundled engine: --enable-lora alone is one, as vLLM's."""
    count = 0 if options.max_loras is None else read_argument("max_loras", options.max_loras, "--max-loras")
    if options.enable_lora is False and count:
        raise UsageError("--no-enable-lora", "contradicts --max-loras", "leave one out")
    return count or int(options.enable_lora is True)


def modules_of(options: ServeOptions, max_loras: int) -> dict[str, str]:
    """--lora-modules: directories by the names that clients use."""
    modules: dict[str, str] = {}
    for text in options.lora_modules or []:
        where = f"--lora-modules {printable(text, 60)}"
        if not max_loras:
            raise UsageError(where, "there is no slot for adapters", "add --enable-lora, or --max-loras N")
        name, path = module_of(text, where)
        if name in modules or name in (options.served_model_name or [options.model or ""]):
            raise UsageError(where, f"{printable(name, 60)!r} is named twice", "choose another name")
        modules[name] = path
    return modules


def module_of(text: str, where: str) -> tuple[str, str]:
    """(name, path) of NAME=DIR, or of an object of JSON, as vLLM takes them."""
    name, _, path = text.partition("=")
    if text.startswith("{"):
        try:
            values = json.loads(text)
            name, path = values.pop("name"), values.pop("path")
        except (ValueError, KeyError) as error:
            raise UsageError(where, "is no object with name and path", "write NAME=DIR") from error
        if set(values) - {"base_model_name"}:
            raise UsageError(where, f"has {sorted(values)[0]!r}, which is not known", "write NAME=DIR")
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise UsageError(where, "must be NAME=DIR", "write my-adapter=/path/to/it")
    return name, path


def rank_of(options: ServeOptions) -> int:
    """This process's number among those torchrun started; 0 without tensor parallelism."""
    size = options.tensor_parallel_size or "1"
    if size == "1":
        return 0
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if world != size or not rank.isdecimal():
        raise UsageError(
            f"--tensor-parallel-size {printable(size, 20)}",
            f"needs as many processes ({world or 'no torchrun'} started)",
            f"start with: torchrun --nproc-per-node {printable(size, 20)} -m kvplan serve ...",
        )
    return int(rank)


def has_weights(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.safetensors"))


def refuse_others(options: ServeOptions) -> None:
    """Refuse what a plan takes and the bundled engine does not have."""
    plain = PlanOptions()
    taken = {"model", "gpu", "max_model_len", "revision", "offline", "enable_lora", "max_loras", *SETTINGS}
    names = [field.name for field in fields(PlanOptions)]
    for name in dict.fromkeys([*names, *ARGUMENTS]):
        if name not in taken and getattr(options, name) != getattr(plain, name):
            raise UsageError(
                flag_of(name), "is not an argument of the bundled engine", "leave it out, or use --simulate"
            )


def config_of(options: ServeOptions, context: int | None, *, is_dummy: bool) -> "EngineConfig":
    from engine import EngineConfig

    settings = {
        field: read_argument(name, value, flag_of(name)) if isinstance(value, str) else value
        for name, field in SETTINGS.items()
        if (value := getattr(options, name)) is not None
    }
    size = options.kv_offloading_size
    stated = 0 if size is None else read_argument("kv_offloading_size", size, flag_of("kv_offloading_size"))
    settings |= offloading(stated, options)
    return EngineConfig(
        device=options.device or "auto",
        max_model_len=context,
        load_format="dummy" if is_dummy else "auto",
        speculative_config=speculative_of(options, is_dummy=is_dummy),
        max_loras=slots_of(options),
        seed=0 if options.seed in (None, "0") else parse_count(str(options.seed), "--seed", 2**62),
        **settings,
    )


class Speculation(TypedDict, total=False):
    """Keys of --speculative-config that the bundled engine has, by vLLM's names."""

    method: Any
    model: Any  # a directory or a name; then what is known of it
    num_speculative_tokens: Any
    prompt_lookup_min: Any
    prompt_lookup_max: Any


def speculative_of(options: ServeOptions, *, is_dummy: bool) -> "SpeculativeConfig | None":
    """vLLM's JSON of how to guess; a key that the engine has nothing for is refused by name."""
    from engine.draft_rules import SpeculativeConfig

    text, flag = options.speculative_config, "--speculative-config"
    if text is None:
        return None
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        problem = f"is not a JSON object ({printable(text, 60)!r})"
        raise UsageError(flag, problem, """write '{"method": "ngram", "num_speculative_tokens": 4}'""")
    if odd := [name for name in settings if name not in SPECULATIVE]:
        raise UsageError(
            f"{flag}: {printable(odd[0], 40)}",
            f"is not a key that the bundled engine has ({', '.join(SPECULATIVE)})",
            "leave it out",
        )
    stated: Speculation = cast("Speculation", settings)
    stated.setdefault("method", "draft_model" if "model" in stated else "ngram")
    stated.setdefault("num_speculative_tokens", 0)
    model = stated.get("model")
    if isinstance(model, str) and not has_weights(Path(model)):
        from kvplan.cli.resolve import Source, resolve

        if not is_dummy:
            raise UsageError(f"{flag}: model {printable(model, 80)}", "has no weights", "name a directory with weights")
        stated["model"] = resolve(model, Source(options.revision, options.offline)).spec
    return SpeculativeConfig(**stated)


def offloading(size: int, options: ServeOptions) -> dict[str, Any]:
    """Host memory of `size` bytes, 0 for none, and files for KV, in the engine's GiB."""
    directory, disk_size = options.kv_offloading_dir, options.kv_offloading_disk_size
    disk = None if disk_size is None else gib(disk_size, "--kv-offloading-disk-size")
    return {
        "kv_offloading_size": size / GIB if size else None,
        "kv_offloading_dir": directory,
        "kv_offloading_disk_size": None if disk is None else disk / GIB,
    }


def speed_of(text: str | None) -> float:
    if text is None:
        return 1.0
    speed = float(text) if re.fullmatch(r"[0-9]{1,7}(\.[0-9]{1,6})?", text) else math.nan
    if not 0 < speed <= MOST_SPEED:
        raise UsageError(
            "--speed", f"must be above 0 and at most {MOST_SPEED:,.0f} ({printable(text, 40)!r})", "write 10"
        )
    return speed


def answer(options: ServeOptions, start: "Start") -> int:
    """Listen, say so, and answer until a signal ends it."""
    from kvplan.serve.app import Api
    from kvplan.serve.metrics import ServerMetrics
    from kvplan.serve.run import listen, serve
    from kvplan.serve.worker import Worker

    served = served_of(options, start)
    drain_s = math.ceil(parse_duration(options.drain_timeout or "30s", "--drain-timeout"))
    listener = listen(options.host or HOST, port_of(options.port or PORT))
    rules = start.backend.scheduler.config
    metrics = ServerMetrics(
        served.names[0],
        start.backend.max_model_len,
        start.cache_config,
        0 if rules.drafts is None else rules.drafts.num_drafts,
        rules.max_loras,
        start.tiers,
    )
    url = url_of(listener.getsockname())
    with listener:
        with output.standard_output():
            for line in start.log:
                print(line, flush=True)

        def ready() -> None:
            output.tell("note", f"serve: {printable(served.names[0], 200)} on {url}")

        serve(Api(Worker(start.backend, metrics, start.hooks), served), listener, drain_s, ready)
    return 0


def text_directory(options: ServeOptions) -> Path | None:
    """Where the tokenizer and its chat template lie."""
    if options.tokenizer is not None:
        return Path(options.tokenizer)
    model = Path(options.model or "")
    return model if options.gpu is None and has_weights(model) else None


def url_of(address: Any) -> str:
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def port_of(text: str) -> int:
    return 0 if text == "0" else parse_count(text, "--port", 65535)


def served_of(options: ServeOptions, start: "Start") -> "Served":
    """What the server says of itself, and its limits."""
    from importlib.metadata import PackageNotFoundError, version

    from kvplan.serve.app import Served
    from kvplan.serve.chat import template_of
    from kvplan.serve.generation import Limits

    try:
        number = version("kvplan")
    except PackageNotFoundError:
        number = "0"
    keys = tuple(options.api_key or [key for key in [os.environ.get("KVPLAN_API_KEY", "")] if key])
    if "" in keys:
        raise UsageError("--api-key", "is empty", "leave it out, or state a key")
    requests = options.max_num_queued_reqs
    usual = max(LEAST_QUEUED, 4 * start.backend.scheduler.config.max_num_seqs)
    tokens = options.max_num_queued_tokens
    limits = Limits(
        usual if requests is None else parse_count(requests, "--max-num-queued-reqs"),
        None if tokens is None else parse_tokens(tokens, "--max-num-queued-tokens"),
    )
    timeout = options.request_timeout
    return Served(
        names=tuple(options.served_model_name or [start.model]),
        num_tokens=start.num_tokens,
        version=number,
        limits=limits,
        template=template_of(text_directory(options)),
        api_keys=keys,
        adapters=start.adapters,
        request_timeout_s=None if timeout is None else parse_duration(timeout, "--request-timeout"),
    )
