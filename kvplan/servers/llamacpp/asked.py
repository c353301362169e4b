"""A request in llama.cpp's terms: the file, the devices and the settings of a server."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.files import printable
from kvplan.core.units import GIB, MIB
from kvplan.hardware.gpu import GpuSpec
from kvplan.models.gguf_model import GGUFModel, ggml_tensors, gguf_beside, gguf_of, stored_in
from kvplan.servers.base import terms_of
from kvplan.servers.llamacpp.architectures import DRAFTERS
from kvplan.servers.llamacpp.beside import Beside, adapter_tensors, tower_tensors
from kvplan.servers.llamacpp.settings import DEFAULT_SLOTS, Device, Override, Settings
from kvplan.servers.llamacpp.shape import TensorLike
from kvplan.servers.plans.plan import Estimate, Request
from kvplan.servers.words.arguments import DEFAULTS, EngineArgs, flags_of

USUAL_TYPE: Final = "Q4_K_M"  # what -hf downloads unless told otherwise (common/download.cpp)
# Free memory before loading, below the total, in public logs of ten idle GPUs: 148 (P40) to 605 MiB (RTX PRO 6000).
CONTEXT_MIB: Final = (148, 477, 605)
CONTEXT_SOURCE: Final = "free and total memory in llama.cpp's start-up logs of ten kinds of GPU"
RUNTIMES: Final = {"amd": "HIP", "intel": "SYCL"}
BATCH, UBATCH, FIT_CTX, MARGIN = 2048, 512, 4096, "1024"  # its defaults; the margin in MiB
CACHE_TYPES: Final = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")  # common/arg.cpp
DRAFT_TOKENS, VOCABULARY = 3, 128  # its default; how far vocabularies may differ (common/speculative.cpp)
MTP, MTP_TYPE = "mtp", "draft-mtp"  # the method, and what llama.cpp calls it
EXPERTS: Final = r"ffn_(up|down|gate_up|gate)_(ch|)exps"
# Arguments of the table that --gpu sets for every server.
BY_GPUS: Final = ("tensor_parallel_size",)


def context(gpu: GpuSpec) -> Estimate:
    """What the driver takes of a GPU before the server allocates."""
    low, likely, high = (size * MIB for size in CONTEXT_MIB)
    if gpu.vendor == "apple":
        return Estimate(0, 0, high, "Metal's own is not known; the high end is CUDA's", CONTEXT_SOURCE, "calibrated")
    runtime = RUNTIMES.get(gpu.vendor, "CUDA")
    text = f"{likely / GIB:.2f} GiB ({runtime} context), {low // MIB}-{high // MIB} MiB in logs"
    return Estimate(low, likely, high, text, CONTEXT_SOURCE, "calibrated")


def device(request: Request, taken: int) -> Device:
    """The GPU with so many of its bytes in use when the server starts.

    One with a limit of its own leaves the rest of the memory to the host, and reads no buffer of the host's
    (ggml-metal.cpp, `supports_buft`).
    """
    gpu = request.gpu
    integrated = gpu.unified and not gpu.has_own_limit
    return Device(gpu.total_memory, max(0, gpu.total_memory - taken), gpu.sm * 10, integrated)


def model(request: Request) -> GGUFModel:
    """The file that is served: the one that was named, else what llama-quantize would make."""
    stored, stated, drafts = request.checkpoint, request.args.quantization, request.args.speculative_method == MTP
    if request.weights_bytes is not None:
        raise UsageError("--weights-bytes", "llama.cpp's layers are placed tensor by tensor", "name the GGUF file")
    if stored is not None and stored.format == "gguf":
        own = gguf_beside(stored, request.spec)
        if stated is not None and stated.upper() != own.label:
            raise UsageError(f"--quant {stated}", f"the file is {own.label or 'of another type'}", "remove it")
    else:
        own = gguf_of(request.spec, stated or usual_type(request), drafts=drafts)
    if drafts:
        check_nextn(own)
    return own


def check_nextn(model: GGUFModel) -> None:
    """Refuse a file whose layers for multi-token prediction the server does not draft with, or kvplan does not size."""
    what, cure = f"multi-token prediction (--spec-type {MTP_TYPE})", f"leave out --spec-type {MTP_TYPE}"
    if not model.num_nextn:
        problem = "the model's file has no layer for it: llama.cpp creates no context for the drafts, and ends"
        raise UsageError(what, problem, f"name a file that has one, or {cure}", keys=("speculative_method",))
    if model.architecture not in DRAFTERS or model.num_nextn > 1:
        problem = f"kvplan knows no graph for {model.num_nextn} such layers of {model.architecture!r}"
        raise UnsupportedModelError(what, problem, cure)


def usual_type(request: Request) -> str:
    """The type of the file that most people load: a checkpoint's own if it has one, else Q4_K_M."""
    return "MXFP4_MOE" if "mxfp4" in request.spec.scheme_kinds else USUAL_TYPE


def check(request: Request) -> None:
    """Refuse what llama.cpp does not have, by the flag."""
    args, engine = request.args, request.release.engine
    own, title = flags_of(engine), terms_of(engine).title
    check_draft(request)
    if request.spec.is_encoder:
        raise UnsupportedModelError(request.spec.name, f"kvplan sizes no encoder on {title}", "use another --engine")
    for name, usual in DEFAULTS.items():
        value = getattr(args, name)
        if value != usual and name not in own and name not in BY_GPUS:
            flag = f"--{name.replace('_', '-')}"
            cure = {"kv_cache_dtype": "write --cache-type-k and --cache-type-v"}.get(name, "remove it")
            raise UsageError(flag, f"is no argument of {title}", cure, keys=(name,))


