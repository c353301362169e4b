"""`kvplan serve`: an OpenAI-compatible server on the bundled engine, or on a simulated one that computes nothing."""

import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvplan.asked.form import contexts_of, flag_of, given, refuse_missing
from kvplan.asked.question import MODEL_CURE, Source, resolve
from kvplan.cli import output
from kvplan.cli.engine_options import has_weights, modules_of, offloading, slots_of, speculative_of
from kvplan.cli.options import form_of, inputs_of, refuse_given
from kvplan.cli.serve_options import ServeOptions
from kvplan.cli.typed import in_options, option_words
from kvplan.core.errors import EnvironmentProblem, KvplanError, SettingError, UsageError
from kvplan.core.files import printable
from kvplan.core.git import release
from kvplan.core.units import format_gib, parse_count, parse_duration, parse_ratio, parse_tokens
from kvplan.models import catalog
from kvplan.servers.base import abilities_of, face_of, server_of, terms_of
from kvplan.servers.words.argument_values import read_argument

if TYPE_CHECKING:
    import socket

    from engine import Engine, EngineConfig
    from kvplan.models.spec import ModelSpec
    from kvplan.serve.app import ServedModel
    from kvplan.serve.chat import ChatTemplate
    from kvplan.serve.faults import Faults
    from kvplan.serve.metrics import ServerMetrics
    from kvplan.serve.start import Start
    from kvplan.servers.words.arguments import EngineArgs

LIBRARIES: Final = ("starlette", "uvicorn", "prometheus_client", "jinja2", "tokenizers")
LEAST_QUEUED: Final = 1024
MOST_SPEED: Final = 1e6
OF_TWIN: Final = (
    "speed", "output_tokens", "efficiency", "tier", "replicas", "kv_events_config", "faults", "noise", "startup_time",
    "clock", "link",
)  # fmt: skip
MOST_REPLICAS: Final = 64
MOST_PORT: Final = 65535
OF_ENGINE: Final = ("device", "seed", "kv_offloading_dir", "kv_offloading_disk_size")
# Engine argument -> field of the engine's own configuration.
ALIKE: Final = """
    max_num_seqs max_num_batched_tokens gpu_memory_utilization dtype kv_cache_dtype block_size enable_prefix_caching
    async_scheduling enforce_eager tensor_parallel_size pipeline_parallel_size pp_layer_partition max_lora_rank
    fully_sharded_loras kv_offloading_size
"""
SETTINGS: Final[Mapping[str, str]] = {
    **{name: name for name in ALIKE.split()}, "num_gpu_blocks_override": "num_blocks",
}  # fmt: skip
HOST, PORT = "127.0.0.1", "8000"


def serve(options: ServeOptions) -> int:
    """Serve until a signal, and return its exit code."""
    require_libraries()
    refuse_model_as_gpu(options)
    refuse_missing(("MODEL", form_of(options).names_model, MODEL_CURE))
    if options.gpu is None:
        refuse_given(options, OF_TWIN, "needs --simulate", "name a GPU with --simulate")
        with output.showing_warnings():
            refuse_others(options)
            require_torch()
            if rank_of(options):
                return follow_rank_0(options)
            with front_of(options) as front:
                return answer(front, [of_engine(options)])
    refuse_given(options, OF_ENGINE, "cannot be used with --simulate", "remove it")
    options, num_ranks = without_ranks(options)
    replicas = num_ranks if options.replicas is None else parse_count(options.replicas, "--replicas", MOST_REPLICAS)
    with front_of(options, replicas) as front:
        starts = simulated(options, replicas, are_ranks=num_ranks > 1)
        time.sleep(0.0 if options.startup_time is None else parse_duration(options.startup_time, "--startup-time"))
        return answer(front, starts)


def refuse_model_as_gpu(options: ServeOptions) -> None:
    """Refuse `--simulate MODEL --gpu GPU`: the option takes the GPU."""
    named = next((name for name in options.gpu or () if catalog.find(name) is not None), None)
    if options.model is not None or named is None:
        return
    others = " ".join(f"--simulate {name}" for name in options.gpu or () if name != named) or "--simulate h100-80g"
    raise UsageError("--simulate", f"takes a GPU, and {named} is a model", f"run `kvplan serve {named} {others}`")


