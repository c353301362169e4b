"""Why a server did not start, where memory has no part: a port, a file, an account, a driver, an argument.

A row is a cause with the messages that prove it, the sentence about it, and what to do. Messages are those of the
servers, or of the libraries below them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from kvplan.servers.logs.failures import SHAPES, Cause, Wording

LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM 0.33 config/lora.py: MaxLoRARanks
Details = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Fix:
    """What removes an obstacle.

    text      what it does
    flag      as typed, or empty for an action
    argument  the engine argument of that flag, if a command can be made with it
    value     its value from the details; None: it has none
    """

    text: str
    flag: str = ""
    argument: str | None = None
    value: Callable[[Details], str | None] | None = None


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A cause that memory has no part in.

    reason    the sentence; {name} is filled in from the details
    bare      the sentence if the line does not state them
    messages  (message, its source, what must also be near it)
    details   patterns of the line, or of one near it, that state them
    runs      True if the server runs, and only requests fail
    """

    cause: Cause
    reason: str
    bare: str
    fixes: tuple[Fix, ...]
    messages: tuple[tuple[str, str] | tuple[str, str, str], ...]
    details: tuple[str, ...] = ()
    runs: bool = False

    def details_in(self, text: str) -> Details:
        """Details that a line states, by the first pattern that matches."""
        matches = (re.search(pattern, text) for pattern in self.details)
        return next((match.groupdict() for match in matches if match is not None), {})

    def sentence(self, text: str) -> str:
        details = self.details_in(text)
        return self.reason.format(**details) if details else self.bare


def _next_rank(details: Details) -> str | None:
    return next((str(rank) for rank in LORA_RANKS if rank >= int(details.get("rank", LORA_RANKS[-1] + 1))), None)


def _next_port(details: Details) -> str | None:
    """The port after the one for requests; PORT if the line names none, None for others, which --port does not set."""
    if not details:
        return "PORT"
    port = int(details["port"])
    return str(port + 1 if port < 65535 else port - 1) if "api" in details else None


def _dashed(details: Details) -> str | None:
    argument = details.get("argument", "")
    return argument.replace("_", "-") if argument.startswith("--") and "_" in argument else None


def _model(details: Details) -> str | None:
    argument = details.get("argument", "-")
    return None if argument.startswith("-") else f"--model {argument}"


_HUB: Final = "huggingface_hub"
_TRANSFORMERS: Final = "transformers"
_CUDA: Final = "CUDA"
_LOADER: Final = "llama.cpp src/llama-model-loader.cpp"

