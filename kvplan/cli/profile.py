"""`kvplan profile`: run an engine on a workload into a run directory, with a live view, and compare at the end."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvplan.asked.question import Source, resolve
from kvplan.cli import output
from kvplan.cli.engine_options import modules_of, slots_of, speculative_of
from kvplan.cli.live import live_view
from kvplan.cli.profile_load import default_dir, requests_of, seed_of
from kvplan.cli.run_options import ProfileOptions
from kvplan.core.errors import EnvironmentProblem, KvplanError, SettingError, UsageError
from kvplan.core.files import path_text, printable
from kvplan.core.units import GIB, parse_count, parse_duration, parse_fraction, parse_size, parse_tokens
from kvplan.measure.run_capacity import baselines as baselines_of
from kvplan.measure.rundir import RunWriter, load_run
from kvplan.models.hf_config import load_spec
from kvplan.models.spec import ModelSpec
from kvplan.report import trace_events
from kvplan.servers.words.argument_values import gib

if TYPE_CHECKING:
    import torch

    from engine import EngineConfig
    from kvplan.hardware.nvml import Device
    from kvplan.measure.profile import Outcome, Workload
    from kvplan.measure.recording import Recording

# Used without a model and GPU: small enough for any laptop, but a real architecture.
DEMO_MODEL, DEMO_DTYPE = "smollm2-135m", "float32"
LORA = ("max_loras", "max_lora_rank", "fully_sharded_loras")
RESERVING = ("contiguous", "static")  # allocators that --baseline takes
SHARED = 0.01  # of the device's memory; if other processes use more, they distort the measurement


def profile(options: ProfileOptions) -> int:
    """Run, compare, and return the exit code: 0, 4 if the run ended early, 130 if interrupted."""
    check_flags(options)
    if options.server is not None or options.command is not None:
        from kvplan.cli.profile_server import profile_server

        return profile_server(options)
    device = device_of(options)
    rank = rank_of(options)
    spec = model_of(options, device)
    workload = workload_of(options)
    config = config_of(options, spec, device, workload)
    interval = parse_duration(options.interval or "50ms", "--interval")
    timeout = None if options.timeout is None else parse_duration(options.timeout, "--timeout")
    check_input(options, device, workload.adapters, config.max_lora_rank)
    check_pool(options, spec, config, workload)
    target = Path(options.run_dir) if options.run_dir else default_dir(spec.name)
    is_quiet = options.quiet or rank > 0
    from engine.resolve import check_states
    from engine.state_slots import are_in_blocks
    from kvplan.measure import profile as runs
    from kvplan.measure.recording import Recording

    check_states(spec, config)
    if are_in_blocks(spec, config):
        problem = f"is not combined with the recurrent states of {spec.name}: a run's figures are of states in slots"
        raise SettingError("", ("enable_prefix_caching",), problem, "", off=True)
    with ExitStack() as stack:
        stack.enter_context(output.showing_warnings())
        film, trace = (options.film, options.trace_events) if rank == 0 else (None, None)
        films = stack.enter_context(beside(options, target, film, "--film", {".html": "html"}))
        traces = stack.enter_context(beside(options, target, trace, trace_events.FLAG, trace_events.FORMATS))
        if traces and traces[0].format == "pftrace":
            trace_events.require_perfetto()
        recording = Recording(bool(films), bool(traces))
        nvml, gpu = stack.enter_context(runs.watched_gpu(device))
        refuse_shared(gpu, allow=options.allow_shared)
        start = manifest(spec, config, device, workload, gpu, runs.environment(nvml, gpu))
        writer = RunWriter(target, start) if rank == 0 else runs.SilentWriter(target, start)
        if not is_quiet:
            output.tell("note", f"profile: {spec.name} on {device}; the run is saved in {path_text(target)}")
        with live_view(quiet=is_quiet) as watch:
            outcome = runs.profile(
                spec,
                config,
                workload,
                writer,
                weights=Path(options.weights) if options.weights else None,
                interval_s=interval,
                timeout_s=timeout,
                gpu=gpu,
                nvml=nvml,
                baselines=options.baseline or (),  # type: ignore[arg-type] # check_flags has seen them
                snapshot=options.snapshot and rank == 0,
                watch=watch,
                recording=recording,
            )
        if rank == 0:
            conclude(options, target, writer, outcome)
            save(films, outcome, lambda file: film_page(recording, spec, config))
            save(traces, outcome, lambda file: tracks(recording, target, file.format))
    return outcome.exit_code


def conclude(options: ProfileOptions, target: Path, writer: RunWriter, outcome: "Outcome") -> None:
    """Print and write the results of a finished run."""
    if outcome.message is not None:
        why = f"ended early ({outcome.message})" if outcome.is_early else outcome.message
        output.tell("error", f"profile: {why}; what was measured is in {path_text(target)}")
    results = writer.manifest.get("results") or {}
    for served in (results, *baselines_of(results)):
        if 0 < served.get("num_failed", 0) < served.get("num_finished", 0):
            output.tell(
                "warning",
                f"profile: {served['num_failed']} of {served['num_finished']} requests failed "
                f"({served['failures'][0]}); the figures cover the others",
            )
    if outcome.exit_code == 0:
        from kvplan.cli.reconcile import answer
        from kvplan.measure.reconcile import reconcile_run

        output.answer(answer(reconcile_run(load_run(target))), options.format, options.color)


def beside(
    options: ProfileOptions, target: Path, path: str | None, flag: str, suffixes: Mapping[str, str]
) -> AbstractContextManager[list[output.ReportFile]]:
    """Report file of a flag, if given; it must not be in the run's own directory."""
    if path is None:
        return output.report_files(())
    if Path(path).absolute().parent == target.absolute():
        raise UsageError(
            f"{flag} {path_text(Path(path))}",
            "is inside the run directory, which must not exist yet",
            "use a path outside it",
        )
    return output.report_files((path,), flag, suffixes, force=options.force)