def without_ranks(options: ServeOptions) -> tuple[ServeOptions, int]:
    """Options of one data-parallel rank, and the number of ranks: each is a server with a pool of its own."""
    text = options.data_parallel_size
    num_ranks = 1 if text is None else parse_count(str(text), "--data-parallel-size", MOST_REPLICAS)
    if num_ranks > 1 and options.enable_expert_parallel:
        problem = "ranks that share experts are not simulated"
        raise UsageError("--data-parallel-size", problem, "remove --enable-expert-parallel")
    if num_ranks > 1 and options.replicas is not None:
        raise UsageError("--replicas", "cannot be used with --data-parallel-size", "use one of them")
    alone: dict[str, Any] = {"data_parallel_size": None}
    return replace(options, **alone), num_ranks


def require_libraries() -> None:
    from importlib.util import find_spec

    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise EnvironmentProblem(
            ", ".join(missing), "not installed", "run `pip install '.[serve]'` in kvplan's sources"
        )


def simulated(options: ServeOptions, replicas: int = 1, *, are_ranks: bool = False) -> "list[Start]":
    """Starts of simulated servers for a plan; are_ranks: they are data-parallel ranks of one."""
    from engine.directory import read_eos_token_ids
    from kvplan.planning.plan import plan
    from kvplan.serve.text import tokenizer_of
    from kvplan.servers.bundled.log_wordings import simulated_line
    from kvplan.simulate.drafts import stated_drafts
    from kvplan.simulate.question import refuse_beside_drafts, shares_of, tiers_of
    from kvplan.simulate.setup import check
    from kvplan.simulate.steptime import step_time

    inputs = inputs_of(options)
    request = inputs.only("serve", "name one GPU and one --ctx")
    output.say(inputs, quiet=options.quiet)
    the_plan = plan(request)
    specs = tiers_of(options.tier or ())
    check(the_plan, specs, drafts=face_of(request.release.engine) is None, hands_over=True)
    drafts = stated_drafts(the_plan, shares_of(options.efficiency))
    refuse_beside_drafts({"--tier": bool(specs and drafts is not None)})
    engine = the_plan.request.release.engine
    if face_of(engine) is not None:
        beside = ("tier", "speculative_config", "kv_events_config", "lora_modules", "link")
        refuse_given(options, beside, f"is not simulated with {terms_of(engine).title}'s scheduler", "remove it")
    spec = the_plan.request.spec
    directory = None if options.tokenizer is None else Path(options.tokenizer)
    count = None if options.output_tokens is None else parse_tokens(options.output_tokens, "--output-tokens")
    modules = modules_of(options.lora_modules, the_plan.request.args.max_loras, names_of(options))
    there = {name: path for name, path in modules.items() if Path(path).exists()}  # others are names alone
    check_adapters(there, spec, the_plan.request.args.max_lora_rank)
    settings: dict[str, Any] = {
        "eos_token_ids": frozenset() if directory is None else read_eos_token_ids(directory),
        "speed": speed_of(options.speed),
        "output_tokens": count or 128,
        "drafts": drafts,
        "noise": 0.0 if options.noise is None else parse_ratio(options.noise, "--noise"),
        "warn": lambda line: output.tell("warning", f"serve: {line}"),
    }
    times = step_time(the_plan, shares_of(options.efficiency), options.calibration)
    tokenizer = tokenizer_of(directory, spec.vocab_size)
    gpu = the_plan.request.gpu
    opening = simulated_line(the_plan.request.release.label, gpu.device_name, gpu.total_memory)
    log = [opening, *server_of(engine).outputs().logs.lines(the_plan)]
    vector_size = spec.hidden_size if pools(the_plan.request.args) else None
    common = (log, vector_size, modules, the_plan, times, tokenizer)
    return list(twins(options, replicas, specs, settings, common, are_ranks=are_ranks))