OBSTACLES: Final[tuple[Obstacle, ...]] = (
    Obstacle(
        "port_in_use", "port {port} is in use by another process", "a port that it needs is in use by another process",
        (
            Fix("another port, if it is free", "--port {value}", None, _next_port),
            Fix("stop the process that uses the port, perhaps an earlier server (`ss -ltnp` lists ports and "
                "processes)"),
        ),
        (
            ("Address already in use", "errno EADDRINUSE"),
            ("error while attempting to bind on address", "asyncio"),
            ("EADDRINUSE", "torch TCPStore"),
            ("is used by a process already", "SGLang srt/utils/network.py"),
            ("couldn't bind HTTP server socket", "llama.cpp tools/server/server-http.cpp"),
        ),
        (r"(?P<api>bind on address) \([^()]{0,60}, (?P<port>[0-9]{1,5})\)",
         r"_port at (?P<port>[0-9]{1,5}) is not available",
         r"(?P<api>HTTP server socket), hostname: [^,]{1,80}, port: (?P<port>[0-9]{1,5})",
         r"already in use \(addr='tcp://[^']{1,60}:(?P<port>[0-9]{1,5})'"),
    ),
    Obstacle(
        "disk_full", "the disk is full", "the disk is full",
        (
            Fix("free disk space, or set HF_HOME to a folder on a larger disk (in a container, mount it): the model's "
                "files go there"),
        ),
        (
            ("No space left on device", "errno ENOSPC"),
            ("Disk quota exceeded", "errno EDQUOT"),
            ("Not enough free disk space", _HUB),
        ),
    ),
    Obstacle(
        "model_access", "the repository {repository} is gated or private, and this account may not read it",
        "the model's repository is gated or private, and this account may not read it",
        (
            Fix("accept the model's license on huggingface.co, and start the server with HF_TOKEN set to a token of "
                "that account (`docker run -e HF_TOKEN=...`)"),
        ),
        (
            ("Cannot access gated repo", _HUB),
            ("You are trying to access a gated repo", _TRANSFORMERS),
            ("GatedRepoError", _HUB),
            ("401 Client Error", _HUB),
            ("403 Client Error", _HUB),
        ),
        (r"huggingface\.co/(?:api/models/)?(?P<repository>[\w.-]{1,96}/[\w.-]{1,96}?)(?:/resolve|/tree|\.?$|\.?\s)",
         r"Access to model (?P<repository>[\w.-]{1,96}/[\w.-]{1,96}) is restricted"),
    ),
    Obstacle(
        "model_not_found", "{name} is no folder here and no repository on huggingface.co",
        "the model is no folder here and no repository on huggingface.co",
        (
            Fix("correct the name of the model; a folder must exist inside the container, too: mount it (`-v`)"),
        ),
        (
            ("is not a valid model identifier listed on", _TRANSFORMERS),
            ("Repository Not Found for url", _HUB),
            ("RepositoryNotFoundError", _HUB),
            ("Repo id must", _HUB),
            ("Invalid repository ID or local directory specified", "vLLM transformers_utils/config.py"),
            ("does not appear to have a file named config.json", _TRANSFORMERS),
        ),
        (r"(?:^|: |specified: )['\"](?P<name>[\w./:-]{1,200})['\"](?: is not|\.?$)",
         r"(?P<name>[\w./:-]{1,200}) (?:is not a local folder|does not appear)"),
    ),
    Obstacle(
        "hub_unreachable", "huggingface.co cannot be reached", "huggingface.co cannot be reached",
        (
            Fix("let the server reach huggingface.co (HTTPS_PROXY, or HF_ENDPOINT for a mirror), or download the model "
                "first, name its folder as the model, and set HF_HUB_OFFLINE=1"),
        ),
        (
            ("couldn't connect to", _TRANSFORMERS, r"huggingface"),
            ("LocalEntryNotFoundError", _HUB),
            ("offline mode is enabled", _HUB, r"huggingface"),
            ("Max retries exceeded with url", "urllib3", r"huggingface"),
            ("Temporary failure in name resolution", "getaddrinfo", r"huggingface"),
        ),
    ),
    Obstacle(
        "weight_files", "a weight file is missing or incomplete", "a weight file is missing or incomplete",
        (
            Fix("download the model again, all parts of it, and name the first; files of a few hundred bytes are Git "
                "LFS pointers: run `git lfs pull`"),
        ),
        (
            ("Cannot find any model weights with", "vLLM, SGLang model_loader"),
            ("HeaderTooLarge", "safetensors"),
            ("MetadataIncompleteBuffer", "safetensors"),
            ("Error while deserializing header", "safetensors"),
            ("InvalidHeaderDeserialization", "safetensors"),
            ("failed to open GGUF file", "llama.cpp ggml/src/gguf.cpp"),
            ("is not within the file bounds", _LOADER),
            ("failed to load GGUF split from", _LOADER),
            ("model must be loaded with the first split", _LOADER),
            ("invalid split file", _LOADER),
            ("corrupted model: ", _LOADER),
            ("found tensors with invalid data", _LOADER),
            ("failed to read tensor data", "llama.cpp ggml/src/gguf.cpp"),
            ("failed to read magic", "llama.cpp ggml/src/gguf.cpp"),
            ("invalid magic characters", "llama.cpp ggml/src/gguf.cpp"),
        ),
    ),
    Obstacle(
        "model_unknown", "this installation knows no model of type {name}", "this installation does not know the model",
        (
            Fix("use a newer release of the server; of transformers only if the release supports the model already"),
        ),
        (
            ("Transformers does not recognize this architecture", _TRANSFORMERS),
            ("are not supported for now", "vLLM, SGLang models/registry.py", "Model architectures"),
            ("Unrecognized configuration class", _TRANSFORMERS),
            ("unknown model architecture: ", "llama.cpp src/llama-model.cpp"),
            ("unsupported model architecture: ", "llama.cpp src/llama-model.cpp"),
            ("unknown pre-tokenizer type: ", "llama.cpp src/llama-vocab.cpp"),
            ("unknown projector type: ", "llama.cpp tools/mtmd/clip.cpp"),
        ),
        (r"model type [`'\"]?(?P<name>[\w.-]{1,60})[`'\"]? but", r"Model architectures \[['\"](?P<name>\w{1,80})",
         r"model architecture: '(?P<name>[\w.-]{1,60})'", r"projector type: (?P<name>[\w.-]{1,60})"),
    ),
    Obstacle(
        "remote_code", "the model needs code from its repository, which does not run by default",
        "the model needs code from its repository, which does not run by default",
        (
            Fix("runs the repository's Python code: read it first", "--trust-remote-code", "trust_remote_code"),
        ),
        (
            ("contains custom code which must be executed", _TRANSFORMERS),
            ("consider setting trust_remote_code=True", "vLLM transformers_utils/config.py"),
            ("Please pass the argument trust_remote_code=True", _TRANSFORMERS),
        ),
    ),
    Obstacle(
        "chat_template", "the model has no chat template, so chat requests fail",
        "the model has no chat template, so chat requests fail",
        (
            Fix("a Jinja file with the model's own template; base models have none: use their instruct version, or "
                "/v1/completions", "--chat-template FILE"),
        ),
        (("default chat template is no longer allowed", _TRANSFORMERS),),
        runs=True,
    ),
    Obstacle(
        "gpu_not_visible", "it sees no GPU: the NVIDIA driver is not visible to it",
        "it sees no GPU: the NVIDIA driver is not visible to it",
        (
            Fix("start the container with `--gpus all` (Kubernetes: request nvidia.com/gpu) on a host with the NVIDIA "
                "Container Toolkit; without a container, install the driver: `nvidia-smi` must list the GPU"),
        ),
        (
            ("libcuda.so.1: cannot open shared object file", _CUDA),
            ("Failed to infer device type", "vLLM config/device.py"),
            ("Found no NVIDIA driver on your system", "torch"),
            ("NVML Shared Library Not Found", "NVML"),
            ("could not select device driver", "Docker"),
        ),
    ),
    Obstacle(
        "driver_mismatch", "the NVIDIA driver was updated, and the old one is still loaded",
        "the NVIDIA driver was updated, and the old one is still loaded",
        (Fix("reboot the host: `nvidia-smi` must work again"),),
        (("Driver/library version mismatch", "NVML"),),
    ),
    Obstacle(
        "driver_too_old", "the NVIDIA driver is too old for this build's CUDA version",
        "the NVIDIA driver is too old for this build's CUDA version",
        (
            Fix("update the driver; or use an image or wheel built for the CUDA version that `nvidia-smi` shows"),
        ),
        (
            ("CUDA driver version is insufficient", _CUDA),
            ("The NVIDIA driver on your system is too old", "torch"),
            ("forward compatibility was attempted on non supported HW", _CUDA),
            ("provided PTX was compiled with an unsupported toolchain", _CUDA),
            ("unsatisfied condition: cuda>=", "nvidia-container-cli"),
        ),
    ),
    Obstacle(
        "broken_install", "its compiled libraries do not match the installed PyTorch",
        "its compiled libraries do not match the installed PyTorch",
        (
            Fix("install the server again in a fresh environment, with the PyTorch release that it brings; afterwards "
                "install nothing that replaces torch"),
        ),
        (
            ("undefined symbol: ", "the linker"),
            ("torchvision::nms does not exist", "torchvision"),
        ),
    ),
    Obstacle(
        "versions_differ", "{first} and {second} have different versions", "two packages have different versions",
        (
            Fix("install the same version of both (FLASHINFER_DISABLE_VERSION_CHECK=1 skips the check; kernels that "
                "differ may then fail)"),
        ),
        (("Please install the same version of both packages", "flashinfer jit/env.py"),),
        (r"(?P<first>[\w-]{1,60}) version \(\S{1,40}\) does not match (?P<second>[\w-]{1,60}) version",),
    ),
    Obstacle(
        "library_missing", "the library {name} is missing", "a library is missing",
        (
            Fix("install the package that has it, or use the server's image; CUDA's libraries (libcudart, libnvrtc, "
                "libcublas) must be of the CUDA version that the wheels were built for"),
        ),
        ((": cannot open shared object file", "the linker"),),
        (r"(?P<name>lib[\w.+-]{1,80}?): cannot open shared object file",),
    ),
    Obstacle(
        "package_missing", "the Python package {name} is missing", "a Python package is missing",
        (
            Fix("install it in the server's environment or image; the error names the package"),
        ),
        (
            ("No module named ", "Python", "(?:ModuleNotFound|Import)Error"),
            ("NIXL is not available", "vLLM distributed/kv_transfer/kv_connector/v1/nixl"),
            ("lease install ", "vLLM, SGLang", "Error.{1,300}leaseinstall(?!the|or)"),
        ),
        (r"No module named ['\"]?(?P<name>[\w.]{1,80})", r"Error: (?P<name>NIXL) is not available",
         r"lease install [`'\"]?(?P<name>[\w.-]{1,60}\w)"),
    ),
    Obstacle(
        "no_compiler", "a kernel is compiled at start-up, and {name} is missing",
        "a kernel is compiled at start-up, and the compiler fails",
        (
            Fix("install the CUDA toolkit (nvcc), ninja and a C++ compiler, and set CUDA_HOME; if FlashInfer compiles, "
                "its packages flashinfer-cubin and flashinfer-jit-cache of the same version hold compiled kernels"),
        ),
        (
            ("Could not find nvcc", "flashinfer, torch"),
            ("nvcc: not found", "the shell"),
            ("No such file or directory: nvcc", "Python"),
            ("No such file or directory: ninja", "Python"),
            ("Ninja is required to load C++ extensions", "torch"),
            ("CUDA_HOME environment variable is not set", "torch"),
            ("Failed to find C compiler", "triton"),
            ("Python.h: No such file or directory", "the C compiler"),
        ),
        (r"(?P<name>nvcc|ninja)\b", r"find (?P<name>C compiler)", r"(?P<name>Python\.h)"),
    ),
    Obstacle(
        "toolkit_too_old", "the CUDA toolkit that compiles kernels at start-up is too old: {reason}",
        "the CUDA toolkit that compiles kernels at start-up is too old",
        (
            Fix("install a newer CUDA toolkit and set CUDA_HOME to it, or use an image that has one; if FlashInfer "
                "compiles, its packages flashinfer-cubin and flashinfer-jit-cache of the same version hold compiled "
                "kernels"),
        ),
        (
            ("requires CUDA >=", "flashinfer jit/"),
            ("nvcc fatal : Unknown option", "nvcc"),
            ("nvcc fatal : Unsupported gpu architecture", "nvcc"),
            ("nvcc fatal : Value ", "nvcc", "is not defined for option"),
        ),
        (r"(?P<reason>SM [0-9]{1,2}\.[0-9x] requires CUDA >= [0-9.]{1,6}[0-9])",
         r"nvcc fatal\s{0,4}: (?P<reason>(?:Unknown option|Unsupported gpu architecture) \S{1,60})"),
    ),
    Obstacle(
        "kernel_not_built", "a kernel that is compiled at start-up does not compile: {error}",
        "a kernel that is compiled at start-up does not compile",
        (
            Fix("the first line with `error` above it decides: a CUDA toolkit older than the GPU or the code, another "
                "host compiler, too little memory for the compiler (MAX_JOBS=2); FlashInfer's packages "
                "flashinfer-cubin and flashinfer-jit-cache of the same version hold compiled kernels"),
        ),
        (("ninja: build stopped: subcommand failed", "ninja"), ("Error building extension", "torch")),
        (r"(?P<error>[\w./-]{1,60}\([0-9]{1,6}\): error: .{1,100}|fatal error: .{1,100})",),
    ),
    Obstacle(
        "fabric_manager", "the GPUs' NVSwitch fabric is not initialized (CUDA error 802)",
        "the GPUs' NVSwitch fabric is not initialized (CUDA error 802)",
        (
            Fix("start nvidia-fabricmanager of the driver's own version on the host (`systemctl start "
                "nvidia-fabricmanager`; `nvidia-smi -q | grep -A3 Fabric` must say Completed)"),
        ),
        (("system not yet initialized", _CUDA), ("cudaErrorSystemNotReady", _CUDA)),
    ),
    Obstacle(
        "checkpoint_shapes", "the checkpoint's tensors do not have the shapes of its config or quantization",
        "the checkpoint's tensors do not have the shapes of its config or quantization",
        (
            Fix("use the config.json and the quantization that belong to the checkpoint (a bitsandbytes one needs "
                "`--quantization bitsandbytes`), and a release that knows the model; download it again if it was "
                "edited"),
        ),
        SHAPES,
    ),
    Obstacle(
        "file_tensors", "the file's tensors or tokenizer are not those expected of its architecture",
        "the file's tensors or tokenizer are not those expected of its architecture",
        (Fix("use a newer build of the server, or a file that a newer converter made; download it again if cut"),),
        (
            ("missing tensor ", _LOADER, "(?:llama|loading model)"),
            ("cannot find tokenizer ", "llama.cpp src/llama-vocab.cpp", "nmodelfile"),
            ("create_tensor: tensor ", _LOADER, "not found"),
            ("wrong number of tensors; expected", _LOADER),
            ("has wrong shape; expected", _LOADER),
            ("key not found in model: ", _LOADER),
            ("has wrong array length; expected", _LOADER),
        ),
    ),
    Obstacle(
        "checkpoint_names", "the checkpoint's tensor {name} has no place in the model's class",
        "the checkpoint and the model's class have other tensors",
        (Fix("a release that knows this checkpoint (its quantization, its drafts), or the model's own draft"),),
        (
            ("There is no module or parameter named", "vLLM model_executor/models/utils.py"),
            ("weights were not initialized from checkpoint", "vLLM model_executor/model_loader/default_loader.py"),
        ),
        (r"KeyError: ['\"](?P<name>[\w.]{1,120})['\"]", r"parameter named ['\"](?P<name>[\w.]{1,120})['\"]"),
    ),
    Obstacle(
        "adapter_unsupported", "the adapter is of a kind that it does not serve: {reason}",
        "the adapter is of a kind that it does not serve",
        (Fix("a plain LoRA adapter, or its weights merged into the model's (PEFT: merge_and_unload)"),),
        (
            ("vLLM only supports modules_to_save being", "vLLM lora/peft_helper.py"),
            ("vLLM does not yet support DoRA", "vLLM lora/peft_helper.py"),
            ("vLLM does not support ", "vLLM lora/peft_helper.py", "support.{0,30}(?i:lo?ra|layer_repl)"),
            ("expected target modules in", "vLLM lora/lora_model.py"),
        ),
        (r"(?P<reason>vLLM (?:only supports modules_to_save|does not (?:yet )?support) .{1,120})",),
    ),
    Obstacle(
        "request_slots", "{needed} requests were admitted and {free} request slots were free",
        "more requests were admitted than it has slots for",
        (Fix("fewer at once, as its message asks; one that admits too many is a bug", "--max-running-requests"),),
        (),  # while serving: in its own table
        (r"available_size\(\)=(?P<free>[0-9]{1,9}), num_reqs=(?P<needed>[0-9]{1,9})",),
    ),
    Obstacle(
        "host_memory_not_mapped", "the GPU cannot read pinned memory of the host here, as in WSL",
        "the GPU cannot read pinned memory of the host here, as in WSL",
        (
            Fix("the model runner that does without it", "VLLM_USE_V2_MODEL_RUNNER=0"),
            Fix("of WSL 2 with a driver that can", "VLLM_WSL2_ENABLE_PIN_MEMORY=1"),
        ),
        (("UVA is not available", "vLLM v1/worker/gpu/buffer_utils.py"),),
    ),
    Obstacle(
        "tokenizer_unknown", "this installation's transformers does not know the tokenizer class {name}",
        "this installation's transformers does not know the tokenizer's class",
        (
            Fix("use an image with a newer transformers (a tokenizer saved by transformers 5 is not read by 4), or the "
                "tokenizer of the base model", "--tokenizer BASE_MODEL"),
        ),
        (("does not exist or is not currently imported", _TRANSFORMERS, "Tokenizer class"),),
        (r"Tokenizer class (?P<name>\w{1,80}) does not exist",),
    ),
    Obstacle(
        "probe_failed", "Kubernetes restarted it because its probe failed before it was ready",
        "Kubernetes restarted it because its probe failed before it was ready",
        (
            Fix("give it the time that loading takes: a startupProbe with failureThreshold x periodSeconds above it "
                "(a download and a compilation included); the log of the restarted container (`kubectl logs "
                "--previous`) says how far it came"),
        ),
        (
            ("failed startup probe, will be restarted", "kubelet"),
            ("failed liveness probe, will be restarted", "kubelet"),
            ("Startup probe failed", "kubelet"),
        ),
    ),
    Obstacle(
        "segmentation_fault", "one of its processes crashed (SIGSEGV)", "one of its processes crashed (SIGSEGV)",
        (
            Fix("set PYTHONFAULTHANDLER=1 and start again: the trace then ends in the library that crashed; a library "
                "that was installed over the server's own is the usual reason"),
        ),
        (
            ("Exit Code: 139", "kubectl describe"),
            ("exited with code 139", "128 + SIGSEGV"),
            ("exit code 139", "128 + SIGSEGV"),
            ("Segmentation fault (core dumped)", "the shell"),
            ("Fatal Python error: Segmentation fault", "Python"),
            ("died with exit code -11", "multiprocessing"),
            ("(exit code: -11)", "vLLM v1/executor/multiproc_executor.py"),
        ),
    ),
    Obstacle(
        "unknown_argument", "it does not know the argument {argument}", "it does not know one of its arguments",
        (
            Fix("its spelling with dashes", "{value}", None, _dashed),
            Fix("a model that is not behind `vllm serve` needs its flag", "{value}", None, _model),
            Fix("omit or correct it; it may belong to another release (`--help` lists those of this one)"),
        ),
        (
            ("error: unrecognized arguments: ", "argparse"),
            ("error: invalid argument: -", "llama.cpp common/arg.cpp"),
        ),
        (r"(?:unrecognized arguments|invalid argument): (?P<argument>\S{1,200})",),
    ),
    Obstacle(
        "argument_value", "{argument} does not accept {value}", "it does not accept the value of an argument",
        (Fix("use one of the values that the message or `--help` lists; another release may have more"),),
        (
            (": invalid choice: ", "argparse", "argument-{1,2}[a-z]"),
            (": expected one argument", "argparse", "argument-{1,2}[a-z]"),
            ("error while handling argument ", "llama.cpp common/arg.cpp"),
            ("is not supported for ", "vLLM model_executor/layers/fused_moe/oracle", "_backend=[a-z]"),
        ),
        (r"(?P<argument>\w{1,40}_backend)=(?P<value>'[^']{1,40}') is not supported",
         r"argument (?:-\w/)?(?P<argument>--[\w/-]{1,80}): invalid choice: (?P<value>'[^']{0,80}'|\S{1,80})",),
    ),
    Obstacle(
        "lora_rank", "the adapter has rank {rank}, and --max-lora-rank is {most}",
        "the adapter's rank is above --max-lora-rank",
        (
            Fix("room for the adapter's rank; higher ranks take more memory", "--max-lora-rank {value}",
                "max_lora_rank", _next_rank),
        ),
        (("is greater than max_lora_rank", "vLLM lora/peft_helper.py"),),
        (r"LoRA rank (?P<rank>[0-9]{1,5}) is greater than max_lora_rank (?P<most>[0-9]{1,5})",),
    ),
    Obstacle(
        "drafts_above_step", "the draft tokens of all sequences exceed the tokens of a step by {excess}",
        "the draft tokens of all sequences exceed the tokens of a step",
        (
            Fix("more tokens per step than all sequences draft", "--max-num-batched-tokens"),
            Fix("fewer sequences draft fewer tokens", "--max-num-seqs"),
        ),
        (("max_num_scheduled_tokens is set to", "vLLM config/vllm.py"),),
        (r"max_num_scheduled_tokens is set to -(?P<excess>[0-9]{1,9})",),
    ),
    Obstacle(
        "drafts_and_graphs", "no CUDA graph's size suits both {drafts} tokens per sequence and {ranks} ranks",
        "no CUDA graph's size suits both the drafted tokens and the ranks",
        (
            Fix("num_speculative_tokens + 1 must be a multiple of the ranks: 3 with 4 ranks, 7 with 8",
                "--speculative-config"),
        ),
        (("t determine cudagraph shapes that are both", "vLLM#29036"),),
        (r"multiple of (?P<drafts>[0-9]{1,4}) \(num_speculative_tokens \+ 1\).{0,60} and (?P<ranks>[0-9]{1,4}) ",),
    ),
    Obstacle(
        "not_capturable", "a CUDA graph cannot record one of its operations",
        "a CUDA graph cannot record one of its operations",
        (Fix("runs without CUDA graphs, and decodes slower", "--enforce-eager", "enforce_eager"),),
        (("operation not permitted when stream is capturing", _CUDA),),
    ),
    Obstacle(
        "own_request_refused", "a proxy answers the server's request to itself (status {status})",
        "a proxy answers the server's request to itself",
        (
            Fix("addresses that the proxy must not get", "no_proxy=127.0.0.1,localhost,0.0.0.0"),
        ),
        (
            ("Initialization failed. warmup error", "SGLang srt/entrypoints/http_server.py",
             r"res=<Response\[(?:40[37]|50[234])\]"),
        ),
        (r"res=<Response \[(?P<status>[0-9]{3})\]",),
    ),
    Obstacle(
        "kernel_crash", "a kernel crashed on the GPU ({error})", "a kernel crashed on the GPU",
        (
            Fix("set CUDA_LAUNCH_BLOCKING=1 and start again: the trace then ends in the kernel; another attention "
                "backend or release may do without it"),
        ),
        (
            ("illegal memory access", _CUDA),
            ("Memory access fault by GPU", "ROCm"),
            ("illegal instruction was encountered", _CUDA),
            ("misaligned address", _CUDA),
            ("device-side assert triggered", _CUDA),
            ("unspecified launch failure", _CUDA),
            ("],thread: [", _CUDA, "Assertion"),
            ("KVCache failed with error", "flashinfer"),
            ("Failed to initialize cutlass", "flashinfer"),
        ),
        (r"(?P<error>illegal memory access|illegal instruction|misaligned address|device-side assert)",),
    ),
)  # fmt: skip
# Messages that decide even beside a line about memory.
_DECISIVE: Final = frozenset(
    {"port_in_use", "driver_mismatch", "driver_too_old", "kernel_crash", "lora_rank", "drafts_above_step"}
)

# What rules a message out: files in shared memory; the port of NCCL's own monitor, which it can do without.
UNLESS: Final[Mapping[str, str]] = {
    "disk_full": r"/dev/shm|shared ?memory|nccl-|psm_",
    "port_in_use": r"ras/client_support|ras/ras\.cc",
}

_HINTS: Final = frozenset({"segmentation_fault", "probe_failed"})  # symptoms: another message may say why

OF_CAUSE: Final[Mapping[str, Obstacle]] = {obstacle.cause: obstacle for obstacle in OBSTACLES}


def _wordings(obstacle: Obstacle) -> tuple[Wording, ...]:
    strength = "decisive" if obstacle.cause in _DECISIVE else "hint" if obstacle.cause in _HINTS else "general"
    return tuple(
        Wording(
            obstacle.cause,
            phrase,
            "any",
            source,
            needs=needs[0] if needs else "",
            unless=UNLESS.get(obstacle.cause, ""),
            strength=strength,  # type: ignore[arg-type]  # one of the two words of Wording
            fatal=not obstacle.runs,
        )
        for phrase, source, *needs in obstacle.messages
    )


WORDINGS: Final = tuple(wording for obstacle in OBSTACLES for wording in _wordings(obstacle))