def check_draft(request: Request) -> None:
    """Refuse drafts that kvplan does not size, and those that the server does not take."""
    draft, method, own = request.draft, request.args.speculative_method, request.spec.vocab_size
    sized = method is None or (method == MTP and "speculative_method" in flags_of(request.release.engine))
    if (draft is not None and draft.head) or not sized:
        what = f"drafts by {method}" if draft is None or not draft.head else f"draft {draft.name}"
        problem = "kvplan sizes llama.cpp's drafts of a whole model, or of the model's own layers (mtp)"
        raise UnsupportedModelError(what, problem, "leave them out")
    if draft is not None and method == MTP:
        problem = "is a second file with the layers for multi-token prediction, which kvplan does not size"
        raise UsageError(f"draft {draft.name}", problem, "name a file with these layers and the model's own")
    if draft is not None and abs(draft.vocab_size - own) > VOCABULARY:
        problem = f"has {draft.vocab_size:,} tokens, the model {own:,}: llama.cpp refuses more than {VOCABULARY} apart"
        raise UsageError(f"draft {draft.name}", problem, "use a draft of the same family", keys=("draft_model",))


def beside(request: Request, architecture: str) -> Beside:
    """What is loaded beside the model; the headers of its files are read."""
    args, draft = request.args, None
    adapters = tuple(
        adapter_tensors(stored, ggml_tensors(stored), architecture, f"--lora {printable(name, 200)}")
        for name in (args.lora or "").split(",")
        if name and (stored := stored_in(Path(name)))
    )
    if request.draft is not None:
        own = request.draft_checkpoint
        if own is not None and own.format == "gguf":
            draft = gguf_beside(own, request.draft)
        else:
            draft = gguf_of(request.draft, args.draft_quant or USUAL_TYPE)
    tower: tuple[TensorLike, ...] = ()
    if args.mmproj is not None:
        if args.split_mode == "none" and args.main_gpu:
            problem = "the tower is on GPU 0, which the model leaves out"
            raise UsageError(f"--mmproj with --main-gpu {args.main_gpu}", problem, "use --main-gpu 0")
        stored = stored_in(Path(args.mmproj))
        tower = tower_tensors(stored, ggml_tensors(stored), f"--mmproj {printable(args.mmproj, 200)}")
    return Beside(adapters, draft, args.draft_gpu_layers, tower, args.mmproj_offload is not False)


def settings(args: EngineArgs, num_devices: int, *, drafts: bool = False) -> Settings:
    """The arguments by what they mean; with drafts a slot's output is kept for each of its draft tokens, too."""
    stated = args.max_model_len
    batch, slots = args.max_num_batched_tokens or BATCH, args.max_num_seqs or DEFAULT_SLOTS
    tokens, mtp = args.num_speculative_tokens or DRAFT_TOKENS, args.speculative_method == MTP
    outputs = min(batch, slots * (1 + tokens)) if drafts or mtp else None
    return Settings(
        ctx=stated if isinstance(stated, int) else 0,
        slots=args.max_num_seqs,
        unified=args.kv_unified,
        batch=batch,
        outputs=outputs,
        ubatch=args.micro_batch_size or UBATCH,
        gpu_layers=args.gpu_layers,
        flash=args.flash_attn or "auto",
        cache_k=_cache_type("--cache-type-k", args.cache_type_k),
        cache_v=_cache_type("--cache-type-v", args.cache_type_v),
        offload_cache=args.kv_offload is not False,
        full_windows=args.swa_full is True,
        offload_ops=args.op_offload is not False,
        split_mode=args.split_mode or "layer",
        main_gpu=args.main_gpu or 0,
        split=tuple(_numbers("--tensor-split", args.tensor_split or "")),
        overrides=tuple(_overrides(args, num_devices)),
        fit=args.fit != "off",
        fit_target=tuple(int(size * MIB) for size in _numbers("--fit-target", args.fit_target or MARGIN)),
        fit_ctx=args.fit_ctx or FIT_CTX,
        mtp_tokens=tokens if mtp else 0,
    )


def _cache_type(flag: str, stated: str | None) -> str:
    """Type of the keys or values in the cache, as in a file."""
    if stated is not None and stated.lower() not in CACHE_TYPES:
        raise UsageError(f"{flag} {printable(stated, 40)!r}", "is not a cache type", f"use {', '.join(CACHE_TYPES)}")
    return (stated or "f16").upper()


def _numbers(flag: str, text: str) -> Iterator[float]:
    for word in re.split("[,/]", text) if text else ():
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", word.strip()):
            raise UsageError(flag, f"is not numbers with commas between ({printable(text, 60)!r})", "write 3,1")
        yield float(word)


def _overrides(args: EngineArgs, num_devices: int) -> Iterator[Override]:
    """Rules for tensors' places, in the order in which the first match wins."""
    for rule in (args.override_tensor or "").split(",") if args.override_tensor else ():
        pattern, equals, name = rule.rpartition("=")
        match = re.fullmatch(r"CUDA(\d{1,2})", name)
        number = int(match[1]) if match else None
        if not equals or (name != "CPU" and number is None) or (number or 0) >= num_devices:
            names = ", ".join(["CPU", *(f"CUDA{i}" for i in range(num_devices))])
            raise UsageError("--override-tensor", f"{printable(rule, 80)!r} names no place", f"write REGEX={names}")
        yield Override(pattern, number)
    if args.cpu_moe:
        yield Override(rf"\.{EXPERTS}", None)
    for layer in range(args.n_cpu_moe or 0):
        yield Override(rf"blk\.{layer}\.{EXPERTS}", None)