def twins(
    options: ServeOptions, replicas: int, specs: Any, settings: dict[str, Any], common: tuple[Any, ...], *,
    are_ranks: bool,
) -> "Iterator[Start]":  # fmt: skip
    """Starts of the servers in this process, each with a clock, a pool and ports of its own."""
    from kvplan.cli.fleet import parse_link
    from kvplan.serve.kv_events import Publisher, events_config, require_events
    from kvplan.serve.start import Start, cache_config
    from kvplan.serve.transfer import Transfer, transfer_config
    from kvplan.serve.twin import Twin, VirtualClock, WallClock, unix_time
    from kvplan.serve.worker import Hooks
    from kvplan.simulate.setup import groups, timed_tiers

    log, vector_size, modules, the_plan, times, tokenizer = common
    spec, link = the_plan.request.spec, None if options.link is None else parse_link(options.link)
    pairs = [transfer_config(the_plan, link, number, is_rank=are_ranks) for number in range(replicas)]
    if pairs[0] is not None:
        refuse_given(options, ("tier", "speculative_config"), "cannot be used with --kv-transfer-config", "remove it")
        if vector_size is not None or settings["drafts"] is not None:
            what = "a pooling model hands nothing over" if vector_size is not None else "drafts are not handed over"
            raise UsageError("--kv-transfer-config", what, "remove it")
    events = events_config(options.kv_events_config)
    if events is not None:
        require_events()
    for number, pair in enumerate(pairs):
        clock = VirtualClock() if options.clock == "virtual" else WallClock()
        own, rank = dict(modules), number if are_ranks else 0
        publisher = None if events is None else Publisher(events, number, rank, unix_time(clock))
        tiers = timed_tiers(the_plan, specs) if pair is None else Transfer(the_plan, groups(the_plan), pair)
        settings |= {"clock": clock, "adapters": own, "tiers": tiers, "publisher": publisher}
        backend = Twin(the_plan, times, tokenizer, **settings)
        hooks = Hooks(backend.delay, close=backend.close, now=clock.now, is_virtual=clock.is_virtual)
        if isinstance(tiers, Transfer):
            hooks = replace(hooks, attach=tiers.attach_to, transfer=tiers.take_answer)
        facts = (cache_config(the_plan), [] if number else log, spec.name, spec.vocab_size, hooks, own)
        release = the_plan.request.release
        yield Start(
            backend, *facts, backend.tiers, tuple(log), vector_size, backend.lag, rank, face_of(release.engine),
            {
                "release": abilities_of(release.engine).prompts_first, "tokenizer": options.tokenizer,
                "architecture": spec.architecture, "model_type": spec.model_type,
            },
        )  # fmt: skip


def pools(args: "EngineArgs") -> bool:
    """True if the server embeds prompts; one that classifies them is refused."""
    if args.convert == "classify":
        raise UsageError("--convert classify", "no classifier is simulated", "use embed")
    return args.runner == "pooling" or args.convert == "embed"


def of_engine(options: ServeOptions) -> "Start":
    """Start of the bundled engine, with a directory's weights or random ones."""
    from kvplan.serve.real import start_of

    modules = adapters_of(options)
    engine, opening = engine_of(options, modules)
    host, pool = engine.runner.host, engine.memory_report().kv_cache
    if host is not None and options.num_gpu_blocks_override is None and not options.quiet:
        output.tell(
            "note",
            f"serve: the KV pool of each rank takes {format_gib(pool)}, and {format_gib(host.free)} were free on this "
            "host; a smaller --max-num-seqs or --num-gpu-blocks-override takes less",
        )
    return replace(start_of(engine, opening), adapters=modules)


def follow_rank_0(options: ServeOptions) -> int:
    """Run one of the other ranks until rank 0 ends."""
    engine, _ = engine_of(options, adapters_of(options))
    from kvplan.serve.ranks import follow
    from kvplan.serve.real import start_logs

    say_log(start_logs(engine)[rank_of(options)])
    follow(engine)
    return 0


def adapters_of(options: ServeOptions) -> dict[str, str]:
    """Directories of the engine's adapters by the names that clients use."""
    return modules_of(options.lora_modules, slots_of(options.enable_lora, options.max_loras), names_of(options))