def film_page(recording: "Recording", spec: ModelSpec, config: "EngineConfig") -> str:
    """The pool step by step, and that of --baseline."""
    from kvplan.report.film_html import film_html

    title = f"{printable(spec.name, 200)} on {config.device}, {config.max_model_len:,} tokens: a run of the engine"
    return film_html(recording.films, title, "measured")


def tracks(recording: "Recording", target: Path, form: str) -> Iterator[bytes]:
    """Requests and counters of every serving, and the run's samples."""
    servers = [trace_events.server(followed.finish()) for followed in recording.tracks.values()]
    return trace_events.written([*servers, trace_events.samples(load_run(target))], form)


def save(
    files: list[output.ReportFile], outcome: "Outcome", content: Callable[[output.ReportFile], str | Iterator[bytes]]
) -> None:
    """Write the recordings; if the run ended early, a write error is only a warning."""
    for file in files:
        try:
            file.save(content(file))
        except KvplanError as error:
            if outcome.exit_code == 0:
                raise
            output.tell("warning", str(error))


# --- options ----------------------------------------------------------------------------------------------------------


def check_flags(options: ProfileOptions) -> None:
    """Refuse flags that cannot be combined."""
    if options.trace is not None and (
        options.lengths or options.num_seqs or options.prompt_tokens or options.output_tokens
    ):
        raise UsageError(
            "--trace", "already sets the number of requests and their lengths", "remove the other flags for that"
        )
    if options.lengths is not None and options.prompt_tokens is not None:
        raise UsageError("--lengths and --prompt-tokens", "both set request lengths", "use only one")
    for index, baseline in enumerate(options.baseline or ()):
        if baseline not in RESERVING:
            name = printable(baseline, 40)
            raise UsageError(f"--baseline {name!r}", "must be contiguous or static", "write one of them")
        if baseline == options.allocator:
            problem = "is already the allocator of the first run"
            raise UsageError(f"--baseline {baseline}", problem, "remove --allocator")
        if baseline in (options.baseline or ())[:index]:
            raise UsageError(f"--baseline {baseline}", "is given twice", "remove one")
    for flag, value in (("--rate", options.rate), ("--max-concurrency", options.max_concurrency)):
        if value is not None and options.server is None and options.command is None:
            raise UsageError(flag, "works only with a server", "add --server URL, or --command 'vllm serve ...'")
    if options.baseline and options.speculative_config is not None:
        problem = "would run without drafts: only the paged allocator takes them, and a comparison changes one thing"
        raise UsageError(f"--baseline {options.baseline[0]}", problem, "remove it, or --speculative-config")
    if options.run_dir == "":
        raise UsageError("--output ''", "names no directory", "name a new one, or remove it for runs/MODEL-N")
    if options.weights is not None:
        weights_directory(options.weights)