def engine_of(options: ServeOptions, modules: Mapping[str, str]) -> "tuple[Engine, str]":
    """The running engine with its adapters and its tokenizer, and the line of the log that states its arguments."""
    import torch

    from engine import Engine
    from kvplan.serve.real import arguments_of
    from kvplan.serve.text import stand_in, tokenizer_of
    from kvplan.servers.bundled.log_wordings import arguments_line, prefix

    directory, spec = model_of(options)
    (context,) = contexts_of(form_of(options))
    if context == "auto":
        raise UsageError("--max-model-len auto", "is for --simulate", "state the tokens")
    config = config_of(options, context, is_dummy=directory is None)
    check_adapters(modules, spec, config.max_lora_rank)
    tokenizer = None if options.tokenizer is None else tokenizer_of(Path(options.tokenizer), spec.vocab_size)
    if directory is None and not options.quiet and not rank_of(options):
        output.tell("note", f"serve: {printable(spec.name, 200)} has random weights; name a directory for its own")
    if config.device == "auto" and not torch.cuda.is_available() and not options.quiet and not rank_of(options):
        output.tell("note", "serve: torch shows no GPU, so the CPU serves; --simulate GPU needs neither")
    source: Any = spec if directory is None else directory
    stated = arguments_of(spec, config, options.model or "", release_number())
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    opening = prefix(rank_of(options), num_ranks) + arguments_line(stated)
    lines = [opening]

    def begin(stage: str) -> None:
        say_log(lines)
        lines.clear()

    try:
        engine = Engine(source, config, begin)
        for name, path in modules.items():
            engine.load_adapter(name, path)
    except SettingError:
        raise  # the command names its settings
    except KvplanError as error:
        if isinstance(error, EnvironmentProblem):  # `kvplan why` reads what the memory was asked for
            begin("")
        raise in_options(error, option_words(ServeOptions, output.command_line())) from error
    engine.tokenizer = tokenizer or engine.tokenizer or stand_in(engine.spec.vocab_size)
    return engine, opening


def require_torch() -> None:
    try:
        import torch  # noqa: F401  to say what is missing before anything else is done
    except ImportError as error:
        raise EnvironmentProblem(
            "serve", "torch is not installed", "run `pip install '.[engine]'` in kvplan's sources, or use --simulate"
        ) from error


def model_of(options: ServeOptions) -> "tuple[Path | None, ModelSpec]":
    """(directory with the model's weights, if it is one; the model)."""
    from engine.directory import read_spec

    assert options.model is not None
    if has_weights(Path(options.model)):
        return Path(options.model), read_spec(Path(options.model))
    return None, resolve(options.model, Source(options.revision, options.offline)).spec


def check_adapters(modules: Mapping[str, str], spec: "ModelSpec", max_lora_rank: int) -> None:
    """Refuse adapters that the engine cannot load, before it loads the model; a simulated one refuses the same."""
    from kvplan.serve.adapters import check_adapter

    for text, path in modules.items():
        try:
            check_adapter(Path(path), spec, max_lora_rank)
        except KvplanError as error:
            named = in_options(error, option_words(ServeOptions, output.command_line()))
            raise named.within(f"--lora-modules {printable(text, 60)}") from error


def names_of(options: ServeOptions) -> list[str]:
    """The base model's names for clients."""
    return options.served_model_name or [options.model or ""]


def rank_of(options: ServeOptions) -> int:
    """This process's rank under torchrun; 0 without parallelism."""
    sizes = {name: getattr(options, name) or "1" for name in ("tensor_parallel_size", "pipeline_parallel_size")}
    stated = {name: text for name, text in sizes.items() if text != "1"}
    if not stated:
        return 0
    size = str(math.prod(read_argument(name, text, flag_of(name)) for name, text in stated.items()))
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if world != size or not rank.isdecimal():
        refuse_ranks(options, {name: int(text) for name, text in stated.items()})
        raise UsageError(
            " ".join(f"--{name.replace('_', '-')} {printable(text, 20)}" for name, text in stated.items()),
            f"needs {'as many' if len(stated) == 1 else size} processes ({world or 'no torchrun'} started)",
            f"start with: torchrun --nproc-per-node {size} -m kvplan serve ...",
        )
    return int(rank)


def refuse_ranks(options: ServeOptions, sizes: Mapping[str, Any]) -> None:
    """Refuse a model that the engine does not run on several ranks, before they are asked for."""
    from engine import EngineConfig
    from engine.resolve import check_states

    check_states(model_of(options)[1], EngineConfig(**sizes))


def refuse_others(options: ServeOptions) -> None:
    """Refuse plan options that the bundled engine does not support."""
    engines = {"enable_lora", "max_loras", "speculative_config", *SETTINGS}
    taken = {"model", "gpu", "max_model_len", "revision", "offline", *engines}
    problem = "is not an argument of the bundled engine"
    form_of(options).refuse_except(taken, problem, "remove it, or use --simulate")


def config_of(options: ServeOptions, context: int | None, *, is_dummy: bool) -> "EngineConfig":
    from engine import EngineConfig

    values = given(form_of(options))
    settings = {field: values[name] for name, field in SETTINGS.items() if name in values}
    settings |= offloading(
        values.get("kv_offloading_size", 0), options.kv_offloading_dir, options.kv_offloading_disk_size
    )
    source = Source(options.revision, options.offline)
    return EngineConfig(
        device=options.device or "auto",
        max_model_len=context,
        load_format="dummy" if is_dummy else "auto",
        speculative_config=speculative_of(options.speculative_config, source, is_dummy=is_dummy),
        max_loras=slots_of(options.enable_lora, options.max_loras),
        seed=0 if options.seed in (None, "0") else parse_count(str(options.seed), "--seed", 2**62),
        **settings,
    )


def speed_of(text: str | None) -> float:
    if text is None:
        return 1.0
    speed = float(text) if re.fullmatch(r"[0-9]{1,7}(\.[0-9]{1,6})?", text) else math.nan
    if not 0 < speed <= MOST_SPEED:
        raise UsageError(
            "--speed", f"must be above 0 and at most {MOST_SPEED:,.0f} ({printable(text, 40)!r})", "write 10"
        )
    return speed


@dataclass(frozen=True, slots=True)
class Front:
    """What faces the clients, checked before a model is loaded; the socket is bound and does not listen yet.

    requests, tokens  limits on the queue; None: by default
    """

    listeners: "list[socket.socket]"
    drain_s: int
    api_keys: tuple[str, ...]
    template: "ChatTemplate"
    names: tuple[str, ...]
    requests: int | None
    tokens: int | None
    timeout_s: float | None
    is_strict: bool
    faults: "Faults"


@contextmanager
def front_of(options: ServeOptions, replicas: int = 1) -> Iterator[Front]:
    """Check the options that face the clients, and keep the ports."""
    from kvplan.serve.chat import template_of
    from kvplan.serve.faults import faults_of
    from kvplan.serve.run import bind

    requests, tokens, timeout = options.max_num_queued_reqs, options.max_num_queued_tokens, options.request_timeout
    checked: dict[str, Any] = {
        "drain_s": math.ceil(parse_duration(options.drain_timeout or "30s", "--drain-timeout")),
        "api_keys": keys_of(options),
        "names": served_names(options),
        "requests": None if requests is None else parse_count(requests, "--max-num-queued-reqs"),
        "tokens": None if tokens is None else parse_tokens(tokens, "--max-num-queued-tokens"),
        "timeout_s": None if timeout is None else parse_duration(timeout, "--request-timeout"),
        "faults": faults_of(options.faults),
        "is_strict": options.strict_fields,
        "template": template_of(text_directory(options)),
    }
    port = port_of(options.port or PORT)
    if port + replicas > MOST_PORT + 1:
        raise UsageError(f"--port {port}", f"leaves no room for {replicas} ports in a row", "choose a lower one")
    with ExitStack() as stack:
        ports = [port and port + number for number in range(replicas)]
        listeners = [stack.enter_context(bind(options.host or HOST, own)) for own in ports]
        yield Front(listeners, **checked)