def check_input(
    options: ProfileOptions, device: "torch.device", adapters: Mapping[str, Path], max_lora_rank: int
) -> None:
    """Refuse, before anything is written, errors that otherwise only the engine would detect."""
    if options.snapshot and device.type != "cuda":
        raise UsageError("--snapshot", "torch records memory history only on a GPU", "remove it")
    if options.weights is not None:
        from engine.loader import Checkpoint

        Checkpoint(Path(options.weights))  # opens the files, and names a missing or damaged one
    if adapters:
        from engine.peft import read_adapter

        for path in adapters.values():
            if (rank := read_adapter(path).rank) > max_lora_rank:
                problem = f"has rank {rank}, and the slots are for {max_lora_rank}"
                raise UsageError(f"--lora-modules: {path_text(path)}", problem, "raise --max-lora-rank")


def check_pool(options: ProfileOptions, spec: ModelSpec, config: "EngineConfig", workload: "Workload") -> None:
    """Refuse a pool of given size that is too small for the longest request; free memory is checked later."""
    from engine.kv_cache import group_layers
    from kvplan.measure.profile import refuse_small_pool

    if config.num_blocks is not None:
        groups = tuple(group.rule for group in group_layers(spec, config.block_size))
        refuse_small_pool(groups, config, workload, config.num_blocks, options.baseline or ())


def rank_of(options: ProfileOptions) -> int:
    """This process's rank under torchrun; 0 without tensor parallelism."""
    stages = _count(options.pipeline_parallel_size, "--pp") or 1
    if stages > 1:
        problem = "a run records the memory of one rank, and those of other stages hold other layers"
        raise UsageError(f"--pp {stages}", problem, "use kvplan serve, whose log states each rank's bytes")
    size = _count(options.tensor_parallel_size, "--tp") or 1
    if size == 1:
        return 0
    started = os.environ.get("WORLD_SIZE", "")
    if started != str(size) or not os.environ.get("RANK", "").isdecimal():
        raise UsageError(
            f"--tp {size}",
            f"needs {size} processes ({started or 'no torchrun'} found)",
            f"start with: torchrun --nproc-per-node {size} -m kvplan profile ...",
        )
    return int(os.environ["RANK"])


def device_of(options: ProfileOptions) -> "torch.device":
    """Device as requested; else a GPU if there is one; else the CPU if neither model nor weights are named."""
    try:
        import torch
    except ImportError as error:
        raise EnvironmentProblem(
            "profile", "torch is not installed", "pip install '.[engine]' in kvplan's sources"
        ) from error
    if options.device is not None:
        try:
            device = torch.device(options.device)
        except RuntimeError as error:
            raise UsageError(f"--device {options.device!r}", "is not a device", "use cpu, cuda or cuda:N") from error
        if device.type not in ("cpu", "cuda"):
            raise UsageError(f"--device {options.device!r}", "the engine runs on cpu, cuda or cuda:N")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise EnvironmentProblem(f"--device {options.device}", f"{_why_no_gpu()}", "use --device cpu")
        return _own_gpu(options) if device.type == "cuda" and device.index is None else device
    if torch.cuda.is_available():
        return _own_gpu(options)
    if options.model is not None or options.weights is not None:
        raise EnvironmentProblem("profile", f"{_why_no_gpu()}", "use --device cpu, which is slower")
    return torch.device("cpu")


def _own_gpu(options: ProfileOptions) -> "torch.device":
    """The first GPU, or with tensor parallelism the rank's own."""
    import torch

    local = os.environ.get("LOCAL_RANK", "0") if options.tensor_parallel_size not in (None, "1") else "0"
    return torch.device("cuda", int(local) if local.isdecimal() else 0)


def _why_no_gpu() -> str:
    """NVML's explanation for a GPU that torch does not find."""
    from kvplan.hardware.nvml import DeviceError, open_nvml

    try:
        with open_nvml() as nvml:
            names = ", ".join(device.name for device in nvml.devices())
    except DeviceError as error:
        return "no GPU that CUDA can use" if error.reason == "absent" else str(error)
    return f"torch cannot use the GPU that the driver shows ({names})" if names else "no GPU that CUDA can use"


def model_of(options: ProfileOptions, device: "torch.device") -> ModelSpec:
    """The model's facts: from the weights' directory if given, with which MODEL must agree."""
    if options.weights is not None:
        return _weights_spec(Path(options.weights), options.model)
    name = options.model
    if name is None:
        if device.type == "cpu" and not options.quiet:
            output.tell("note", f"no MODEL and no GPU: the small model {DEMO_MODEL} on the CPU, with random weights")
        name = DEMO_MODEL if device.type == "cpu" else "llama-3.1-8b"
    return resolve(name, Source()).spec