def keys_of(options: ServeOptions) -> tuple[str, ...]:
    """Keys that clients need; none: everyone may ask."""
    keys = tuple(options.api_key or [key for key in [os.environ.get("KVPLAN_API_KEY", "")] if key])
    if any(not key.strip() for key in keys):
        raise UsageError("--api-key", "is empty", "remove it, or set a key")
    return keys


def served_names(options: ServeOptions) -> tuple[str, ...]:
    """The model's names for clients; none: its own."""
    names = tuple(options.served_model_name or ())
    if any(not name.strip() for name in names):
        raise UsageError("--served-model-name", "is empty", "remove it, or set a name")
    return tuple(dict.fromkeys(names))


def answer(front: Front, starts: "list[Start]") -> int:
    """Listen, print the log of the start and the address, and handle requests until a signal."""
    from kvplan.measure.serverlog.log import parse_log
    from kvplan.serve.app import Api
    from kvplan.serve.metrics import ServerMetrics, features_of
    from kvplan.serve.run import begin, serve
    from kvplan.serve.worker import Worker

    apis = []
    for start in starts:
        served = served_of(front, start)
        metrics = faced_metrics(start, served.names[0]) or ServerMetrics(
            served.names[0],
            start.backend.max_model_len,
            start.cache_config,
            *features_of(start.backend.scheduler),
            start.tiers,
            parse_log("\n".join(start.whole_log)),
            start.rank,
            start.fallbacks,
        )
        if start.lag is not None:
            metrics.watch(start.lag)
        apis.append(Api(Worker(start.backend, metrics, start.hooks), served))
        say_log(start.log)
    for listener in front.listeners:
        begin(listener)
    urls = ", ".join(url_of(listener.getsockname()) for listener in front.listeners)

    def ready() -> None:
        output.tell("note", f"serve: {printable(served.names[0], 200)} on {urls}")

    serve(apis, front.listeners, front.drain_s, ready)
    return 0


def faced_metrics(start: "Start", name: str) -> "ServerMetrics | None":
    """The /metrics page of a server with a face."""
    if start.face is None:
        return None
    from kvplan.serve.face_metrics import FaceMetrics

    return FaceMetrics(start.face, name, start.backend.scheduler, start.hooks.now)


def text_directory(options: ServeOptions) -> Path | None:
    """Directory of the tokenizer and its chat template."""
    if options.tokenizer is not None:
        return Path(options.tokenizer)
    model = Path(options.model or "")
    return model if options.gpu is None and has_weights(model) else None


def url_of(address: Any) -> str:
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def port_of(text: str) -> int:
    """The port to listen on; 0: any free port."""
    if text == "0":
        return 0
    try:
        return parse_count(text, "--port", MOST_PORT)
    except UsageError as error:
        raise UsageError("--port", error.problem, f"{error.remedy}, or 0 for any free port") from error


def release_number() -> str:
    """This release of kvplan; "0" if it is not installed."""
    return release() or "0"


def say_log(lines: list[str]) -> None:
    """Write lines of the start-up log on standard error, in one piece: other ranks may write there too."""
    with suppress(OSError, ValueError):  # the stream is closed
        sys.stderr.write("".join(f"{printable(line, 4000)}\n" for line in lines))
        sys.stderr.flush()


def served_of(front: Front, start: "Start") -> "ServedModel":
    """The server's metadata and limits."""
    from kvplan.serve.app import ServedModel
    from kvplan.serve.fields import Door
    from kvplan.serve.generation import Limits
    from kvplan.serve.worker import NO_HOOKS

    usual = max(LEAST_QUEUED, 4 * start.backend.scheduler.config.max_num_seqs)
    return ServedModel(
        names=front.names or (start.model,),
        num_tokens=start.num_tokens,
        version=release_number(),
        limits=Limits(usual if front.requests is None else front.requests, front.tokens),
        template=front.template,
        api_keys=front.api_keys,
        adapters=start.adapters,
        request_timeout_s=front.timeout_s,
        vector_size=start.vector_size,
        face=start.face,
        info=start.info,
        hands_over=start.hooks.transfer is not NO_HOOKS.transfer,
        door=Door(start.lag is not None, front.is_strict, lambda line: say_log([line])),
        faults=front.faults,
    )