def weights_directory(path: str) -> Path:
    """The checkpoint's directory. Raise UsageError if it does not exist."""
    directory = Path(path)
    if not path or not directory.is_dir():
        where = path_text(directory) if path else "''"
        raise UsageError(f"--weights {where}", "is not a directory", "name one with config.json and safetensors")
    return directory


def _weights_spec(directory: Path, model: str | None) -> ModelSpec:
    spec = load_spec(directory, name=printable(model or str(directory), 1000))
    if model is not None:
        named = resolve(model, Source()).spec
        for fact in ("num_layers", "hidden_size", "vocab_size"):
            if getattr(named, fact) != getattr(spec, fact):
                raise UsageError(
                    f"--weights {path_text(directory)}",
                    f"is not {printable(model, 200)} ({fact} {getattr(spec, fact)}, not {getattr(named, fact)})",
                    "remove MODEL or name its own weights",
                )
    return spec


def workload_of(options: ProfileOptions) -> "Workload":
    from kvplan.measure.profile import Workload

    requests, shared = requests_of(options)
    duration = None if options.duration is None else parse_duration(options.duration, "--duration")
    slots = slots_of(options.enable_lora, options.max_loras)
    adapters = {name: Path(path) for name, path in modules_of(options.lora_modules, slots, ()).items()}
    return Workload(requests, shared, duration, seed_of(options), adapters)


def config_of(options: ProfileOptions, spec: ModelSpec, device: "torch.device", workload: "Workload") -> "EngineConfig":
    """The engine's configuration, with everything that depends on the workload resolved."""
    from engine import EngineConfig

    is_demo = options.model is None and options.weights is None and device.type == "cpu"
    dtype = options.dtype or (DEMO_DTYPE if is_demo else "auto")
    longest = workload.longest
    limit = spec.context_limit
    max_model_len = parse_tokens(options.max_model_len, "--ctx") if options.max_model_len else min(limit, longest + 1)
    if max_model_len > limit:
        raise UsageError(f"--ctx {max_model_len}", f"{printable(spec.name, 200)} has {limit} positions", "lower it")
    if longest > max_model_len:
        raise UsageError(
            "profile",
            f"the longest request has {longest} tokens, the context {max_model_len}",
            "raise --ctx or shorten it",
        )
    budget = _count(options.max_num_batched_tokens, "--max-num-batched-tokens")
    most_seqs = min(len(workload.requests), 1024, budget or EngineConfig().max_num_batched_tokens)
    settings: dict[str, Any] = {
        "tensor_parallel_size": _count(options.tensor_parallel_size, "--tp"),
        "max_num_seqs": _count(options.max_num_seqs, "--max-num-seqs") or most_seqs,
        "max_num_batched_tokens": budget,
        "block_size": _count(options.block_size, "--block-size"),
        "num_blocks": _count(options.num_blocks, "--num-blocks"),
        "gpu_memory_utilization": None
        if options.gpu_memory_utilization is None
        else parse_fraction(options.gpu_memory_utilization, "--gpu-memory-utilization"),
        "memory_limit": None if options.memory_limit is None else parse_size(options.memory_limit, "--memory-limit"),
        "kv_cache_dtype": options.kv_cache_dtype,
        "enforce_eager": options.enforce_eager,
        "enable_prefix_caching": options.enable_prefix_caching,
        "allocator": options.allocator,
        "kv_offloading_size": _gib(options.kv_offloading_size, "--kv-offloading-size"),
        "kv_offloading_dir": options.kv_offloading_dir,
        "kv_offloading_disk_size": _gib(options.kv_offloading_disk_size, "--kv-offloading-disk-size"),
        "max_loras": slots_of(options.enable_lora, options.max_loras),
        "max_lora_rank": _count(options.max_lora_rank, "--max-lora-rank"),
        "fully_sharded_loras": options.fully_sharded_loras,
        "speculative_config": speculative_of(options.speculative_config, Source(), is_dummy=options.weights is None),
        "seed": seed_of(options),
    }
    return EngineConfig(
        device=str(device),
        dtype=dtype,
        max_model_len=max_model_len,
        load_format="auto" if options.weights else "dummy",
        **{name: value for name, value in settings.items() if value is not None},
    )


def _count(text: str | None, option: str) -> int | None:
    return None if text is None else parse_count(text, option, 2**31)


def _gib(text: str | None, option: str) -> float | None:
    """Size in GiB for the engine, or None if it is not given or 0."""
    size = 0 if text is None else gib(text, option)
    return size / GIB if size else None


def refuse_shared(gpu: "Device | None", *, allow: bool) -> None:
    """Report other processes' GPU memory, and refuse to measure above 1%, because it would be included."""
    if gpu is None:
        return
    memory, others = gpu.memory(), [process for process in gpu.processes() if process.used]
    in_use, who = (
        sum(process.used or 0 for process in others),
        f"pid {', '.join(str(process.pid) for process in others)}",
    )
    if not others and memory.reserved is not None and not memory.is_host:
        # Processes of other containers are not listed, but their memory is. (Without a figure for the driver's own
        # memory, or on a GPU that shares host memory, `used` does not show other processes.)
        in_use, who = memory.used, "of processes that the driver does not list"
    if in_use > SHARED * memory.total and not allow:
        raise EnvironmentProblem(
            gpu.label, f"other processes hold {in_use:,} bytes ({who})", "stop them, or measure with --allow-shared"
        )
    if others or in_use > SHARED * memory.total:
        output.tell("warning", f"{gpu.label}: other processes hold {in_use:,} bytes; they are not counted in the rows")


def manifest(
    spec: ModelSpec,
    config: "EngineConfig",
    device: "torch.device",
    workload: "Workload",
    gpu: "Device | None",
    environment: dict[str, Any],
) -> dict[str, Any]:
    """Contents of run.json before the run; `inputs` are those of kvplan.servers.bundled.rules.EngineInputs."""
    from engine.kv_cache import group_layers
    from engine.memory import device_memory

    dtype = spec.dtype if config.dtype == "auto" else config.dtype
    groups = len(group_layers(spec, config.block_size))
    blocks_per_seq = -(-(config.max_model_len or 0) // config.block_size)
    # Querying torch for a GPU's memory would create the CUDA context, which is still to be measured.
    whole = device_memory(device)[1] if gpu is None else gpu.memory().total
    total = min(config.memory_limit or 2**63, whole)
    return {
        "model": {"name": spec.name, "source": spec.source, "config": dict(spec.config)},
        "device": device.type,
        "inputs": {
            "total": total,
            "dtype": dtype,
            "kv_cache_dtype": dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
            "block_size": config.block_size,
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "tensor_parallel_size": config.tensor_parallel_size,
            "num_blocks": config.num_blocks,
            "max_blocks": 1 + config.num_seqs * blocks_per_seq * groups if device.type == "cpu" else None,
            "backend": "torch" if device.type == "cpu" or config.backend == "torch" else "triton",
            "batches_in_flight": config.batches_in_flight(device.type),
            **({name: getattr(config, name) for name in LORA} if config.max_loras else {}),
        },
        "engine": settings_of(config),
        **draft_entry(config),
        "workload": {
            "num_requests": len(workload.requests),
            "prompt_tokens": sum(request.prompt_tokens for request in workload.requests),
            "output_tokens": sum(request.output_tokens for request in workload.requests),
            "longest": workload.longest,
            "shared_prefix": workload.shared_prefix,
            "duration_s": workload.duration_s,
            **({"adapters": list(workload.adapters)} if config.max_loras else {}),
        },
        "groups": groups,
        "environment": environment,
    }


def settings_of(config: "EngineConfig") -> dict[str, Any]:
    """The engine's settings as JSON; a draft model by its name."""
    drafts = config.speculative_config
    settings = asdict(replace(config, speculative_config=None))
    if drafts is None:
        return settings
    spec = draft_spec(config)
    own = {setting.name: getattr(drafts, setting.name) for setting in fields(drafts)}
    return settings | {"speculative_config": own | {"model": spec and spec.name}}


def draft_entry(config: "EngineConfig") -> dict[str, Any]:
    """The draft model for the manifest, as the model itself is in it."""
    spec = draft_spec(config)
    if spec is None:
        return {}
    return {"draft": {"name": spec.name, "source": spec.source, "config": dict(spec.config)}}


def draft_spec(config: "EngineConfig") -> ModelSpec | None:
    """The draft model's facts, or None without one."""
    model = None if config.speculative_config is None else config.speculative_config.model
    return model if model is None or isinstance(model, ModelSpec) else load_spec(Path(model))
